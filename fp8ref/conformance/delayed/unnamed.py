"""What delayed scaling may do that no rule does: what else its scale is made of."""

import math
from collections.abc import Callable

import numpy as np

from fp8ref.conformance.delayed.sequences import Sequence, named
from fp8ref.conformance.delayed.subject import Subject
from fp8ref.conformance.kit.finding import show
from fp8ref.formats import BFLOAT16, Format
from fp8ref.sim.quantize import cast

_FORGET: Sequence = ((1e-3,),) * 40


def remembers(subject: Subject) -> str:
    """A sentence if a new state knows the amaxes of an earlier one, such as by a list that all
    objects share; else ""."""
    asked: Sequence = ((1.0,),)
    subject.run(_FORGET)  # so that amaxes of still earlier states count less
    alone = subject.run(asked)[-1]
    subject.run(((1024.0,),))
    after = subject.run(asked)[-1]
    if alone == after or math.isnan(alone.scale):
        return ""
    return (
        f"a new state knows of earlier ones: after {named(asked)} its scale is "
        f"{show(alone.scale)}, and {show(after.scale)} where a state before it had amax 1024 "
        "(H-2)"
    )


def unforgotten(subject: Subject, steps: int) -> str:
    """Why a large amax has no end, in a sentence; steps: after how many it was looked for last."""
    scales = {one.scale for one in subject.run(tuple((2.0**i,) for i in range(0, 40, 2)))}
    if len(scales) == 1:
        return f"no amax changes its scale, {show(scales.pop())}: amaxes are not used (H-1)"
    alone = [subject.run(((2.0**i,),))[-1].scale for i in (20, 19, -20)]
    large, small = alone[1:]
    if len(scales) == 2 and alone[0] == large != small:
        bound = 2.0**-20 * max(small / large, large / small)
        return f"an amax above {bound:.6g} counts as {bound:.6g} (H-1)"
    if len(scales) == 2:
        return "its scale changes once, and then never again (H-3)"
    falling = subject.run(((64.0,), *((1.0,),) * steps))
    if all(one.scale == falling[1].scale for one in falling[1:]):
        return f"an amax is never forgotten: after {steps:,} steps its scale is that of it (H-3)"
    return f"its scale goes on to change after {steps:,} equal steps (H-3)"


def reductions(subject: Subject, fmt: Format, value: str) -> list[str]:
    """What else than the largest or the newest amax of a history its scale is made of, or how else
    its scale is rounded, if it is known."""

    def factor(amax: float) -> float:
        return fmt.max / amax if value == "scale" else amax / fmt.max

    def near(a: float, b: float) -> bool:
        return math.isclose(a, b, rel_tol=1e-6)  # float32 roundings: 2^-23 each

    amaxes = (2.0, 8.0, 5.0)
    scales = [one.scale for one in subject.run(tuple((amax,) for amax in amaxes))]
    if len(scales) <= len(amaxes):
        return []  # it raises
    if near(scales[2], factor(2)) and near(scales[3], factor(8)):
        return [
            "its scale is a step late: after amaxes 2 and 8 it is that of 2. shows='stored' "
            "takes what a state stores"
        ]
    of: dict[str, Callable] = {
        "mean": lambda v: sum(v) / len(v),
        "minimum": min,
        "sum": sum,
        "median": lambda v: sorted(v)[len(v) // 2],
    }
    for name, reduce in of.items():
        if near(scales[3], factor(reduce(amaxes))):
            return [f"its scale is that of the {name} of the amaxes, not of the largest"]
    rising = (3.0, 5.0, 7.3)
    steps = tuple((amax,) for amax in rising)
    rising_scales = [one.scale for one in subject.run(steps)][1:]
    expected = [factor(float(np.float32(amax))) for amax in rising]
    as_float32 = np.asarray(expected, np.float32)
    if rising_scales == expected and rising_scales != as_float32.tolist():
        return ["its scale is not rounded to float32"]
    if rising_scales == cast.round_to(as_float32, BFLOAT16).tolist():
        return ["its scale is rounded to bfloat16"]
    ratios = [a / b for a, b in zip(rising_scales, expected, strict=False)]
    constant = len(ratios) == len(rising) and near(min(ratios), max(ratios))
    if constant and not near(ratios[0], 1):
        largest = f"the largest amax to {fmt}, max {fmt.max:g}"
        return [f"its {value} is {ratios[0]:.6g} times that of {largest}"]
    return []
