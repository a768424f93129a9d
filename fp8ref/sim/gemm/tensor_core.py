"""A tensor core's step as data (G-10, G-11, G-18, G-23, G-24): it aligns, cuts off, sums products.

Order of a step: the largest exponent E of its products and the accumulator; each term cut off below
2^(E - fraction_bits); an exact sum; the sum cut off after output_bits. UNITS holds the units of
GPUs, MODELED those that rest on one simulator alone. ``accumulate`` strings steps together.
``step_plain`` and ``chain_plain`` are the definitions; ``kernels.chains`` and, from an accumulator,
``kernels.chains_from`` compute the same for units that are ``compiled``, and ``chain`` for others,
by ``kernels.modeled``.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fp8ref import formats
from fp8ref.formats import E4M3FN, E5M2, FLOAT16, FLOAT32, Format
from fp8ref.shared import errors, package_data, registry
from fp8ref.sim import threads
from fp8ref.sim.kernels import modeled
from fp8ref.sim.kernels.compiled import PRODUCTS, worth

__all__ = ["UNITS"]

K_STEP = 32
"""The K of one instruction; a tensor core's GEMM has a K that is a multiple of it."""

_NONE = -(1 << 20)  # the exponent of a zero: it takes no part in a maximum
_LEAST = -126  # the exponent of a zero factor, and of a zero accumulator, under zeros "least"
_UNBOUNDED = -1000  # an emin below every exponent: subnormals count as if they were normal

Rounding = Literal["toward_zero", "toward_negative", "nearest_even"]
"""How a number is cut off: toward zero, toward negative infinity, or to nearest even."""

ROUNDINGS: tuple[Rounding, ...] = ("toward_zero", "toward_negative", "nearest_even")
"""The values of ``Rounding``."""

_CUTS = {"toward_zero": np.trunc, "toward_negative": np.floor, "nearest_even": np.rint}
_CHOICES = {
    "rounding": ROUNDINGS,
    "output_rounding": ROUNDINGS,
    "exponents": ("coded", "factors", "products"),
    "zeros": ("excluded", "counted", "least"),
    "subnormals": ("kept", "flushed"),
}


def is_int(value: object) -> bool:
    """True of an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class TensorCore:
    """The numbers and rules of one step (G-10): ``fused_width`` products and the accumulator,
    aligned, cut off, summed, cut off.

    fraction_bits    fraction bits kept of each term, below the largest exponent of the step.
    output_bits      fraction bits of the result, which has an 8-bit exponent.
    evidence         the source of the numbers. The rule for zeros (G-11) is mmaemu's, which an
                     H100 follows; MMA-Sim's is ``least``.
    rounding         how each term is cut off: ``toward_zero``, ``toward_negative`` or
                     ``nearest_even``; output_rounding: how the result is.
    exponents        how the exponent of a product is found: ``coded``, the sum of its factors',
                     subnormals counting as emin; ``factors``, the same with subnormals normalized;
                     ``products``, that of the product's value.
    zeros            ``excluded``: a product with a zero factor takes no part in the largest
                     exponent; ``counted``: it does, with emin for the zero; ``least``: with -126,
                     and a zero accumulator too.
    subnormals       subnormal operands are ``kept``, or ``flushed`` to zero.
    accumulator      the format of the accumulator and of the result: float32, or float16 (G-24).
    block_scales     products are scaled by powers of two before they are aligned (G-23).

    Raises:          ValueError: a width other than 4, 8, 16 or 32; bits out of range; an unknown
                     word; counted zeros with exponents other than ``coded``; another accumulator,
                     or more output_bits than it has.
    """

    name: str
    fused_width: int
    fraction_bits: int
    output_bits: int
    evidence: str
    rounding: Rounding = "toward_zero"
    output_rounding: Rounding = "toward_zero"
    exponents: Literal["coded", "factors", "products"] = "coded"
    zeros: Literal["excluded", "counted", "least"] = "excluded"
    subnormals: Literal["kept", "flushed"] = "kept"
    accumulator: Format = FLOAT32
    block_scales: bool = False

    def __post_init__(self) -> None:
        if not is_int(self.fused_width) or self.fused_width not in (4, 8, 16, 32):
            raise ValueError(
                f"fused_width is at least 4 and divides 32, a step's K; got {self.fused_width!r}."
            )
        for key, most in (("fraction_bits", 25), ("output_bits", 23)):
            errors.integer(key, getattr(self, key), 1, most)
        for key, choices in _CHOICES.items():
            errors.one_of(key, getattr(self, key), choices)
        if self.zeros != "excluded" and self.exponents != "coded":
            raise ValueError(
                f"zeros {self.zeros!r} needs exponents 'coded'; got {self.exponents!r}."
            )
        if (
            self.accumulator not in (FLOAT32, FLOAT16)
            or self.output_bits > self.accumulator.mantissa_bits
        ):
            raise ValueError(
                "the accumulator is float32, or float16 with at most 10 output_bits; got "
                f"{self.accumulator}, output_bits={self.output_bits}."
            )

    @property
    def compiled(self) -> bool:
        """Whether the compiled kernel supports it: G-10 with any width and bits."""
        return all(
            getattr(self, key) == getattr(TensorCore, key)
            for key in (*_CHOICES, "accumulator", "block_scales")
        )


_EVERY = {
    name: TensorCore(
        name=name,
        **numbers | {"accumulator": formats.FORMATS[numbers.get("accumulator", "float32")]},
    )
    for name, numbers in package_data.tables(__file__, "units").items()
}

UNITS = {name: unit for name, unit in _EVERY.items() if unit.compiled}
"""The tensor cores of GPUs by name (G-10)."""

MODELED = {name: unit for name, unit in _EVERY.items() if not unit.compiled}
"""Tensor cores that rest on one simulator alone, by name (G-23, G-24).

