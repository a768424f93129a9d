"""Identify a quantizer to e2m1fn: its blocks, policy, rounding, and how pairs of codes are packed.

``identify_quantizer`` comes here for a format of 4 bits. Scales of two levels are no function of a
block's amax alone (S-22), so that whole tensors are compared: with each policy, granularity and
rounding.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8ref.conformance.inputs import fp4_inputs
from fp8ref.conformance.kit import subject as subjects
from fp8ref.conformance.kit.finding import (
    Counterexample,
    Finding,
    Outcome,
    bits_of,
    other_devices,
    show,
)
from fp8ref.conformance.quantizer.fp4 import outputs
from fp8ref.conformance.quantizer.fp4.outputs import Output
from fp8ref.formats import Format
from fp8ref.policy import FP4_POLICIES, POLICIES, by_name
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec import profiles

MX_POLICIES = tuple(
    name for name, policy in POLICIES.items() if policy.e8m0 is not None and not policy.eps
)
"""The policies of POLICIES that serve MX blocks of e2m1fn."""

ROUNDINGS = ("nearest_even", "nearest_away", "toward_zero")
"""Roundings that a quantizer which repeats itself is compared with."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A quantizer that the one under test may be."""

    policy: str
    granularity: str
    axis: int
    rounding: Any = "nearest_even"

    def quantize(self, x: np.ndarray, fmt: Format) -> Quantized:
        """The simulator's result."""
        return scaling.quantize(
            x,
            fmt,
            granularity=self.granularity,
            policy=self.policy,
            axis=self.axis,
            rounding=self.rounding,
        )

    def __str__(self) -> str:
        return f"{self.policy} in {self.granularity}, axis {self.axis}, {self.rounding}"


def candidates() -> list[Candidate]:
    """All that round to nearest even, the usual ones first."""
    kinds = [(p, g) for g in ("nvfp4_1x16", "nvfp4_16x16") for p in FP4_POLICIES]
    kinds += [(p, g) for g in ("mx_1x32", "mx_32x32") for p in MX_POLICIES]
    return [Candidate(policy=p, granularity=g, axis=axis) for axis in (-1, 0) for p, g in kinds]


