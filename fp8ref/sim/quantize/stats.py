"""Quantization error in numbers (spec Q): for a tensor, or for each group that shares a scale.

``statistics`` gives SQNR, bias, and the rates of underflow, overflow and saturation; ``exponents``
histograms; ``error`` the error of a GEMM's output against a reference. Statistics and histograms
are sums or maxima over elements, taken in slabs by ``reduce_groups``, so that a large tensor needs
little extra memory.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from fp8ref.formats import NARROW_FORMATS, Format
from fp8ref.shared.errors import require
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec import granularity as granularities

__all__ = ["error", "sqnr_by_row", "statistics"]

SLAB = 1 << 20
"""Elements that are reduced at a time: 8 MiB a float64 temporary."""

_K = TypeVar("_K", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Counts (int64) and sums (float64) of a tensor, shape (), or of each group, the scales' (Q-6).

    count          elements
    zeros          inputs that are zero
    non_finite     inputs that are NaN or infinite: in no sum or maximum; their codes are counted
    non_finite_codes  codes that are NaN or infinite
    underflows     inputs that are not zero whose code is zero
    subnormals     codes that are subnormal, zero not among them
    overflows      scaled values, NaN apart, that become non-finite without saturation (C-4)
    saturated      codes of +-max: the group's amax is one of them, overflow or not
    signal, noise  sum of x^2, sum of e^2, with the error e = dequantize(q) - x
    magnitude, error  sum of |x|, sum of e
    max_ulp        largest |decode(code) - scaled|, in the format's spacings at scaled (Q-2)
    """

    count: np.ndarray
    zeros: np.ndarray
    non_finite: np.ndarray
    non_finite_codes: np.ndarray
    underflows: np.ndarray
    subnormals: np.ndarray
    overflows: np.ndarray
    saturated: np.ndarray
    signal: np.ndarray
    noise: np.ndarray
    magnitude: np.ndarray
    error: np.ndarray
    max_ulp: np.ndarray

    @property
    def sqnr(self) -> np.ndarray:
        """10 log10(signal / noise) in dB. Inf without noise; -Inf if noise is infinite or there is
        no signal; NaN if a finite x became NaN, or no x is finite (Q-1)."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            value = 10 * np.log10(self.signal / self.noise)
        value = np.where(self.noise == 0, np.inf, value)
        return np.where(self.count == self.non_finite, np.nan, value)[()]

    @property
    def bias(self) -> np.ndarray:
        """The mean of e over the finite x; NaN if there is none."""
        return _quotient(self.error, self.count - self.non_finite)

    @property
    def relative_bias(self) -> np.ndarray:
        """sum of e / sum of |x|; 0 if the sum of e is 0; NaN if no x is finite."""
        value = np.where(self.error == 0, 0.0, _quotient(self.error, self.magnitude))
        return np.where(self.count == self.non_finite, np.nan, value)[()]

    @property
    def underflow_rate(self) -> np.ndarray:
        """underflows / count; every rate is of all elements, zeros and non-finite too (Q-3)."""
        return self.underflows / self.count

    @property
    def subnormal_rate(self) -> np.ndarray:
        """subnormals / count."""
        return self.subnormals / self.count

    @property
    def overflow_rate(self) -> np.ndarray:
        """overflows / count."""
        return self.overflows / self.count

    @property
    def saturation_rate(self) -> np.ndarray:
        """saturated / count: at least one element of each group, its amax."""
        return self.saturated / self.count


def statistics(x, q: Quantized, *, per_group: bool = False) -> Statistics:
    """The statistics of x and the q that it was quantized to.

    Shapes:   x hp, the shape of q.codes; every field () or, per group, the shape of q.scale.
    Units:    e in x's; max_ulp in spacings of q.fmt.
    Order:    scaled = RN32(f32(x) * scale), as S-5 before its clip; e = f64(dequantize(q)) -
              f64(x), rounded once to float64; float64 sums.
    Specials: NaN and infinite x count as ``non_finite`` and enter no sum; a finite x whose code is
              NaN makes the sums of e and max_ulp NaN.
    Raises:   ValueError: x float64, not numbers, empty, or not of q's shape; a q that is not a
              Quantized of FP8 with its scales.
    Source:   spec Q-1 to Q-4, Q-6.
    """
    _check(x, q)
    with np.errstate(invalid="ignore", over="ignore"):  # a finite x may have become Inf or NaN
        return Statistics(**reduce_groups(x, q, _measure, per_group=per_group))


def sqnr_by_row(x, decoded) -> np.ndarray:
    """The SQNR in dB of each row, such as a token, over its finite elements (Q-1).

    One large row owns the SQNR of a whole tensor; these show what the other rows keep.

    Shapes:   x and decoded = dequantize(q) [..., C]; float64 [...].
    Specials: NaN for a row of zeros, Inf without an error, -Inf where an error is not a number.
    """
    x, decoded = np.asarray(x), np.asarray(decoded)
    if x.ndim > 1 and len(x) > 1 and x.size > SLAB // 4:  # temporaries stay in the cache
        halves = slice(len(x) // 2), slice(len(x) // 2, None)
        return np.concatenate([sqnr_by_row(x[half], decoded[half]) for half in halves])
    finite = np.isfinite(x)
    value = np.where(finite, x, 0).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        noise = (np.where(finite, decoded - value, 0.0) ** 2).sum(axis=-1)
        signal = (value**2).sum(axis=-1)
        decibels = 10 * np.log10(signal / noise)
    return np.where(signal > 0, np.where(np.isnan(decibels), -np.inf, decibels), np.nan)[()]


def _measure(x: np.ndarray, q: Quantized) -> Iterator[tuple[str, np.ufunc, np.ndarray]]:
    finite, scaled, decoded = np.isfinite(x), _scaled(x, q), cast.decode(q.codes, q.fmt)
    at_code = np.abs(decoded)
    yield "count", np.add, np.ones(x.shape, np.bool_)
    yield "zeros", np.add, x == 0
    yield "non_finite", np.add, ~finite
    yield "non_finite_codes", np.add, ~np.isfinite(decoded)
    yield "underflows", np.add, (x != 0) & (decoded == 0)
    yield "subnormals", np.add, (at_code > 0) & (at_code < q.fmt.smallest_normal)
    yield "overflows", np.add, overflows(scaled, q.fmt)
    yield "saturated", np.add, at_code == q.fmt.max
    yield (
        "max_ulp",
        np.maximum,
        np.where(finite, np.abs(decoded.astype(np.float64) - scaled) / _spacing(scaled, q.fmt), 0),
    )
    value = np.where(finite, x, 0).astype(np.float64)
    yield "magnitude", np.add, np.abs(value)
    yield "signal", np.add, value * value
    e = np.where(finite, scaling.dequantize(q) - value, 0)
    yield "error", np.add, e
    yield "noise", np.add, e * e


def _scaled(x: np.ndarray, q: Quantized) -> np.ndarray:
    """RN32(x * scale), before the clip."""
    return x * scaling.spread(q.scale, x.shape, q.blocks)


def _spacing(scaled: np.ndarray, fmt: Format) -> np.ndarray:
    """The format's spacing at these values, with an exponent unbounded above."""
    exponent = np.where(scaled == 0, fmt.emin, np.maximum(np.frexp(scaled)[1] - 1, fmt.emin))
    return np.ldexp(1.0, exponent - fmt.mantissa_bits)


