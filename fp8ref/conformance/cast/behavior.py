"""The behavior of a cast as data: a field for each decision, and the codes (spec C).

``KNOWN_CASTS`` are the casts with a name: the specification's two and those of the libraries.
``encode`` gives the codes of any behavior. It rounds by ``sim.cast``, and adds the four roundings
that the specification does not have.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fp8ref import formats
from fp8ref.conformance.cast import e8m0
from fp8ref.conformance.cast.e8m0 import E8m0Behavior
from fp8ref.formats import BFLOAT16, FLOAT16, FLOAT32, P3109_FORMATS, Format
from fp8ref.shared import package_data, registry
from fp8ref.sim.quantize import cast

ROUNDINGS: tuple[str, ...] = package_data.tables(__file__, "decisions")["roundings"]
"""The roundings that a cast may have: those of C-2 but ``stochastic``, and four more."""

SpecialResult = Literal["max", "inf", "nan"]
"""What a cast gives for overflow or an infinity: the format's max, an infinity or a NaN."""

WIDE = {"bfloat16": BFLOAT16, "float16": FLOAT16, "float32": FLOAT32}
"""The formats that a double rounding may pass through, by name."""


@dataclass(frozen=True, kw_only=True)
class DoubleRounding:
    """The intermediate format of a double rounding, and the rounding to it."""

    dtype: str
    rounding: str = "nearest_even"

    def __str__(self) -> str:
        if self.rounding == "nearest_even":
            return self.dtype
        return f"{self.dtype} ({self.rounding})"


@dataclass(frozen=True, kw_only=True)
class Behavior:
    """Every decision of a cast to one format.

    rounding         one of ROUNDINGS, as if the exponent were unbounded.
    overflow         what finite magnitudes that round above max give; infinite: what infinities
                     give.
    nan              the codes of NaN and of -NaN.
    subnormals       ``kept``; ``flushed``: results below the smallest normal number become zeros;
                     ``flushed_before``: inputs below it do.
    negative_zero    ``kept``; ``lost``: -0 and negative values that underflow give 0;
                     ``lost_at_zero``: -0 alone does.
    double_rounding  the intermediate format, by the dtype of the input; no entry: rounded once.
    """

    rounding: str = "nearest_even"
    overflow: SpecialResult = "max"
    infinite: SpecialResult = "max"
    nan: tuple[int, int]
    subnormals: Literal["kept", "flushed", "flushed_before"] = "kept"
    negative_zero: Literal["kept", "lost", "lost_at_zero"] = "kept"
    double_rounding: Mapping[str, DoubleRounding] = field(default_factory=dict)


AnyBehavior = Behavior | E8m0Behavior
"""The behavior of a cast to any format of at most 8 bits."""


@dataclass(frozen=True, kw_only=True)
class KnownCast:
    """A cast with a name, in every format.

    overflow  ``special``: Inf where the format has it, else NaN.
    nan       ``emitted``: the code of C-5; ``signed``: that code with the input's sign;
              ``quiet``: the quiet NaN of IEEE 754 with the input's sign.
    """

    name: str
    overflow: Literal["max", "special"]
    nan: Literal["emitted", "signed", "quiet"]
    # formats in which overflow gives max, though overflow is ``special``
    saturates_only: tuple[str, ...] = ()

    def behavior(self, fmt: Format) -> Behavior:
        """The behavior of this cast in one format."""
        special: SpecialResult = "nan" if fmt.inf_code is None else "inf"
        saturates = self.overflow == "max" or fmt.name in self.saturates_only
        beyond: SpecialResult = "max" if saturates else special
        code = fmt.nan_code
        if self.nan == "quiet" and fmt.inf_code is not None:
            code = fmt.inf_code | 1 << (fmt.mantissa_bits - 1)
        one_nan = self.nan == "emitted" or not fmt.negative_zero
        signed = code if one_nan else code | fmt.sign_bit
        return Behavior(
            overflow=beyond,
            infinite=beyond,
            nan=(code, signed),
            negative_zero="kept" if fmt.negative_zero else "lost",
        )


_CASTS = package_data.tables(__file__, "behavior")

KNOWN_CASTS = {name: KnownCast(name=name, **fields) for name, fields in _CASTS["known"].items()}
"""The casts with a name.

Where two are the same in a format, a cast has both names. Since 2.12 torch saturates to e4m3fn.
"""

NANS_OF_TORCHAO: dict[str, dict[str, tuple[int, int]]] = _CASTS["nans_of_torchao"]
"""The codes of NaN and of -NaN in formats without NaN, of torchao 0.18's f32_to_f4_unpacked,
f32_to_f6_e2m3_unpacked and f32_to_f6_e3m2_unpacked, by the name of a cast. They are those of the
NaNs of arithmetic: other payloads give others."""

NAMES = tuple(dict.fromkeys([*KNOWN_CASTS, "torchao_f4", "torchao_f6", *e8m0.KNOWN_E8M0_CASTS]))
"""The names that a cast may have."""


def known_casts(fmt: Format) -> dict[str, Any]:
    """The behaviors in one format that have a name, the specification's first.

    In a format without NaN they differ in the code of a NaN alone: that of C-9 and PTX; that of
    ml_dtypes 0.6, a zero of the other sign; torchao's.
    """
    if not fmt.signed:
        return dict(e8m0.KNOWN_E8M0_CASTS)
    if not fmt.has_nan:
        nans = {"saturating": (fmt.nan_code, fmt.nan_code), "ml_dtypes": (fmt.sign_bit, 0)}
        nans |= NANS_OF_TORCHAO.get(fmt.name, {})
        return {name: Behavior(nan=nan) for name, nan in nans.items()}
    # no library has those of P3109
    own = [k for k in KNOWN_CASTS.values() if fmt.name not in P3109_FORMATS or k.nan == "emitted"]
    return {k.name: k.behavior(fmt) for k in own}


