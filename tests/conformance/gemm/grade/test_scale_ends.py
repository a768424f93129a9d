"""Scales that no usual tensor has: the ends of e8m0 and float32, and NaN (spec B-14)."""

import numpy as np
import pytest

from fp8ref.conformance.gemm import grade_gemm
from fp8ref.conformance.gemm.grade import grading, scale_ends
from fp8ref.conformance.gemm.scaled_gemm import hardware_scales, operand
from fp8ref.formats import E2M1FN, E4M3FN, E8M0FNU
from fp8ref.sim.gemm import gemm
from fp8ref.sim.quantize import cast, scaling

TINY, HUGE = np.float32(2.0**-127), np.float32(2.0**127)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(grading, "SHAPES", ((16, 16, 32),))
    monkeypatch.setattr(grading, "SHAPES_OF_BLOCKS", ((16, 16, 128),))


def exact(a, b):
    """The dequantized product in float64, rounded once."""
    x, y = (cast.decode(q.codes, q.fmt).astype(np.float64) * spread(q) for q in (a, b))
    return (x @ y.T).astype(np.float32)


def spread(q):
    return scaling.spread(np.asarray(q.scale_inv, np.float64), q.codes.shape, q.blocks)


def reading(change):
    """The GEMM that changes scale_inv of both operands first."""

    def function(a, b):
        return exact(*(q._replace(scale_inv=change(np.array(q.scale_inv))) for q in (a, b)))

    return function


def as_zero(scale_inv):
    """Byte 0 of e8m0 read as a subnormal float32 that is flushed."""  # vllm#46676
    return np.where(scale_inv == TINY, np.float32(0), scale_inv)


def byte_255_as_a_number(scale_inv):
    return np.where(np.isnan(scale_inv), np.float32(1), scale_inv)


def byte_255_as_infinity(scale_inv):
    return np.where(np.isnan(scale_inv), np.float32(np.inf), scale_inv)


def byte_254_as_nan(scale_inv):
    return np.where(scale_inv == HUGE, np.float32(np.nan), scale_inv)


def byte_1_as_byte_0(scale_inv):
    return np.where(scale_inv == 2 * TINY, TINY, scale_inv)


def nan_where_small(scale_inv):
    """The product with a reciprocal that overflows."""  # flashinfer#2595
    return np.where(scale_inv < 1e-22, np.float32(np.nan), scale_inv)


def floored(scale_inv):
    return np.maximum(scale_inv, np.float32(4.8e-7))


def capped(scale_inv):
    return np.minimum(scale_inv, np.float32(2046))


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "blockwise_1x128", "mx_1x32"])
def test_a_right_gemm_is_right(granularity):
    assert grade_gemm(exact, granularity=granularity).verdict == "right"


@pytest.mark.parametrize(
    ("change", "granularity", "said"),
    [
        (as_zero, "mx_1x32", "scale_inv 2^-127 of a is read as 0"),
        (byte_1_as_byte_0, "mx_1x32", "scale_inv 2^-126 of a is read as another number"),
        (byte_254_as_nan, "mx_1x32", "scale_inv 2^127 of a gives NaN"),
        (byte_255_as_a_number, "mx_1x32", "scale_inv NaN of a is ignored"),
        (byte_255_as_infinity, "mx_1x32", "scale_inv NaN of a gives infinity"),
        (nan_where_small, "rowwise", "scale_inv 2^-100 of a gives NaN"),
        (floored, "tensorwise", "scale_inv 2^-22 of b is read as another number"),
        (capped, "tensorwise", "scale_inv 2^12 of b is read as another number"),
        (capped, "blockwise_1x128", "scale_inv 2^12 of a is read as another number"),
    ],
)
def test_a_scale_that_is_read_wrong_is_named(change, granularity, said):  # B-14
    grade = grade_gemm(reading(change), granularity=granularity)
    assert grade.verdict == "wrong"
    assert said in [cause.name for cause in grade.causes]


def test_what_the_gemm_refuses_is_not_asked():
    def function(a, b):
        if not (np.isfinite(a.scale_inv).all() and np.isfinite(b.scale_inv).all()):
            raise ValueError("NaN scale")
        return exact(a, b)

    grade = grade_gemm(function)
    assert grade.verdict == "right"
    assert "scale_inv NaN of a, for which it raised" in grade.unasked


