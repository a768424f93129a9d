"""What a GEMM is held to on a GPU: the plan of its tensor cores, within what their steps lose; on a
CPU, as before.
"""

import jax
import numpy as np
import pytest
import torch

from fp8ref.conformance.kit.compare import Check
from fp8ref.crosscheck import bounds, device_gemm
from fp8ref.formats import BFLOAT16, E4M3FN, E5M2
from fp8ref.recipe import RECIPES
from fp8ref.sim.gemm import gemm
from fp8ref.sim.gemm.accumulate import Accumulation
from fp8ref.sim.gemm.tensor_core import UNITS
from fp8ref.sim.quantize import scaling

SPEC = RECIPES["tensorwise"].output


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(device_gemm, "capability", lambda backend: (9, 0))


@pytest.fixture
def operands(rng):
    x, y = (rng.standard_normal((n, 512)).astype(np.float32) for n in (24, 16))
    x[:, ::7] *= 2.0**-9  # codes of subnormal numbers too
    return scaling.quantize(x, E4M3FN), scaling.quantize(y, E5M2)


def test_a_cpu_has_the_exact_result(operands, monkeypatch):  # B-1
    monkeypatch.setattr(device_gemm, "capability", lambda backend: None)
    a, b = operands
    assert device_gemm.plan("torch", SPEC) is None
    simulated = device_gemm.simulated("torch", a, b, SPEC)
    np.testing.assert_array_equal(
        simulated, gemm.matmul(a, b, epilogue=SPEC.epilogue, out_dtype=BFLOAT16)
    )
    check, out = Check(name="output", bound=1.0), 2 * simulated
    device_gemm.compare(check, "torch", [bounds.Part(a, b, simulated)], SPEC, out, names=("", ""))
    errors = np.abs(out - simulated) / bounds.gemm(a, b, SPEC, out, simulated)
    assert check.worst == errors.max()


def test_a_hopper_gpu_has_its_plans_bits(on_hopper, operands):  # B-16
    a, b = operands
    for which, accumulate in (("output", "fast"), ("grad_weight", "slow")):
        spec = RECIPES["tensorwise"].gemms[which]
        assert device_gemm.plan("jax", spec).name == f"hopper_{accumulate}"
        expected = gemm.matmul(
            a,
            b,
            accumulate=f"hopper_{accumulate}",
            epilogue="product_then_round",
            out_dtype=BFLOAT16,
        )
        np.testing.assert_array_equal(device_gemm.simulated("jax", a, b, spec), expected)


@pytest.mark.parametrize("recipe", ["bf16", "blockwise", "mxfp8"])
def test_what_no_fp8_unit_multiplies_has_no_plan(on_hopper, recipe):  # B-16
    assert all(device_gemm.plan("torch", spec) is None for spec in RECIPES[recipe].gemms.values())


def test_another_gpu_has_no_plan(monkeypatch):  # B-16
    monkeypatch.setattr(device_gemm, "capability", lambda backend: (12, 0))
    assert device_gemm.plan("torch", SPEC) is None


@pytest.mark.parametrize("unit", UNITS)
def test_any_chain_of_a_unit_is_within_the_bound(unit, operands):  # B-16
    """Of neighboring K, promoted or not, in any number of parts; and the exact result."""
    a, b = operands
    plans = [
        Accumulation(name="one", unit=UNITS[unit], promotion=p, split_k=s)
        for p in (None, 32, 128)
        for s in (1, 3)
    ]
    outs = [
        gemm.matmul(a, b, accumulate=plan, out_dtype=BFLOAT16) for plan in ("exact", "f32", *plans)
    ]
    for out in outs:
        assert (
            np.abs(out - outs[0]) <= bounds.gemm(a, b, SPEC, out, outs[0], unit=UNITS[unit])
        ).all()


def test_a_wrong_scale_is_beyond_the_bound(on_hopper, operands):  # B-16
    a, b = (q._replace(codes=q.codes[:, :64]) for q in operands)
    simulated = device_gemm.simulated("torch", a, b, SPEC)
    check, parts = Check(name="output", bound=1.0), [bounds.Part(a, b, simulated)]
    device_gemm.compare(check, "torch", parts, SPEC, 2 * simulated, names=("torch", "sim"))
    assert not check.ok


def test_both_frameworks_are_asked_for_their_gpu():
    found = {backend: device_gemm.capability(backend) for backend in ("torch", "jax")}
    assert found["jax"] is None or jax.default_backend() == "gpu"
    assert found["torch"] == (
        torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    )
