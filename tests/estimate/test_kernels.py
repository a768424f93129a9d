import dataclasses

import pytest
import sizes

from fp8ref.estimate import kernels
from fp8ref.estimate.kernels import Kernel
from fp8ref.policy import POLICIES
from fp8ref.recipe import RECIPES, ROLES


def moved(recipe, how, role, **keys):
    """Bytes an element of role by part, and kernels, of a linear whose other operands are empty."""
    alone = kernels.of_linear(RECIPES[recipe], dict.fromkeys(ROLES, 0) | {role: 1}, how, **keys)
    found: dict[str, float] = {}
    for kernel in alone:
        found[kernel.part] = found.get(kernel.part, 0) + kernel.bytes
    return {part: size for part, size in found.items() if size}


# torchao 0.18, testing/training/roofline_utils.py, get_tensor_memory_traffic_ovhd_s: bytes an element of each recipe and role.
@pytest.mark.parametrize(
    ("recipe", "bytes_"),
    [("bf16", (0, 0, 0)), ("tensorwise", (6, 8, 6)), ("rowwise", (8, 10, 8)), ("delayed", (4, 6, 4))],
)
def test_bytes_that_inductors_kernels_move(recipe, bytes_):
    assert tuple(sum(moved(recipe, "inductor", role).values()) for role in ROLES) == bytes_


def test_a_recipe_that_keeps_grad_weight():
    """A weight by rows forward, 3 bytes, and whole for grad_input: 2 for an amax of its own, which torchao takes from the rows', 3 to cast."""
    assert [moved("rowwise_with_gw_hp", "inductor", role) for role in ROLES] == [{"cast": 3}, {"amax": 2, "cast": 6}, {"cast": 3}]


@pytest.mark.parametrize(
    ("recipe", "parts"),
    [
        ("tensorwise", {"amax": 2, "cast": 4}),
        ("rowwise", {"amax": 4, "cast": 6}),
        ("delayed", {"cast": 4}),
        ("mxfp8", {"amax": 4, "cast": 8}),  # quantized and back for each GEMM
    ],
)
def test_bytes_that_xlas_kernels_move(recipe, parts):
    assert [moved(recipe, "xla", role) for role in ROLES] == [parts] * 3


def test_blocks_have_kernels_in_torch_alone():
    assert moved("blockwise", "inductor", "input") == moved("blockwise", "eager", "input") == {"cast": 6}
    assert moved("blockwise", "xla", "input") == {"amax": 4, "cast": 8}
    assert kernels.multiplies_fp8(RECIPES["blockwise"].output, "torch")  # G-17
    assert not kernels.multiplies_fp8(RECIPES["blockwise"].output, "jax")
    assert not kernels.multiplies_fp8(RECIPES["mxfp8"].output, "torch")  # G-16
    assert not kernels.multiplies_fp8(RECIPES["bf16"].output, "torch")


def test_what_another_linear_has_cast_is_not_cast_again():
    whole, without = (kernels.of_linear(RECIPES["tensorwise"], dict.fromkeys(ROLES, 1), "xla", roles=roles) for roles in (ROLES, ROLES[1:]))
    assert whole[-len(without) :] == without
    assert len(whole) == len(without) + 3


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
def test_eager_makes_every_operand_anew(recipe):
    """Two GEMMs want each; of an amax 6 bytes, of a cast 27, and 2 to lay out what a GEMM reads across memory."""
    assert moved(recipe, "eager", "input") == {"amax": 12, "cast": 54, "layout": 2}
    assert moved(recipe, "eager", "grad_output") == {"amax": 12, "cast": 54, "layout": 2}
    forward = moved(recipe, "eager", "input", gemms=("output",))
    assert forward == {"amax": 6, "cast": 27}


def test_a_forward_pass_alone_writes_codes_in_one_order():
    assert moved("tensorwise", "inductor", "input", gemms=("output",)) == {"amax": 2, "cast": 3}
    assert moved("tensorwise", "inductor", "grad_output", gemms=("output",)) == {}


def test_what_is_gathered_is_laid_out_afterwards():
    """A shard of 1 of 8 elements: an amax and a cast of it, then 2 bytes for each of the 8."""
    for how in ("inductor", "xla"):
        assert moved("tensorwise", how, "weight", gathered=8) == {"layout": 16, "amax": 2, "cast": 3}
    assert moved("rowwise", "xla", "weight", gathered=8) == {"layout": 16, "amax": 4, "cast": 6}


def test_results_scaled_afterwards():
    """torchao's slow rowwise GEMMs (G-8), and all of XLA's rowwise ones, whose results are float32 until then."""
    row, whole = RECIPES["rowwise"], RECIPES["tensorwise"]
    assert kernels.rescale(row.output, 1, "inductor") == []
    assert kernels.rescale(row.grad_input, 1, "inductor") == [Kernel("rescale", 4)]
    assert kernels.rescale(row.grad_input, 1, "eager") == [Kernel("rescale", 4), Kernel("rescale", 8)]
    assert kernels.rescale(row.output, 1, "xla") == [Kernel("rescale", 4)]  # of a bfloat16 result: scales are powers of two (G-22)
    exact = dataclasses.replace(row.output, a=dataclasses.replace(row.output.a, policy=POLICIES["torchao"]))
    assert kernels.rescale(exact, 1, "xla") == [Kernel("rescale", 6)]
    assert all(kernels.rescale(whole.grad_input, 1, how) == [] for how in ("inductor", "eager", "xla"))


def test_who_fuses():
    assert kernels.fusion(sizes.config(), "jax") == "xla"
    assert kernels.fusion(sizes.config(), "torch") == "eager"
    assert kernels.fusion(sizes.config(compile="block"), "torch") == "inductor"
