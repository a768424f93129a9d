"""Search for the quantizer to 4 bits that explains whole tensors: policy, blocks, rounding.

Scales of two levels are no function of a block's amax alone (S-22), so that whole tensors are
compared, with each policy, granularity and rounding.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fp8ref.conformance.inputs import dtypes, fp4_inputs
from fp8ref.conformance.kit import subject as subjects
from fp8ref.conformance.kit.finding import Counterexample, Finding, Outcome, bits_of, show
from fp8ref.conformance.kit.subject import ConformanceError, Subject
from fp8ref.conformance.quantizer import outputs
from fp8ref.conformance.quantizer.candidates import Expected
from fp8ref.conformance.quantizer.outputs import QuantizerOutput
from fp8ref.formats import Format
from fp8ref.policy import FP4_POLICIES, POLICIES, by_name
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec import profiles

SHAPE = fp4_inputs.SHAPE  # the shape [M, K] of the tensors

MX_POLICIES = tuple(
    name for name, policy in POLICIES.items() if policy.e8m0 is not None and not policy.eps
)
"""The policies of POLICIES that serve MX blocks of e2m1fn."""

ROUNDINGS = ("nearest_even", "nearest_away", "toward_zero")
"""Roundings that a quantizer which repeats itself is compared with."""

CALLS = 16  # calls of which the mean code of stochastic rounding is taken

MOST_BIAS = 6  # standard deviations: a fair mean is beyond it once in 5e8


@dataclass(frozen=True, kw_only=True)
class BlockCandidate:
    """A quantizer that the one under test may be."""

    policy: str
    granularity: str
    axis: int
    rounding: Any = "nearest_even"

    def quantize(self, x: np.ndarray, fmt: Format) -> Quantized:
        """The simulator's result."""
        return scaling.quantize(x, fmt, **dataclasses.asdict(self))

    def __str__(self) -> str:
        return f"{self.policy} in {self.granularity}, axis {self.axis}, {self.rounding}"


def block_candidates() -> list[BlockCandidate]:
    """All that round to nearest even, the usual ones first."""
    rules = {name: p.two_level for name, p in FP4_POLICIES.items() if p.two_level is not None}
    blocks = ("nvfp4_1x16", "nvfp4_16x16")
    kinds = [(p, g) for g in blocks for p, rule in rules.items() if g in rule.granularities]
    kinds += [(p, g) for g in ("mx_1x32", "mx_32x32") for p in MX_POLICIES]
    every = [(p, g, a) for a in (-1, 0) for p, g in kinds]
    return [BlockCandidate(policy=p, granularity=g, axis=a) for p, g, a in every]


class Match(NamedTuple):
    """The candidates that no element contradicts, and how codes are packed."""

    nearest: BlockCandidate
    agreeing: Sequence[BlockCandidate]
    packing: str


