import pytest
import sizes

from fp8ref.recipe import RECIPES
from fp8ref.train import device_shapes


def test_parameters_by_kind():
    assert device_shapes.kinds(sizes.CONFIG) == {
        "embedding": 16384,
        "attention": 2 * (2 * 4096 + 2 * 2048),
        "mlp": 2 * 3 * 8192,
        "norms": 320,
        "lm_head": 16384,
        "all": 106816,
    }


def test_tokens_of_a_device_are_those_of_a_part_of_its_share():
    assert device_shapes.tokens(sizes.config()) == 256
    assert device_shapes.tokens(sizes.config(parts=2, data=2, fsdp=2, tensor=2)) == 32


@pytest.mark.parametrize(
    ("linear", "shape", "used"),
    [("q_proj", (64, 64), (32, 64)), ("o_proj", (64, 64), (64, 32)), ("down_proj", (64, 128), (64, 64)), ("lm_head", (256, 64), (256, 64))],
)
def test_tensor_parallelism_cuts_columns_or_rows(linear, shape, used):  # P-10
    assert device_shapes.used(f"model.layers.0.{linear}", shape, sizes.config(**sizes.MESH)) == used


@pytest.mark.parametrize(
    ("name", "shape", "jax", "torch"),
    [
        ("model.layers.0.mlp.down_proj.weight", (64, 128), (32, 64), (32, 64)),
        ("model.embed_tokens.weight", (256, 64), (128, 64), (128, 64)),
        ("model.norm.weight", (64,), (64,), (32,)),
        ("lm_head.weight", (255, 64), None, (128, 64)),
    ],
)
def test_pieces_at_rest(name, shape, jax, torch):  # P-10, P-11
    config = sizes.config(**sizes.MESH)
    assert device_shapes.at_rest(name, shape, config, "torch") == torch
    if jax:
        assert device_shapes.at_rest(name, shape, config, "jax") == jax


@pytest.mark.parametrize(
    ("recipe", "jax", "torch"), [("bf16", False, False), ("tensorwise", True, True), ("rowwise", True, False), ("delayed", True, True)]
)
def test_which_weights_move_as_codes(recipe, jax, torch):  # P-6, P-11
    assert device_shapes.in_fp8(RECIPES[recipe], sizes.config(), "jax") == jax
    assert device_shapes.in_fp8(RECIPES[recipe], sizes.config(), "torch") == torch
    assert not device_shapes.in_fp8(RECIPES[recipe], sizes.config(gather="compute"), "torch")


def test_copies_are_sharded_parameters_of_fsdp2_alone():
    assert [device_shapes.sharded(sizes.config(data=2), backend) for backend in ("jax", "torch")] == [False, True]
    assert [device_shapes.sharded(sizes.config(fsdp=2), backend) for backend in ("jax", "torch")] == [True, True]
