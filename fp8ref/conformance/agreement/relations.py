"""How the scales of one side follow from the other's, where bytes alone are compared."""

from collections.abc import Callable

import numpy as np

from fp8ref.checkpoints import arrangement
from fp8ref.formats import BFLOAT16, FLOAT16
from fp8ref.sim.quantize import cast

__all__ = ["relation"]


def _order(x: np.ndarray, y: np.ndarray) -> str:
    fitting = (name for name, ordered in arrangement.orders(x) if np.array_equal(ordered, y))
    return next(fitting, "")


def _dtype(x: np.ndarray, y: np.ndarray) -> str:
    fmts = (fmt for fmt in (BFLOAT16, FLOAT16) if np.array_equal(cast.round_to(x, fmt), y))
    return next((f"they are rounded to {fmt}" for fmt in fmts), "")


def _floor(x: np.ndarray, y: np.ndarray) -> str:
    least = y.min()
    floored = x.size > 1 and np.array_equal(np.maximum(x, least), y)
    return f"none is below {least:.6g}" if floored else ""


def _factor(x: np.ndarray, y: np.ndarray) -> str:
    ratio = y.astype(np.float64) / x
    # equal up to the roundings of each quotient, and no rounding itself
    single = x.size > 1 and np.ptp(ratio) < 2.0**-21 * abs(ratio).max()
    return (
        f"they are {ratio.flat[0]:.6g} times as large"
        if single and abs(ratio - 1).max() > 2.0**-20
        else ""
    )


def _powers(x: np.ndarray) -> bool:
    return bool((np.frexp(x)[0] == 0.5).all())


def _rounds(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether y is x rounded up or down to powers of two."""
    return _powers(y) and not _powers(x) and bool(((y / x > 0.5) & (y / x < 2)).all())


RELATIONS: dict[str, tuple[bool | None, str, Callable[[np.ndarray, np.ndarray], str | bool]]] = {
    "amax_floor": (None, "", _floor),
    "scale_inverse": (
        None,
        "they are the reciprocals",
        lambda x, y: np.allclose(1 / x, y, rtol=2.0**-22, atol=0),  # of one more rounding each
    ),
    "scale_exponents": (None, "they are log2 + 127", lambda x, y: (np.log2(x) + 127 == y).all()),
    "scale_order": (None, "", _order),
    "scale_dtype": (None, "", _dtype),
    "rounded_after": (True, "they are rounded to powers of two", _rounds),
    "power_of_two": (False, "they are powers of two, and the codes fit them", _rounds),
    "scale_factor": (None, "", _factor),
}
"""{cause: whether codes are equal (None: either), how y follows from x, whether it does}."""


def relation(x: np.ndarray, y: np.ndarray, equal_codes: bool) -> tuple[str, str]:
    """(cause, how one side's scales follow from the other's); ("", ""): by no known relation.

    x, y   of A and B, of one shape, which differ.
    """
    x, y = (np.atleast_2d(scales).astype(np.float32) for scales in (x, y))
    with np.errstate(all="ignore"):
        for cause, (needed, text, follows) in RELATIONS.items():
            for who, (here, there) in (("B", (x, y)), ("A", (y, x))):
                if needed in (None, equal_codes) and (detail := follows(here, there)):
                    other = "A" if who == "B" else "B"
                    words = detail if isinstance(detail, str) else text
                    return cause, f"{who}'s scales follow from {other}'s: {words}"
    return "", ""
