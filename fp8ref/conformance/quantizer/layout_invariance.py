"""Check that the identified policy also holds for other shapes, dtypes and strides.

In each shape the largest element, NaNs and infinities are planted in turn: last in each group,
inside it, and for one shape in many places. Kernels go wrong there: at tails, lanes and blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from fp8ref import policy as policy_data
from fp8ref.conformance.inputs import quantizer_inputs
from fp8ref.conformance.kit import subject as subjects
from fp8ref.conformance.kit.finding import (
    Counterexample,
    Finding,
    bits_of,
    listed,
    shapes_finding,
    show,
    strides_finding,
)
from fp8ref.conformance.kit.subject import RefusedError, compare_each
from fp8ref.conformance.quantizer import (
    candidates,
    counterexamples,
    outputs,
    planted_tensors,
    policy_match,
    ragged_blocks,
)
from fp8ref.conformance.quantizer.candidates import Candidate, Comparison, by_group
from fp8ref.conformance.quantizer.counterexamples import index_of
from fp8ref.conformance.quantizer.granularity import noise
from fp8ref.conformance.quantizer.planted_tensors import PlantedTensor
from fp8ref.conformance.quantizer.policy_match import Answers
from fp8ref.policy import ScalePolicy
from fp8ref.sim.quantize import scaling
from fp8ref.spec.granularity import by_name

SHAPES = (
    *((1, 128), (3, 256), (16, 384), (64, 512)),
    *((128, 128), (299, 128), (3, 28672), (1031, 1152)),
)
"""Shapes whose K is as S-6 asks.