def overflows(scaled: np.ndarray, fmt: Format) -> np.ndarray:
    """Whether values exceed max when rounded with an exponent unbounded above."""
    # A tie between max and the next number goes to the even one of their codes.
    magnitude, tie = np.abs(scaled), fmt.max + _spacing(np.asarray(fmt.max), fmt) / 2
    return magnitude >= tie if fmt.max_code % 2 else magnitude > tie


@dataclass(frozen=True, kw_only=True)
class Exponents:
    """Histograms of floor(log2 |value|), int64 [..., bins] (spec Q-5).

    Bin 0 is below 2^lowest, bin 1 is exponent lowest, and so on; the last is 2^(highest + 1) and
    above, infinities included. Zeros and NaNs are in no bin.

    scaled  of the values before the cast, RN32(f32(x) * scale); codes  of the decoded codes.
    """

    lowest: int
    highest: int
    scaled: np.ndarray
    codes: np.ndarray


def exponents(
    x,
    q: Quantized,
    *,
    per_group: bool = False,
    lowest: int | None = None,
    highest: int | None = None,
) -> Exponents:
    """Histograms of exponents, before and after the cast: which part of the format's range is used.

    Shapes:   as statistics, with a last axis of highest - lowest + 3 bins.
    Units:    exponents of scaled values. Default range: from half the smallest subnormal (below it
              everything rounds to zero) to the exponent of max.
    Raises:   ValueError: as statistics; lowest above highest.
    Source:   spec Q-5.
    """
    _check(x, q)
    lowest = q.fmt.emin - q.fmt.mantissa_bits - 1 if lowest is None else lowest
    highest = int(np.frexp(q.fmt.max)[1]) - 1 if highest is None else highest
    if lowest > highest:
        raise ValueError(
            f"a histogram needs lowest <= highest; got lowest={lowest}, highest={highest}."
        )
    bins = range(highest - lowest + 3)

    def measure(
        x: np.ndarray, q: Quantized
    ) -> Iterator[tuple[tuple[str, int], np.ufunc, np.ndarray]]:
        for name, value in (("scaled", _scaled(x, q)), ("codes", cast.decode(q.codes, q.fmt))):
            exponent = np.where(np.isinf(value), highest + 1, np.frexp(value)[1] - 1)
            # All below lowest share the first bin, all above highest the last.
            place = np.clip(exponent, lowest - 1, highest + 1) - (lowest - 1)
            counted = (value != 0) & ~np.isnan(value)
            for i in bins:
                yield (name, i), np.add, (place == i) & counted

    with np.errstate(invalid="ignore", over="ignore"):  # NaN, and products beyond float32
        counts = reduce_groups(x, q, measure, per_group=per_group)
    scaled, codes = (
        np.stack([counts[name, i] for i in bins], axis=-1) for name in ("scaled", "codes")
    )
    return Exponents(lowest=lowest, highest=highest, scaled=scaled, codes=codes)


