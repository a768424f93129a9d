"""Gradient accumulation (spec T-7): what both backends' trainers are held to."""

import numpy as np
import pytest

from fp8ref.recipe import OPERANDS, delayed_casts
from fp8ref.sim import delayed
from fp8ref.sim.quantize import scaling

PARTS = 3  # no power of two, so that the last product rounds


def config_of(small, recipe: str, parts: int = PARTS, **parallel):
    return small.replace(
        numerics={"recipe": recipe},
        data={"batch_size": 4 * parts, "microbatches": parts},
        parallel=parallel,
    )


def tokens_of(config) -> np.ndarray:
    return np.random.default_rng(3).integers(
        0, 256, (config.data.batch_size, config.data.sequence_length + 1)
    )


def by_hand(gradients, tokens: np.ndarray, parts: int) -> dict[str, np.ndarray]:
    """float32 sums over the parts in order, and one product with the rounded reciprocal of their
    number. gradients: of tokens, in one part.
    """
    total: dict[str, np.ndarray] = {}
    for part in np.split(tokens, parts):
        for name, value in gradients(part).items():
            assert value.dtype == np.float32
            total[name] = total[name] + value if name in total else value.copy()
    return {name: value * np.float32(1 / parts) for name, value in total.items()}


def check_bits(trainer, whole, gradients) -> None:
    """Gradients and loss of a trainer, and of its first step, are those of an accumulation by hand,
    from one that knows of no parts.

    gradients   of whole: of tokens, by name.
    """
    config, tokens = trainer.config, tokens_of(trainer.config)
    expected = by_hand(gradients, tokens, config.data.microbatches)
    found = trainer.gradients(tokens)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    losses = [whole.evaluate(part) for part in np.split(tokens, config.data.microbatches)]
    # Float32 sums and means of numbers near 5.5, in programs that are compiled otherwise than the
    # whole's: some 16 roundings of 2^-22 each
    assert trainer.evaluate(tokens) == pytest.approx(np.mean(losses), abs=16 * 2.0**-22)
    norm = np.sqrt(sum(np.square(value, dtype=np.float64).sum() for value in expected.values()))
    metrics = trainer.step(tokens)
    assert metrics["loss"] == pytest.approx(np.mean(losses), abs=16 * 2.0**-22)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=2.0**-20)


def without_parts(config):
    return config.replace(data={"microbatches": 1})


def check_whole(trainer_class, config) -> None:
    """In bfloat16 a batch in parts has the gradients of the whole, but for rounding.

    Every row's activations are the same bits either way; grad_output of a row is 1 / m of what it
    is within its part, and is rounded at some ten sites on its way, each by at most 2^-9 of itself;
    a matrix's gradient is rounded to bfloat16 once a part, or once. All of these are at most 12 *
    2^-9 of a sum's terms, whose signs differ: half of it on the norm, as in the tests of meshes,
    2^-6.
    """
    whole, trainer = trainer_class(without_parts(config)), trainer_class(config)
    tokens = tokens_of(config)
    ours, theirs = trainer.gradients(tokens), whole.gradients(tokens)
    for name, value in theirs.items():
        assert np.linalg.norm(ours[name] - value) <= 2.0**-6 * np.linalg.norm(value), name
    # rows' losses are the same bits; the mean of 192 float32 values of 5.5 in another order: 2^-24
    # a sum of at most 8 levels, and the parts'
    first, other = trainer.step(tokens), whole.step(tokens)
    assert first["loss"] == pytest.approx(other["loss"], rel=16 * 2.0**-24)
    assert first["grad_norm"] == pytest.approx(other["grad_norm"], rel=2.0**-6)


def delayed_states(seen, config) -> dict:
    """(scale, history, updates) by (layer, role) after one step from fresh states, by the
    simulator. seen: of every part, (layer, GEMM, a, b).
    """
    found: dict[tuple, list] = {}
    for layer, which, *operands in seen:
        for role, hp in zip(OPERANDS[which], operands, strict=True):
            found.setdefault((layer, role), []).append(delayed.observe(scaling.amax(hp)))
    states = {}
    for (layer, role), observations in found.items():
        assert len({float(o.amax) for o in observations}) > 1 or role == "weight"  # parts differ
        fmt, keys = delayed_casts(config.numerics.recipe)[role]
        states[layer, role] = delayed.update(
            delayed.init(keys), delayed.merge(*observations), config=keys, fmt=fmt
        )
    return states
