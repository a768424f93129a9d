import pytest
import sizes

from fp8ref.estimate import gemms
from fp8ref.estimate.gpus import GPUS
from fp8ref.recipe import RECIPES


def shapes(recipe, path, backend="torch", **keys):
    config = sizes.config(recipe, **keys)
    decision = next(d for d in config.decisions() if d.path.endswith(path))
    return {g.which: g for g in gemms.gemms(decision, config, backend)}


def test_shapes_are_those_of_a_device():  # L-2
    found = shapes("tensorwise", "0.mlp.down_proj", **sizes.MESH)
    assert {which: (g.m, g.n, g.k) for which, g in found.items()} == {
        "output": (128, 64, 64),
        "grad_input": (128, 64, 64),
        "grad_weight": (64, 64, 128),
    }
    found = shapes("tensorwise", "0.mlp.up_proj")
    assert {which: (g.m, g.n, g.k) for which, g in found.items()} == {
        "output": (256, 128, 64),
        "grad_input": (256, 64, 128),
        "grad_weight": (128, 64, 256),
    }


@pytest.mark.parametrize(
    ("recipe", "which", "backend", "how"),
    [
        ("tensorwise", "grad_input", "jax", "e5m2 tensorwise x e4m3fn tensorwise, slow"),
        ("rowwise_with_gw_hp", "grad_input", "torch", "e4m3fn rowwise x e4m3fn tensorwise, slow"),
        ("rowwise_with_gw_hp", "grad_weight", "torch", "bf16"),
        ("delayed", "output", "jax", "e4m3fn tensorwise delayed x e4m3fn tensorwise delayed, fast"),
    ],
)
def test_what_a_gemm_runs_in(recipe, which, backend, how):
    assert shapes(recipe, "0.mlp.up_proj", backend)[which].how == how


@pytest.mark.parametrize(("recipe", "backend"), [("mxfp8", "torch"), ("mxfp8", "jax"), ("blockwise", "jax")])
def test_operands_in_blocks_without_a_kernel_are_no_fp8_gemm(recipe, backend):  # G-16
    assert "dequantised: no FP8 GEMM" in gemms.how(RECIPES[recipe].output, backend)


def test_data_sheets():
    assert {name: (g.fp8 / g.bf16, g.bandwidth, g.processors) for name, g in GPUS.items()} == {
        "H100 SXM": (2.0, 3.35e12, 132),
        "H200 SXM": (2.0, 4.8e12, 132),
    }
    assert all("data sheet" in g.source for g in GPUS.values())