@dataclass(frozen=True, kw_only=True)
class Error:
    """An output's error against its reference (Q-7), over elements whose reference is finite.

    count            elements whose reference is finite
    non_finite       elements whose reference is not
    disagreeing      those among the latter where the output is not the same NaN or infinity
    max_absolute     max |out - ref|
    max_relative     max |out - ref| / |ref|, 0 / 0 being 0
    rms_relative     sqrt(sum (out - ref)^2 / sum ref^2)
    bias             sum (out - ref) / sum |ref|
    magnitude_bias   sum sign(ref) (out - ref) / sum |ref|: negative where magnitudes shrink, as
                     truncation makes them
    """

    count: int
    non_finite: int
    disagreeing: int
    max_absolute: float
    max_relative: float
    rms_relative: float
    bias: float
    magnitude_bias: float


def error(out, reference) -> Error:
    """The error of a GEMM's output against a reference, such as an exact sum.

    Shapes:   out and reference of one shape, any floating-point dtypes, each widened to float64.
    Specials: NaN or Inf for a finite reference gives NaN or Inf; none finite: NaN; 0 / 0 is 0.
    Raises:   ValueError: shapes that differ; nothing to compare.
    Source:   spec Q-7.
    """
    out, reference = cast.exact(out), cast.exact(reference)
    if out.shape != reference.shape or not out.size:
        raise ValueError(
            f"out and reference have one non-empty shape; got {out.shape} and {reference.shape}."
        )
    finite = np.isfinite(reference)
    same = (out == reference) | (np.isnan(out) & np.isnan(reference))
    ref = reference[finite]
    with np.errstate(invalid="ignore", over="ignore"):
        e = out[finite] - ref
        total = np.abs(ref).sum()
        return Error(
            count=int(ref.size),
            non_finite=int((~finite).sum()),
            disagreeing=int((~finite & ~same).sum()),
            max_absolute=float(np.abs(e).max(initial=0)) if ref.size else np.nan,
            max_relative=float(_quotient(np.abs(e), np.abs(ref), zero=True).max(initial=0))
            if ref.size
            else np.nan,
            rms_relative=float(
                np.sqrt(_quotient((e * e).sum(), (ref * ref).sum(), zero=ref.size > 0))
            ),
            bias=float(_quotient(e.sum(), total, zero=ref.size > 0)),
            magnitude_bias=float(_quotient((np.sign(ref) * e).sum(), total, zero=ref.size > 0)),
        )


