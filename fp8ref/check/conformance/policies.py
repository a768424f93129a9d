"""Which policy's scales and codes a quantiser has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fp8ref.check.conformance import amaxes
from fp8ref.check.conformance.amaxes import KINDS, Questions
from fp8ref.check.conformance.deviations import NONE, Deviation
from fp8ref.check.conformance.quantized import Quantizer, Reading
from fp8ref.check.conformance.subject import ConformanceError, RefusedError
from fp8ref.check.conformance.witness import rounded
from fp8ref.formats import Format
from fp8ref.granularity import scale_shape
from fp8ref.policy import ScalePolicy
from fp8ref.sim import cast, scaling
from fp8ref.sim.scales import Scales, scales_from_amax

# Where each policy is decided
CLAUSES = {"torchao": "S-3", "torchao_pow2": "S-4", "torchao_mask": "S-4", "flax": "S-13", "flax_bf16": "S-13", "msamp": "S-15"}
CLAUSES |= dict.fromkeys(("mx_floor", "mx_rceil", "te_mxfp8"), "S-14")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A policy, the format whose max it scales to, the format of the codes, whether float32 subnormals are zeros (S-12), and any deviation."""

    policy: ScalePolicy
    top: Format
    fmt: Format
    flushes: bool = False
    deviation: Deviation = NONE

    def quantize(self, x: np.ndarray, granularity: str, axis: int) -> scaling.Quantized:
        x = _flushed(x) if self.flushes else x
        given = x if self.policy.compute.name == "float32" else cast.round_to(x, self.policy.compute)
        amax = self.deviation.amax(given, granularity, axis=axis)
        with np.errstate(all="ignore"):
            scales = self.deviation.scales(scales_from_amax(amax, self.top, self.deviation.of(self.policy)), amax, self.top)
        if self.flushes:
            scales = Scales(*(_flushed(np.asarray(s)) for s in scales))
        return scaling.quantize_with(x, scales, self.fmt, granularity=granularity, policy=self.policy, axis=axis)

    @property
    def clause(self) -> str:
        return CLAUSES.get(self.policy.name, "S-9")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One tensor, its groups' questions, and what was read."""

    x: np.ndarray
    group: np.ndarray
    kind: np.ndarray
    largest: np.ndarray
    reading: Reading

    @property
    def amax(self) -> np.ndarray:
        return np.abs(self.largest)

    @property
    def ordinary(self) -> np.ndarray:
        return self.kind == KINDS.index("ordinary")


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Of each question, whether scales and codes (or values) are the candidate's; None where no scales came.

    ulps  by how many float32 numbers the scales are off, the median; 0 where no scales came.
    """

    candidate: Candidate
    scales: np.ndarray | None
    codes: np.ndarray
    ulps: float

    @property
    def both(self) -> np.ndarray:
        return self.codes if self.scales is None else self.scales & self.codes

    @property
    def deciding(self) -> np.ndarray:
        """What tells the policy: its scales, where there are any."""
        return self.codes if self.scales is None else self.scales


def ask(quantizer: Quantizer, what: Questions, shape: tuple[int, int], granularity: str, axis: int) -> list[Asked]:
    """Every question, as many in a tensor as it has groups; groups without one are zeros."""
    group = amaxes.groups(shape, granularity, axis)
    count = int(group.max()) + 1
    asked = []
    for begin in range(0, what.largest.size, count):
        some, kinds = what.largest[begin : begin + count], what.kind[begin : begin + count]
        missing = count - some.size
        largest = np.concatenate([some, np.zeros(missing, np.float32)])
        kind = np.concatenate([kinds, np.full(missing, amaxes.KINDS.index("zero"))])
        x = amaxes.tensor(largest, group, quantizer.dtype)
        try:
            reading = quantizer.ask(x)
        except RefusedError as error:
            raise RefusedError(
                f"{error} Its amax is {_refused(quantizer, x, np.abs(largest), group):.9g}, as amaxes of a tensor may be (S-9)."
            ) from error
        asked.append(Asked(x=x, group=group, kind=kind, largest=largest, reading=reading))
    return asked


def ordinary(asked: Sequence[Asked]) -> np.ndarray:
    return np.concatenate([a.ordinary for a in asked])


def _refused(quantizer: Quantizer, x: np.ndarray, amax: np.ndarray, group: np.ndarray) -> float:
    """The first amax that it raises for by itself, all other groups zeros; the first of all if it takes each."""
    for i, one in enumerate(amax):
        try:
            quantizer.ask(np.where(group == i, x, np.float32(0)))
        except RefusedError:
            return float(one)
    return float(amax[0])


def returned(asked: Sequence[Asked], granularity: str, axis: int) -> dict[str, str]:
    """What each array beside the codes is, by how it goes with the amax: ``scale``, ``scale_inv``, ``amax``.

    Raises:   ConformanceError: one has no number for each group.
    """
    amax, found = np.concatenate([a.amax for a in asked]), {}
    for name in asked[0].reading.scales:
        values = np.concatenate([per_group(a, name, granularity, axis) for a in asked])
        low, high = (float(values[np.argmax(amax == np.float32(v))]) for v in (1, 1024))
        if np.array_equal(values, amax, equal_nan=True):
            found[name] = "amax"
        elif low > high:
            found[name] = "scale"
        elif low < high:
            found[name] = "scale_inv"
    return found


def per_group(a: Asked, name: str, granularity: str, axis: int) -> np.ndarray:
    """The numbers of an array of scales in the groups' order: one a group, transposed or not, or one an element."""
    values, count = a.reading.scales[name], int(a.group.max()) + 1
    if values.size == count:
        return (values.T if transposed(values.shape, a.x.shape, granularity, axis) else values).reshape(-1)
    if values.shape == a.x.shape:
        return values.reshape(-1)[np.unique(a.group.reshape(-1), return_index=True)[1]]
    raise ConformanceError(
        f"its {name or 'scales'} have shape {list(values.shape)} for x {list(a.x.shape)}, but elements share scales as in {granularity}, "
        f"axis {axis}, whose scales have shape {list(scale_shape(granularity, a.x.shape, axis))}. Return one scale for each group."
    )


