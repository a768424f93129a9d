"""Functions of arrays as GEMMs."""

import numpy as np
import pytest

from fp8ref.conformance.gemm.adapters import wrap
from fp8ref.conformance.gemm.scaled_gemm import ProbeError, RefusedError, operand
from fp8ref.formats import E4M3FN
from fp8ref.sim.gemm import gemm


def operands(granularity="rowwise"):
    """Codes from 0.5 to 15, whose sums float32 holds."""
    rng = np.random.default_rng(0)
    return [
        operand(rng.integers(0x30, 0x50, (n, 64)).astype(np.uint8), E4M3FN, granularity, 0.5)
        for n in (8, 16)
    ]


def numpy(a, b, scale_a, scale_b):
    return a.astype(np.float32) @ b.astype(np.float32).T * scale_a * scale_b.T


def torch(a, b, scale_a, scale_b, bias):
    return a.float() @ b.float().T * scale_a * scale_b.T + bias


def jax(a, b, scale_a, scale_b):
    return a.astype("float32") @ b.astype("float32").T * scale_a * scale_b.T


@pytest.mark.parametrize(
    ("function", "framework"), [(numpy, "numpy"), (torch, "torch"), (jax, "jax")]
)
def test_arrays_of_a_framework(function, framework):
    pytest.importorskip(framework)
    found = wrap(function, framework=framework, granularity="rowwise")
    a, b = operands()
    assert np.array_equal(found.multiply(a, b)[0], gemm.matmul(a, b))
    assert found.bias == (function is torch)


def test_a_bias():
    pytest.importorskip("torch")
    a, b = operands()
    bias = np.arange(16, dtype=np.float32)
    found = wrap(torch, framework="torch", granularity="rowwise")
    assert np.array_equal(found.multiply(a, b, bias)[0], gemm.matmul(a, b) + bias)


def test_the_first_framework_that_it_takes():
    pytest.importorskip("torch")
    assert wrap(torch, granularity="rowwise").about["device"] == "cpu"
    assert "torch" in wrap(torch, granularity="rowwise").about


def test_a_function_of_operands():
    found = wrap(gemm.matmul, name="sim")
    assert found.name == "sim"
    assert wrap(found) is found


def test_what_is_no_gemm():
    with pytest.raises(ValueError, match=r"a GEMM takes \(a, b\) or .*; one takes 1 arguments"):
        wrap(lambda a: a, name="one")
    with pytest.raises(ValueError, match="none takes 0 arguments"):
        wrap(lambda: 0, name="none")
    with pytest.raises(ValueError, match="framework is one of numpy, torch, jax; got 'cupy'"):
        wrap(numpy, framework="cupy")
    with pytest.raises(RefusedError, match="raised ZeroDivisionError"):
        wrap(lambda a, b, c, d: 1 / 0, framework="numpy")


def test_scales_that_are_changed_are_seen():
    def mine(a, b, scale_a, scale_b):
        scale_a *= 2
        return a.astype(np.float32) @ b.astype(np.float32).T

    with pytest.raises(ProbeError, match=r"changed its operands\. Let it work on copies"):
        wrap(mine, framework="numpy")
