"""Round numbers to a format, once, from the exact value (spec C).

``encode`` gives codes, ``decode`` their values, ``round_to`` values of any format of at most 32
bits. Order: round as if the exponent were unbounded; saturate or overflow; then zeros, infinities
and NaNs (C-3 to C-6).

``encode_plain`` is the definition, in float64 arithmetic that is exact. A finite x is |x| = n *
2^q, where 2^q is the spacing of the format's numbers at |x|. Dividing by a power of two is exact,
so n keeps every bit of x: rounding x is rounding n to an integer. The codes of a format count its
magnitudes upwards without gaps, so that code = n + (steps of the exponent above emin) *
2^mantissa_bits, and a carry out of n gives the right code by itself. The compiled twin is
``kernels.cast``.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Literal, get_args

import numpy as np

from fp8ref import formats
from fp8ref.formats import BFLOAT16, FLOAT16, FLOAT32, Format
from fp8ref.shared import errors
from fp8ref.sim import philox, threads
from fp8ref.sim.kernels import cast as kernels
from fp8ref.sim.kernels.compiled import ELEMENTS, worth
from fp8ref.spec.gemm import STOCHASTIC

__all__ = ["ROUNDINGS", "decode", "encode", "round_to"]

Rounding = Literal[
    "nearest_even", "nearest_away", "toward_zero", "to_odd", "stochastic", "stochastic_8"
]
"""How a value between two numbers of a format is rounded (C-2).

nearest_even  to the nearest; a tie goes to the even code
nearest_away  to the nearest; a tie goes away from zero
toward_zero   to the neighbor with the smaller magnitude
to_odd        to the neighbor with the odd code
stochastic    away from zero with a probability equal to the discarded fraction, by 48 random bits
stochastic_8  the same by 8 random bits, as NVIDIA's cvt.rs: of the fraction cut to 8 bits
"""

ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
"""The values of ``Rounding``."""

_MOST_BITS = 16  # of a format that has codes here
_PIECE = 1 << 18  # elements that are widened to float32 or float64 at a time: 2 MiB a float64 array


def encode(
    x,
    fmt: Format | str,
    *,
    rounding: Rounding = "nearest_even",
    saturate: bool = True,
    seed: int | None = None,
) -> np.ndarray:
    """Round x once to a format of at most 16 bits and return its codes, one a byte, or one a
    uint16 above 8 bits (``packing`` puts two of 4 bits into a byte).

    rounding  nearest_even, nearest_away (ties), toward_zero, to_odd, or stochastic and
              stochastic_8, by a seed in [0, 2^64) and the flat index in C order.
    Shapes:   x any shape and memory order, empty too, float64, float32, float16 or bfloat16; codes
              uint8, or uint16 above 8 bits, of the same shape, C order.
    Order:    round as if the exponent were unbounded; then saturate or overflow; then zeros,
              infinities, NaNs.
    Specials: NaN -> fmt.nan_code; -0 and underflow keep their sign where the format has -0;
              above fmt.max: max if saturate, else Inf, or NaN in a format without infinities;
              infinities likewise. toward_zero and to_odd give max of any finite x. Into e8m0fnu:
              zero and negative values -> NaN, below 2^-127 -> 2^-127. Into a format without NaN,
              such as e2m1fn: NaN -> max.
    Raises:   ValueError: fmt of more than 16 bits; x not floating point; unknown rounding; a seed
              missing or not used; to_odd or stochastic into e8m0fnu; a format without NaN and
              without saturate; subnormals that a thread takes for zeros.
    Source:   spec C-1 to C-7, C-9.

    >>> from fp8ref.formats import E4M3FN
    >>> encode([448, 464, 480, -0.0, 2.0**-10, np.nan], E4M3FN)
    array([126, 126, 126, 128,   0, 127], dtype=uint8)
    >>> encode([448.0, 464.0, 480.0], E4M3FN, saturate=False)
    array([126, 126, 127], dtype=uint8)
    """
    x, fmt = array(x), formats.by_name(fmt)
    _check(x, fmt, rounding, seed, saturate)
    codes = np.empty(x.shape, code_dtype(fmt))
    flat = codes.reshape(-1)
    kernel = None
    if kernels.encodes(fmt) and x.dtype != np.float64 and rounding != "stochastic_8":
        kernel = kernels.encoder(fmt, rounding, saturate)
    plain = functools.partial(
        encode_plain, fmt=fmt, rounding=rounding, saturate=saturate, seed=seed
    )
    if kernel is None or not worth(kernel, x.size, ELEMENTS):
        for begin, piece in _pieces(x):
            flat[begin : begin + piece.size] = plain(piece, start=begin)
        return codes
    _encode_compiled(x, flat, kernel, plain, seed)
    return codes


def _encode_compiled(
    x: np.ndarray,
    codes: np.ndarray,
    kernel: Callable,
    plain: Callable[..., np.ndarray],
    seed: int | None,
) -> None:
    """Write the codes of x, flat, by a kernel; plain: the definition, for what it leaves."""
    key = np.uint64(0 if seed is None else seed)
    undecided: list[np.ndarray] = []

    def encode_range(begin: int, end: int) -> None:
        late = kernel(bits[begin:end], target[begin:end], start + begin, key)
        if late is not None and late.size:
            undecided.append(begin + late)

    for start, piece in _pieces(x):
        bits, target = float32_bits(piece), codes[start : start + piece.size]
        threads.run(encode_range, bits.size, unit=philox.BLOCK, grain=1 << 17)
        if undecided:  # 16 random bits did not decide these: the definition draws 32 more
            late = np.concatenate(undecided)
            undecided.clear()
            target[late] = plain(bits[late].view(np.float32), start=start + late)


def encode_plain(
    x,
    fmt: Format,
    *,
    rounding: Rounding = "nearest_even",
    saturate: bool = True,
    seed: int | None = None,
    start: int | np.ndarray = 0,
) -> np.ndarray:
    """The definition of ``encode``, in NumPy alone; start is the flat index of x's first element,
    or of each, for stochastic rounding. Raises as encode."""
    x, fmt = array(x), formats.by_name(fmt)
    _check(x, fmt, rounding, seed, saturate)
    value = exact(x)
    n, exponent = in_spacings(value, fmt)
    n = round_spacings(n, exponent, fmt, rounding, seed=seed, start=start)
    code = magnitude_codes(n, exponent, fmt)
    if not fmt.signed:
        code -= 1  # no zero: the smallest magnitude is 1 * 2^emin, and its code is 0
    directed = rounding in ("toward_zero", "to_odd")
    # An infinity is above max under every rounding; a finite value only under the roundings that
    # can carry it there (C-4).
    above = np.isinf(value) | (code > fmt.max_code)
    overflow = (
        fmt.max_code if saturate else (fmt.nan_code if fmt.inf_code is None else fmt.inf_code)
    )
    code = np.where(above, np.where(directed & ~np.isinf(value), fmt.max_code, overflow), code)
    if fmt.signed:
        negative = np.signbit(value) & ((code != fmt.nan_code) | (not fmt.has_nan))
        negative &= fmt.negative_zero | (code != 0)
        code = np.where(negative, code | fmt.sign_bit, code)
    else:
        code = np.where(value <= 0, fmt.nan_code, np.maximum(code, 0))
    return np.where(np.isnan(value), fmt.nan_code, code).astype(code_dtype(fmt))


def code_dtype(fmt: Format) -> type[np.uint8 | np.uint16]:
    """The dtype of a format's codes."""
    return np.uint8 if fmt.bits <= 8 else np.uint16


