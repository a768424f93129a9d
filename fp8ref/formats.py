"""Floating-point formats as data (spec F-1 to F-7): formats of 4, 6 and 8 bits, and float32,
bfloat16 and float16.

A format is a layout and its special codes; everything else is derived. Nothing here rounds: see
``sim/quantize/cast.py``. ``FP8_FORMATS`` holds the four formats that recipes quantize tensors to,
by name, ``FP4_FORMATS`` the one of 4 bits, which backends emulate, and ``NARROW_FORMATS`` all that
the simulator's casts and ``quantize`` take. ``FORMATS`` holds every format with a name, and
the module itself, in a REPL or a notebook, shows a line on each.
"""

import math
import re
import sys
import types
from dataclasses import dataclass, replace
from typing import Literal

from fp8ref.shared import registry
from fp8ref.shared.tables import Listing

__all__ = [
    "BFLOAT16",
    "E2M1FN",
    "E4M3",
    "E4M3FN",
    "E5M2",
    "FLOAT16",
    "FLOAT32",
    "FORMATS",
    "FP8_FORMATS",
    "NARROW_FORMATS",
    "Format",
]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A binary floating-point format: (-1)^sign * 2^(exponent field - bias) * 1.mantissa, subnormal
    where the field is 0.

    Formats are equal where all fields are, hashable, and printed by name.
    nan         the codes that are NaN, in both signs, if any: ``top_exponent``, those with all
                exponent bits set; ``top_code``, the one with all mantissa bits set too;
                ``negative_zero``, the code that would be -0, which the format then lacks.
    infinities  whether there are any: the first code after the largest finite number.
    By default both are as in IEEE 754.
    signed      false only for e8m0fnu, which has no zero and no subnormals either.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    nan: Literal["top_exponent", "top_code", "negative_zero"] | None = "top_exponent"
    infinities: bool = True
    signed: bool = True

    @property
    def bits(self) -> int:
        """The length of a code, the sign bit included."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def emin(self) -> int:
        """The exponent of the smallest normal number; subnormals are multiples of 2^(emin -
        mantissa_bits)."""
        return 1 - self.bias if self.signed else -self.bias

    @property
    def sign_bit(self) -> int:
        """The bit that negative numbers have set; 0 in an unsigned format."""
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def negative_zero(self) -> bool:
        """Whether there is a -0."""
        return self.signed and self.nan != "negative_zero"

    @property
    def _top(self) -> int:
        """The code with all exponent and mantissa bits set."""
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1

    @property
    def max_code(self) -> int:
        """The code of the largest finite number."""
        if self.nan == "top_exponent":  # an infinity, if any, is one of these codes
            return self._top - (1 << self.mantissa_bits)
        return self._top - (self.nan == "top_code") - self.infinities

    @property
    def max(self) -> float:
        """The largest finite number."""
        exponent = (self.max_code >> self.mantissa_bits) - self.bias
        mantissa = self.max_code & ((1 << self.mantissa_bits) - 1)
        return (1 + mantissa * 2.0**-self.mantissa_bits) * 2.0**exponent

    @property
    def smallest_normal(self) -> float:
        """2^emin."""
        return 2.0**self.emin

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number (in e8m0fnu, which has no subnormals, the smallest normal
        one)."""
        return 2.0 ** (self.emin - self.mantissa_bits)

    @property
    def inf_code(self) -> int | None:
        """The code of +Inf; None in a format without infinities."""
        return self.max_code + 1 if self.infinities else None

    @property
    def has_nan(self) -> bool:
        """Whether any code is NaN."""
        return self.nan is not None

    @property
    def nan_code(self) -> int:
        """The code that casts emit for a NaN (spec C-5): a NaN, or +max where there is none."""
        return self.sign_bit if self.nan == "negative_zero" else self._top

    def summary(self) -> str:
        """Its bits, range and special values in a line.

        >>> E5M2.summary()
        '8 bits: 5 exponent, 2 mantissa; from 2^-16 to 57344; NaN, infinities'
        """
        specials = ["NaN"] * self.has_nan + ["infinities"] * self.infinities
        return (
            f"{self.bits} bits: {self.exponent_bits} exponent, {self.mantissa_bits} mantissa; from "
            f"2^{math.log2(self.smallest_subnormal):g} to {self.max:g}; "
            f"{', '.join(specials) or 'numbers only'}"
        )

    def __repr__(self) -> str:
        return self.name


E4M3FN = Format(
    name="e4m3fn", exponent_bits=4, mantissa_bits=3, bias=7, nan="top_code", infinities=False
)
"""FP8 with 4 exponent and 3 mantissa bits: max 448, no infinities (F-2)."""

E5M2 = Format(name="e5m2", exponent_bits=5, mantissa_bits=2, bias=15)
"""FP8 with 5 exponent and 2 mantissa bits: max 57344, with infinities (F-2)."""

E4M3FNUZ = replace(E4M3FN, name="e4m3fnuz", bias=8, nan="negative_zero")
"""FP8 with 4 exponent and 3 mantissa bits: max 240, no infinities, no negative zero (F-3)."""

E5M2FNUZ = replace(E4M3FNUZ, name="e5m2fnuz", exponent_bits=5, mantissa_bits=2, bias=16)
"""FP8 with 5 exponent and 2 mantissa bits: max 57344, no infinities, no negative zero (F-3)."""

