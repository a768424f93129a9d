"""Floating-point formats as data (spec F-1 to F-5): five formats of 8 bits, one of 4, and
float32, bfloat16 and float16.

A format is a layout and a rule for its special codes; everything else is derived. Nothing here
rounds: see ``sim/quantize/cast.py``. ``FP8_FORMATS`` holds the four formats that tensors are
quantized to, by name, and ``FP4_FORMATS`` the one that they are quantized to under simulation;
``FORMATS`` holds all of them, and the module itself, in a REPL or a notebook, shows a line on each.
"""

import math
import sys
import types
from dataclasses import dataclass
from typing import Literal

from fp8ref.shared import registry
from fp8ref.shared.tables import Listing

__all__ = ["BFLOAT16", "E2M1FN", "E4M3FN", "E5M2", "FLOAT16", "FLOAT32", "FORMATS", "FP8_FORMATS"]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A binary floating-point format: (-1)^sign * 2^(exponent field - bias) * 1.mantissa, subnormal
    where the field is 0.

    Formats are equal where all fields are, hashable, and printed by name. ``specials`` says which
    codes are not finite numbers:
    ``ieee``   the all-ones exponent holds Inf (mantissa 0) and NaN;
    ``fn``     no Inf; only the code with all exponent and mantissa bits set is NaN, in both signs;
    ``fnuz``   no Inf, no -0; the code of -0 is the only NaN;
    ``finite`` no Inf and no NaN: every code is a number.
    ``signed`` is false only for e8m0fnu, which has no zero and no subnormals either.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Literal["ieee", "fn", "fnuz", "finite"]
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
    def max_code(self) -> int:
        """The code of the largest finite number."""
        # All exponent and mantissa bits set. ieee has infinity and NaNs in this exponent, fn has
        # its NaN in this code, fnuz a number.
        top = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        if self.specials == "ieee":
            return top - (1 << self.mantissa_bits)
        return top - (self.specials == "fn")  # of a finite format none is left out

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
        return self.max_code + 1 if self.specials == "ieee" else None

    @property
    def has_nan(self) -> bool:
        """Whether any code is NaN."""
        return self.specials != "finite"

    @property
    def nan_code(self) -> int:
        """The code that casts emit for a NaN (spec C-5): a NaN, or +max where there is none."""
        if self.specials == "fnuz":
            return self.sign_bit
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1

    def summary(self) -> str:
        """Its bits, range and special values in a line.

        >>> E5M2.summary()
        '8 bits: 5 exponent, 2 mantissa; from 2^-16 to 57344; NaN, infinities'
        """
        specials = ["NaN"] * self.has_nan + ["infinities"] * (self.inf_code is not None)
        return (
            f"{self.bits} bits: {self.exponent_bits} exponent, {self.mantissa_bits} mantissa; from "
            f"2^{math.log2(self.smallest_subnormal):g} to {self.max:g}; "
            f"{', '.join(specials) or 'numbers only'}"
        )

    def __repr__(self) -> str:
        return self.name


E4M3FN = Format(name="e4m3fn", exponent_bits=4, mantissa_bits=3, bias=7, specials="fn")
"""FP8 with 4 exponent and 3 mantissa bits: max 448, no infinities (F-2)."""

E5M2 = Format(name="e5m2", exponent_bits=5, mantissa_bits=2, bias=15, specials="ieee")
"""FP8 with 5 exponent and 2 mantissa bits: max 57344, with infinities (F-2)."""

E4M3FNUZ = Format(name="e4m3fnuz", exponent_bits=4, mantissa_bits=3, bias=8, specials="fnuz")
"""FP8 with 4 exponent and 3 mantissa bits: max 240, no infinities, no negative zero (F-3)."""

E5M2FNUZ = Format(name="e5m2fnuz", exponent_bits=5, mantissa_bits=2, bias=16, specials="fnuz")
"""FP8 with 5 exponent and 2 mantissa bits: max 57344, no infinities, no negative zero (F-3)."""

E8M0FNU = Format(
    name="e8m0fnu", exponent_bits=8, mantissa_bits=0, bias=127, specials="fn", signed=False
)
"""Powers of two from 2^-127 to 2^127, and NaN: 8 exponent bits, for scales (F-4)."""

E2M1FN = Format(name="e2m1fn", exponent_bits=2, mantissa_bits=1, bias=1, specials="finite")
"""FP4 with 2 exponent bits and 1 mantissa bit: 16 numbers up to 6, no infinities, no NaN (F-5)."""

BFLOAT16 = Format(name="bfloat16", exponent_bits=8, mantissa_bits=7, bias=127, specials="ieee")
"""bfloat16: 8 exponent and 7 mantissa bits."""

FLOAT16 = Format(name="float16", exponent_bits=5, mantissa_bits=10, bias=15, specials="ieee")
"""IEEE float16: 5 exponent and 10 mantissa bits."""

FLOAT32 = Format(name="float32", exponent_bits=8, mantissa_bits=23, bias=127, specials="ieee")
"""IEEE float32: 8 exponent and 23 mantissa bits."""

FP8_FORMATS = {f.name: f for f in (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ)}
"""The four formats that tensors are quantized to, by name."""

FP4_FORMATS = {E2M1FN.name: E2M1FN}
"""The format of 4 bits that tensors are quantized to by the simulator alone, by name (F-5)."""

QUANTIZED_FORMATS = {**FP8_FORMATS, **FP4_FORMATS}
"""The formats that the simulator quantizes tensors to, by name."""

FORMATS = {**FP8_FORMATS, **{f.name: f for f in (E8M0FNU, E2M1FN, BFLOAT16, FLOAT16, FLOAT32)}}
"""All formats by name: the FP8 formats, e8m0fnu, e2m1fn, bfloat16, float16 and float32."""


def by_name(fmt: Format | str) -> Format:
    """The format of that name; a Format is returned as it is.

    Raises:   ValueError: another name, with the nearest; anything else.
    """
    return registry.lookup("fmt is a Format or", FORMATS, fmt, Format)


def check(fmt: object) -> None:
    """ValueError unless fmt is a Format: a name is not."""
    if not isinstance(fmt, Format):
        raise ValueError(
            f"fmt is a Format, such as fp8ref.formats.E4M3FN; got {fmt!r}. Names: formats.FORMATS."
        )


class _Module(types.ModuleType):
    """This module, which shows its formats."""

    def __repr__(self) -> str:
        return repr(_LISTING)

    def _repr_html_(self) -> str:
        return _LISTING._repr_html_()


_LISTING = Listing(FORMATS, {name: fmt.summary() for name, fmt in FORMATS.items()})
sys.modules[__name__].__class__ = _Module