def identify_fp4(
    function: Callable[..., Any],
    fmt: Format,
    *,
    name: str | None = None,
    expect: str | None = None,
    granularity: str | None = None,
    axis: int | None = None,
    framework: str | None = None,
    device: str = "cpu",
) -> Outcome:
    """Identify a quantizer to e2m1fn.

    function   x [M, K], float32 or bfloat16, -> codes, one a byte or two (F-5), or values of x's
               shape, alone or in a tuple, a dict or an object next to its scales.
    expect     a policy's name that it must follow, with granularity and axis if they are given.

    Raises:    ValueError: an unknown name; ConformanceError: not a valid quantizer, as
               identify_quantizer.
    """
    expected = None if expect is None else by_name(expect).name
    if expected is None and (granularity is not None or axis is not None):
        raise ValueError(
            "an expected granularity or axis needs an expected policy. Name one with --expect."
        )
    name = name or subjects.name_of(function)
    subject = subjects.wrap(
        name, function, framework=framework, device=device, shape=fp4_inputs.SHAPE
    )
    source = subjects.first_dtype(subject, fp4_inputs.SHAPE)
    tensors = fp4_inputs.tensors(source)
    answers = {kind: outputs.ask(subject, x, source) for kind, x in tensors.items()}
    repeats = outputs.repeats(subject, tensors["spread"], answers["spread"], source)
    nearest, agreeing, packing = _nearest(tensors, answers, fmt, stochastic=not repeats)
    bias = (
        None
        if repeats
        else outputs.bias(
            subject, tensors["spread"], nearest.quantize(tensors["spread"], fmt), source, packing
        )
    )
    matched = bool(agreeing) and (bias is None or bias.fair)
    scales = outputs.name_scales(
        tensors["spread"], answers["spread"], nearest.quantize(tensors["spread"], fmt)
    )
    unlike = (
        []
        if matched
        else [
            _counterexample(tensors, answers, nearest, fmt, source, packing, stochastic=not repeats)
        ]
    )
    if matched:
        wrong = {
            k: outputs.wrong_scale(x, answers[k], nearest.quantize(x, fmt), scales)
            for k, x in tensors.items()
        }
        unlike = [
            _wrong_scale(n, k, scales[n], nearest, source)
            for k, n in wrong.items()
            if n is not None
        ][:1]
    rounding = nearest.rounding if repeats else "stochastic"
    others = tuple(str(dataclasses.replace(c, rounding=rounding)) for c in agreeing[1:])
    findings = [
        Finding(
            what="packing",
            value=packing,
            evidence=f"codes of {len(tensors)} tensors {list(fp4_inputs.SHAPE)}",
        ),
        Finding(what="granularity", value=nearest.granularity, evidence=f"axis {nearest.axis}"),
        Finding(
            what="policy",
            value=nearest.policy if matched else None,
            others=others if matched else (str(nearest),),
            evidence=_count(tensors, agreeing),
        ),
        Finding(
            what="rounding",
            value=rounding,
            evidence=bias.text
            if bias
            else "ties and their neighbors under scales that are powers of two",
        ),
        Finding(
            what="scales",
            value=", ".join(f"{n}: {scale_name or 'unknown'}" for n, scale_name in scales.items())
            or "none",
            evidence="by their numbers",
        ),
        Finding(
            what="NaN",
            value=outputs.codes_of_nan(subject, source),
            evidence="not compared: e2m1fn has no NaN (C-9)",
        ),
    ]
    is_known = matched and not unlike
    differences = (
        _differences(
            expect,
            granularity,
            axis,
            [nearest, *agreeing],
            tensors,
            answers,
            fmt,
            source,
            packing,
            not repeats,
        )
        if expected
        else []
    )
    return Outcome(
        name=name,
        kind="quantizer",
        fmt=fmt,
        framework=subject.framework,
        findings=findings,
        identified=is_known,
        expected=expect,
        found={
            "format": fmt.name if is_known else None,
            "policy": nearest.policy if matched else None,
            "granularity": nearest.granularity,
            "axis": nearest.axis,
            "rounding": rounding,
            "packing": packing,
            "scales": scales,
            "profiles": profiles.policy_profiles(nearest.policy, fmt.bits) if is_known else [],
        },
        summary=(
            f"{nearest.policy} to {fmt} in {nearest.granularity}, axis {nearest.axis}, {rounding}, "
            f"{packing}"
            if is_known
            else f"no known quantizer to {fmt}; the nearest is {nearest}"
        ),
        named=is_known and (rounding in ("nearest_even", "stochastic")) and packing != "high first",
        unlike=unlike,
        differences=differences,
        limits=[
            "other shapes, strides and ragged blocks",
            *other_devices(subject.framework, device),
        ],
    )


def _nearest(
    tensors, answers, fmt: Format, *, stochastic: bool
) -> tuple[Candidate, list[Candidate], str]:
    """(the candidate that fewest elements contradict, those that none does, how codes are
    packed).
    """

    def compared(some: Sequence[Candidate]) -> list[tuple[int, Candidate, str]]:
        comparisons = []
        for candidate in some:
            expected = {kind: candidate.quantize(x, fmt) for kind, x in tensors.items()}
            for packing in answers["spread"].packings:
                wrong = sum(
                    int(
                        differs(
                            answers[kind], q, tensors[kind], packing, stochastic=stochastic
                        ).sum()
                    )
                    for kind, q in expected.items()
                )
                comparisons.append((wrong, candidate, packing))
        return sorted(
            comparisons, key=lambda comparison: comparison[0]
        )  # stable: the usual ones first

    if stochastic:
        ranked = compared([dataclasses.replace(c, rounding="toward_zero") for c in candidates()])
    else:
        ranked = compared(candidates())
        if ranked[0][0]:  # another rounding, of the scales that came nearest
            nearest = list(dict.fromkeys(c for _, c, _ in ranked[:6]))
            ranked = sorted(
                ranked
                + compared(
                    [dataclasses.replace(c, rounding=r) for r in ROUNDINGS[1:] for c in nearest]
                ),
                key=lambda comparison: comparison[0],
            )
    best = ranked[0]
    return (
        best[1],
        [c for wrong, c, packing in ranked if wrong == 0 and packing == best[2]],
        best[2],
    )


