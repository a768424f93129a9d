"""Optimizer states as data: how AdamW keeps its moments and the master of a weight (spec O).

A ``Moment`` is every decision between a float32 number and what is stored of it. A ``Layout`` is
both moments and the master. LAYOUTS has the layouts of libraries and papers, and fp8ref's own, all
with float32 masters; WITH_MASTERS has those with narrower ones. ``Scalars`` are the numbers of one
step that are the same for every element. ``sim.states`` implements all of them; a backend
implements them or refuses.
"""

import functools
import math
import struct
from numbers import Real
from typing import Any, Generic, NamedTuple, TypeVar

from fp8ref.formats import FORMATS
from fp8ref.shared import errors, package_data, registry
from fp8ref.spec.states.layout import Layout as Layout
from fp8ref.spec.states.layout import Moment as Moment

__all__ = ["LAYOUTS", "Layout", "Moment", "corrections"]

GRADIENT_MIN = 2.0**-56
"""A gradient of a smaller magnitude counts as zero (O-2)."""

GRADIENT_MAX = 2.0**56
"""A gradient of a larger magnitude counts as NaN (O-2)."""

CONVERGING = 1 - 2.0**-14
"""The largest b1^2 / b2 under which the ratio of moments has a bound (O-6)."""

STEP_MIN = 2.0**-90
"""A smaller change of a weight counts as zero (O-6)."""

EXPANDED_RANGE = 448.0 * 448.0 / 2
"""The range that an expansion fills, as COAT's kernel has it (O-10)."""

EXPONENTS = (4.0, 2.0, 1.0, 0.5)
"""The exponents of an expansion, largest first, which products and roots give exactly (O-10)."""


Number = TypeVar("Number")  # a float, or an array of one


class Scalars(NamedTuple, Generic[Number]):
    """The numbers of one step, float32 numbers as Python floats or arrays (O-3).

    b1, a1, b2, a2           the betas and what they lack to 1
    inverse1, inverse2       1 / (1 - b1^t) and 1 / sqrt(1 - b2^t), which correct the bias
    bound                    the largest ratio of moments (O-6)
    learning_rate, eps, weight_decay
    """

    b1: Number
    a1: Number
    b2: Number
    a2: Number
    inverse1: Number
    inverse2: Number
    bound: Number
    learning_rate: Number
    eps: Number
    weight_decay: Number