def decode(codes, fmt: Format | str) -> np.ndarray:
    """The values of the codes, exactly.

    Shapes:   codes any shape, uint8, or uint16 above 8 bits; float32 of the same shape.
    Specials: every NaN code -> NaN; codes of infinities -> infinities; e8m0fnu has no zero.
    Raises:   ValueError: fmt of more than 16 bits; codes of another dtype, or not below 2^bits.
    Source:   spec F-2 to F-7.
    """
    codes, fmt = array(codes), formats.by_name(fmt)
    _check_coded(fmt, "decode")
    if codes.dtype != code_dtype(fmt):
        raise ValueError(
            f"codes of {fmt} are {code_dtype(fmt).__name__}; got {codes.dtype}. View float8 arrays "
            "with .view(np.uint8)."
        )
    if fmt.smallest_subnormal < 2.0**-126:
        check_subnormals()
    if codes.itemsize * 8 > fmt.bits and codes.size and int(codes.max()) >> fmt.bits:
        raise ValueError(
            f"codes of {fmt} are at most {(1 << fmt.bits) - 1}; got {codes.max()}. Unpack pairs "
            "with packing.unpack."
        )
    # no code is out of range, and this is the fastest mode
    return np.take(_table(fmt), codes, mode="wrap")


def codes_of(numbers: np.ndarray, fmt: Format | str) -> np.ndarray:
    """The codes of numbers that fmt has: the inverse of ``decode``. Nothing is rounded."""
    return encode(numbers, fmt)


