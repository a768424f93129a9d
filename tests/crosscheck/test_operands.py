import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from fp8ref.conformance.kit.compare import Report
from fp8ref.crosscheck.one_device import crosscheck
from fp8ref.crosscheck.operands import (
    OperandCast,
    as_factor,
    check_operands,
    in_pass_order,
    observe,
    quantizers,
)
from fp8ref.formats import BFLOAT16, E4M3FN
from fp8ref.jax.linear import observer as jax_observer
from fp8ref.recipe import OPERANDS, RECIPES, REDUCED_AXES, CastSpec
from fp8ref.sim import delayed
from fp8ref.sim.gemm import gemm
from fp8ref.sim.quantize import cast, scaling


def test_gemms_are_put_in_the_order_of_the_pass(small):
    """Whatever order callbacks come in."""
    names = [d.path for d in small.decisions() if d.fp8]
    calls = [(name, which) for name in names for which in OPERANDS]
    np.random.default_rng(0).shuffle(calls)

    class Shuffled:
        backend, config, count = "jax", small, 0

        def observe(self, tokens, observer):
            for name, which in calls:
                observer(name, which, None, None, None)

    found = [
        (o.layer, o.gemm)
        for o in in_pass_order(observe(Shuffled(), np.zeros((4, 17), np.int32)), small)
    ]
    assert found[: len(names)] == [(name, "output") for name in names]
    assert found[len(names) :] == [
        (name, which) for name in names[::-1] for which in ("grad_input", "grad_weight")
    ]


class OneLinear:
    """A trainer of one linear, whose GEMMs are the simulator's; ``planted`` may change or drop
    one.
    """

    backend, count = "torch", 0
    config = SimpleNamespace(run=SimpleNamespace(seed=0))

    def __init__(self, rng, planted=lambda which, a, b, out: (a, b, out)):
        normal = {"input": (32, 64), "weight": (48, 64), "grad_output": (32, 48)}
        self.tensors = {
            role: cast.round_to(rng.standard_normal(shape).astype(np.float32), BFLOAT16)
            for role, shape in normal.items()
        }
        self.planted = planted

    def observe(self, tokens, observer):
        for which, spec in RECIPES["rowwise"].gemms.items():
            pair = []
            for role, how, axis in zip(
                OPERANDS[which], (spec.a, spec.b), REDUCED_AXES[which], strict=True
            ):
                pair.append(
                    scaling.quantize(
                        self.tensors[role],
                        how.fmt,
                        granularity=how.granularity,
                        policy=how.policy,
                        axis=axis,
                    )
                )
            factors = map(as_factor, pair)
            out = gemm.matmul(*factors, epilogue=spec.epilogue, out_dtype=BFLOAT16)
            live = (
                (self.tensors[role], q.codes, q.scale)
                for role, q in zip(OPERANDS[which], pair, strict=True)
            )
            if seen := self.planted(which, *live, out):
                observer("linear", which, *seen)


def failed_checks(trainer, plan="rowwise"):
    report = Report()
    check_operands(
        report,
        trainer,
        np.zeros((1, 2), np.int32),
        {"linear": RECIPES[plan]},
        quantizers(["torch"]),
        {},
        None,
        None,
    )
    assert report.checks
    return {check.name: check.detail for check in report.failures}


def test_the_simulators_own_gemms_pass(rng):
    assert failed_checks(OneLinear(rng)) == {}


@pytest.mark.parametrize("gemm_name", list(OPERANDS))
def test_what_was_planned_and_what_ran_are_compared(gemm_name, rng):
    failed = failed_checks(
        OneLinear(rng, lambda which, *values: values if which != gemm_name else None)
    )
    assert list(failed) == [f"linear/{gemm_name}/value/torch"]
    assert "was planned in FP8 and did not run" in failed[f"linear/{gemm_name}/value/torch"]
    failed = failed_checks(OneLinear(rng), plan="bf16")
    assert "ran in FP8 and was not planned" in failed[f"linear/{gemm_name}/value/torch"]