def scalars(
    step: int, *, learning_rate: float, b1: float, b2: float, eps: float, weight_decay: float
) -> Scalars[float]:
    """The numbers of the step with that number, 1 for the first.

    Order:    float64 products and quotients, each rounded once, then one rounding to float32 (O-3).
    Raises:   ValueError: as ``check``; step below 1; a learning rate outside [0, 1024].
    """
    check(b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    _check_number("learning_rate", learning_rate)
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ValueError(f"steps are counted from 1; got step={step!r}.")
    if not 0 <= learning_rate <= 1024:
        raise ValueError(f"learning_rate is in [0, 1024]; got {learning_rate!r}.")
    table = corrections(b1, b2)
    of_step = table[min(step, len(table)) - 1]
    values = (b1, 1.0 - b1, b2, 1.0 - b2, *of_step, learning_rate, eps, weight_decay)
    return Scalars(*map(float32, values))


@functools.lru_cache(maxsize=16)
def corrections(b1: float, b2: float) -> tuple[tuple[float, float, float], ...]:
    """(1 / (1 - b1^t), 1 / sqrt(1 - b2^t), bound) of the steps from 1 on, rounded to float32; later
    steps have the last entry, where all powers are below 2^-30 (O-3)."""
    rows = []
    ratio = b1 * b1 / b2
    converges = ratio <= CONVERGING
    power1 = power2 = power_r = 1.0
    while max(power1, power2, power_r if converges else 0.0) >= 2.0**-30:
        power1, power2, power_r = power1 * b1, power2 * b2, power_r * ratio
        root_v = math.sqrt(1.0 - power2)
        bound = math.inf
        if converges:
            root_ratio = math.sqrt((1.0 - power_r) / (1.0 - ratio))
            bound = (1.0 - b1) * root_ratio / math.sqrt(1.0 - b2) * root_v
            bound = bound / (1.0 - power1) * (1.0 + 2.0**-7)
        rows.append((float32(1.0 / (1.0 - power1)), float32(1.0 / root_v), float32(bound)))
    return tuple(rows)


def float32(value: float) -> float:
    """RN32(value), as a Python float.

    >>> float32(0.1)
    0.10000000149011612
    """
    return value if math.isinf(value) else struct.unpack("f", struct.pack("f", value))[0]


def check(
    *, b1: float, b2: float, eps: float, weight_decay: float, layout: "Layout | None" = None
) -> None:
    """ValueError unless AdamW's numbers are in the ranges in which no operation overflows or needs
    a subnormal number (O-2); and b1^2 / b2 below 1 - 2^-14 where the layout is bounded."""
    for name, value in (("b1", b1), ("b2", b2), ("eps", eps), ("weight_decay", weight_decay)):
        _check_number(name, value)
    if not (b1 == 0 or 0.5 <= b1 <= 1 - 2.0**-14):
        raise ValueError(f"b1 is 0 or in [0.5, 1 - 2^-14]; got {b1!r}.")
    if not 0.5 <= b2 <= 1 - 2.0**-14:
        raise ValueError(
            f"b2 is in [0.5, 1 - 2^-14], which keeps squared gradients normal; got {b2!r}."
        )
    if not 2.0**-50 <= eps <= 1:
        raise ValueError(
            f"eps is in [2^-50, 1], from about 8.9e-16; got {eps!r}. Use 1e-8, or 1e-15."
        )
    if not 0 <= weight_decay <= 1024:
        raise ValueError(f"weight_decay is in [0, 1024]; got {weight_decay!r}.")
    if layout is not None and layout.bounded and b1 * b1 / b2 > CONVERGING:
        raise ValueError(
            f"layout {layout.name!r} is bounded, which needs b1^2 / b2 below 1 - 2^-14; got "
            f"b1={b1!r}, b2={b2!r}. Use a larger b2 (O-6)."
        )
    if layout is not None and layout.average == "lerp" and (b1 <= 0.5 or b2 <= 0.5):
        raise ValueError(f"average 'lerp' needs betas above 0.5 (O-5); got b1={b1!r}, b2={b2!r}.")


def _check_number(name: str, value: float) -> None:
    """ValueError for None, a schedule or other values that are no number."""
    if not isinstance(value, Real):
        raise ValueError(f"{name} is a number; got {value!r}.")


def check_seed(seed: int, layout: Layout) -> None:
    """ValueError unless a seed is valid (C-2), and 0 without stochastic rounding."""
    errors.seed(seed)
    if seed and not layout.stochastic:
        raise ValueError(
            f"layout {layout.name!r} rounds to nearest and has no use for a seed; got seed={seed}."
        )


def _layout(name: str, decisions: dict[str, Any]) -> Layout:
    for key in {"m", "v", "master"} & decisions.keys():
        fields = decisions[key]
        decisions[key] = Moment(**fields | {"fmt": FORMATS[fields["fmt"]]})
    return Layout(name=name, **decisions)


_LAYOUTS = [
    _layout(name, decisions) for name, decisions in package_data.tables(__file__, "layouts").items()
]

LAYOUTS = {layout.name: layout for layout in _LAYOUTS if layout.master == Moment()}
"""The layouts of layouts.toml with float32 masters by name (O-1)."""

WITH_MASTERS = {layout.name: layout for layout in _LAYOUTS if layout.master != Moment()}
"""The layouts with narrower masters by name (O-14)."""


def by_name(layout: str | Layout) -> Layout:
    """The layout of that name; a Layout is itself; ValueError for anything else."""
    return registry.lookup("layout is a Layout or", LAYOUTS | WITH_MASTERS, layout, Layout)