def by_name(name: str, fmt: Format) -> Any:
    """The known cast of this name in one format; ValueError lists the names."""
    which = "a cast's behavior is"
    if fmt.bits != 8:
        which = f"a cast to {fmt} is expected to be"
    return registry.lookup(which, known_casts(fmt), name)


def encode(
    x: np.ndarray, fmt: Format | str, behavior: AnyBehavior, *, source: str = "float32"
) -> np.ndarray:
    """The codes that a cast of this behavior gives.

    Shapes:   x any shape, float32 or float64 of numbers of dtype ``source``; codes uint8, as x.
    Order:    the intermediate format; round with the exponent unbounded; overflow; subnormals;
              zeros; infinities; NaN.
    """
    fmt = formats.by_name(fmt)
    if isinstance(behavior, E8m0Behavior):
        return behavior.encode(x)
    through = behavior.double_rounding.get(source)
    value = x
    if through is not None:
        value = cast.round_to_plain(x, WIDE[through.dtype], rounding=through.rounding)  # type: ignore[arg-type]
        # round_to_plain gives one NaN for all; the code of a NaN may depend on its sign.
        sign = np.where(np.signbit(x), np.float32(-1), np.float32(1))
        value = np.where(np.isnan(x), np.copysign(np.float32(np.nan), sign), value)
    special: SpecialResult = "nan" if fmt.inf_code is None else "inf"
    # The compiled encode is much faster. It has this behavior, except for the codes of NaNs.
    plain = (
        behavior.rounding == "nearest_even"
        and behavior.subnormals == "kept"
        and value.dtype == np.float32
    )
    plain &= (
        behavior.negative_zero == ("kept" if fmt.negative_zero else "lost")
        and fmt.name in formats.FP8_FORMATS
    )
    if plain and behavior.overflow == behavior.infinite and behavior.overflow in ("max", special):
        codes = cast.encode(value, fmt, saturate=behavior.overflow == "max")
        nan = codes == fmt.nan_code  # of NaNs and of overflow, which have one code
        if nan.any():
            positive, negative = (np.uint8(code) for code in behavior.nan)
            return np.where(nan, np.where(np.signbit(value), negative, positive), codes)
        return codes
    code = _magnitude_codes(value, fmt, behavior)
    return _with_specials(code, code > fmt.max_code, value, fmt, behavior)


def _magnitude_codes(value: np.ndarray, fmt: Format, behavior: Behavior) -> np.ndarray:
    """The codes of the rounded magnitudes; int64, counted on beyond ``fmt.max_code``."""
    value = cast.exact(value)
    if behavior.subnormals == "flushed_before":
        value = np.where(np.abs(value) < fmt.smallest_normal, np.copysign(0.0, value), value)
    n, exponent = cast.in_spacings(value, fmt)
    n = _rounded(n, exponent, np.signbit(value), fmt, behavior.rounding)
    code = cast.magnitude_codes(n, exponent, fmt)
    if behavior.subnormals != "kept":
        # By the rounded code: what rounds up to the smallest normal number is kept here.
        code = np.where(code < 1 << fmt.mantissa_bits, 0, code)
    return code


def _rounded(
    n: np.ndarray, exponent: np.ndarray, negative: np.ndarray, fmt: Format, rounding: str
) -> np.ndarray:
    """n of ``cast.in_spacings`` as integers: rounded by the simulator if it has the mode."""
    if rounding in cast.ROUNDINGS:
        return cast.round_spacings(n, exponent, fmt, rounding)
    # The rest is exact, and so is its comparison with a half.
    floor = np.floor(n)
    rest = n - floor
    away = {
        "nearest_zero": rest > 0.5,
        "away_from_zero": rest > 0,
        "up": (rest > 0) & ~negative,
        "down": (rest > 0) & negative,
    }[rounding]
    return floor + away


def _with_specials(
    code: np.ndarray, above: np.ndarray, value: np.ndarray, fmt: Format, behavior: Behavior
) -> np.ndarray:
    """Codes of magnitudes with their signs, overflow, infinities and NaNs; above marks overflow."""
    negative = np.signbit(value)
    nan = np.where(negative, behavior.nan[1], behavior.nan[0])
    sign = np.where(negative, fmt.sign_bit, 0)

    def beyond(kind: SpecialResult) -> np.ndarray:
        if kind == "nan":
            return nan
        return sign | (fmt.max_code if kind == "max" or fmt.inf_code is None else fmt.inf_code)

    infinite = np.isinf(value)
    if behavior.negative_zero == "kept":
        lost = np.zeros_like(negative)
    elif behavior.negative_zero == "lost":
        lost = code == 0
    else:
        lost = value == 0
    signed = code | np.where(lost, 0, sign)
    # Later lines win: infinities are above max too, and code is 0 for NaNs.
    signed = np.where(above & ~infinite, beyond(behavior.overflow), signed)
    signed = np.where(infinite, beyond(behavior.infinite), signed)
    return np.where(np.isnan(value), nan, signed).astype(np.uint8)