Among them are one row, a square, over 256 rows that no block divides, long rows, 10^6 elements.
"""

RAGGED = ((1, 1), (2, 3), (3, 17), (4, 1000))
"""Shapes for scales of lines and of whole tensors, where K is free."""


def check(
    comparison: Comparison, shape: tuple[int, int]
) -> tuple[list[Finding], list[Counterexample]]:
    """Check the dtypes, and in each the shapes and strides, up to the first counterexample.

    shape  of the tensors by which the policy of another dtype is checked.
    """
    findings, counterexamples = list[Finding](), list[Counterexample]()
    own = comparison.dtype
    for dtype in (own, *(d for d in ("bfloat16", "float16") if d != own)):
        other = replace(comparison, quantizer=replace(comparison.quantizer, dtype=dtype))
        if dtype != own:
            other = replace(other, candidate=replace(comparison.candidate, source=dtype))
            agreed, finding, wrong = check_dtype(other, shape)
            findings, counterexamples = [*findings, finding], [*counterexamples, *wrong]
            if agreed is None:
                continue
            other = replace(other, candidate=agreed)
        subject = other.quantizer.subject
        subjects.check_no_reuse(subject, noise(), noise()[::-1], dtype, outputs.parts_of)
        for check_one in (check_shapes, check_ragged_blocks, check_strides):
            if not counterexamples:
                more, counterexamples = check_one(other, large=dtype == own)
                findings += [
                    f if dtype == own else replace(f, what=f"{f.what} of {dtype}") for f in more
                ]
    return findings, counterexamples


def check_shapes(
    comparison: Comparison, *, large: bool = True
) -> tuple[list[Finding], list[Counterexample]]:
    """Compare tensors of other shapes with the candidate.

    A NaN that XLA's own max loses is reported, and no fault (P-3).
    """
    layout = comparison.scale_layout
    sizes = [
        *(RAGGED if by_name(layout.granularity).reduced is None else ()),
        *(SHAPES if large else SHAPES[:-1]),
    ]
    if layout.granularity == "tensorwise" and not comparison.quantizer.memory:
        sizes.append(planted_tensors.WHOLE)
    shapes = [shape[::-1] if layout.axis == 0 else shape for shape in sizes]
    accepted, refused, wrong, lost = _compared(comparison, shapes)
    same = (
        "the same policy, also with the largest element, a NaN or an infinity of either sign last "
        "in its group or inside"
    )
    findings = [shapes_finding(accepted, refused, wrong, same, most=large)]
    if lost:
        words = "lost where XLA's max loses it"
        findings.append(Finding("NaN inside", False, str(lost[0]), words=words))
    return findings, wrong


def check_ragged_blocks(
    comparison: Comparison, *, large: bool = True
) -> tuple[list[Finding], list[Counterexample]]:
    """Compare tensors whose last block is ragged with the candidate for zeros behind them (S-6).

    A quantizer may refuse them, or return another shape: that is reported, and no fault.
    """
    shapes = ragged_blocks.shapes(comparison.scale_layout)
    if not shapes:
        return [], []
    accepted, refused, wrong, _ = _compared(comparison, shapes)
    parts = [f"{listed(accepted)}: as with zeros behind"] if accepted else []
    if refused:
        parts.append(f"it raises, or gives another shape, for {listed(refused)}")
    unasked = (f"ragged last blocks: it does not take {listed(refused)}",) if refused else ()
    alike = "as with zeros behind" if accepted else "not taken"
    finding = Finding(
        "ragged blocks",
        not wrong if accepted else None,
        str(wrong[0]) if wrong else "; ".join(parts),
        words="not all alike" if wrong else alike,
        unasked=unasked,
    )
    return [finding], wrong


def _compared(
    comparison: Comparison, shapes: Sequence[tuple[int, int]]
) -> tuple[
    list[tuple[int, int]], list[tuple[int, int]], list[Counterexample], list[Counterexample]
]:
    """(shapes taken, shapes refused, the first counterexample, and the first of a lost NaN (P-3)).
    What is wrong in a shape counts where a later tensor of it is refused too.
    """
    quantizer, layout = comparison.quantizer, comparison.scale_layout
    wrong: list[Counterexample] = []
    lost: list[Counterexample] = []

    def compare(shape: tuple[int, int]) -> list[Counterexample]:
        for tensor in planted_tensors.tensors(shape, layout, quantizer):
            try:
                output = quantizer.ask(tensor.x)
            except outputs.WrongShapeError as error:
                if not ragged_blocks.is_ragged(shape, layout):
                    raise
                raise RefusedError(str(error)) from error
            unexplained = _counterexample(comparison, tensor, output)
            padded = ragged_blocks.padded(tensor.x, layout)
            nan = unexplained and "NaN" in tensor.planted
            is_lost = nan and policy_match.loses_nan(quantizer, padded, layout)
            first = lost if is_lost else wrong
            first += [] if first else unexplained
        return wrong

    accepted, refused, _ = compare_each(shapes, compare)
    return accepted, refused, wrong, lost


def check_strides(
    comparison: Comparison, *, large: bool = True
) -> tuple[list[Finding], list[Counterexample]]:
    """Compare tensors that are not contiguous in memory with the candidate."""
    quantizer = comparison.quantizer
    tensors = [
        planted_tensors.random((128, 256), quantizer),
        *planted_tensors.tensors((128, 256), comparison.scale_layout, quantizer),
    ]

    def compare(view: str) -> list[Counterexample]:
        answers = [(tensor, quantizer.ask(tensor.x, view=view)) for tensor in tensors]
        wrong = (w for answer in answers for w in _counterexample(comparison, *answer))
        return [replace(w, input=f"{w.input}, {view} in memory") for w in wrong][:1]

    accepted, refused, wrong = compare_each(quantizer.subject.views, compare)
    return [strides_finding(accepted, refused, wrong)], wrong


def check_dtype(
    comparison: Comparison, shape: tuple[int, int]
) -> tuple[Candidate | None, Finding, list[Counterexample]]:
    """Find another dtype's candidate: the same policy, or one that computes in that dtype (S-13).

    None if the dtype is not taken, or no such policy agrees.
    """
    quantizer, candidate = comparison.quantizer, comparison.candidate
    scale_layout = comparison.scale_layout
    dtype = quantizer.dtype
    what = f"from {quantizer.dtype}"
    amaxes = quantizer_inputs.identifying(candidate.fmt, dtype)
    layout = scale_layout.granularity, scale_layout.axis
    try:
        quantizer.once(np.ones(shape, np.float32))
        responses = outputs.ask(quantizer, amaxes, shape, *layout)
    except RefusedError as error:
        unasked = (f"{dtype}, for which it raises",)
        refusal = Finding(what, None, str(error), words="not taken", unasked=unasked)
        return None, refusal, []
    answers = Answers(
        quantizer=quantizer,
        responses=responses,
        scale_layout=scale_layout,
        fmt=candidate.fmt,
        shape=shape,
    )
    own, policies = _decisions(candidate.policy), policy_data.POLICIES.values()
    same_decisions = [p for p in policies if _decisions(p) == own]
    agreements = [
        candidates.agreement(replace(candidate, policy=p), *answers.rows)
        for p in sorted(same_decisions, key=lambda p: p != candidate.policy)
    ]
    agreed = next((a for a in agreements if (a.both | ~answers.considered).all()), None)
    if agreed:
        evidence = f"{answers.considered.sum()} groups match it"
        finding = Finding(what, agreed.candidate.policy.name, evidence)
        return agreed.candidate, finding, []
    # S-13 leaves quotients in float16 open, but no scale
    stated = dtype == "bfloat16" or candidate.policy.stored == "scale"
    right = agreements[0].both if stated else agreements[0].deciding
    wrong = _counterexample_among(answers, right | ~answers.considered, candidate)
    words = "something else"
    evidence = "codes by quotients in float16, which S-13 leaves open"
    if wrong:
        evidence = str(wrong[0])
        matched = policy_match.match_policies(answers, candidate.policy)
        if matched.basis is not None:
            words = matched.chosen.words
    return None, Finding(what, None, evidence, words=words), wrong


def _decisions(policy: ScalePolicy) -> dict[str, Any]:
    """All fields of a policy except its name and what it computes in."""
    names = {f.name for f in fields(policy)} - {"name", "compute"}
    return {name: getattr(policy, name) for name in names}


def _counterexample(
    comparison: Comparison, tensor: PlantedTensor, output: outputs.QuantizerOutput
) -> list[Counterexample]:
    """The first element whose code or scale is not the candidate's; empty if there is none."""
    layout = comparison.scale_layout
    candidate = comparison.candidate
    dtype = comparison.dtype
    x = ragged_blocks.padded(tensor.x, layout)
    group = quantizer_inputs.groups(x.shape, layout.granularity, layout.axis)
    expected, count = comparison.expected(x), int(group.max()) + 1
    if other := _other_counts(tensor, output, layout, count):
        return other
    # kind and largest play no part in comparing scales and codes.
    none = np.zeros(count, np.float32)
    output = ragged_blocks.padded_output(output, expected)
    kind = np.zeros(count, np.int64)
    response = outputs.Response(x=x, group=group, kind=kind, largest=none, output=output)
    returned = {name: outputs.per_group(response, name, layout) for name in layout.kinds}
    differs = candidates.mismatches(output, expected, candidate)
    differs |= ~candidates.equal_scales(response, expected, layout)[group]
    for name in layout.kinds.keys() - layout.scales.keys():
        amax = np.reshape(scaling.amax(x, layout.granularity, axis=layout.axis), -1)
        differs |= ~np.isclose(returned[name], amax, rtol=0, atol=0, equal_nan=True)[group]
    differs[tensor.x.shape[0] :], differs[:, tensor.x.shape[1] :] = False, False
    if not differs.any():
        return []
    at = np.unravel_index(int(np.argmax(differs)), x.shape)
    at_group = group[at]
    place = ""
    if tensor.at is not None:
        planted = tensor.at[at_group]
        index = index_of(np.unravel_index(planted, tensor.x.shape))
        place = f" as x{index} = {show(tensor.x.flat[planted])}"
    got = {name: scales[at_group] for name, scales in returned.items()}
    texts = counterexamples.output_texts(output, at, got, expected, at_group, layout)
    return [
        Counterexample(
            f"x{index_of(at)} = {show(x[at])} of {tensor}{place}",
            texts[0] + _as_without(comparison, tensor, at_group, got),
            f"{texts[1]} by {candidate.words}",
            "S-2, S-5, S-6",
            bits=(bits_of(x[at], dtype),),
            dtype=dtype,
        )
    ]


