"""Invalid GEMMs are refused with the operands that show it."""

import dataclasses

import numpy as np
import pytest
from helpers.gemm.planted_gemms import planted_gemm

from fp8ref.conformance.gemm import identify_gemm
from fp8ref.conformance.gemm.scaled_gemm import ProbeError, ScaledGemm, operand, rows_of
from fp8ref.formats import E4M3FN, E5M2
from fp8ref.sim.gemm import gemm

SHAPE = (16, 16, 64)


def probe(function):
    return identify_gemm(ScaledGemm(name="mine", function=function), shape=SHAPE)


def raises(a, b):
    raise KeyError("no such kernel")


def leaves(a, b):
    raise SystemExit(0)


class Unreadable:
    dtype = np.dtype("float32")

    def __array__(self, *_, **__):
        raise RuntimeError("CUDA error: an illegal memory access")


def changes(a, b):
    a.codes[0, 0] ^= 1
    return gemm.matmul(a, b)


def wanders(a, b, calls=[]):  # noqa: B006
    calls.append(None)
    return gemm.matmul(a, b) + np.float32(len(calls))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            raises,
            "mine raised KeyError for a e4m3fn .16, 64. and b e4m3fn .16, 64., tensorwise: 'no "
            "such kernel'",
        ),
        (leaves, "mine raised SystemExit for .*: 0. Call it on such operands alone"),
        (
            lambda a, b: Unreadable(),
            "mine raised RuntimeError for .*CUDA error: an illegal memory access",
        ),
        (
            lambda a, b: (gemm.matmul(a, b), None),
            "mine gives one array .*; got tuple. Return the array alone",
        ),
        (changes, "mine changed its operands, a e4m3fn .*copies"),
        (wanders, "mine does not repeat itself: .* gave .* at .0, 0., then .*deterministic"),
        (
            lambda a, b: gemm.matmul(a, b)[:, :3],
            r"mine gives \[M, N\] = \[16, 16\] .*; got shape \[16, 3\]",
        ),
        (
            lambda a, b: gemm.matmul(a, b).astype(np.float64),
            "mine gives float32, bfloat16, float16; got float64",
        ),
        (
            lambda a, b: None,
            "gives one array .M, N. of NumPy, PyTorch or JAX; got NoneType. Return the array alone",
        ),
    ],
)
def test_an_invalid_gemm_is_refused(function, said):
    with pytest.raises(ProbeError, match=said):
        probe(function)


def test_a_gemm_that_varies_over_its_result():
    """Another plan from row 64 on, as a kernel with tiles of two kinds has."""

    def function(a, b):
        upper, lower = (
            gemm.matmul(a, b, accumulate=plan) for plan in ("hopper_fast", "hopper_slow")
        )
        return np.where(np.arange(len(a.codes))[:, None] < 64, upper, lower)

    with pytest.raises(
        ProbeError,
        match=r"sums in different ways within one result \[128, 128\], K = 1024: equal operands "
        r"gave .* Probe a smaller M",
    ):
        identify_gemm(ScaledGemm(name="mine", function=function), shape=(128, 128, 1024))


def test_a_function_that_reuses_its_output():
    """As with CUDA graphs, or out=: what it gave before is kept, and noise in it is noticed."""
    buffer = np.zeros((32, 32), np.float32)

    def reuses(a, b):
        buffer[:] = gemm.matmul(a, b, accumulate="hopper_slow")
        return buffer

    found = identify_gemm(ScaledGemm(name="mine", function=reuses), shape=(32, 32, 512))
    assert found.ok
    assert found.plan["promotion"] == 128
    rng = np.random.default_rng(0)

    def noisy(a, b):
        buffer[:] = gemm.matmul(a, b) + rng.standard_normal((32, 32))
        return buffer

    with pytest.raises(ProbeError, match="mine does not repeat itself"):
        identify_gemm(ScaledGemm(name="mine", function=noisy), shape=(32, 32, 512))


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
def test_operands(granularity):
    codes = np.zeros((4, 32), np.uint8)
    scale = (
        np.float32(3) if granularity == "tensorwise" else np.arange(1, 5, dtype=np.float32)[:, None]
    )
    made = operand(codes, E5M2, granularity, scale)
    assert (
        made.scale.shape == made.scale_inv.shape == (() if granularity == "tensorwise" else (4, 1))
    )
    np.testing.assert_array_equal(made.scale_inv, np.float32(1) / scale)
    assert (made.fmt, made.granularity, made.axis) == (E5M2, granularity, -1)


def test_rows_of_blocks_keep_their_scales():
    scale = np.array([[1, 2], [4, 8], [16, 32]], np.float32)
    q = operand(np.zeros((80, 64), np.uint8), E4M3FN, "mx_32x32", scale)
    for rows, blocks in ((4, 1), (32, 1), (33, 2), (80, 3)):
        np.testing.assert_array_equal(rows_of(q, np.arange(rows)).scale, scale[:blocks])
    with pytest.raises(ValueError, match="of blocks of 32 rows the first rows are taken"):
        rows_of(q, np.array([0, 2]))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_function_of_a_frameworks_own_arrays(framework):
    def function(a, b):
        result = gemm.matmul(a, b, accumulate="hopper_slow")
        if framework == "torch":
            import torch

            return torch.from_numpy(result)
        import jax.numpy as jnp

        return jnp.asarray(result)

    found = identify_gemm(
        dataclasses.replace(planted_gemm("hopper_slow"), function=function), shape=(32, 32, 256)
    )
    assert found.ok
    assert found.plan["promotion"] == 128