def canonical_nans(codes: np.ndarray, fmt: Format | str) -> np.ndarray:
    """codes with NaNs as encode emits them, for comparisons (C-5). Raises as decode."""
    fmt = formats.by_name(fmt)
    return np.where(np.isnan(decode(codes, fmt)), code_dtype(fmt)(fmt.nan_code), codes)


def round_to(
    x,
    fmt: Format | str,
    *,
    rounding: Rounding = "nearest_even",
    saturate: bool = False,
    seed: int | None = None,
) -> np.ndarray:
    """Round x once to a format of at most 32 bits; values. Unlike ``encode`` it does not saturate.

    Shapes:   x any shape, float64, float32, float16 or bfloat16; float32 of the same shape, holding
              values of fmt.
    Order:    rounding, saturate and seed as in encode, subnormals kept.
    Specials: as encode; NaN -> NaN, and Inf where fmt has it.
    Raises:   ValueError: as encode; a wider format whose values float32 does not hold, or without
              -0.
    Source:   spec C-1 to C-6.
    """
    fmt = formats.by_name(fmt)
    if fmt.bits <= 8:
        return decode(encode(x, fmt, rounding=rounding, saturate=saturate, seed=seed), fmt)
    _check_wide(fmt)
    x = array(x)
    if fmt.emin - fmt.mantissa_bits < -126:
        check_subnormals(x)
    if (
        fmt in (FLOAT32, FLOAT16, BFLOAT16)
        and x.dtype == np.float32
        and rounding == "nearest_even"
        and not saturate
        and seed is None
    ):
        return _nearest_even(x, fmt)
    return round_to_plain(x, fmt, rounding=rounding, saturate=saturate, seed=seed)


def round_to_plain(
    x,
    fmt: Format,
    *,
    rounding: Rounding = "nearest_even",
    saturate: bool = False,
    seed: int | None = None,
    start: int = 0,
) -> np.ndarray:
    """The definition of ``round_to`` for formats of more than 8 bits, in float64; fmt is not
    checked. start as ``encode_plain``."""
    _check_rounding(rounding, seed)
    value = exact(x)
    n, exponent = in_spacings(value, fmt)
    n = round_spacings(n, exponent, fmt, rounding, seed=seed, start=start)
    rounded = np.ldexp(n, exponent - fmt.mantissa_bits)
    overflow = fmt.max if saturate else np.nan if fmt.inf_code is None else np.inf
    rounded = np.where(
        rounded > fmt.max, fmt.max if rounding in ("toward_zero", "to_odd") else overflow, rounded
    )
    rounded = np.where(np.isinf(value), overflow, rounded)
    return np.where(np.isnan(value), np.nan, np.copysign(rounded, value)).astype(np.float32)


def _check_wide(fmt: Format) -> None:
    """ValueError unless float32 holds the values of a wide format."""
    if (
        not fmt.signed
        or not fmt.negative_zero
        or fmt.mantissa_bits > 23
        or fmt.emin < -126
        or fmt.max > FLOAT32.max
    ):
        raise ValueError(
            f"round_to gives float32: signed formats with -0 in its range; got {fmt}. Use float32."
        )


def _nearest_even(x: np.ndarray, fmt: Format) -> np.ndarray:
    """Fast ``round_to`` from float32 to float32, float16 (NumPy's) or bfloat16 (with integers)."""
    if fmt.name == "float32":
        return x.copy()
    if fmt.name == "float16":
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return x.astype(np.float16).astype(np.float32)
    # bfloat16 is float32's upper half. Adding 0x7FFF, and 1 more where the kept half is odd,
    # carries exactly as a tie to even does.
    bits = np.atleast_1d(x).view(np.uint32)
    rounded = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) & np.uint32(
        0xFFFF0000
    )
    return np.where(np.isnan(x), x, rounded.view(np.float32).reshape(x.shape))


def _is_tiny(x: np.ndarray) -> np.ndarray:
    """Where 0 < |x| < 2^-126, from bits, which threads that flush subnormals read too."""
    if x.dtype.name not in _LEAST_NORMAL:
        return np.zeros((), bool)
    least = _LEAST_NORMAL[x.dtype.name]
    magnitude = np.atleast_1d(x).view(least.dtype) << 1
    return (magnitude != 0) & (magnitude < least << 1)


_LEAST_NORMAL: dict[str, np.ndarray] = {
    "float64": np.array(0x3810 << 48, np.uint64),
    "float32": np.array(0x80 << 16, np.uint32),
    "bfloat16": np.array(0x80, np.uint16),
}
"""{dtype: the bits of 2^-126}; float16 has no number below it."""

_TINY, _HALF, _TWO = np.float32(2.0**-126), np.float32(0.5), np.float32(2)