Plans of G-12 have none of them.
"""


def by_name(unit: str | TensorCore) -> TensorCore:
    """The unit of a name, in UNITS or MODELED; a TensorCore is returned as it is."""
    return registry.lookup("unit is a TensorCore or", UNITS | MODELED, unit, TensorCore)


def check_pair(fmt_a: Format, fmt_b: Format) -> None:
    """ValueError unless tensor cores take both: e4m3fn and e5m2, in any pairing."""
    formats.check(fmt_a)
    formats.check(fmt_b)
    if fmt_a not in (E4M3FN, E5M2) or fmt_b not in (E4M3FN, E5M2):
        raise ValueError(
            f"tensor cores multiply e4m3fn and e5m2; got {fmt_a} and {fmt_b}. Use accumulate "
            "'exact' or 'f32'."
        )


def step_plain(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    fmt_a: Format,
    fmt_b: Format,
    unit: TensorCore,
    scales: np.ndarray | None = None,
) -> np.ndarray:
    """The definition of one step: a [..., M, w] and b [..., N, w] of FP8 formats, c [..., M, N] of
    the accumulator's; float64 [..., M, N].

    scales  of a unit with block_scales: int [..., M, N], the sum of both scales' exponents.

    All are finite values in float64. Everything is exact in float64: a term has at most 27 bits
    above its unit, and 33 of them are summed.
    """
    if unit.subnormals == "flushed":
        a, b = _flushed(a, fmt_a), _flushed(b, fmt_b)
    # [..., M, 1, w] x [..., 1, N, w] -> [..., M, N, w]
    products = a[..., :, None, :] * b[..., None, :, :]
    product_exponents = _product_exponents(a, b, products, fmt_a, fmt_b, unit)
    if scales is not None:
        products = np.ldexp(products, scales[..., None])
        product_exponents = product_exponents + scales[..., None]
    c_exponents = exponents(c, unit.accumulator.emin, _LEAST if unit.zeros == "least" else _NONE)
    largest = np.maximum(product_exponents.max(axis=-1), c_exponents)
    largest = np.where(largest < _UNBOUNDED, 0, largest)  # nothing but zeros
    # In units of 2^(E - fraction_bits), cutting a term off is rounding it to an integer.
    scale = unit.fraction_bits - largest
    cut = _CUTS[unit.rounding]
    total = cut(np.ldexp(products, scale[..., None])).sum(axis=-1) + cut(np.ldexp(c, scale))
    return _round_result(
        np.ldexp(total, -scale), unit.output_bits, unit.output_rounding, unit.accumulator
    )


def chain_plain(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    fmt_a: Format,
    fmt_b: Format,
    unit: TensorCore,
    scales: np.ndarray | None = None,
) -> np.ndarray:
    """Steps over all of K, each from the result of the one before: a [..., M, K], b [..., N, K], c
    [..., M, N]; float32 [..., M, N].

    scales  of a unit with block_scales: int [..., M, N, K / w], for each step.
    """
    acc = c.astype(np.float64)
    for i, k in enumerate(range(0, a.shape[-1], unit.fused_width)):
        part = slice(k, k + unit.fused_width)
        step_scales = None if scales is None else scales[..., i]
        left, right = (x[..., part].astype(np.float64) for x in (a, b))
        acc = step_plain(left, right, acc, fmt_a, fmt_b, unit, step_scales)
    return acc.astype(np.float32)


def chain(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    fmt_a: Format,
    fmt_b: Format,
    unit: TensorCore,
    scales: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """``chain_plain`` of a [M, K], b [N, K], c [M, N], compiled, for units that cut toward zero.

    scales  of a unit with block_scales: int [M, K / w] and [N, K / w], the exponents of both
            operands' scales.
    """
    (m, k), n, steps = a.shape, len(b), a.shape[1] // unit.fused_width
    has = (
        unit.rounding == "toward_zero"
        and unit.output_rounding != "toward_negative"
        and unit.exponents != "products"
    )
    if not has or not worth(modeled.chain, m * n * k, PRODUCTS):
        both = None if scales is None else scales[0][:, None] + scales[1][None, :]
        return chain_plain(a, b, c, fmt_a, fmt_b, unit, both)
    if unit.subnormals == "flushed":
        a, b = _flushed(a, fmt_a), _flushed(b, fmt_b)
    zeros = np.zeros((m, steps), np.int64), np.zeros((n, steps), np.int64)
    a_scales, b_scales = (np.asarray(scale, np.int64) for scale in scales or zeros)
    left = np.ascontiguousarray(a, np.float64), _kernel_exponents(a, fmt_a, unit)
    right = (
        np.ascontiguousarray(b.T, np.float64),
        np.ascontiguousarray(_kernel_exponents(b, fmt_b, unit).T),
    )
    acc = np.array(c, np.float64, order="C")
    scaled = (np.ascontiguousarray(a_scales), np.ascontiguousarray(b_scales.T))
    numbers = (unit.fused_width, unit.fraction_bits, unit.output_bits)
    acc_limits = (
        unit.accumulator.emin,
        _LEAST if unit.zeros == "least" else _NONE,
        2.0 ** (unit.accumulator.bias + 1),
    )
    nearest = unit.output_rounding == "nearest_even"
    threads.run(
        lambda begin, end: modeled.chain(
            *left, *right, *scaled, acc, begin, end, steps, *numbers, nearest, *acc_limits
        ),
        m,
    )
    return acc.astype(np.float32)


def scale_exponents(scale: np.ndarray) -> np.ndarray:
    """int64: the exponents of powers of two; 0 for NaN."""
    return np.frexp(np.where(np.isnan(scale), np.float32(1), scale))[1].astype(np.int64) - 1


def exponents(values: np.ndarray, emin: int, zero: int = _NONE) -> np.ndarray:
    """max(floor(log2|v|), emin) as int32; ``zero`` for 0, by default below all sums."""
    return np.where(values == 0, zero, np.maximum(np.frexp(values)[1] - 1, emin)).astype(np.int32)


def _product_exponents(
    a: np.ndarray,
    b: np.ndarray,
    products: np.ndarray,
    fmt_a: Format,
    fmt_b: Format,
    unit: TensorCore,
) -> np.ndarray:
    """The exponent of each product, [..., M, N, w]; below all others if it does not count."""
    if unit.exponents == "products":
        return exponents(products, _UNBOUNDED)
    return (
        _factor_exponents(a, fmt_a, unit)[..., :, None, :]
        + _factor_exponents(b, fmt_b, unit)[..., None, :, :]
    )


def _factor_exponents(values: np.ndarray, fmt: Format, unit: TensorCore) -> np.ndarray:
    """The exponent of each factor, by the unit's rules for subnormals and zeros."""
    emin = fmt.emin if unit.exponents == "coded" else _UNBOUNDED
    return exponents(
        values, emin, {"excluded": _NONE, "counted": emin, "least": _LEAST}[unit.zeros]
    )


def _kernel_exponents(values: np.ndarray, fmt: Format, unit: TensorCore) -> np.ndarray:
    """``_factor_exponents`` for the compiled kernel."""
    return np.maximum(_factor_exponents(values, fmt, unit), modeled.NO_EXPONENT).astype(np.int16)


def _flushed(values: np.ndarray, fmt: Format) -> np.ndarray:
    return np.where(np.abs(values) < 2.0**fmt.emin, 0, values)


def _round_result(
    value: np.ndarray, bits: int, rounding: Rounding, accumulator: Format = FLOAT32
) -> np.ndarray:
    """Round a step's sum to ``bits`` fraction bits, the exponent at least that of the accumulator's
    smallest normal number; infinity from twice its largest power of two on; a zero result is +0."""
    exponent = np.maximum(np.frexp(value)[1] - 1, accumulator.emin)
    cut = np.ldexp(_CUTS[rounding](np.ldexp(value, bits - exponent)), exponent - bits)
    return (
        np.where(np.abs(cut) >= 2.0 ** (accumulator.bias + 1), np.copysign(np.inf, cut), cut) + 0.0
    )
