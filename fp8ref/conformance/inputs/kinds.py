"""The kind of a single input, by what decides its answer: of a cast's value, and of a scale's amax.

A *kind* belongs to one number. How a whole tensor or a GEMM operand is filled is its *pattern*
(``quantizer_inputs``, ``vectors.gemm``). ``conformance.cast`` names a cast's wrong decisions.
"""

import numpy as np

from fp8ref import policy as policies
from fp8ref.conformance.inputs import dtypes
from fp8ref.formats import Format
from fp8ref.policy import ScalePolicy
from fp8ref.shared import package_data
from fp8ref.sim.quantize import cast

_CLAUSES = package_data.tables(__file__, "kinds")

CAST_CLAUSES: dict[str, str] = _CLAUSES["casts"]
"""{kind of a cast's input: its clauses}; the first kind that applies is the kind."""

CASTS = tuple(CAST_CLAUSES)  # the kinds of a cast's input

CAST_RANGES = ("in range", "above max", "infinite", "NaN")
"""The four kinds by which a certificate tallies 2^32 inputs.

They are names of CASTS, but follow from the unsaturated code: "above max" is what rounds above max,
and "in range" is everything else.
"""

AMAX_CLAUSES: dict[str, str] = _CLAUSES["amaxes"]
"""{kind of an amax under a policy: its clauses}; the first kind that applies is the kind.

The clauses are those that a kind adds to the policy's formula (S-3, S-9, S-14, S-15, S-17, S-20).
"""

AMAXES = tuple(AMAX_CLAUSES)  # the kinds of an amax under a policy

AMAX_RANGES = ("ordinary", "tiny", "huge", "subnormal", "zero", "infinite", "NaN")
"""The kinds of an amax by its magnitude alone, where no policy is known yet.

"ordinary" amaxes are those for which every policy divides, without eps, overflow or a special case.
"""

NONZERO_RANGES = AMAX_RANGES[:4]  # those kinds that are finite amaxes above zero


def cast_kinds(x: np.ndarray, source: dtypes.Source, fmt: Format) -> np.ndarray:
    """Indices of CASTS: what decides the cast of each value of a source's dtype."""
    value = cast.exact(x)
    finite = np.isfinite(value)
    magnitude = np.where(finite, np.abs(value), 1.0)
    spacing = dtypes.spacing(magnitude, source)
    exponent = np.where(magnitude == 0, fmt.emin, np.maximum(np.frexp(magnitude)[1] - 1, fmt.emin))
    step = np.ldexp(1.0, exponent - fmt.mantissa_bits)
    rest = magnitude / step - np.floor(magnitude / step)  # exact: a power of two
    # A float64's own neighbors may be 2^-53 of the spacing away; this difference is exact.
    from_tie = np.abs(rest - 0.5) * step
    least = fmt.smallest_subnormal if fmt.signed else fmt.smallest_normal
    cases = [
        np.isnan(value),
        ~finite,
        value == 0,
        (value < 0) & (not fmt.signed),
        magnitude > fmt.max,
        rest == 0,
        rest == 0.5,
        from_tie <= spacing,
        magnitude < least / 2,
        magnitude < fmt.smallest_normal,
    ]
    return np.select(cases, range(len(cases)), len(cases))


def amax_kinds(amax: np.ndarray, fmt: Format, policy: str | ScalePolicy) -> np.ndarray:
    """Indices of AMAXES: what decides the scale of each float32 amax under a policy."""
    policy = policies.by_name(policy)
    value = cast.exact(amax)
    finite = np.isfinite(value) & (value > 0)
    safe = np.where(finite, value, 1.0)

    def from_power(v: np.ndarray) -> np.ndarray:  # in float32 spacings, to the nearest power of two
        fraction = np.frexp(v)[0]  # in [0.5, 1), whose spacing in float32 is 2^-24
        return np.minimum(fraction - 0.5, 1 - fraction) * 2.0**24

    cases = [
        np.isnan(value),
        np.isinf(value),
        value == 0,
        value < policy.eps,
        value < 2.0**-126,
        fmt.max / safe >= 2.0**128,
        from_power(safe) == 0,
        from_power(safe) <= 1,
        from_power(safe / fmt.max) == 0,
        from_power(safe / fmt.max)
        <= 64,  # S-4: up to 44 float32 numbers below a power of two count as it
    ]
    return np.select(cases, range(len(cases)), len(cases))
