import pytest
import sizes

from fp8ref.recipe import RECIPES
from fp8ref.run.plan import estimate
from fp8ref.run.plan.estimate import Shape
from fp8ref.run.plan.hardware import GPUS, Gpu


def gpu(**keys):
    return Gpu(**{"name": "none", "bf16": 1e15, "fp8": 2e15, "bandwidth": 1e12, "memory": 1e9, "source": "made up"} | keys)


def shapes(recipe, path, backend="torch", **keys):
    config = sizes.config(recipe, **keys)
    decision = next(d for d in config.decisions() if d.path.endswith(path))
    return {g.which: g for g in estimate.gemms(decision, config, backend)}


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


@pytest.mark.parametrize(("recipe", "backend", "fp8"), [("mxfp8", "torch", False), ("mxfp8", "jax", False), ("blockwise", "jax", False)])
def test_operands_in_blocks_without_a_kernel_are_no_fp8_gemm(recipe, backend, fp8):  # G-16
    spec = RECIPES[recipe].output
    assert not estimate.multiplies_fp8(spec, backend)
    assert "dequantised: no FP8 GEMM" in estimate.how(spec, backend)
    assert estimate.multiplies_fp8(RECIPES["blockwise"].output, "torch")  # G-17


def test_a_gemm_takes_the_longer_of_its_flops_and_its_bytes():
    """[16, 64] x [32, 64]: 2^16 FLOPs; 2 (16 + 32) 64 + 2 x 16 x 32 = 7168 bytes in bf16, 4096 in FP8."""
    shape = Shape("l", "output", 16, 32, 64, "", True)
    fast = gpu(bf16=2.0**16, fp8=2.0**17)
    assert [estimate.seconds(shape, fast, fp8=fp8) for fp8 in (False, True)] == [1.0, 0.5]
    narrow = gpu(bandwidth=1024.0)
    assert [estimate.seconds(shape, narrow, fp8=fp8) for fp8 in (False, True)] == [7.0, 4.0]


@pytest.mark.parametrize(
    ("recipe", "bytes_"),
    [
        ("bf16", (0, 0, 0)),
        ("tensorwise", (6, 6, 6)),  # read twice, written for two GEMMs
        ("delayed", (4, 4, 4)),  # read once
        ("rowwise", (6, 6, 6)),  # a cast for each GEMM, which reads and writes once
        ("rowwise_with_gw_hp", (3, 3 + 5, 3)),
    ],
)
def test_bytes_that_casts_move(recipe, bytes_):
    roles = ("input", "weight", "grad_output")
    for role, expected in zip(roles, bytes_, strict=True):
        assert estimate.casts(RECIPES[recipe], dict.fromkeys(roles, 0) | {role: 1}) == expected


def test_speedup_of_a_linear():
    """up_proj: 3 GEMMs of 2 x 256 x 128 x 64 = 2^22 FLOPs; casts of 6 bytes of 256 x 64 + 128 x 64 + 256 x 128 = 57344 elements."""
    config = sizes.config()
    decision = next(d for d in config.decisions() if d.path.endswith("0.mlp.up_proj"))
    made = gpu(bf16=2.0**22, fp8=2.0**23, bandwidth=6 * 57344 / 0.5)
    # bf16: 3 s, its bytes a fraction of that; FP8: 1.5 s and 0.5 s for the casts
    assert estimate.speedup(decision, config, "torch", made) == pytest.approx(3 / 2)
    slow = gpu(bf16=2.0**22, fp8=2.0**23, bandwidth=6 * 57344)
    assert estimate.speedup(decision, config, "torch", slow) == pytest.approx(3 / 2.5)


def test_each_device_casts_its_own_rows_of_a_weight_that_is_gathered_in_fp8():
    """over 2, up_proj's weight of 8192 elements: 24576 fewer bytes, of half the tokens otherwise."""
    alone, both = sizes.config(fsdp=2, gather="compute"), sizes.config(fsdp=2)
    decision = next(d for d in alone.decisions() if d.path.endswith("0.mlp.up_proj"))
    made = gpu(bf16=1e30, fp8=1e30, bandwidth=1.0)
    times = [1 / estimate.speedup(decision, config, "torch", made) for config in (alone, both)]
    bf16 = 2 * 64 * (128 + 128) + 2 * 128 * 128 + 2 * 128 * (128 + 64) + 2 * 128 * 64 + 2 * 128 * (128 + 64) + 2 * 128 * 64
    assert (times[0] - times[1]) * bf16 == pytest.approx(6 * 8192 / 2)


def test_what_stays_in_high_precision_has_no_speedup():
    config = sizes.config()
    assert estimate.speedup(config.decisions()[-1], config, "torch", gpu()) is None


def test_data_sheets():
    assert {name: (g.fp8 / g.bf16, g.bandwidth) for name, g in GPUS.items()} == {"H100 SXM": (2.0, 3.35e12), "H200 SXM": (2.0, 4.8e12)}
    assert all("data sheet" in g.source for g in GPUS.values())