def differs(
    answer: Output, q: Quantized, x: np.ndarray, packing: str, *, stochastic: bool = False
) -> np.ndarray:
    """Where codes or values are not those of q, bool [M, K]; elements whose scaled value is NaN
    agree (C-9).
    """
    with np.errstate(all="ignore"):
        scaled = x * scaling.spread(q.scale, x.shape, q.blocks)
    got = answer.codes(packing)
    if got is None:
        assert answer.values is not None
        wrong = answer.values != answer.rounded(scaling.dequantize(q))
    elif stochastic:  # q is rounded toward zero: the code, or the next one away from it
        above = np.minimum(
            (q.codes & 7) + (np.abs(scaled) > np.abs(cast.decode(q.codes, q.fmt))), q.fmt.max_code
        ) | (q.codes & 8)
        wrong = (got != q.codes) & (got != above)
    else:
        wrong = got != q.codes
    return wrong & ~np.isnan(scaled)


def _counterexample(
    tensors,
    answers,
    nearest: Candidate,
    fmt: Format,
    source: str,
    packing: str,
    *,
    stochastic: bool,
) -> Counterexample:
    """The first element that contradicts the nearest candidate, in the simplest tensor."""
    for kind, x in tensors.items():
        q = nearest.quantize(x, fmt)
        wrong = differs(answers[kind], q, x, packing, stochastic=stochastic)
        if wrong.any():
            i, j = (int(v[0]) for v in np.nonzero(wrong))
            got = answers[kind].codes(packing)
            shown = (
                show(float(cast.decode(got[i, j], fmt)))
                if got is not None
                else show(float(answers[kind].values[i, j]))
            )
            expected_value = (
                cast.decode(q.codes[i, j], fmt) if got is not None else scaling.dequantize(q)[i, j]
            )
            return Counterexample(
                input=f"element [{i}, {j}], {show(float(x[i, j]))}, of a tensor of {kind}",
                bits=(bits_of(float(x[i, j]), source),),
                dtype=source,
                got=shown,
                expected=f"{show(float(expected_value))} of {nearest}",
                clause=by_name(nearest.policy).clause,
            )
    return Counterexample(
        input="the mean of many calls",
        bits=(),
        dtype=source,
        got="a biased code",
        expected="an unbiased one",
        clause="C-2",
    )


def _wrong_scale(
    name: str, kind: str, quantity: str | None, nearest: Candidate, source: str
) -> Counterexample:
    return Counterexample(
        input=f"a tensor of {kind}",
        bits=(),
        dtype=source,
        got=f"an array {name} that is not its {quantity or 'scale, scale_inv or tensor_scale_inv'}",
        expected=f"that of {nearest}",
        clause=by_name(nearest.policy).clause,
    )


def _differences(
    expect,
    granularity,
    axis,
    ours: Sequence[Candidate],
    tensors,
    answers,
    fmt,
    source,
    packing,
    stochastic,
) -> list[Counterexample]:
    """Where it is not what was expected: of the policy's own granularities, or the one that is
    expected.
    """
    fitting = [
        c
        for c in candidates()
        if c.policy == expect and granularity in (None, c.granularity) and axis in (None, c.axis)
    ]
    fitting = [dataclasses.replace(c, rounding="toward_zero") if stochastic else c for c in fitting]
    if not fitting:
        raise ValueError(
            f"policy {expect!r} is not of {fmt} blocks; expect one of "
            f"{', '.join([*FP4_POLICIES, *MX_POLICIES])}."
        )
    if packing != "high first" and any(
        c in ours and not _any_wrong(c, tensors, answers, fmt, packing, stochastic) for c in fitting
    ):
        return []
    if packing == "high first":
        text = "the first code of a pair in its high half"
        return [
            Counterexample(
                input="any tensor",
                bits=(),
                dtype=source,
                got=text,
                expected="in its low half",
                clause="F-5",
            )
        ]
    nearest = min(fitting, key=lambda c: c.granularity != ours[0].granularity)
    return [_counterexample(tensors, answers, nearest, fmt, source, packing, stochastic=stochastic)]


def _any_wrong(candidate: Candidate, tensors, answers, fmt, packing, stochastic) -> bool:
    return any(
        differs(answers[k], candidate.quantize(x, fmt), x, packing, stochastic=stochastic).any()
        for k, x in tensors.items()
    )


def _count(tensors, agreeing: Sequence[Candidate]) -> str:
    size = sum(x.size for x in tensors.values())
    return (
        f"all of {size} codes of {len(tensors)} tensors"
        if agreeing
        else f"some of {size} codes of {len(tensors)} tensors"
    )
