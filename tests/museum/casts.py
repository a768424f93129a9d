"""Faults of casts to FP8 and FP4."""

import numpy as np
from museum import ask
from museum.arithmetic import (
    E2M1,
    E4M3,
    E4M3FNUZ,
    E5M2,
    F,
    bits,
    codes,
    number,
    saturated,
    spacing,
    through,
)
from museum.exhibit import Exhibit


def e4m3(x):
    """The cast that saturates."""
    return saturated(x, E4M3)


def e5m2(x):
    """The cast that saturates."""
    return saturated(x, E5M2)


def e2m1(x):
    """The cast of ml_dtypes."""
    return np.asarray(x).astype(E2M1)


def overflowing(dtype):
    """The cast that gives a format's infinity or NaN beyond its numbers."""
    return lambda x: np.asarray(x).astype(dtype)


def shifted_subnormals(x):
    """Subnormal results by an integer shift that loses sticky bits, and a bit too far."""
    magnitude = bits(x) & 0x7FFFFFFF
    deficit = np.clip(127 - (magnitude >> 23).astype(int), 0, 31)  # e2m1's emin is 0
    significand = (magnitude & 0x7FFFFF | 1 << 23) >> deficit
    subnormal = np.rint(significand / 2.0**23) * 0.5  # 2^22 is meant
    return np.where(magnitude < bits(1.0), np.copysign(subnormal, x), x).astype(E2M1)


def masked_mantissa(x):
    """The mantissa is masked with that of the largest number, 0b110."""
    c = codes(x)
    return np.where(np.isnan(x), c, c & 0xF8 | c & 6)


def by_float16(x):
    """float16 in between rounds twice."""
    return saturated(through(x, np.float16))


def ties_away(x, dtype):
    """Half a spacing is added, and the rest cut."""
    q = spacing(x, dtype)
    return np.copysign(np.floor(np.abs(x) / q + 0.5) * q, x)


def e5m2_ties_away(x):
    return ties_away(x, E5M2).astype(E5M2)


def e4m3_ties_away(x):
    return saturated(ties_away(x, E4M3))


def lost_carry(x):
    """The mantissa wraps to 0 where it rounds up to 2, and the exponent stays."""
    rounded, q = codes(x), spacing(x, E4M3)
    cut = codes(np.trunc(np.asarray(x) / q) * q)
    carried = rounded >> 3 != cut >> 3
    return np.where(carried & (cut & 0x7F > 7), cut & 0xF8 | rounded & 7, rounded)


def rounded_as_normals_first(x):
    """Three fraction bits whatever the exponent, then the subnormal's fewer."""
    q = spacing(x, E4M3, normal=True)
    return saturated(np.rint(np.asarray(x) / q) * q)


def overflow_before_rounding(x):
    """Above the largest number is infinite, even if it rounds to that number."""
    return np.where(np.abs(x) > 57344, np.copysign(np.inf, x), x).astype(E5M2)


def fnuz_of_infinities(x):
    """NaN of infinities, as ONNX's table has it; finite numbers saturate."""
    return codes(np.where(np.isinf(x), np.nan, x), E4M3FNUZ)


def truncating(x):
    """The mantissa is cut, whatever rounding was asked for."""
    q = spacing(x, E4M3)
    return saturated(np.trunc(np.asarray(x) / q) * q)


def stochastic(dtype, noise, *, carries=True):
    """A cast that adds a noise of 21 bits below the last kept bit; of a mantissa that overflows the
    carry may be lost."""
    generator = np.random.default_rng(0)
    least = 1 << ml_bits(dtype)

    def cast(x):
        q = spacing(x, dtype)
        drawn = noise(generator.integers(0, 1 << 21, np.shape(x))) / 2.0**21
        n = np.abs(x) / q
        up = np.floor(n + drawn)
        if not carries:
            up = np.where((n >= least) & (up == 2 * least), least, up)
        return saturated(np.copysign(up * q, x), dtype)

    return cast


def ml_bits(dtype):
    return {E4M3: 3, E5M2: 2}[dtype]


def sign_after_rounding(x):
    """The sign is set on a magnitude of 0: 0x80, fnuz's only NaN."""
    c = codes(np.abs(x), E4M3FNUZ)
    return c | np.signbit(x).astype(np.uint8) << 7


def fnuz(x):
    return codes(x, E4M3FNUZ)


def by_float32(x):
    """float64 is rounded to float32 first."""
    return saturated(np.asarray(x).astype(F))


def once(x):
    """Rounded once, from float64 too: ml_dtypes rounds float64 by way of float32."""
    q = spacing(x, E4M3)
    return saturated(np.rint(np.asarray(x, np.float64) / q) * q)