def check_subnormals(x: np.ndarray | None = None) -> None:
    """ValueError if this thread's processor flushes subnormals, results or operands, to zero.

    x    what alone is computed with: without subnormal numbers in it nothing is lost.
    """
    if _TINY * _HALF * _TWO != _TINY and (x is None or _is_tiny(x).any()):
        raise ValueError(
            "the simulator needs subnormal numbers; this thread flushes them to zero. Call "
            "torch.set_flush_denormal(False), or use a process without -ffast-math libraries."
        )


def array(x) -> np.ndarray:
    """np.asarray(x); ValueError where NumPy cannot read x, such as a bfloat16 tensor of torch,
    where some elements of x are masked."""
    if isinstance(x, np.ma.MaskedArray) and np.any(x.mask):
        raise ValueError(
            f"casts take no masked arrays; got {int(np.sum(x.mask))} masked. Use x.filled(...)."
        )
    try:
        return np.asarray(x)
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"casts take an array that NumPy can read; got {type(x).__name__} "
            f"({str(error).rstrip('.')}). From torch use x.detach().float().numpy()."
        ) from error


def exact(x) -> np.ndarray:
    """x as float64, exactly; ValueError unless float64 holds its floating-point dtype."""
    x = array(x)
    check_dtype(x)
    if x.dtype == np.float64:
        return x
    with np.errstate(invalid="ignore"):  # a signalling NaN is an input like others
        return x.astype(np.float64)


def float32_bits(x: np.ndarray) -> np.ndarray:
    """The bits of float32(x), flat uint32; x is contiguous and float32, float16 or bfloat16."""
    x = x.reshape(-1)
    if x.dtype.name == "bfloat16":
        return x.view(np.uint16).astype(np.uint32) << np.uint32(16)
    with np.errstate(invalid="ignore"):
        return x.astype(np.float32, copy=False).view(np.uint32)


def _pieces(x: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(flat index, contiguous piece of x) in C order; copied pieces are small."""
    if x.flags.c_contiguous:
        whole = x.reshape(-1)
        size = whole.size if x.dtype == np.float32 else _PIECE
        yield from ((i, whole[i : i + size]) for i in range(0, whole.size, max(size, 1)))
    elif x.size <= _PIECE:
        yield 0, np.ascontiguousarray(x).reshape(-1)
    else:
        rows, each = x.shape[0], x.size // x.shape[0]
        step = max(1, _PIECE // each)
        for i in range(0, rows, step):
            part = x[i : i + step] if each <= _PIECE else x[i]
            yield from ((i * each + begin, piece) for begin, piece in _pieces(part))


def _check(x: np.ndarray, fmt: Format, rounding: str, seed: int | None, saturate: bool) -> None:
    if not isinstance(saturate, bool | np.bool_):
        raise ValueError(f"saturate is True or False; got {saturate!r}.")
    _check_coded(fmt, "encode")
    formats.check_saturates(fmt, saturate)
    if fmt.signed is False and rounding in ("to_odd", *STOCHASTIC):
        raise ValueError(
            f"rounding {rounding!r} is not defined for {fmt}. Use 'nearest_even' or 'toward_zero' "
            "(C-7)."
        )
    _check_rounding(rounding, seed)
    if fmt.smallest_subnormal < 2.0**-126:
        check_subnormals()
    check_dtype(x)


def _check_coded(fmt: Format, name: str) -> None:
    if fmt.bits > _MOST_BITS:
        raise ValueError(
            f"{name} takes formats of at most {_MOST_BITS} bits; got {fmt}. Use round_to."
        )


def check_dtype(x: np.ndarray) -> None:
    """ValueError unless x holds floating-point numbers that float64 holds."""
    # bfloat16 comes from ml_dtypes, whose dtypes may be of kind 'V', known by name only.
    if x.dtype.name not in ("float64", "float32", "float16", "bfloat16"):
        raise ValueError(
            f"casts take float64, float32, float16 or bfloat16; got {x.dtype}. Use .astype first."
        )
    if not x.dtype.isnative:
        raise ValueError(
            f"casts take native byte order; got {x.dtype.str!r}. Use "
            "x.astype(x.dtype.newbyteorder('='))."
        )


def _check_rounding(rounding: str, seed: int | None) -> None:
    errors.one_of("rounding", rounding, ROUNDINGS)
    if (seed is not None) != (rounding in STOCHASTIC):
        raise ValueError(
            f"stochastic rounding needs a seed, others none; got rounding={rounding!r}, "
            f"seed={seed}."
        )
    if seed is not None:
        check_seed(seed)


def check_shape(shape: object) -> None:
    """ValueError unless it is a shape: a tuple, or a list, of integers that are not negative."""
    if not isinstance(shape, tuple | list) or not all(
        isinstance(n, int | np.integer) and n >= 0 for n in shape
    ):
        text = f"an array of shape {shape.shape}" if isinstance(shape, np.ndarray) else repr(shape)
        raise ValueError(
            f"a shape is a tuple of non-negative integers, such as () or (4, 128); got {text}."
        )


def check_seed(seed: object) -> None:
    """ValueError unless it is an integer in [0, 2^64)."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 1 << 64:
        raise ValueError(f"a seed is an integer in [0, 2^64); got {seed!r}.")


def in_spacings(value: np.ndarray, fmt: Format) -> tuple[np.ndarray, np.ndarray]:
    """|value| in units of the format's spacing there, exactly: (n, e), e >= emin, with
    |value| = n * 2^(e - mantissa_bits). Infinities and NaNs give n = 0.
    """
    magnitude = np.where(np.isfinite(value), np.abs(value), 0.0)
    # frexp's mantissa is in [0.5, 1), hence the -1. Below emin the subnormals' spacing holds.
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, fmt.emin)
    exponent = np.where(magnitude == 0, fmt.emin, exponent)
    return np.ldexp(magnitude, fmt.mantissa_bits - exponent), exponent