@dataclass(frozen=True, kw_only=True)
class TensorAnswers:
    """What a quantizer gave for whole tensors, by their kind, the simplest first.

    repeats  whether a second call gives the same; if not, it may round stochastically.
    """

    subject: Subject
    source: str
    fmt: Format
    tensors: Mapping[str, np.ndarray]
    outputs: Mapping[str, QuantizerOutput]
    repeats: bool

    @property
    def candidates(self) -> list[BlockCandidate]:
        """``block_candidates``, which give the lower of two codes if rounding is stochastic."""
        return [
            c if self.repeats else dataclasses.replace(c, rounding="toward_zero")
            for c in block_candidates()
        ]

    def wrong(self, kind: str, q: Quantized, packing: str) -> np.ndarray:
        """Where codes or values of a tensor are not q's, bool [M, K]; of a NaN, all agree (C-9)."""
        x, output = self.tensors[kind], self.outputs[kind]
        with np.errstate(all="ignore"):
            scaled = x * scaling.spread(q.scale, x.shape, q.blocks)
        if output.values is not None:
            differs = output.values != dtypes.rounded(scaling.dequantize(q), output.dtype)
        else:
            codes = output.unpacked(packing)
            differs = codes != q.codes
            if not self.repeats:  # q is rounded toward zero: the code, or the next one away from it
                away = np.abs(scaled) > np.abs(cast.decode(q.codes, q.fmt))
                above = np.minimum((q.codes & 7) + away, q.fmt.max_code) | (q.codes & 8)
                differs &= codes != above
        return differs & ~np.isnan(scaled)

    def match(self) -> Match:
        """The candidate that fewest elements contradict, and all that none does."""
        ranked = self._ranked(self.candidates)
        if self.repeats and ranked[0][0]:  # another rounding, of the scales that came nearest
            nearest = list(dict.fromkeys(candidate for _, candidate, _ in ranked[:6]))
            pairs = [(c, r) for r in ROUNDINGS[1:] for c in nearest]
            others = [dataclasses.replace(c, rounding=r) for c, r in pairs]
            ranked = sorted([*ranked, *self._ranked(others)], key=lambda row: row[0])
        _, best, packing = ranked[0]
        agreeing = [c for count, c, p in ranked if count == 0 and p == packing]
        return Match(best, agreeing, packing)

    def _ranked(self, some: Sequence[BlockCandidate]) -> list[tuple[int, BlockCandidate, str]]:
        """(how many elements differ, candidate, packing), the fewest first."""
        rows = []
        for candidate in some:
            tensors = self.tensors.items()
            expected = {kind: candidate.quantize(x, self.fmt) for kind, x in tensors}
            for packing in self.outputs["spread"].packings(SHAPE):
                wrong = (self.wrong(kind, q, packing) for kind, q in expected.items())
                rows.append((sum(int(differs.sum()) for differs in wrong), candidate, packing))
        return sorted(rows, key=lambda row: row[0])  # stable: the usual ones first

    def counterexample(self, candidate: BlockCandidate, packing: str) -> Counterexample:
        """The first element that contradicts a candidate, in the simplest tensor; or, if no element
        alone is wrong, that their mean is.
        """
        for kind, x in self.tensors.items():
            q, output = candidate.quantize(x, self.fmt), self.outputs[kind]
            wrong = self.wrong(kind, q, packing)
            if not wrong.any():
                continue
            i, j = (int(v[0]) for v in np.nonzero(wrong))
            if output.values is not None:
                got, expected = output.values[i, j], scaling.dequantize(q)[i, j]
            else:
                codes = np.stack([output.unpacked(packing)[i, j], q.codes[i, j]])
                got, expected = cast.decode(codes, self.fmt)
            return Counterexample(
                f"element [{i}, {j}], {show(float(x[i, j]))}, of a tensor of {kind}",
                show(float(got)),
                f"{show(float(expected))} of {candidate}",
                by_name(candidate.policy).clause,
                bits=(bits_of(float(x[i, j]), self.source),),
                dtype=self.source,
            )
        words = ("the mean of many calls", "a biased code", "an unbiased one", "C-2")
        return Counterexample(*words, dtype=self.source)


def identify(subject: Subject, fmt: Format, expected: Expected) -> Outcome:
    """Identify a quantizer to e2m1fn: its blocks, policy, rounding, and how it packs pairs.

    Raises:    ValueError: an expected policy that is not of such blocks; ConformanceError: not a
               valid quantizer, as identify_quantizer.
    """
    answers = _asked(subject, fmt)
    match = answers.match()
    nearest, x = match.nearest, answers.tensors["spread"]
    spread = nearest.quantize(x, fmt)
    bias = 0.0 if answers.repeats else measure_bias(answers, spread, match.packing)
    matched = bool(match.agreeing) and abs(bias) <= MOST_BIAS
    output, quantities = answers.outputs["spread"], known_scales(x, spread).items()
    scales = {  # what each returned array is; None for one that is none of the scales
        name: next((k for k, v in quantities if _is_scale(output, name, v, spread)), None)
        for name in output.scales
    }
    if matched:
        unlike = _wrong_scales(answers, nearest, scales)
    else:
        unlike = [answers.counterexample(nearest, match.packing)]
    rounding = nearest.rounding if answers.repeats else "stochastic"
    where = f"{nearest.policy} to {fmt} in {nearest.granularity}, axis {nearest.axis}"
    identified = matched and not unlike
    return Outcome(
        name=subject.name,
        kind="quantizer",
        fmt=fmt,
        framework=subject.framework,
        findings=_findings(answers, match, matched, bias, scales),
        identified=identified,
        expected=expected.name,
        found={
            "format": fmt.name if identified else None,
            "policy": nearest.policy if matched else None,
            "granularity": nearest.granularity,
            "axis": nearest.axis,
            "rounding": rounding,
            "packing": match.packing,
            "scales": scales,
            "profiles": profiles.policy_profiles(nearest.policy, fmt.bits) if identified else [],
        },
        summary=f"{where}, {rounding}, {match.packing}"
        if identified
        else f"no known quantizer to {fmt}; the nearest is {nearest}",
        named=identified
        and rounding in ("nearest_even", "stochastic")
        and match.packing != "high first",
        unlike=unlike,
        differences=_differences(answers, match, expected) if expected.policy else [],
        limits=["other shapes, strides and ragged blocks", *subject.other_devices],
    )