@pytest.mark.parametrize("gemm_name", list(OPERANDS))
def test_a_wrong_code_scale_or_output_fails_its_own_check(gemm_name, rng):
    def planted(*, code=0, ulps=0, factor=1.0):
        def change(which, a, b, out):
            if which != gemm_name:
                return a, b, out
            hp, codes, scale = b
            codes, scale = codes.copy(), scale.copy()
            codes[0, 0] ^= code
            for _ in range(ulps):
                scale[0] = np.nextafter(scale[0], np.float32(0))
            return a, (hp, codes, scale), out * np.float32(factor)

        return set(failed_checks(OneLinear(rng, change)))

    role = OPERANDS[gemm_name][1]
    assert planted() == set()
    assert planted(code=1) == {f"linear/{role}/codes/torch"}
    assert planted(ulps=1) == {f"linear/{role}/scale/torch"}
    assert planted(factor=1.02) == {f"linear/{gemm_name}/value/torch"}


@pytest.mark.slow
def test_a_gemm_that_was_planned_and_did_not_run_fails(small, monkeypatch):
    monkeypatch.setattr(
        jax_observer,
        "_observer",
        type(
            "Deaf", (), {"get": lambda self: None, "set": lambda *a: None, "reset": lambda *a: None}
        )(),
    )
    report = crosscheck(small, backends=("jax",), steps=0)
    failed = {check.name: check.detail for check in report.failures}
    assert "did not run" in failed["model.layers.0.mlp.up_proj/grad_weight/value/jax"]


@pytest.mark.slow
def test_a_wrong_gemm_breaks_its_bound(small, monkeypatch):
    from fp8ref.jax.gemm import gemm

    original = gemm._dot

    def wrong(*args):
        right = original(*args)
        return (right * np.float32(1.02)).astype(right.dtype)

    monkeypatch.setattr(gemm, "_dot", wrong)
    report = crosscheck(small, backends=("jax",), steps=0)
    assert any("/grad_weight/value/jax" in check.name for check in report.failures)


@pytest.mark.parametrize("who", ["jax", "torch"])
def test_every_quantizer_rounds_its_input_to_bfloat16_and_returns_plain_arrays(who):
    x = np.array([[1.0, -448.0], [2.0, 3.5]], np.float32)
    codes, scale = quantizers([who])[who].quantize(
        x, OperandCast("input", CastSpec(fmt=E4M3FN, granularity="rowwise"), 1)
    )
    assert (codes.dtype, codes.shape, scale.dtype, scale.shape) == (
        np.uint8,
        (2, 2),
        np.float32,
        (2, 1),
    )
    # by hand: scales 448 / 448 and 448 / 3.5; 1 -> 0x38, -448 -> 0xFE, 256 -> 0x78, 448 -> 0x7E
    np.testing.assert_array_equal(codes, [[0x38, 0xFE], [0x78, 0x7E]])
    np.testing.assert_array_equal(scale, [[1], [128]])
    x[0, 0] = 1 + 2.0**-9  # 1 in bfloat16
    tensorwise = OperandCast("input", CastSpec(fmt=E4M3FN), 1)
    rounded, _ = quantizers([who])[who].quantize(x, tensorwise)
    np.testing.assert_array_equal(rounded[0], [0x38, 0xFE])


@pytest.mark.parametrize("who", ["jax", "torch"])
def test_every_encoder_saturates(who):
    np.testing.assert_array_equal(
        quantizers([who])[who].encode(np.array([1e9, -1e9, 1.0], np.float32), E4M3FN),
        [0x7E, 0xFE, 0x38],
    )


@pytest.mark.parametrize("axis", [0, 1])
def test_a_states_scales_are_rounded_by_the_seed(axis, rng):  # S-24, H-1
    """The flat index counts along the reduced axis."""
    spec = dataclasses.replace(RECIPES["delayed"].output.a, rounding="stochastic")
    hp = cast.round_to(rng.standard_normal((32, 16)).astype(np.float32), BFLOAT16)
    state = delayed.init(spec.delayed)
    found = OperandCast("input", spec, axis, seed=5).simulated(hp, state)
    scales = delayed.scales(state, spec.delayed, spec.fmt)
    expected = scaling.quantize_with(
        hp if axis else hp.T, scales, spec.fmt, rounding="stochastic", seed=5
    )
    np.testing.assert_array_equal(found.codes, expected.codes if axis else expected.codes.T)
    assert found.axis == axis