def round_spacings(
    n: np.ndarray,
    exponent: np.ndarray,
    fmt: Format,
    rounding: Rounding,
    *,
    seed: int | None = None,
    start: int | np.ndarray = 0,
) -> np.ndarray:
    """n of ``in_spacings``, with its exponents, rounded to integers, float64.

    start  the flat index of its first element, or of each, for stochastic rounding.
    """
    if rounding == "nearest_even" and fmt.mantissa_bits:
        return np.rint(n)
    floor = np.floor(n)
    rest = n - floor
    # Without mantissa bits the exponent alone makes a code odd. Ties to e8m0fnu go up (C-7).
    odd = (floor + (0 if fmt.mantissa_bits else exponent - fmt.emin)) % 2 == 1
    if rounding == "nearest_away" or (rounding == "nearest_even" and not fmt.signed):
        return floor + (rest >= 0.5)
    if rounding == "nearest_even":
        return floor + ((rest > 0.5) | ((rest == 0.5) & odd))
    if rounding == "toward_zero":
        return floor
    if rounding == "to_odd":
        return floor + ((rest > 0) & ~odd)
    assert seed is not None
    # Away from zero if the rest, cut to 48 bits, and a random 48-bit integer together carry: with
    # the probability of what is cut off (C-2).
    random = philox.uniform48(start, n.size, int(seed)).reshape(n.shape)
    if rounding == "stochastic_8":
        return floor + (np.floor(rest * 2.0**8) + np.floor(random / 2.0**40) >= 2.0**8)
    return floor + (np.floor(rest * 2.0**48) + random >= 2.0**48)


def magnitude_codes(n: np.ndarray, exponent: np.ndarray, fmt: Format) -> np.ndarray:
    """Codes of magnitudes n * 2^(exponent - mantissa_bits); int64, counted past ``max_code``.

    n holds integers, as float64.
    """
    # A carry of n into the next exponent gives that exponent's first code by itself. Subnormals and
    # the first normal binade share a spacing, so that both count from the same emin.
    return n.astype(np.int64) + (exponent - fmt.emin) * (1 << fmt.mantissa_bits)


@functools.lru_cache(maxsize=64)
def _table(fmt: Format) -> np.ndarray:
    """The value of each code, float32 [2^bits]."""
    code = np.arange(1 << fmt.bits)
    magnitude = code & ~fmt.sign_bit
    mantissa = magnitude & ((1 << fmt.mantissa_bits) - 1)
    field = magnitude >> fmt.mantissa_bits
    if fmt.signed:
        normal = field > 0
        value = np.ldexp(
            (normal << fmt.mantissa_bits) + mantissa,
            np.maximum(field, 1) - fmt.bias - fmt.mantissa_bits,
        )
    else:
        value = np.ldexp(1.0, field - fmt.bias)
    value = np.where((code & fmt.sign_bit) != 0, -value, value)
    value[magnitude > fmt.max_code] = np.nan
    if fmt.inf_code is not None:
        value[fmt.inf_code], value[fmt.inf_code | fmt.sign_bit] = np.inf, -np.inf
    if fmt.has_nan:
        value[fmt.nan_code] = np.nan  # may be the code of -0
    return value.astype(np.float32)