def _asked(subject: Subject, fmt: Format) -> TensorAnswers:
    """The answers to all tensors, and whether a second call repeats one."""
    source = subjects.first_dtype(subject, SHAPE)
    tensors = fp4_inputs.tensors(source)
    results = {kind: outputs.ask_four_bits(subject, x, source) for kind, x in tensors.items()}
    again = outputs.ask_four_bits(subject, tensors["spread"], source)
    return TensorAnswers(
        subject=subject,
        source=source,
        fmt=fmt,
        tensors=tensors,
        outputs=results,
        repeats=np.array_equal(results["spread"].tensor, again.tensor, equal_nan=True),
    )


def _findings(
    answers: TensorAnswers,
    match: Match,
    matched: bool,
    bias: float,
    scales: Mapping[str, str | None],
) -> list[Finding]:
    nearest, kinds = match.nearest, len(answers.tensors)
    rounding = nearest.rounding if answers.repeats else "stochastic"
    others = tuple(str(dataclasses.replace(c, rounding=rounding)) for c in match.agreeing[1:])
    size = sum(x.size for x in answers.tensors.values())
    by = "ties and their neighbors under scales that are powers of two"
    if not answers.repeats:
        by = f"the mean of {CALLS} calls is {bias:.1f} standard deviations from an unbiased one"
    names = ", ".join(f"{n}: {scale_name or 'unknown'}" for n, scale_name in scales.items())
    return [
        Finding("packing", match.packing, f"codes of {kinds} tensors {list(SHAPE)}"),
        Finding("granularity", nearest.granularity, f"axis {nearest.axis}"),
        Finding(
            "policy",
            nearest.policy if matched else None,
            f"{'all' if match.agreeing else 'some'} of {size} codes of {kinds} tensors",
            others=others if matched else (str(nearest),),
        ),
        Finding("rounding", rounding, by),
        Finding("scales", names or "none", "by their numbers"),
        Finding("NaN", _codes_of_nan(answers), "not compared: e2m1fn has no NaN (C-9)"),
    ]


def _wrong_scales(
    answers: TensorAnswers, nearest: BlockCandidate, names: Mapping[str, str | None]
) -> list[Counterexample]:
    """The first returned array that is not what its name says; as a list, empty if all are."""
    for kind, x in answers.tensors.items():
        output, q = answers.outputs[kind], nearest.quantize(x, answers.fmt)
        quantities = known_scales(x, q)
        for name, quantity in names.items():
            if quantity is None or not _is_scale(output, name, quantities[quantity], q):
                what = quantity or "scale, scale_inv or tensor_scale_inv"
                got = f"an array {name} that is not its {what}"
                words = (f"a tensor of {kind}", got, f"that of {nearest}")
                clause = by_name(nearest.policy).clause
                return [Counterexample(*words, clause, dtype=answers.source)]
    return []


