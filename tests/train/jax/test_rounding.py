"""A run draws by its seed, step, microbatch and linear; so do stacks of layers, and resumed runs."""

import numpy as np
import pytest
from helpers.training import microbatches

from fp8ref.recipe import OPERANDS, RECIPES, REDUCED_AXES
from fp8ref.selection.statistics import planned
from fp8ref.shared.errors import ConfigError
from fp8ref.sim import linear as sim
from fp8ref.train import loop
from fp8ref.train.jax import operand_statistics
from fp8ref.train.jax.trainer import Trainer

FEW = {"fp8_fqns": ("q_proj", "down_proj")}  # of which XLA compiles less


@pytest.mark.parametrize(("parts", "parallel"), [(1, {"scan": True}), (2, {})])
def test_every_microbatch_of_every_step_draws_by_a_seed_of_its_own(parts, parallel, small):  # S-24
    config = microbatches.config_of(small, "nvfp4", parts, **parallel)
    config = config.replace(run={"seed": 2**33 + 5}, numerics=FEW)
    trainer, tokens = Trainer(config), microbatches.tokens_of(config)
    trainer.step(tokens)
    seen = {}

    def observe(name, which, *operands):
        seen.setdefault((name, which), []).append(operands[:2])

    trainer.observe(tokens, observe)
    assert len(seen) == 3 * sum(d.fp8 for d in trainer.decisions)
    for (name, which), calls in seen.items():
        assert len(calls) == parts
        for part, operands in enumerate(calls):
            seed = sim.seed_in_run(config.run.seed, 1, name, part)
            hp = {role: q[0] for role, q in zip(OPERANDS[which], operands, strict=True)}
            expected = sim.quantize_operands(which, hp, RECIPES["nvfp4"], seed=seed)
            for q, right, axis in zip(operands, expected, REDUCED_AXES[which], strict=True):
                codes = right.codes if axis else right.codes.T
                np.testing.assert_array_equal(q[1], codes, err_msg=f"{name} {which}")


def test_statistics_are_of_the_codes_of_the_step(small):  # S-24, Q-8
    """Of two microbatches, whose sequences are no whole number of rotated blocks."""
    config = microbatches.config_of(small, "nvfp4", 2).replace(
        numerics=FEW, data={"sequence_length": 24}
    )
    trainer, tokens = Trainer(config), microbatches.tokens_of(config)
    expected = operand_statistics.on_host(
        planned(trainer.decisions), lambda observer: trainer.observe(tokens, observer)
    )
    found = trainer.statistics(tokens)
    assert found.keys() == expected.keys()
    for name, of_operand in expected.items():
        for field in ("underflow_rate", "saturation_rate"):
            assert found[name][field] == of_operand[field], name
        # sums in float32 of 4,608 numbers at most, and in float64 on the host
        assert found[name]["sqnr"] == pytest.approx(of_operand["sqnr"], abs=1e-2), name


def test_tokens_that_rotations_do_not_divide_are_refused(small):  # S-23
    config = microbatches.config_of(small, "nvfp4", 1).replace(
        data={"sequence_length": 18, "batch_size": 2}
    )
    with pytest.raises(ConfigError, match=r"'nvfp4' rotates 16 tokens.*a device has 36 in a pass"):
        loop.trainer("jax", config)


def test_a_resumed_stack_of_layers_draws_as_layers_that_went_on(small, tmp_path):  # S-24, K-5
    config = microbatches.config_of(small, "nvfp4", 1).replace(numerics=FEW)
    tokens, stacked = microbatches.tokens_of(config), config.replace(parallel={"scan": True})
    whole = Trainer(config)
    first = whole.gradients(tokens)
    for name, of_stack in Trainer(stacked).gradients(tokens).items():
        np.testing.assert_array_equal(of_stack, first[name], err_msg=name)
    whole.step(tokens)
    whole.save(tmp_path / "state")()
    resumed = Trainer(config)
    resumed.load(tmp_path / "state", 1)
    again = resumed.gradients(tokens)
    for name, value in whole.gradients(tokens).items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)
    assert np.isfinite(whole.evaluate(tokens))
