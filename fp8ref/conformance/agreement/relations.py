"""How the scales of one side follow from the other's, where bytes alone are compared."""

from collections.abc import Callable

import numpy as np

from fp8ref.checkpoints import arrangement
from fp8ref.formats import BFLOAT16, FLOAT16
from fp8ref.sim.quantize import cast

__all__ = ["relation"]


def _order(x: np.ndarray, y: np.ndarray) -> str:
    # the other side's are swizzled once
    named = ((name, z) for name, z in arrangement.orders(x) if "twice" not in name)
    fitting = (name for name, ordered in named if np.array_equal(ordered, y))
    return next((f"{{x}}'s scales are {{y}}'s, but {name}" for name in fitting), "")


def _dtype(x: np.ndarray, y: np.ndarray) -> str:
    fmts = (fmt for fmt in (BFLOAT16, FLOAT16) if np.array_equal(cast.round_to(x, fmt), y))
    return next((f"{{y}}'s scales are {{x}}'s, rounded to {fmt}" for fmt in fmts), "")


def _factor(x: np.ndarray, y: np.ndarray) -> str:
    ratio = y.astype(np.float64) / x
    # equal up to the roundings of each quotient, and no rounding itself
    one = np.ptp(ratio) < 2.0**-21 * abs(ratio).max() and abs(ratio - 1).max() > 2.0**-20
    return f"{{y}}'s scales are {{x}}'s times {ratio.flat[0]:.6g}" if one else ""


def _floor(x: np.ndarray, y: np.ndarray) -> str:
    least = y.min()
    # a floor is far below usual scales, and above some of those that it replaces
    floors = np.array_equal(np.maximum(x, least), y) and least < 2.0**-12 and (x < least / 2).any()
    return f"none of {{y}}'s scales is below {least:.6g}" if floors else ""


def _powers(x: np.ndarray) -> bool:
    return bool((np.frexp(x)[0] == 0.5).all())


def _rounds(x: np.ndarray, y: np.ndarray) -> str:
    """Whether y is x rounded up or down to powers of two."""
    rounded = _powers(y) and not _powers(x) and bool(((y / x > 0.5) & (y / x < 2)).all())
    return "{y}'s scales are {x}'s, rounded to powers of two" if rounded else ""


def _inverse(x: np.ndarray, y: np.ndarray) -> str:
    # one more rounding of each
    inverse = np.allclose(1 / x, y, rtol=2.0**-22, atol=0)
    return "{y}'s scales are the reciprocals of {x}'s" if inverse else ""


def _exponents(x: np.ndarray, y: np.ndarray) -> str:
    return "{y}'s scales are log2 of {x}'s, plus 127" if (np.log2(x) + 127 == y).all() else ""


RELATIONS: dict[str, tuple[bool | None, Callable[[np.ndarray, np.ndarray], str]]] = {
    "scale_inverse": (None, _inverse),
    "scale_exponents": (None, _exponents),
    "scale_order": (None, _order),
    "scale_dtype": (None, _dtype),
    "rounded_after": (True, _rounds),
    "power_of_two": (False, _rounds),
    "amax_floor": (None, _floor),
    "scale_factor": (None, _factor),
}
"""{cause: whether codes are equal (None: either), how y follows from x if it does}."""


def relation(x: np.ndarray, y: np.ndarray, equal_codes: bool) -> tuple[str, str]:
    """(cause, how one side's scales follow from the other's); ("", ""): by no known relation.

    x, y   of A and B, of one shape, which differ.
    """
    x, y = (np.atleast_2d(scales).astype(np.float32) for scales in (x, y))
    with np.errstate(all="ignore"):
        for cause, (needed, follows) in RELATIONS.items():
            for sides, pair in (("AB", (x, y)), ("BA", (y, x))):
                if needed in (None, equal_codes) and (text := follows(*pair)):
                    return cause, text.format(x=sides[0], y=sides[1])
    return "", ""