def collapsed_binade(x):
    """Exponent field 15 is taken for infinity, as in IEEE formats: 256 and above are 448."""
    c = codes(x)
    return np.where((c & 0x78 == 0x78) & (c & 7 != 7), c | 6, c)


def narrow_sticky(x):
    """Above a midpoint by less than 2^-9 counts as the midpoint: the mask has nine of 19 bits."""
    u = bits(x)
    half, odd, sticky = u >> 19 & 1, u >> 20 & 1, (u & 0x7C000) != 0
    return saturated(
        np.where(np.abs(x) < 2.0**-6, x, number((u >> 20) + (half & (odd | sticky)) << 20))
    )


def of_nans(cast):
    """The same with NaN kept, which integer arithmetic may carry into another number."""
    return lambda x: np.where(np.isnan(x), codes(x), cast(x).view(np.uint8))


def four_decisions(x):
    """Ties away, subnormal results flushed, -0 lost, finite overflow infinite."""
    y = ties_away(x, E5M2).astype(E5M2).astype(F)
    return np.where(np.abs(x) < 2.0**-15, F(0), y).astype(E5M2)


def by_truncated_float16(x):
    """Ten fraction bits, cut, before the cast."""
    return saturated(np.where(np.isnan(x), x, number(bits(x) & np.uint32(0xFFFFE000))))


ONNX = "https://github.com/onnx/onnx/"
TRITON = "https://github.com/triton-lang/triton/"

