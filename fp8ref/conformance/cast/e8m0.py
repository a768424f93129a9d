"""The behavior of a cast to e8m0fnu as data, a field for each decision; its codes (spec C-7, C-10).

``KNOWN_E8M0_CASTS`` are those with a name. e8m0fnu has no zero and no sign, and its smallest number
is a subnormal of float32: libraries agree on the numbers between 2^-126 and 2^127, by one of three
roundings, and on little else.
"""

from dataclasses import dataclass

import numpy as np

from fp8ref.conformance.inputs.dtypes import rounded
from fp8ref.formats import E8M0FNU
from fp8ref.shared import package_data
from fp8ref.sim.quantize import cast

_TABLES = package_data.tables(__file__, "decisions")
DECISIONS: dict[str, tuple[str, ...]] = _TABLES["e8m0"]
"""{decision: the values that it may have, that of the specification's default first}."""

NUMBERS: dict[str, str] = _TABLES["e8m0_numbers"]
"""{a number of a behavior that no right cast changes: what it says in words}."""


@dataclass(frozen=True, kw_only=True)
class E8m0Behavior:
    """Every decision of a cast to e8m0fnu; the fields have the values of DECISIONS.

    rounding    of magnitudes m * 2^k, 1 <= m < 2: ``nearest``, halfway up; ``nearest_even``,
                halfway to the even code; ``nearest_zero``, halfway down; ``up`` and ``down``, away
                from and toward zero; ``nearest_log2``, the nearest logarithm, up from sqrt(2);
                ``toward_one`` and ``away_from_one``: log2 rounded toward and away from zero.
    subnormals  inputs below 2^-126: ``kept``, rounded as others, to 2^-127 at least; ``by_field``:
                as if float32's field of the mantissa had a leading 1, so that ``nearest`` gives
                2^-126 of all above 2^-127, and ``up`` of all; ``flushed``, as a zero.
    overflow    what finite magnitudes that round above 2^127 give; infinite: what infinities give.
    zero        ``nan``, or ``least``: 2^-127, code 0.
    negative    what negative numbers give: NaN, the code of the magnitude, or 2^-127.
    bias        of the codes; bits: of the fraction, that ``up`` reads; tie: of nearest roundings;
                log2_in: a dtype to which log2 is rounded before it is rounded to an integer.
    """

    rounding: str = "nearest"
    subnormals: str = "kept"
    overflow: str = "max"
    infinite: str = "max"
    zero: str = "nan"
    negative: str = "nan"
    bias: int = 127
    bits: int = 0x7FFFFF
    tie: float = 1.5
    log2_in: str = ""

    @property
    def rounding_words(self) -> str:
        """The rounding, and each of NUMBERS that is not a right cast's, in words."""
        other = [k for k in NUMBERS if getattr(self, k) != getattr(E8m0Behavior, k)]
        words = [f" ({NUMBERS[k].format(getattr(self, k))})" for k in other]
        return self.rounding + "".join(words)

    def encode(self, x: np.ndarray) -> np.ndarray:
        """The codes of x, uint8 of its shape; NaN gives 255."""
        value = cast.exact(x)
        magnitude = np.where(np.isfinite(value), np.abs(value), 1.0)
        fraction, exponent = np.frexp(magnitude)
        code = self._rounded(2 * fraction, exponent + 126)
        tiny = magnitude < 2.0**-126
        if self.subnormals == "by_field":
            # the tie of a nearest rounding, 2^-127, is a number: it goes down
            least = np.inf if self.rounding == "down" else 2.0**-127
            field = np.where(tiny, magnitude * 2.0**149, 0).astype(np.int64)
            up = field & self.bits > 0 if self.rounding == "up" else magnitude > least
            code = np.where(tiny, up, code)
        code = np.maximum(code + self.bias - 127, 0)
        special = {"max": E8M0FNU.max_code, "nan": E8M0FNU.nan_code}
        code = np.where(code > E8M0FNU.max_code, special[self.overflow], code)
        code = np.where(np.isinf(value), special[self.infinite], code)
        zero = (magnitude == 0) | (tiny & (self.subnormals == "flushed"))
        code = np.where(zero, 0 if self.zero == "least" else E8M0FNU.nan_code, code)
        if self.negative != "magnitude":
            sign = E8M0FNU.nan_code if self.negative == "nan" else 0
            code = np.where((value < 0) & ~zero, sign, code)
        return np.where(np.isnan(value), E8M0FNU.nan_code, code).astype(np.uint8)

    def _rounded(self, m: np.ndarray, code: np.ndarray) -> np.ndarray:
        """The codes of magnitudes m * 2^(code - 127), 1 <= m < 2; int64, counted on beyond 254."""
        if self.log2_in:
            log = rounded(np.log2(np.maximum(m, 1)) + (code - 127), self.log2_in)
            of = _OF_LOGS.get(self.rounding, np.zeros_like)
            return of(log.astype(np.float64)).astype(np.int64) + 127
        up = {
            "nearest": m >= self.tie,
            "nearest_even": (m > self.tie) | ((m == self.tie) & (code % 2 == 1)),
            "nearest_zero": m > self.tie,
            "up": np.ceil(np.ldexp(m - 1, 23)).astype(np.int64) & self.bits > 0,
            "down": np.zeros(m.shape, bool),
            "nearest_log2": m * m >= 2,  # float64 squares the numbers of float32 exactly
            "toward_one": (m > 1) & (code < 127),
            "away_from_one": (m > 1) & (code >= 127),
        }
        return code.astype(np.int64) + up[self.rounding]


_OF_LOGS = {"up": np.ceil, "down": np.floor, "nearest_log2": np.rint, "toward_one": np.trunc}

KNOWN_E8M0_CASTS = {
    name: E8m0Behavior(**decisions)
    for name, decisions in package_data.tables(__file__, "e8m0").items()
}
"""The casts to e8m0fnu with a name (C-10)."""
