"""Scales at the ends of what they can be: tiny, huge, NaN (spec B-14).

Kernels decode e8m0 with shifts, and multiply float32 scales as they come. So byte 0 may be read as
0, byte 255 as a number, and a small scale may be flushed. The other operand's scale brings each
result back to the middle of the range, so that every output dtype holds it.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fp8ref.conformance.gemm.grade.stimuli import Asked, Shape
from fp8ref.conformance.gemm.grade.structure import Cause, first_of
from fp8ref.conformance.gemm.scaled_gemm import RefusedError, hardware_scales
from fp8ref.conformance.kit.arrays import equal
from fp8ref.sim.quantize import cast

EXPONENTS = (-127, -126, -100, -76, -22, -9, 8, 12, 76, 100, 126, 127)
"""log2 of the scale_inv that are asked: the ends of e8m0 and of e4m3fn, and of float32 some that no
usual tensor has, such as 2^-76 = 1.3e-23."""

VANISHING = np.float32(2.0**-100)
"""A scale_inv of both operands whose product is 0: of dead experts, such as 1e-23 of each."""


class End(NamedTuple):
    """A scale_inv at an end, the other operand's, and the product of codes that they multiply."""

    value: np.float32
    opposite: np.float32
    product: float

    def of(self, who: str) -> str:
        """The scale and whose it is, in words."""
        if np.isnan(self.value):
            return f"NaN of {who}"
        return (
            f"2^{int(np.log2(self.value))} of {'a and b' if self.opposite == self.value else who}"
        )


def ends(granularity: str, other: str) -> Iterator[End]:
    """Those that an operand of this granularity can have; other: that of the other operand.

    Neither the product nor any order of its products with the scales leaves the normal numbers.
    """
    most = int(np.log2(hardware_scales(other, np.asarray(np.float32(2.0**120)))))
    for exponent in EXPONENTS:
        value = np.asarray(np.float32(2.0**exponent))
        if hardware_scales(granularity, value) != value:
            continue
        if value < 2.0**-126 and not granularity.startswith("mx"):
            continue  # a subnormal float32, which a device may flush
        opposite = np.float32(2.0 ** -np.clip(exponent, -most, most))
        yield End(np.float32(value), opposite, 4.0 if exponent < 0 else 0.5)
    yield End(np.float32(np.nan), np.float32(1), 1.0)


def examine(asked: Asked, shape: Shape) -> tuple[list[Cause], list[str]]:
    """(causes of wrong results under scales at their ends, what the GEMM raised for), in words.

    A scale that the granularity's hardware does not have is not asked.
    """
    causes, refused = [], []
    for which, who in enumerate("ab"):
        own, other = asked.scaled.granularities[:: 1 if which == 0 else -1]
        held = all(hardware_scales(one, np.asarray(VANISHING)) == VANISHING for one in (own, other))
        both = [End(VANISHING, VANISHING, 4.0)] * (held and which == 0)
        for end in (*ends(own, other), *both):
            try:
                cause = _judge(asked, shape, which, who, end)
            except RefusedError:
                refused.append(f"scale_inv {end.of(who)}, for which it raised")
                continue
            causes += [cause] if cause else []
    return causes, refused


def _judge(asked: Asked, shape: Shape, which: int, who: str, end: End) -> Cause | None:
    """The cause if results under this scale are not exact: all are one power of two, or NaN."""
    values = [np.zeros((rows, shape[2]), np.float32) for rows in shape[:2]]
    for i, x in enumerate(values):
        # Under NaN all of K counts: 0 times an infinity that it is taken for would be NaN.
        x[:, : None if np.isnan(end.value) else 1] = end.product if i == which else 1.0
    stimulus = asked.stimulus(f"products under scale_inv {end.of(who)}", values)
    scaled = []
    for i, q in enumerate((stimulus.a, stimulus.b)):
        scale_inv = np.full_like(q.scale_inv, end.value if i == which else end.opposite)
        with np.errstate(all="ignore"):
            scale = np.asarray(np.float32(1) / scale_inv)
        scaled.append(q._replace(scale=scale, scale_inv=scale_inv))
    results, out = asked.run(stimulus._replace(a=scaled[0], b=scaled[1]))
    value = end.product * float(end.value) * float(end.opposite)
    expected = np.full(results.shape, cast.round_to(np.float64(value), out))
    differ = ~equal(results, expected)
    if not differ.any():
        return None
    got = results[differ]
    reading = "is read as another number"
    if (got == 0).all():
        reading = "is read as 0"
    elif np.isnan(got).all() or np.isinf(got).all():
        reading = f"gives {'NaN' if np.isnan(got).all() else 'infinity'}"
    if np.isnan(end.value) and np.isfinite(got).all():
        reading = "is ignored"
    name = f"scale_inv {end.of(who)} {reading}"
    evidence = f"{int(differ.sum())} of {differ.size} results under it differ"
    return Cause(name, evidence, "wrong", first_of(stimulus, results, expected, differ, "G-4"))
