"""Identify a quantizer, by ``identify_quantizer``: its scales and rounding, from chosen tensors.

In this order: memory and granularity, scale layout, policy, the cast under scale 1, and last
whether all that holds for other shapes, dtypes and strides. Counterexamples are searched for at
each step.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fp8ref import policy as policy_data
from fp8ref.conformance.cast import behavior, decisions
from fp8ref.conformance.cast.behavior import KNOWN_CASTS, Behavior, DoubleRounding
from fp8ref.conformance.cast.identify import check_format
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
)
from fp8ref.conformance.quantizer.candidates import Agreement, Candidate
from fp8ref.conformance.quantizer.fp4.identify import identify_fp4
from fp8ref.conformance.quantizer.granularity import identify_granularity, identify_memory
from fp8ref.conformance.quantizer.outputs import (
    Quantizer,
    QuantizerOutput,
    ScaleLayout,
    smallest_shape,
)
from fp8ref.conformance.quantizer.policy_match import PolicyMatch
from fp8ref.formats import BFLOAT16, FP4_FORMATS, Format
from fp8ref.policy import ScalePolicy
from fp8ref.spec import granularity as granularities

_TENSORWISE_SHAPES = ((1, 32), (16, 16), (16, 128), (128, 128), SHAPE)


def identify_quantizer(
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
    """Identify a quantizer: its granularity, scale policy, returned scales and rounding.

    function   x [M, K], float32 or bfloat16, -> codes (uint8 or float8) or values of that shape,
               alone or in a tuple, a dict or an object next to a scale, a scale_inv or both.
    expect     a policy's name that it must follow, with granularity and axis if they are given.

    A fmt of 4 bits is identified by whole tensors (``fp4``).

    Raises:    ValueError: fmt neither an FP8 format nor e2m1fn, an unknown name; ConformanceError:
               not a valid quantizer: it raises, gives other shapes, changes its input, or does not
               repeat itself.
    """
    if granularity is not None:
        granularities.by_name(granularity)
    if axis not in (None, -1, 0):
        raise ValueError(f"axis is -1, the last axis of x [M, K], or 0, the first; got {axis!r}.")
    if isinstance(fmt, Format) and fmt.name in FP4_FORMATS:
        return identify_fp4(
            function,
            fmt,
            name=name,
            expect=expect,
            granularity=granularity,
            axis=axis,
            framework=framework,
            device=device,
        )
    check_format(fmt)
    expected = None if expect is None else policy_data.by_name(expect)
    if expected is None and (granularity is not None or axis is not None):
        raise ValueError(
            "an expected granularity or axis needs an expected policy. Name one with --expect."
        )
    name = name or subjects.name_of(function)
    try:
        subject = subjects.wrap(name, function, framework=framework, device=device, shape=SHAPE)
    except RefusedError as error:
        raise RefusedError(
            f"{error}\nA quantizer is called with x [M, K]; its scales may reduce either axis "
            "(S-6)."
        ) from error
    quantizer = Quantizer(subject=subject, dtype=subjects.first_dtype(subject, SHAPE))
    quantizer, remembered = identify_memory(quantizer)
    group = identify_granularity(quantizer)
    output = quantizer.ask(np.ones(SHAPE, np.float32))
    found_fmt = _format_of(output, fmt)
    findings = [describe.format_finding(output, found_fmt, fmt), remembered, group.finding]
    if group.granularity is None:
        return describe.without_granularity(
            quantizer, fmt, found_fmt, findings, expect, group.finding
        )
    at, along = group.granularity, -1 if group.axis is None else group.axis
    # One scale for a tensor takes a tensor for each amax: the smallest that the quantizer takes.
    amaxes = quantizer_inputs.identifying(found_fmt, quantizer.dtype)
    shape = (
        smallest_shape(quantizer, _TENSORWISE_SHAPES, lambda s: True)
        if at == "tensorwise"
        else SHAPE
    )
    responses = outputs.ask(quantizer, amaxes, shape, at, along)
    scale_layout = outputs.identify_returned(responses, at, along)
    considered = policy_match.considered(quantizer, responses, scale_layout)
    matched = policy_match.match_policies(
        quantizer, responses, scale_layout, found_fmt, considered, expected=expected, shape=shape
    )
    basis = matched.basis
    chosen = (basis or matched.nearest).candidate
    findings += [
        describe.axis_finding(quantizer, group.axis, chosen, scale_layout),
        describe.returned_finding(scale_layout, output),
        describe.policy_finding(matched, quantizer),
    ]
    unlike = (
        []
        if matched.agreements
        else counterexamples.for_policy(quantizer, matched, matched.nearest, scale_layout)
    )
    misnamed = counterexamples.misnamed_arrays(responses, scale_layout, chosen.policy)
    rounding: Behavior | None = None
    different: list[Counterexample] = []
    beyond: list[Counterexample] = []
    limits = describe.limits(quantizer)
    unexplained = [] if basis else unlike
    if basis:
        cast_alone = identify_inner_cast(
            quantizer, chosen, quantizer_inputs.groups(SHAPE, at, along)
        )
        if cast_alone is None:
            limits.append("the cast alone: with that deviation no amax has scale 1")
        else:
            more, rounding, answers = cast_alone
            findings += more
            different = unexpected_rounding(
                answers, chosen.fmt, float(answers.x.max()), chosen.policy.compute
            )
        unexplained, candidate = _unexplained(
            quantizer, matched, basis, scale_layout, cast_alone, different
        )
        if not unexplained:
            # Policies that agree so far may differ in other tensors.
            others = [a.candidate for a in matched.agreements[1:]] if candidate is chosen else []
            more, beyond = _other_tensors(
                quantizer, [candidate, *others], expected, scale_layout, shape
            )
            findings += more
            limits += (
                ["shapes, ragged blocks and strides of the dtypes after the first difference"]
                if beyond
                else []
            )
        unlike = [*unlike, *unexplained]
    if unexplained:
        limits.append(
            "other shapes, ragged blocks, strides and dtypes: the first tensors are not explained"
        )
    unlike = [*unlike, *misnamed, *beyond]
    # What was expected is compared separately: the function may be identified as something else.
    differences = []
    if expected is not None:
        differences = counterexamples.unexpected_policy(
            quantizer,
            expected,
            fmt,
            responses,
            scale_layout,
            matched,
            found_fmt,
            right_cast=not different,
        )
        differences += counterexamples.unexpected_granularity(
            quantizer,
            group,
            granularity,
            axis,
            Candidate(policy=expected, scale_fmt=fmt, fmt=found_fmt),
            scale_layout,
        )
        differences += counterexamples.transposed_scales(output, scale_layout)
        differences += [w for w in different if w not in differences]
        # A memory is a fault, except for te_delayed and flax, which keep a scale of earlier amaxes.
        differences += [remembered.witness] if remembered.witness and not expected.keeps else []
        differences += [w for w in misnamed if w not in differences]
        differences += beyond if differences else []
    identified = bool(matched.agreements) and not unlike
    untaken = [
        f.what.removeprefix("from ")
        for f in findings
        if f.text == "not taken" and f.what.startswith("from ")
    ]
    fields = describe.result_dict(
        matched, chosen, group, scale_layout, rounding, quantizer, output, found_fmt, identified
    )
    return Outcome(
        name=name,
        kind="quantizer",
        fmt=fmt,
        framework=subject.framework,
        found=fields,
        findings=findings,
        identified=identified,
        summary=describe.summary(
            matched, chosen, group, fields, fmt, quantizer.memory, not beyond, identified
        )
        + (f"; it does not accept {' or '.join(untaken)}" if untaken else ""),
        named=bool(matched.agreements) and not different and chosen.scale_fmt.max == fmt.max,
        unlike=unlike,
        expected=expect,
        differences=differences,
        limits=limits,
    )


def _scale_1_amax(chosen: Candidate) -> float | None:
    """The largest amax of scale 1: the max that is scaled to, less the margin; under
    ``exponents_up`` its power of two.

    None if a deviation, such as a factor, gives that amax and its negative another scale.
    """
    largest = chosen.deviation.limited(chosen.scale_fmt).max / 2.0**chosen.policy.margin
    largest = (
        2.0 ** math.floor(math.log2(largest)) if chosen.policy.ratio == "exponents_up" else largest
    )
    if not chosen.deviation.parts:
        return largest
    x = np.array([[largest], [-largest]], np.float32)
    return (
        largest
        if np.all(chosen.applied(x, ScaleLayout(granularity="rowwise", axis=-1)).scale == 1)
        else None
    )


def identify_inner_cast(
    quantizer: Quantizer, chosen: Candidate, group: np.ndarray
) -> tuple[list[Finding], Behavior, Responses] | None:
    """The decisions of the cast that inputs under scale 1 show, and its responses; None if no amax
    has scale 1.

    group    for each element, the index of its group, [M, K].
    """
    fmt, largest = chosen.fmt, _scale_1_amax(chosen)
    if largest is None:
        return None
    limit = min(fmt.max, largest)
    x = cast_inputs.identifying(fmt, quantizer.dtype, limit=limit)
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
    b = decisions.with_double_rounding(b, a.source, through)
    return [rounding, subnormals, zero, dataclasses.replace(double, what="double_rounding")], b, a


def unexpected_rounding(
    a: Responses, fmt: Format, largest: float, compute: Format
) -> list[Counterexample]:
    """The simplest input that is not cast as in S-5; as a list, empty if there is none.

    A policy that computes in bfloat16 rounds to it before the cast (S-13).
    """
    expected_behavior = KNOWN_CASTS["saturating"].behavior(fmt)
    if compute is BFLOAT16:
        expected_behavior = decisions.with_double_rounding(
            expected_behavior, a.source, DoubleRounding(dtype=compute.name)
        )
    differs = a.mismatches(expected_behavior, canonical=True)
    if not differs.any():
        return []
    # Numbers, quarter points and ties first: where they are wrong, the rounding or subnormals are.
    # If only inputs next to ties are wrong, it is rounded twice (C-1).
    coarse = differs & a.among(cast_inputs.coarse(fmt))
    normal = coarse & (np.abs(a.x) >= fmt.smallest_normal)
    among, clause = (
        (normal, "C-2") if normal.any() else (coarse, "F-1") if coarse.any() else (differs, "C-1")
    )
    at = simplest(a.x, among)
    if a.x[at] == 0:
        clause = "C-6"
    shown = a.counterexample(at, expected_behavior, f"S-5, {clause}")
    return [dataclasses.replace(shown, input=f"{shown.input} next to {largest:g}, under scale 1")]


def explains(a: Responses, b: Behavior) -> bool:
    """Whether all codes are those of behavior b; NaN codes count as equal."""
    return not np.any(
        a.canonical(a.codes)
        != a.canonical(behavior.encode(a.x, a.fmt, b, source=a.source).astype(np.int64))
    )


def _unexplained(
    quantizer: Quantizer,
    matched: PolicyMatch,
    basis: Agreement,
    scale_layout: ScaleLayout,
    cast_alone: tuple[list[Finding], Behavior, Responses] | None,
    different: list[Counterexample],
) -> tuple[list[Counterexample], Candidate]:
    """Counterexamples that the policy found and the rounding found do not explain together, and the
    two together.

    cast_alone  as of identify_inner_cast; different: where its rounding is not that of S-5.
    """
    wrong = (
        counterexamples.for_policy(quantizer, matched, basis, scale_layout)
        if matched.mismatches(basis).any()
        else []
    )
    if cast_alone is None:
        return wrong, basis.candidate
    _, rounding, answers = cast_alone
    if not explains(answers, rounding):
        return wrong or different, basis.candidate
    if not different:
        # Its codes are wrong in a tensor of many groups, though its cast is right.
        return wrong, basis.candidate
    # Compare with the policy and this other rounding: what is left, the rounding does not explain.
    candidate = dataclasses.replace(basis.candidate, rounding=rounding, source=quantizer.dtype)
    own = candidates.agreement(candidate, *outputs.as_rows(matched.responses, scale_layout))
    return counterexamples.for_policy(quantizer, matched, own, scale_layout) if matched.mismatches(
        own
    ).any() else [], candidate


def _other_tensors(
    quantizer: Quantizer,
    agreeing: Sequence[Candidate],
    expected: ScalePolicy | None,
    scale_layout: ScaleLayout,
    shape: tuple[int, int],
) -> tuple[list[Finding], list[Counterexample]]:
    """Check other shapes, dtypes and strides with each candidate that agrees so far, the expected
    policy first.
    """
    for candidate in sorted(agreeing, key=lambda c: c.policy != expected):
        findings, beyond = layout_invariance.check(quantizer, candidate, scale_layout, shape)
        if not beyond:
            break
    return findings, beyond


def _format_of(output: QuantizerOutput, fmt: Format) -> Format:
    """The format that the dtype of the output names, else fmt."""
    return CAST_FORMATS.get(output.dtype.removeprefix("float8_"), fmt)