def _other_counts(
    tensor: PlantedTensor,
    output: outputs.QuantizerOutput,
    scale_layout: outputs.ScaleLayout,
    count: int,
) -> list[Counterexample]:
    """The first array of scales that has not one for each group, where the last block is ragged."""
    if not ragged_blocks.is_ragged(tensor.x.shape, scale_layout):
        return []
    for name in scale_layout.kinds:
        shape = output.scales[name].shape
        if np.prod(shape, dtype=np.int64) != count and shape != tensor.x.shape:
            got = f"{name or 'scales'} {list(shape)}"
            wanted = f"{count} scales, one of each block, the last one too"
            texts = str(tensor), got, wanted, "S-6, S-16"
            return [Counterexample(*texts, dtype=output.dtype)]
    return []


def _as_without(
    comparison: Comparison, tensor: PlantedTensor, group: int, got: Mapping[str, float]
) -> str:
    """In words, whether the kernel overlooked the planted element: the scale is as without it."""
    layout = comparison.scale_layout
    if tensor.at is None or layout.scale is None:
        return ""
    x = tensor.x.copy()
    x.reshape(-1)[tensor.at] = 0
    q = comparison.expected(ragged_blocks.padded(x, layout))
    if by_group(q, layout.kinds[layout.scale])[group] != got[layout.scale]:
        return ""
    return f" (as without x{index_of(np.unravel_index(tensor.at[group], x.shape))})"


def _counterexample_among(
    answers: Answers, right: np.ndarray, candidate: Candidate
) -> list[Counterexample]:
    """The counterexample of the first response with a group that is not right."""
    begin = 0
    for a in answers.responses:
        wrong = ~right[begin : begin + a.amax.size]
        begin += a.amax.size
        if wrong.any():
            return _counterexample(answers.comparison(candidate), PlantedTensor(x=a.x), a.output)
    return []