def reduce_groups(
    x,
    q: Quantized,
    measure: Callable[[np.ndarray, Quantized], Iterator[tuple[_K, np.ufunc, np.ndarray]]],
    *,
    per_group: bool,
) -> dict[_K, np.ndarray]:
    """Sums and maxima of what ``measure`` yields, of all elements or q's groups, in slabs.

    ``measure`` takes a slab, as float32, and its Quantized, and yields (key, np.add or np.maximum,
    one value for each element); truth values are counted. Slabs are whole rows of the first axis
    and cut no group of scales, so a tensor of one row is one slab.

    Shapes:   x not empty, the shape of q.codes; a result () or, per group, the shape of q.scale.
    Order:    within a slab the last axis first; slabs in order.
    """
    x, codes = np.atleast_1d(np.asarray(x)), np.atleast_1d(q.codes)
    # The length of a group along each axis; slabs are cut between groups only.
    sizes = list(granularities.lengths(q.granularity, x.ndim, q.axis))
    block = sizes[0] or 1
    groups: list[int | None] = sizes if per_group else [None] * x.ndim
    rows = max(1, SLAB // max(1, x[0].size) // block) * block
    parts: dict[_K, list[np.ndarray]] = {}
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        scales = (
            ...
            if sizes[0] is None
            else slice(start // block, -(-min(start + rows, len(x)) // block))
        )
        slab = q._replace(codes=codes[part], scale=q.scale[scales], scale_inv=q.scale_inv[scales])
        tensor = q.tensor_scale_inv
        if tensor is not None and len(np.atleast_1d(tensor)) > 1:  # one for each row of the slab
            slab = slab._replace(tensor_scale_inv=tensor[scales])
        for key, combine, values in measure(cast.exact(x[part]).astype(np.float32), slab):
            value = _reduce(values, combine, groups)
            if key in parts and groups[0] is None:
                value = combine(parts[key].pop(), value)
            parts.setdefault(key, []).append(value)
    shape = q.scale.shape if per_group else ()
    return {key: np.concatenate(values).reshape(shape)[()] for key, values in parts.items()}


def _reduce(values: np.ndarray, combine: np.ufunc, groups: list[int | None]) -> np.ndarray:
    """Reduce a slab, last axis first; groups: the group length along each axis, or None."""
    for i in reversed(range(values.ndim)):
        dtype = np.int64 if values.dtype == np.bool_ else values.dtype
        size = groups[i]
        if size is None:
            values = combine.reduce(values, axis=i, keepdims=True, dtype=dtype)
        else:
            values = combine.reduceat(values, range(0, values.shape[i], size), axis=i, dtype=dtype)
    return values


def _quotient(a, b, *, zero: bool = False) -> np.ndarray:
    """a / b by IEEE 754, except that 0 / 0 is 0 if ``zero``."""
    with np.errstate(divide="ignore", invalid="ignore"):
        value = np.true_divide(a, b)
    return np.where((np.asarray(a) == 0) & zero, 0.0, value)[()]


def _check(x, q: Quantized) -> None:
    x = np.asarray(x)
    for scale in (q.scale_inv, q.scale):
        scaling.check_scales(q._replace(scale_inv=scale) if isinstance(q, Quantized) else q, "q")
    text = f"statistics take codes of {', '.join(NARROW_FORMATS)}; got {q.fmt}."
    require(q.fmt.name in NARROW_FORMATS, text)
    text = "statistics take x as it was quantized, never float64. Use x.astype(np.float32)."
    require(x.dtype != np.float64, text)
    text = f"x and q have one shape; got x.shape={x.shape} and codes of shape {q.codes.shape}."
    require(x.shape == q.codes.shape, text)
    cast.exact(x.ravel()[:0])  # refuses dtypes that are not floating point
    granularities.scale_shape(q.granularity, x.shape, q.axis, ragged=True)  # refuses empty tensors
