"""Identify a quantizer, by ``identify_quantizer``: its scales and rounding, from chosen tensors.

In this order: memory and granularity, scale layout, policy, the cast under scale 1, and last
whether all that holds for other shapes, dtypes and strides. Counterexamples are searched for at
each step. A quantizer to a format of 4 bits is asked with ``whole_tensors``.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fp8ref import formats
from fp8ref.conformance.cast import behavior, decisions
from fp8ref.conformance.cast.behavior import KNOWN_CASTS, Behavior, DoubleRounding
from fp8ref.conformance.cast.outputs import Output, Responses
from fp8ref.conformance.inputs import cast_inputs, quantizer_inputs
from fp8ref.conformance.inputs.cast_inputs import CAST_FORMATS
from fp8ref.conformance.inputs.dtypes import rounded
from fp8ref.conformance.kit import subject as subjects
from fp8ref.conformance.kit.explain import simplest
from fp8ref.conformance.kit.finding import Counterexample, Finding, Outcome
from fp8ref.conformance.kit.subject import SHAPE, RefusedError
from fp8ref.conformance.quantizer import (
    candidates,
    counterexamples,
    describe,
    layout_invariance,
    outputs,
    policy_match,
    whole_tensors,
)
from fp8ref.conformance.quantizer.candidates import Candidate, Expected
from fp8ref.conformance.quantizer.granularity import (
    FoundGranularity,
    identify_granularity,
    identify_memory,
)
from fp8ref.conformance.quantizer.outputs import Quantizer, ScaleLayout, smallest_shape
from fp8ref.conformance.quantizer.policy_match import Answers, PolicyMatch
from fp8ref.formats import BFLOAT16, Format
from fp8ref.shared import errors

_TENSORWISE_SHAPES = ((1, 32), (16, 16), (16, 128), (128, 128), SHAPE)


def identify_quantizer(
    function: Callable[..., Any],
    fmt: Format | str,
    *,
    name: str | None = None,
    expect: str | None = None,
    granularity: str | None = None,
    axis: int | None = None,
    framework: str | None = None,
    device: str = "cpu",
) -> Outcome:
    """Identify a quantizer: its granularity, scale policy, returned scales and rounding.

    function   x [M, K], float32 or bfloat16, -> codes (uint8 or float8) or values of that shape,
               alone or in a tuple, a dict or an object next to a scale, a scale_inv or both. Codes
               of 4 bits are one a byte or two (F-5).
    expect     a policy's name that it must follow, with granularity and axis if they are given.

    Raises:    ValueError: fmt neither FP8 nor e2m1fn, an unknown name; ConformanceError: no valid
               quantizer: it raises, gives other shapes, changes its input, or is not repeatable.
    """
    expected = Expected(name=expect, granularity=granularity, axis=axis)
    fmt = formats.by_name(fmt)
    four_bits = fmt.name in formats.FP4_FORMATS
    errors.one_of("a quantizer's format", fmt.name, formats.QUANTIZED_FORMATS)
    name = name or subjects.name_of(function)
    if four_bits:
        shape = whole_tensors.SHAPE
        subject = subjects.wrap(name, function, framework=framework, device=device, shape=shape)
        return whole_tensors.identify(subject, fmt, expected)
    try:
        subject = subjects.wrap(name, function, framework=framework, device=device, shape=SHAPE)
    except RefusedError as error:
        raise RefusedError(
            f"{error}\nA quantizer is called with x [M, K]; its scales may reduce either axis "
            "(S-6)."
        ) from error
    quantizer = Quantizer(subject=subject, dtype=subjects.first_dtype(subject, SHAPE))
    return _identify_by_amaxes(quantizer, fmt, expected)


def require_quantizer(
    function: Callable[..., Any],
    fmt: Format | str = "e4m3fn",
    *,
    expect: str | None = "torchao",
    **options: Any,
) -> Outcome:
    """Require that a function is a quantizer of a policy, else raise an AssertionError with the
    simplest tensors that differ. Options, errors: as of ``identify_quantizer`` (spec S-16).
    """
    return identify_quantizer(function, fmt, expect=expect, **options).require()


def _identify_by_amaxes(quantizer: Quantizer, fmt: Format, expected: Expected) -> Outcome:
    """Identify a quantizer whose scales are functions of the amax of their group alone."""
    quantizer, remembered = identify_memory(quantizer)
    group = identify_granularity(quantizer)
    output = quantizer.ask(np.ones(SHAPE, np.float32))
    # the format that the dtype of the output names, else the one asked for
    found_fmt = CAST_FORMATS.get(output.dtype.removeprefix("float8_"), fmt)
    format_finding = describe.format_finding(output, found_fmt, fmt)
    findings = [format_finding, remembered, group.finding]
    if group.granularity is None:
        return describe.without_granularity(quantizer, fmt, found_fmt, findings, expected.name)
    answers = _answers(quantizer, group, found_fmt)
    matched = policy_match.match_policies(answers, expected.policy)
    findings += [
        describe.axis_finding(matched, group.axis),
        describe.returned_finding(answers.scale_layout, output),
        describe.policy_finding(matched),
    ]
    unlike = []
    if not matched.agreements:
        unlike = counterexamples.for_policy(matched, matched.nearest)
    misnamed = counterexamples.misnamed_arrays(answers, matched.chosen.policy)
    checked = _check_basis(matched, expected, unlike)
    findings += checked.findings
    unlike = [*unlike, *checked.unexplained, *misnamed, *checked.beyond]
    # What was expected is compared separately: the function may be identified as something else.
    differences = []
    if expected.policy is not None:
        differences = counterexamples.unexpected_policy(
            matched, expected.policy, fmt, right_cast=not checked.different
        )
        differences += counterexamples.unexpected_granularity(matched, group, expected, fmt)
        differences += counterexamples.transposed_scales(output, answers.scale_layout)
        differences += [w for w in checked.different if w not in differences]
        # A memory is a fault, except for te_delayed and flax, which keep a scale of earlier amaxes.
        if remembered.witness and not expected.policy.keeps:
            differences.append(remembered.witness)
        differences += [w for w in misnamed if w not in differences]
        differences += checked.beyond if differences else []
    identified = bool(matched.agreements) and not unlike
    fields = describe.result_dict(matched, group, checked.rounding, output, identified)
    return Outcome(
        name=quantizer.subject.name,
        kind="quantizer",
        fmt=fmt,
        framework=quantizer.subject.framework,
        found=fields,
        findings=findings,
        identified=identified,
        summary=describe.summary(matched, group, fields, fmt, not checked.beyond, identified)
        + describe.untaken(findings),
        named=bool(matched.agreements)
        and not checked.different
        and matched.chosen.scale_fmt.max == fmt.max,
        unlike=unlike,
        expected=expected.name,
        differences=differences,
        limits=[*describe.limits(quantizer), *checked.limits],
    )


def _answers(quantizer: Quantizer, group: FoundGranularity, found_fmt: Format) -> Answers:
    """What the quantizer gives for amaxes that tell policies apart."""
    assert group.granularity is not None
    axis = -1 if group.axis is None else group.axis
    # One scale for a tensor takes a tensor for each amax: the smallest that the quantizer takes.
    amaxes = quantizer_inputs.identifying(found_fmt, quantizer.dtype)
    shape = SHAPE
    if group.granularity == "tensorwise":
        shape = smallest_shape(quantizer, _TENSORWISE_SHAPES)
    responses = outputs.ask(quantizer, amaxes, shape, group.granularity, axis)
    return Answers(
        quantizer=quantizer,
        responses=responses,
        scale_layout=outputs.identify_returned(responses, group.granularity, axis),
        fmt=found_fmt,
        shape=shape,
    )


@dataclass(frozen=True, kw_only=True)
class _InnerCast:
    """The cast that inputs under scale 1 show: its decisions, and its responses to these."""

    findings: list[Finding]
    rounding: Behavior
    responses: Responses

    @property
    def explained(self) -> bool:
        """Whether all codes are those of the behavior; NaN codes count as equal."""
        a = self.responses
        codes = behavior.encode(a.x, a.fmt, self.rounding, source=a.source).astype(np.int64)
        return not np.any(a.canonical(a.codes) != a.canonical(codes))


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """What follows from the policy found, or from what was found instead of one.

    rounding     of the cast alone; None where it could not be asked.
    different    the simplest input that is not cast as in S-5.
    unexplained  what the policy and the rounding do not explain together.
    beyond       the first difference in other shapes, dtypes or strides.
    """

    findings: list[Finding] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    rounding: Behavior | None = None
    different: list[Counterexample] = field(default_factory=list)
    unexplained: list[Counterexample] = field(default_factory=list)
    beyond: list[Counterexample] = field(default_factory=list)


def _check_basis(
    matched: PolicyMatch, expected: Expected, unlike: list[Counterexample]
) -> _Checked:
    """Check the cast alone, then other tensors, with the policy that explains the scales.

    unlike  counterexamples to the nearest policy, if none was found.
    """
    first_alone = "other shapes, ragged blocks, strides, dtypes (stopped at the first difference)"
    answers = matched.answers
    if matched.basis is None:
        return _Checked(limits=[first_alone] if unlike else [])
    chosen, findings, limits = matched.chosen, list[Finding](), list[str]()
    inner, different = _inner_cast(answers, chosen), list[Counterexample]()
    if inner is None:
        limits.append("the cast alone: with that deviation no amax has scale 1")
    else:
        findings += inner.findings
        if not chosen.deviation.rounds_x:  # which rounds all inputs of the cast
            different = _unexpected_rounding(inner.responses, chosen)
    unexplained, candidate = _unexplained(matched, inner, different)
    beyond = list[Counterexample]()
    if unexplained:
        limits.append(first_alone)
    else:
        # Policies that agree so far may differ in other tensors.
        others = [a.candidate for a in matched.agreements[1:]] if candidate is chosen else []
        # the expected policy first
        for one in sorted([candidate, *others], key=lambda c: c.policy != expected.policy):
            more, beyond = layout_invariance.check(answers.comparison(one), answers.shape)
            if not beyond:
                break
        findings += more
        if beyond:
            limits.append(
                "shapes, ragged blocks and strides of the dtypes after the first difference"
            )
    return _Checked(
        findings=findings,
        limits=limits,
        rounding=None if inner is None else inner.rounding,
        different=different,
        unexplained=unexplained,
        beyond=beyond,
    )


def _scale_1_amax(chosen: Candidate) -> float | None:
    """The largest amax of scale 1: the max that is scaled to, less the margin; under
    ``exponents_up`` its power of two.

    None if a deviation, such as a factor, gives that amax and its negative another scale.
    """
    largest = chosen.deviation.limited(chosen.scale_fmt).max / 2.0**chosen.policy.margin
    if chosen.policy.ratio == "exponents_up":
        largest = 2.0 ** math.floor(math.log2(largest))
    if not chosen.deviation.parts:
        return largest
    x = np.array([[largest], [-largest]], np.float32)
    scales = chosen.applied(x, ScaleLayout(granularity="rowwise", axis=-1))
    return largest if np.all(scales.scale == 1) else None


def _inner_cast(answers: Answers, chosen: Candidate) -> _InnerCast | None:
    """The cast that inputs under scale 1 show; None if no amax has scale 1."""
    fmt, largest, quantizer = chosen.fmt, _scale_1_amax(chosen), answers.quantizer
    if largest is None:
        return None
    x = cast_inputs.identifying(fmt, quantizer.dtype, limit=min(fmt.max, largest))
    layout = answers.scale_layout
    group = quantizer_inputs.groups(SHAPE, layout.granularity, layout.axis)
    # One element of each group, the anchor, is largest; the others hold the inputs.
    anchors = np.zeros(SHAPE, bool)
    anchors.reshape(-1)[np.unique(group.reshape(-1), return_index=True)[1]] = True
    room = int((~anchors).sum())
    pieces = []
    for begin in range(0, x.size, room):
        some = x[begin : begin + room]
        tensor = np.zeros(SHAPE, np.float32)
        tensor[anchors] = largest
        tensor[~anchors] = np.concatenate([some, np.zeros(room - some.size, np.float32)])
        whole = quantizer.ask(rounded(tensor, quantizer.dtype))
        pieces.append(whole.tensor[~anchors][: some.size])
    output = Output(array=np.concatenate(pieces), dtype=whole.dtype)
    a = Responses(x=x, source=quantizer.dtype, output=output, fmt=fmt)
    b = KNOWN_CASTS["saturating"].behavior(fmt)
    rounding = decisions.rounding(a, b)
    b = dataclasses.replace(b, rounding=rounding.value or "nearest_even")
    # Zeros before subnormals: a lost sign would look like a wrong subnormal.
    zero = decisions.negative_zero(a, b)
    b = dataclasses.replace(b, negative_zero=zero.value or "kept")
    subnormals = decisions.subnormals(a, b)
    b = dataclasses.replace(b, subnormals=subnormals.value or "kept")
    double, through = decisions.double_rounding(a, b)
    double = dataclasses.replace(double, what="double_rounding")
    return _InnerCast(
        findings=[rounding, subnormals, zero, double],
        rounding=decisions.with_double_rounding(b, a.source, through),
        responses=a,
    )


def _unexpected_rounding(a: Responses, chosen: Candidate) -> list[Counterexample]:
    """The simplest input that is not cast as in S-5; as a list, empty if there is none.

    A policy that computes in bfloat16 rounds to it before the cast (S-13).
    """
    fmt, largest = chosen.fmt, float(a.x.max())
    expected_behavior = KNOWN_CASTS["saturating"].behavior(fmt)
    if chosen.policy.compute is BFLOAT16:
        expected_behavior = decisions.with_double_rounding(
            expected_behavior, a.source, DoubleRounding(dtype=BFLOAT16.name)
        )
    differs = a.mismatches(expected_behavior, canonical=True)
    if not differs.any():
        return []
    # Numbers, quarter points and ties first: where they are wrong, the rounding or subnormals are.
    # If only inputs next to ties are wrong, it is rounded twice (C-1).
    coarse = differs & a.among(cast_inputs.coarse(fmt))
    normal = coarse & (np.abs(a.x) >= fmt.smallest_normal)
    kinds = ((normal, "C-2"), (coarse, "F-1"), (differs, "C-1"))
    among, clause = next(kind for kind in kinds if kind[0].any())
    at = simplest(a.x, among)
    if a.x[at] == 0:
        clause = "C-6"
    shown = a.counterexample(at, expected_behavior, f"S-5, {clause}")
    words = f"{shown.input} next to {largest:g}, under scale 1"
    return [dataclasses.replace(shown, input=words)]


def _unexplained(
    matched: PolicyMatch, inner: _InnerCast | None, different: list[Counterexample]
) -> tuple[list[Counterexample], Candidate]:
    """Counterexamples that the policy and rounding found do not explain together, and the two.

    different  where the rounding is not that of S-5.
    """
    basis = matched.basis
    assert basis is not None
    wrong = counterexamples.for_policy(matched, basis)
    if inner is None:
        return wrong, basis.candidate
    if not inner.explained:
        return wrong or different, basis.candidate
    if not different:
        # Its codes are wrong in a tensor of many groups, though its cast is right.
        return wrong, basis.candidate
    # Compare with the policy and this other rounding: what is left, the rounding does not explain.
    candidate = dataclasses.replace(
        basis.candidate, rounding=inner.rounding, source=matched.answers.quantizer.dtype
    )
    own = candidates.agreement(candidate, *matched.answers.rows)
    return counterexamples.for_policy(matched, own), candidate
