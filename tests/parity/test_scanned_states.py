"""JAX's trainer under parallel.scan, whose parameters are stacks of layers: each layer keeps its
own scales and masters (O-11, O-16, T-8).
"""

import numpy as np
import pytest

from fp8ref.train import loop
from fp8ref.train.data import loader
from fp8ref.train.run import train_state

MODEL = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
NARROW = "sqrt_e4m3_f16"
# every way to make a scale, and both masters
SCALED = ("sqrt_e4m3", "torchao", "te", "coat", "msamp_o2", NARROW)


def configured(small, layout: str, recipe: str = "tensorwise", **parallel):
    """Without clipping, as a scan adds up the norm in another order (T-8)."""
    optimizer = {"kind": "adamw_states", "layout": layout, "max_norm": float("inf")}
    return small.replace(
        model=MODEL, numerics={"recipe": recipe}, optimizer=optimizer, parallel=parallel
    )


def tensors(trainer) -> dict[str, np.ndarray]:
    """What a checkpoint would hold, by name."""
    return {
        name: np.asarray(value)
        for name, value in train_state.flat(trainer._step.tensors(trainer._state)).items()
    }


def assert_equal(found, wanted) -> None:
    found, wanted = tensors(found), tensors(wanted)
    assert found.keys() == wanted.keys()
    assert [
        name for name, value in wanted.items() if found[name].tobytes() != value.tobytes()
    ] == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", SCALED)
def test_a_scan_changes_no_bit_of_states(layout, small):  # O-11, O-16, T-8
    config = configured(small, layout)
    tokens = loader.open_batches(config).step(0)
    plain, scanned = (
        loop.trainer("jax", config),
        loop.trainer("jax", config.replace(parallel={"scan": True})),
    )
    assert_equal(scanned, plain)
    assert [scanned.step(tokens)["loss"] for _ in range(2)] == [
        plain.step(tokens)["loss"] for _ in range(2)
    ]
    assert_equal(scanned, plain)
    for key, of_each in plain.moments().items():
        assert all(
            scanned.moments()[key][name].tobytes() == value.tobytes()
            for name, value in of_each.items()
        )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "tensorwise"])
def test_what_else_a_scan_runs_with(recipe, small):  # O-12, O-16, T-7, T-8
    """Microbatches, checkpointing, statistics and health; and a recipe of which no weight has a
    copy.
    """
    config = configured(small, NARROW, recipe).replace(data={"microbatches": 2})
    tokens = loader.open_batches(config).step(0)
    plain = loop.trainer("jax", config)
    scanned = loop.trainer(
        "jax", config.replace(parallel={"scan": True, "checkpointing": "selective"})
    )
    assert scanned.prove(tokens)["missing"] == []
    assert scanned._states(tokens) == plain._states(tokens)
    assert scanned.step(tokens)["loss"] == plain.step(tokens)["loss"]
    assert_equal(scanned, plain)
    assert scanned.evaluate(tokens) == plain.evaluate(tokens)
    assert scanned.statistics(tokens) == plain.statistics(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("through", ["shard_map", "jit"])
@pytest.mark.parametrize("layout", ["sqrt_e4m3", "msamp_o2", NARROW])
def test_a_checkpoint_crosses_scans_and_meshes(layout, through, small, tmp_path):  # O-11, K-2
    """Saved without a scan on one device, trained by a scan on two, read back without: every bit is
    kept, and losses agree as between meshes.
    """
    config = configured(small, layout)
    tokens = loader.open_batches(config).step(0)
    one = loop.trainer("jax", config)
    two = loop.trainer(
        "jax", config.replace(parallel={"scan": True, "fsdp": 2, "through": through})
    )
    one.step(tokens)
    one.save(tmp_path / "state")()
    two.load(tmp_path / "state", 1)
    assert_equal(two, one)
    # other sums over devices: 2^-9 of a loss (tests/parity/test_masters.py)
    assert [two.step(tokens)["loss"] for _ in range(3)] == pytest.approx(
        [one.step(tokens)["loss"] for _ in range(3)], rel=2.0**-9
    )
    two.save(tmp_path / "again")()
    back = loop.trainer("jax", config)
    back.load(tmp_path / "again", 4)
    assert_equal(back, two)