def _differences(answers: TensorAnswers, match: Match, expected: Expected) -> list[Counterexample]:
    """Where it is not the expected policy, in its own granularities or the expected one."""
    fitting = [
        c
        for c in answers.candidates
        if c.policy == expected.name
        and expected.granularity in (None, c.granularity)
        and expected.axis in (None, c.axis)
    ]
    if not fitting:
        raise ValueError(
            f"policy {expected.name!r} is not of {answers.fmt} blocks; expect one of "
            f"{', '.join([*FP4_POLICIES, *MX_POLICIES])}."
        )
    if match.packing == "high first":
        got, source = "the first code of a pair in its high half", answers.source
        return [Counterexample("any tensor", got, "in its low half", "F-5", dtype=source)]
    if any(c in match.agreeing for c in fitting):
        return []
    nearest = min(fitting, key=lambda c: c.granularity != match.nearest.granularity)
    return [answers.counterexample(nearest, match.packing)]


def _codes_of_nan(answers: TensorAnswers) -> str:
    """The codes or values that NaN and -NaN become, in words."""
    x = np.ones(SHAPE, np.float32)
    x[0, 0], x[0, 1] = np.nan, -np.float32(np.nan)
    try:
        output = outputs.ask_four_bits(answers.subject, x, answers.source)
    except ConformanceError:
        return "refused"
    shown = output.values
    if output.codes is not None:
        shown = output.unpacked(output.packings(SHAPE)[0])
    assert shown is not None
    return ", ".join(str(v) for v in shown[0, :2])


def known_scales(x: np.ndarray, q: Quantized) -> dict[str, np.ndarray]:
    """All that a quantizer may return as a scale, by name."""
    scales: dict[str, Any] = {
        "scale": q.scale,
        "scale_inv": q.scale_inv,
        "amax": scaling.amax(x, q.granularity, axis=q.axis),
    }
    if q.tensor_scale_inv is not None:
        shared = "rowwise" if np.ndim(q.tensor_scale_inv) else "tensorwise"
        with np.errstate(all="ignore"):
            scales |= {
                "scale_inv * tensor_scale_inv": q.tensor_scale_inv * q.scale_inv,
                "tensor_scale_inv": q.tensor_scale_inv,
                "tensor_amax": scaling.amax(x, shared, axis=q.axis),
                "tensor_scale": np.float32(1) / q.tensor_scale_inv,
            }
    return scales


def _is_scale(output: QuantizerOutput, name: str, expected: np.ndarray, q: Quantized) -> bool:
    """Whether an array holds these numbers, in any shape, or each row of a square repeated."""
    expected = np.asarray(expected)
    rows = expected
    if expected.ndim == 2:
        rows = np.repeat(expected, q.codes.shape[0] // max(1, expected.shape[0]), axis=0)
    for array in output.readings(name):
        pairs = [(array, rows)]
        if array.size == expected.size:
            pairs = [(array, expected), (array.T, expected)]
        if any(np.array_equal(a.ravel(), b.ravel(), equal_nan=True) for a, b in pairs):
            return True
    return False


def measure_bias(answers: TensorAnswers, floor: Quantized, packing: str) -> float:
    """How many standard deviations the mean of what is added to magnitudes is from that of
    stochastic rounding, whose rate of rounding up is the fraction (C-2).

    floor     "spread" rounded toward zero: each rounding up is a trial of variance p (1 - p).
    """
    x, subject = answers.tensors["spread"], answers.subject
    with np.errstate(all="ignore"):
        scaled = np.abs(x * scaling.spread(floor.scale, x.shape, floor.blocks))
    lower = (floor.codes & 7).astype(np.int64)
    numbers = cast.decode(np.append(np.arange(8), 7).astype(np.uint8), floor.fmt).astype(np.float64)
    spacing = np.diff(numbers)
    spacing[-1] = 1  # nothing is above max
    clipped = np.minimum(scaled, floor.fmt.max).astype(np.float64)
    p = (clipped - numbers[lower]) / spacing[lower]
    ups = 0
    for _ in range(CALLS):
        output = outputs.ask_four_bits(subject, x, answers.source)
        if output.codes is None:
            raise ConformanceError(
                f"{subject.name} does not repeat itself. Of stochastic rounding return codes, "
                "not values."
            )
        ups += int(((output.unpacked(packing) & 7).astype(np.int64) - lower).sum())
    # NVIDIA's cvt.rs takes 8 bits of the fraction: its rate is up to 2^-9 off, on average none.
    deviation = math.sqrt(CALLS * max(float((p * (1 - p)).sum()), 1e-9))
    return float((ups - CALLS * p.sum()) / deviation)