E8M0FNU = Format(
    name="e8m0fnu",
    exponent_bits=8,
    mantissa_bits=0,
    bias=127,
    nan="top_code",
    infinities=False,
    signed=False,
)
"""Powers of two from 2^-127 to 2^127, and NaN: 8 exponent bits, for scales (F-4)."""

E2M1FN = Format(name="e2m1fn", exponent_bits=2, mantissa_bits=1, bias=1, nan=None, infinities=False)
"""FP4 with 2 exponent bits and 1 mantissa bit: 16 numbers up to 6, no infinities, no NaN (F-5)."""

E2M3FN = replace(E2M1FN, name="e2m3fn", mantissa_bits=3)
"""FP6 with 2 exponent and 3 mantissa bits: 64 numbers up to 7.5, no infinities, no NaN (F-6)."""

E3M2FN = replace(E2M1FN, name="e3m2fn", exponent_bits=3, mantissa_bits=2, bias=3)
"""FP6 with 3 exponent and 2 mantissa bits: 64 numbers up to 28, no infinities, no NaN (F-6)."""

E3M4 = Format(name="e3m4", exponent_bits=3, mantissa_bits=4, bias=3)
"""The e3m4 of ml_dtypes: max 15.5, with infinities (F-6)."""

E4M3B11FNUZ = replace(E4M3FNUZ, name="e4m3b11fnuz", bias=11)
"""The e4m3b11fnuz of ml_dtypes: bias 11, no infinities, no negative zero (F-6)."""

E4M3 = Format(name="e4m3", exponent_bits=4, mantissa_bits=3, bias=7)
"""The e4m3 of ml_dtypes: max 240, with infinities (F-6). Its name alone is refused, since most who
write it mean e4m3fn: give the Format."""

P3109_FORMATS = {
    f.name: f
    for f in (
        Format(
            name=f"binary8p{precision}s{domain}",
            exponent_bits=8 - precision,
            mantissa_bits=precision - 1,
            bias=1 << (7 - precision),
            nan="negative_zero",
            infinities=domain == "e",
        )
        for precision in range(1, 8)
        for domain in "ef"
    )
}
"""The signed 8-bit formats of IEEE P3109 by name, such as binary8p3se: of each precision, the bits
of a significand, with infinities (e, extended) and without (f, finite) (F-7)."""

BFLOAT16 = Format(name="bfloat16", exponent_bits=8, mantissa_bits=7, bias=127)
"""bfloat16: 8 exponent and 7 mantissa bits."""

FLOAT16 = Format(name="float16", exponent_bits=5, mantissa_bits=10, bias=15)
"""IEEE float16: 5 exponent and 10 mantissa bits."""

FLOAT32 = Format(name="float32", exponent_bits=8, mantissa_bits=23, bias=127)
"""IEEE float32: 8 exponent and 23 mantissa bits."""

FP8_FORMATS = {f.name: f for f in (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ)}
"""The four formats that tensors are quantized to, by name."""

FP4_FORMATS = {E2M1FN.name: E2M1FN}
"""The format of 4 bits that tensors are quantized to, by name (F-5)."""

QUANTIZED_FORMATS = {**FP8_FORMATS, **FP4_FORMATS}
"""The formats of GEMM operands, by name."""

NARROW_FORMATS = {
    **QUANTIZED_FORMATS,
    **{f.name: f for f in (E2M3FN, E3M2FN, E3M4, E4M3B11FNUZ)},
    **P3109_FORMATS,
}
"""The formats that the simulator casts and quantizes tensors to, by name."""

FORMATS = {**NARROW_FORMATS, **{f.name: f for f in (E8M0FNU, BFLOAT16, FLOAT16, FLOAT32)}}
"""All formats by name: those of ``NARROW_FORMATS``, e8m0fnu, bfloat16, float16 and float32."""


_DTYPE = re.compile(r"\bfloat\d_(\w+?)(_x2)?\b")


def by_name(fmt: Format | str) -> Format:
    """The format of that name, or of a dtype such as torch.float8_e4m3fn or its name; a Format is
    returned as it is.

    Raises:   ValueError: another name, with the nearest; anything else.
    """
    if not isinstance(fmt, Format) and (dtype := _DTYPE.search(str(fmt))):
        fmt = dtype[1]
    return registry.lookup("fmt is a Format or", FORMATS, fmt, Format)


def check(fmt: object) -> None:
    """ValueError unless fmt is a Format: a name is not."""
    if not isinstance(fmt, Format):
        raise ValueError(
            f"fmt is a Format, such as fp8ref.formats.E4M3FN; got {fmt!r}. Names: formats.FORMATS."
        )


def check_saturates(fmt: Format, saturate: bool) -> None:
    """ValueError unless casts to fmt saturate or its codes show an overflow (spec C-9)."""
    if not saturate and not fmt.has_nan:
        raise ValueError(
            f"{fmt} has no infinity or NaN, so casts saturate; got saturate=False. Use True (C-9)."
        )


class _Module(types.ModuleType):
    """This module, which shows its formats."""

    def __repr__(self) -> str:
        return repr(_LISTING)

    def _repr_html_(self) -> str:
        return _LISTING._repr_html_()


_LISTING = Listing(FORMATS, {name: fmt.summary() for name, fmt in FORMATS.items()})
sys.modules[__name__].__class__ = _Module