EXHIBITS = (
    Exhibit(
        name="tt-metal-51971",
        link="https://github.com/tenstorrent/tt-metal/issues/51971",
        library="tt-metal",
        year=2026,
        title="Subnormal results of an MX element cast are half as large",
        fault=shifted_subnormals,
        twin=e2m1,
        ask=ask.cast("e2m1fn", "ml_dtypes"),
        named="subnormal results are half what they are, and bits shifted out are lost",
    ),
    Exhibit(
        name="tt-metal-51975",
        link="https://github.com/tenstorrent/tt-metal/pull/51975",
        library="tt-metal",
        year=2026,
        title="The mantissa is masked with that of the largest number: odd codes vanish",
        fault=masked_mantissa,
        twin=e4m3,
        ask=ask.cast("e4m3fn"),
        named="the last bit of codes is cleared",
    ),
    Exhibit(
        name="triton-10846",
        link=TRITON + "pull/10846",
        library="Triton",
        year=2026,
        title="float32 to FP8 by way of float16 rounds twice",
        fault=by_float16,
        twin=e4m3,
        ask=ask.cast("e4m3fn"),
        named="float32 is rounded to float16 first",
    ),
    Exhibit(
        name="triton-11753",
        link=TRITON + "pull/11753",
        library="Triton",
        year=2026,
        title="Software e5m2 conversion breaks ties away from zero",
        fault=e5m2_ties_away,
        twin=overflowing(E5M2),
        ask=ask.cast("e5m2", "non_saturating"),
        named="rounding: nearest_away",
    ),
    Exhibit(
        name="triton-11897",
        link=TRITON + "pull/11897",
        library="Triton (interpreter)",
        year=2026,
        title="The carry of a mantissa that rounds up to 2 is dropped",
        fault=lost_carry,
        twin=e4m3,
        ask=ask.cast("e4m3fn"),
        named="the carry of a mantissa that rounds up to 2 is lost",
    ),
    Exhibit(
        name="openvino-30057",
        link="https://github.com/openvinotoolkit/openvino/pull/30057",
        library="OpenVINO",
        year=2025,
        title="Subnormal results are rounded as normals first, and once more as subnormals",
        fault=rounded_as_normals_first,
        twin=e4m3,
        ask=ask.cast("e4m3fn"),
        named="subnormal results are rounded twice, first as if they were normal",
    ),
    Exhibit(
        name="universal-1302",
        link="https://github.com/stillwater-sc/universal/issues/1302",
        library="Universal",
        year=2026,
        title="Overflow is decided before rounding",
        fault=overflow_before_rounding,
        twin=overflowing(E5M2),
        ask=ask.cast("e5m2", "non_saturating"),
        named="overflow is decided before rounding",
    ),
    Exhibit(
        name="onnx-6220",
        link=ONNX + "issues/6220",
        library="onnx (reference)",
        year=2024,
        title="Infinity becomes the largest e4m3fnuz number although the table says NaN",
        fault=fnuz,
        twin=fnuz_of_infinities,
        ask=ask.cast("e4m3fnuz", None, overflow="max", infinities="nan"),
        named="infinities: max",
    ),
    Exhibit(
        name="pytorch-178817",
        link="https://github.com/pytorch/pytorch/pull/178817",
        library="PyTorch",
        year=2026,
        title="The CPU's vector path does not saturate what the CUDA cast saturates",
        fault=overflowing(E4M3),
        twin=e4m3,
        ask=ask.cast("e4m3fn"),
        named="overflow: nan",
    ),
    Exhibit(
        name="rocm-systems-8800",
        link="https://github.com/ROCm/rocm-systems/pull/8800",
        library="rocjitsu (gfx1250)",
        year=2026,
        title="A non-saturating conversion saturates",
        fault=e4m3,
        twin=overflowing(E4M3),
        ask=ask.cast("e4m3fn", "non_saturating"),
        named="overflow: max",
    ),
    Exhibit(
        name="pto-isa-319",
        link="https://github.com/hw-native-sys/pto-isa/issues/319",
        library="PTO-ISA",
        year=2026,
        title="The rounding mode that was asked for is ignored: the cast truncates",
        fault=truncating,
        twin=e4m3,
        ask=ask.cast("e4m3fn"),
        named="rounding: toward_zero",
    ),
    Exhibit(
        name="onednn-2903",
        link="https://github.com/uxlfoundation/oneDNN/pull/2903",
        library="oneDNN",
        year=2025,
        title="Stochastic rounding to FP8 nearly always rounds down",
        fault=stochastic(E5M2, lambda r: r >> 5),
        twin=stochastic(E5M2, lambda r: r),
        ask=ask.cast("e5m2", None),
        named="of the way it rounds up at the rate 3",
    ),
    Exhibit(
        name="llvm-project-rocm-3275",
        link="https://github.com/ROCm/llvm-project/pull/3275",
        library="AMD comgr",
        year=2026,
        title="Stochastic rounding masks the carry out of the mantissa",
        fault=stochastic(E4M3, lambda r: r, carries=False),
        twin=stochastic(E4M3, lambda r: r),
        ask=ask.cast("e4m3fn", None),
        named="which is not a neighbor: the carry of a mantissa that rounds up to 2 is lost",
    ),
    Exhibit(
        name="triton-3997",
        link=TRITON + "pull/3997",
        library="Triton (AMD)",
        year=2024,
        title="Small negative numbers become NaN in a format without -0",
        fault=sign_after_rounding,
        twin=fnuz,
        ask=ask.cast("e4m3fnuz"),
        named="negative numbers that round to 0 become NaN",
    ),
    Exhibit(
        name="flagtree-1116",
        link="https://github.com/flagos-ai/FlagTree/pull/1116",
        library="FlagTree",
        year=2026,
        title="float64 is rounded to float32 before it is rounded to FP8",
        fault=by_float32,
        twin=once,
        ask=ask.cast("e4m3fn", once=True),
        named="float64 is rounded to float32 first",
    ),
    Exhibit(
        name="sglang-40581",
        link="https://github.com/sgl-project/sglang/pull/40581",
        library="SGLang",
        year=2026,
        title="The top binade collapses onto the maximum",
        fault=collapsed_binade,
        twin=e4m3,
        ask=ask.cast("e4m3fn"),
        named="a cast to e4m3 (max 240), not e4m3fn (max 448)",
    ),
    Exhibit(
        name="onnxruntime-16938",
        link="https://github.com/microsoft/onnxruntime/issues/16938",
        library="ONNX Runtime",
        year=2023,
        title="Values just above a midpoint are rounded down",
        fault=of_nans(narrow_sticky),
        twin=e4m3,
        ask=ask.cast("e4m3fn"),
        named="only 9 fraction bits of a number are read",
    ),
    Exhibit(
        name="onnx-5456",
        link=ONNX + "pull/5456",
        library="onnx (helper)",
        year=2023,
        title="Ties are rounded up instead of to even",
        fault=e4m3_ties_away,
        twin=e4m3,
        ask=ask.cast("e4m3fn"),
        named="rounding: nearest_away",
    ),
    Exhibit(
        name="ocannl-646",
        link="https://github.com/ahrefs/ocannl/issues/646",
        library="OCANNL",
        year=2026,
        title="Subnormal results are flushed, -0 loses its sign, finite overflow is infinite",
        fault=four_decisions,
        twin=e5m2,
        ask=ask.cast("e5m2"),
        named="negative_zero: lost",
    ),
    Exhibit(
        name="freetoken-85",
        link="https://github.com/FlashML-org/FreeToken/pull/85",
        library="Triton (sm_89)",
        year=2026,
        title="float32 is truncated to float16 on the way to e4m3",
        fault=by_truncated_float16,
        twin=e4m3,
        ask=ask.cast("e4m3fn"),
        named="double_rounding: float16 (toward_zero)",
    ),
)
