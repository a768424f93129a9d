"""How a dequantizer multiplies: the rounding of its product, and scales at their ends."""

from collections.abc import Iterator

import numpy as np

from fp8ref.conformance.decoder.subject import Decoded, Decoder
from fp8ref.conformance.inputs import dtypes
from fp8ref.conformance.kit.arrays import equal
from fp8ref.formats import E8M0FNU
from fp8ref.sim.quantize import cast

ENDS = (-127, -126, -100, -76, -22, -9, -6, 0, 8, 76, 100, 126, 127)
"""log2 of scales: the ends of e8m0 and of e4m3, and of float32 some that no usual tensor has."""


def wrong_products(
    decoder: Decoder, codes: np.ndarray, scales: np.ndarray, tensor: float, decoded: Decoded
) -> tuple[str, np.ndarray]:
    """(the rounding that gives the numbers decoded, in words; where they are not S-8's).

    The words are empty where nothing is wrong, or has no name. A product that is rounded once to
    the output's dtype is S-8's too.
    """
    values = cast.decode(codes, decoder.fmt)
    spread = decoder.spread(scales, codes.shape)
    expected = decoder.expected(codes, scales, decoded.dtype, tensor)
    numbers = decoded.numbers
    dtype = "float32" if decoded.dtype == "float64" else decoded.dtype
    wrong = ~equal(numbers, expected)
    with np.errstate(all="ignore"):
        if decoder.levels < 2 and not decoder.divides:
            once = dtypes.rounded(values.astype(np.float64) * spread, dtype)
            wrong &= ~equal(numbers, once)
        if not wrong.any():
            return "", wrong
        for words, product in _roundings(decoder, values, spread, np.float32(tensor)):
            if equal(numbers, dtypes.rounded(product, dtype)).all():
                return words, wrong
    return "", wrong


def _roundings(
    decoder: Decoder, v: np.ndarray, s: np.ndarray, t: np.float32
) -> Iterator[tuple[str, np.ndarray]]:
    """(words, product) of mistakes in multiplying numbers v by scales s, and by the tensor's t."""
    one = np.float32(1)
    if decoder.levels == 2:
        words = "the product with {} is rounded before {}"
        yield words.format("scale_inv", "the tensor's scale"), (v * s) * t
        yield words.format("the tensor's scale", "scale_inv"), (v * t) * s
        yield "the tensor's scale is ignored", v * s
        for product in (v * (s / t), v * (s * (one / t))):
            yield "it divides by the tensor's scale", product
        s = t * s
    if decoder.divides:
        yield "it multiplies by 1 / scale in the place of dividing", v * (one / s)
        s = one / s
    yield "it divides by 1 / scale_inv in the place of multiplying", v / (one / s)
    yield "it divides by scale_inv", v / s
    yield "its scale is ignored", v
    for dtype in ("bfloat16", "float16"):
        short = dtypes.rounded(s, dtype)
        yield f"scale_inv is rounded to {dtype}", v * short
        yield f"the product is rounded to {dtype}", dtypes.rounded(v * s, dtype)
        words = f"scale_inv and the product are rounded to {dtype}"
        yield words, dtypes.rounded(v * short, dtype)
    log2 = np.log2(s.astype(np.float64))
    for words, exponent in (
        ("rounded down", np.floor(log2)),
        ("rounded up", np.ceil(log2)),
        ("rounded", np.round(log2)),
    ):
        power = np.exp2(exponent).astype(np.float32)
        yield f"scale_inv is {words} to a power of two", v * power
    yield "scale_inv is squared", v * s * s
    yield "the square root of scale_inv is taken", v * np.sqrt(s)


def ends(decoder: Decoder) -> list[np.float32]:
    """The scales at ends that its scales can hold, NaN the last."""
    scales = [np.float32(2.0**n) for n in ENDS if n > -127 or decoder.scale_fmt is E8M0FNU]
    if decoder.scale_fmt is not None:
        held = cast.round_to(np.array(scales), decoder.scale_fmt, saturate=True)
        scales = [s for s, kept in zip(scales, held, strict=True) if s == kept]
    if decoder.scale_fmt is not E8M0FNU:
        largest = decoder.scale_fmt.max if decoder.scale_fmt else np.inf
        scales += [np.float32(0), np.float32(largest)]
    return [*scales, np.float32(np.nan)]


def wrong_end(
    decoder: Decoder, codes: np.ndarray, end: np.float32
) -> tuple[str, np.ndarray, Decoded]:
    """(what is wrong under a scale at an end, in words; where; what was decoded).

    Results that are subnormal are not compared where a device may flush them (S-12).
    """
    decoded = decoder.decode(codes, end)
    expected = decoder.expected(codes, end, decoded.dtype)
    numbers = decoded.numbers
    size = np.abs(expected)
    least = 2.0**-14 if decoded.dtype == "float16" else 2.0**-126
    small = (size > 0) & (size < least)
    wrong = ~equal(numbers, expected) & ~(small if decoder.may_flush else np.zeros_like(small))
    if small.any() and np.array_equal(wrong, small) and not numbers[small].any():
        return f"products below 2^{np.log2(least):g} are flushed to 0", wrong, decoded
    if not wrong.any():
        return "", wrong, decoded
    got = numbers[wrong]
    reading = "is read as another number"
    if (got == 0).all():
        reading = "is read as 0"
    elif np.isnan(got).all() or np.isinf(got).all():
        reading = f"gives {'NaN' if np.isnan(got).all() else 'infinity'}"
    elif np.isfinite(got).all() and not np.isfinite(end):
        reading = "is read as a number"
    if not np.isfinite(end) or end == 0:
        value = f"{end:g}"
    else:
        power = np.log2(float(end))
        value = f"2^{power:g}" if power == int(power) else f"{end:g}"
    return f"a scale_inv of {value} {reading}", wrong, decoded
