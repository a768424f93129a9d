"""A state as another config keeps it: what it is worth stays, up to what the other format rounds
(spec E-8).
"""

import numpy as np
import pytest

from fp8ref.sim.states import states as sim_states
from fp8ref.train import loop
from fp8ref.train.data import loader
from fp8ref.train.run import state_conversion, train_state
from fp8ref.train.run.state_conversion import Source


@pytest.fixture
def little(small):
    """A config whose steps take no time."""
    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return small.replace(model=sizes, data={"batch_size": 2, "sequence_length": 16})


def moments_are_rounded(given, made, layout):
    """Hold moments to those that went in, within what the layout rounds: half a unit in the last
    place of the largest of a tensor.
    """
    for index, which in enumerate(train_state.MOMENTS):
        for name, x in given[which].items():
            moment = None if layout is None else layout.of(x.size).kept[index]
            if moment is None or moment.fmt.bits == 32:
                np.testing.assert_array_equal(made[which][name], x)
                continue
            # A value of p bits rounds by at most 2^-p of itself, so by at most 2^-p of the largest
            # of its tensor, x; a root by as much, and its square by (1 + 2^-p)^2 - 1 < 3 * 2^-p of
            # x.
            p = moment.fmt.mantissa_bits + 1
            bound = (3 if moment.root else 1) * 2.0**-p * np.abs(x).max()
            assert np.abs(made[which][name] - x).max() <= bound, (which, name)


@pytest.mark.parametrize("backend", loop.BACKENDS)
@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("delayed", "te"),
        ("tensorwise", "msamp_o2/master"),
        ("bf16", None),
        ("tensorwise", "coat"),
        ("delayed", "sqrt_e4m3_f16"),
    ],
)
def test_a_state_goes_over_and_back(little, backend, recipe, layout):
    own = little.replace(numerics={"recipe": "delayed"})
    other = little.replace(
        numerics={"recipe": recipe},
        optimizer={"kind": "adamw_states", "layout": layout} if layout else {},
    )
    batches, first, second = (
        loader.open_batches(own),
        loop.trainer(backend, own),
        loop.trainer(backend, other),
    )
    for step in range(2):
        first.step(batches.step(step))
    amaxes = {
        f"{d.path}/{role}": 1.0
        for d in other.decisions()
        for role in ("input", "weight", "grad_output")
    }
    source = Source(
        weights=first.weights(),
        moments=first.moments(),
        delayed=first.fp8_states(),
        step=2,
        amaxes=lambda: amaxes,
    )
    arrays = state_conversion.converted(source, other, backend)
    assert {name: (np.shape(x), np.asarray(x).dtype == np.uint8) for name, x in arrays.items()} == {
        name: (tensor.shape, tensor.dtype == "uint8")
        for name, tensor in train_state.schema(other, backend).items()
    }
    for _ in range(2):  # after a step it takes the state again
        second.adopt(arrays, 2)
        weights, kept = second.weights(), other.optimizer.moment_layout
        for name, w in source.weights.items():
            stored = (
                w
                if kept is None or not kept.keeps_master
                else sim_states.weight(sim_states.master(w, kept), kept)
            )
            np.testing.assert_array_equal(weights[name], stored)
            moments_are_rounded(source.moments, second.moments(), kept)
        loss = second.evaluate(batches.held_out(0))
        second.step(batches.step(2))
        assert second.evaluate(batches.held_out(0)) != loss
    states = second.fp8_states()
    assert all(int(state[2]) == 3 for state in states.values())
    assert bool(states) == (recipe == "delayed")


def test_a_state_that_the_source_has_not_is_full_of_a_batch_s_amax(little):
    config = little.replace(numerics={"recipe": "delayed"})
    names = [
        f"{d.path}/{role}"
        for d in config.decisions()
        if d.fp8
        for role in ("input", "weight", "grad_output")
    ]
    source = Source(
        weights={
            name: np.zeros(shape, np.float32) for name, shape in config.shapes.parameters.items()
        },
        amaxes=lambda: dict.fromkeys(names, 7.0),
    )
    arrays = state_conversion.converted(source, config, "jax")
    first = names[0].rpartition("/")[0]
    assert arrays[f"fp8.{first}.input.stored"] == 64.0  # 448 / 7
    np.testing.assert_array_equal(arrays[f"fp8.{first}.input.amax_history"], np.full(16, 7.0))
