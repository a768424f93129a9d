import numpy as np
import pytest

from fp8ref.crosscheck.one_device import crosscheck
from fp8ref.crosscheck.operands import in_pass_order, observe, quantizers
from fp8ref.formats import E4M3FN
from fp8ref.jax import gemm_observer as jax_observer
from fp8ref.recipe import OPERANDS, CastSpec


def test_gemms_are_put_in_the_order_of_the_pass(small):
    """Whatever order callbacks come in."""
    names = [d.path for d in small.decisions() if d.fp8]
    calls = [(name, which) for name in names for which in OPERANDS]
    np.random.default_rng(0).shuffle(calls)

    class Shuffled:
        backend = "jax"

        def observe(self, tokens, observer):
            for name, which in calls:
                observer(name, which, None, None, None)

    found = [(o.layer, o.gemm) for o in in_pass_order(observe(Shuffled(), np.zeros((4, 17), np.int32)), small)]
    assert found[: len(names)] == [(name, "output") for name in names]
    assert found[len(names) :] == [(name, which) for name in names[::-1] for which in ("grad_input", "grad_weight")]


@pytest.mark.slow
def test_a_gemm_that_was_planned_and_did_not_run_fails(small, monkeypatch):
    monkeypatch.setattr(
        jax_observer, "_observer", type("Deaf", (), {"get": lambda self: None, "set": lambda *a: None, "reset": lambda *a: None})()
    )
    report = crosscheck(small, backends=("jax",), steps=0)
    failed = {check.name: check.detail for check in report.failures}
    assert "did not run" in failed["model.layers.0.mlp.up_proj/grad_weight/value/jax"]


@pytest.mark.slow
def test_a_wrong_gemm_breaks_its_bound(small, monkeypatch):
    from fp8ref.jax import gemm

    original = gemm._dot

    def wrong(*args):
        right = original(*args)
        return (right * np.float32(1.02)).astype(right.dtype)

    monkeypatch.setattr(gemm, "_dot", wrong)
    report = crosscheck(small, backends=("jax",), steps=0)
    assert any("/grad_weight/value/jax" in check.name for check in report.failures)


@pytest.mark.parametrize("who", ["sim", "jax", "torch"])
def test_every_quantizer_rounds_its_input_to_the_named_dtype_and_returns_plain_arrays(who):
    x = np.array([[1.0, -448.0], [2.0, 3.5]], np.float32)
    codes, scale = quantizers([who])[who].quantize(x, CastSpec(fmt=E4M3FN, granularity="rowwise"), axis=1, dtype="bfloat16")
    assert (codes.dtype, codes.shape, scale.dtype, scale.shape) == (np.uint8, (2, 2), np.float32, (2, 1))
    # by hand: scales 448 / 448 and 448 / 3.5; 1 -> 0x38, -448 -> 0xFE, 256 -> 0x78, 448 -> 0x7E
    np.testing.assert_array_equal(codes, [[0x38, 0xFE], [0x78, 0x7E]])
    np.testing.assert_array_equal(scale, [[1], [128]])
    x[0, 0] = 1 + 2.0**-9  # 1 in bfloat16
    rounded, _ = quantizers([who])[who].quantize(x, CastSpec(fmt=E4M3FN), axis=1, dtype="bfloat16")
    np.testing.assert_array_equal(rounded[0], [0x38, 0xFE])


@pytest.mark.parametrize("who", ["sim", "jax", "torch"])
def test_every_encoder_saturates(who):
    np.testing.assert_array_equal(quantizers([who])[who].encode(np.array([1e9, -1e9, 1.0], np.float32), E4M3FN), [0x7E, 0xFE, 0x38])