def test_ends_of_each_granularity():
    """e8m0 has 2^-127 to 2^127, e4m3fn 2^-9 to 2^8 of the powers asked, float32 no subnormal
    one.
    """

    def exponents(granularity):
        found = [end.value for end in scale_ends.ends(granularity, granularity)]
        assert np.isnan(found[-1])
        return [int(np.log2(value)) for value in found[:-1]]

    assert exponents("mx_1x32") == list(scale_ends.EXPONENTS)
    assert exponents("nvfp4_1x16") == [-9, 8]
    assert exponents("tensorwise") == list(scale_ends.EXPONENTS[1:])


# ---- scales that the hardware has ----


@pytest.mark.parametrize(("granularity", "fmt"), [("mx_1x32", E8M0FNU), ("nvfp4_1x16", E4M3FN)])
def test_operands_have_scales_of_the_granularitys_format(granularity, fmt):
    """A GEMM that is handed other ones cannot be right."""
    codes = np.zeros((4, 128), np.uint8)
    shape = scaling.granularities.scale_shape(granularity, codes.shape, -1)
    drawn = 2.0 ** np.random.default_rng(0).uniform(-3, 3, shape)
    q = operand(codes, E4M3FN, granularity, drawn)
    assert (cast.round_to(q.scale_inv, fmt) == q.scale_inv).all()
    assert (hardware_scales(granularity, q.scale_inv) == q.scale_inv).all()
    # the nearest
    assert (np.abs(q.scale_inv - 1 / drawn) <= (fmt == E4M3FN or 4) / drawn / 8).all()
    assert len(np.unique(q.scale_inv)) > 2


def through_e8m0(a, b):
    """A right MX GEMM: what the hardware reads of scales is a byte."""
    read = (
        q._replace(scale_inv=cast.decode(cast.encode(q.scale_inv, E8M0FNU), E8M0FNU))
        for q in (a, b)
    )
    return gemm.matmul(*read)


def test_a_gemm_that_reads_bytes_of_e8m0_is_right():
    assert grade_gemm(through_e8m0, granularity="mx_1x32").verdict == "right"


# ---- codes of 4 bits ----


@pytest.mark.parametrize("granularity", ["mx_1x32", "nvfp4_1x16", "tensorwise"])
def test_a_gemm_of_codes_of_four_bits(granularity):
    how = {"granularity": granularity, "formats": (E2M1FN, E2M1FN)}
    assert grade_gemm(exact, **how).verdict == "right"

    def without_subnormals(a, b):
        return exact(
            *(
                q._replace(codes=np.where(q.codes & 7 == 1, 0, q.codes).astype(np.uint8))
                for q in (a, b)
            )
        )

    grade = grade_gemm(without_subnormals, **how)
    assert grade.verdict == "wrong"
    assert any("subnormal codes of a are taken for 0" in cause.name for cause in grade.causes)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_codes_of_four_bits_as_arrays_of_a_framework(framework):
    """Of PyTorch two a byte, in float4_e2m1fn_x2; of others one a byte."""
    import ml_dtypes
    import torch

    def function(a, b, scale_a, scale_b):
        if framework == "torch":
            assert a.dtype == torch.float4_e2m1fn_x2
            pairs = [x.view(torch.uint8).numpy() for x in (a, b)]
            x, y = (np.stack([p & 15, p >> 4], -1).reshape(len(p), -1) for p in pairs)
        else:
            x, y = (np.asarray(v).view(np.uint8) for v in (a, b))
        x, y = (v.view(ml_dtypes.float4_e2m1fn).astype(np.float32) for v in (x, y))
        return x @ y.T * np.asarray(scale_a) * np.asarray(scale_b).T

    how = {"granularity": "rowwise", "formats": (E2M1FN, E2M1FN), "framework": framework}
    assert grade_gemm(function, **how).verdict == "right"


def test_scales_whose_product_is_zero():
    """An accumulator in units of the product of both scales divides 0 by 0."""

    def in_units(a, b):
        x, y = (cast.decode(q.codes, q.fmt) for q in (a, b))
        unit = np.float32(a.scale_inv.flat[0] * b.scale_inv.flat[0])
        with np.errstate(all="ignore"):
            return exact(a, b) / unit * unit if x.shape[1] == y.shape[1] else None

    grade = grade_gemm(in_units, granularity="tensorwise")
    assert "scale_inv 2^-100 of a and b gives NaN" in grade.message
    assert grade_gemm(exact, granularity="tensorwise").ok