def transposed(shape: tuple[int, ...], of: tuple[int, ...], granularity: str, axis: int) -> bool:
    """Whether scales of this shape, of a tensor's shape, are those of S-6 the other way round."""
    wanted = scale_shape(granularity, of, axis)
    return len(wanted) == 2 and wanted[0] != wanted[1] and tuple(shape) == wanted[::-1]


def agreement(candidate: Candidate, asked: Sequence[Asked], kinds: Mapping[str, str], granularity: str, axis: int) -> Agreement:
    """Compare everything that came with the candidate's."""
    scales, codes, off = [], [], [np.zeros(0)]
    for a in asked:
        q = candidate.quantize(a.x, granularity, axis)
        wrong = unlike(a.reading, q, candidate)
        codes.append(np.bincount(a.group.reshape(-1), weights=wrong.reshape(-1)) == 0)
        equal = np.ones(a.amax.size, bool)
        for name, kind in kinds.items():
            if kind != "amax":
                found, expected = per_group(a, name, granularity, axis), np.reshape(getattr(q, kind), -1)
                equal &= (found == expected) | (np.isnan(found) & np.isnan(expected))
                off.append(np.abs(found.view(np.int32).astype(np.int64) - expected.view(np.int32))[a.ordinary])
        scales.append(equal)
    has_scales = any(kind != "amax" for kind in kinds.values())
    ulps = np.concatenate(off)
    return Agreement(
        candidate=candidate,
        scales=np.concatenate(scales) if has_scales else None,
        codes=np.concatenate(codes),
        ulps=float(np.median(ulps)) if ulps.size else 0.0,
    )


def at_ordinary(candidate: Candidate, asked: Sequence[Asked], kinds: Mapping[str, str], granularity: str, axis: int) -> bool:
    """Whether it decides as the candidate at every ordinary amax; looks no further than the first where it does not."""
    return all(agreement(candidate, [a], kinds, granularity, axis).deciding[a.ordinary].all() for a in asked)


def unlike(reading: Reading, q: scaling.Quantized, candidate: Candidate) -> np.ndarray:
    """Where codes, NaNs being one, or values are not those of q; values by S-8 or as quotients by the scale, rounded to their dtype."""
    if reading.codes is not None:
        return cast.canonical_nans(reading.codes, q.fmt) != cast.canonical_nans(q.codes, q.fmt)
    assert reading.values is not None
    decoded = cast.decode(q.codes, q.fmt)
    with np.errstate(all="ignore"):
        spread = [scaling.spread(s, q.codes.shape, q.granularity, q.axis) for s in (q.scale_inv, q.scale)]
        results = [decoded * spread[0], decoded / spread[1]]
    differs = []
    for expected in results:
        expected = rounded(_flushed(expected) if candidate.flushes else expected, reading.dtype)
        differs.append(~((reading.values == expected) | (np.isnan(reading.values) & np.isnan(expected))))
    return min(differs, key=lambda d: int(d.sum()))


def _flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x).astype(np.float32)[()]
