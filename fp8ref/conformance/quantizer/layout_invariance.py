"""Check that the identified policy also holds for other shapes, dtypes and strides.

In each shape the largest element, NaNs and infinities are planted in turn: last in each group,
inside of each group, and for one shape in many places. Kernels go wrong there: at tails, lanes and
blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from fp8ref import policy as policy_data
from fp8ref.conformance.inputs import quantizer_inputs
from fp8ref.conformance.kit import subject as subjects
from fp8ref.conformance.kit.finding import Counterexample, Finding, bits_of, show, strides_finding
from fp8ref.conformance.kit.subject import VIEWS, RefusedError
from fp8ref.conformance.quantizer import (
    candidates,
    counterexamples,
    outputs,
    planted_tensors,
    policy_match,
    ragged_blocks,
)
from fp8ref.conformance.quantizer.candidates import Candidate
from fp8ref.conformance.quantizer.granularity import noise
from fp8ref.conformance.quantizer.outputs import (
    Quantizer,
    QuantizerOutput,
    Response,
    ScaleLayout,
    WrongShapeError,
    arrays_of,
)
from fp8ref.conformance.quantizer.planted_tensors import PlantedTensor
from fp8ref.conformance.quantizer.policy_match import Answers
from fp8ref.policy import ScalePolicy
from fp8ref.sim.quantize import scaling
from fp8ref.spec.granularity import by_name

SHAPES = (
    (1, 128),
    (3, 256),
    (16, 384),
    (64, 512),
    (128, 128),
    (299, 128),
    (3, 28672),
    (1031, 1152),
)
"""Shapes whose K is as S-6 asks.

Among them are one row, a square, more than 256 rows that no block divides, long rows, and over a
million elements.
"""

RAGGED = ((1, 1), (2, 3), (3, 17), (4, 1000))
"""Shapes for scales of lines and of whole tensors, where K is free."""


def check(
    quantizer: Quantizer, candidate: Candidate, scale_layout: ScaleLayout, shape: tuple[int, int]
) -> tuple[list[Finding], list[Counterexample]]:
    """Check the dtypes, and in each the shapes and strides, up to the first counterexample.

    shape  of the tensors by which the policy of another dtype is checked.
    """
    findings, counterexamples = list[Finding](), list[Counterexample]()
    by_dtype = {quantizer.dtype: candidate}
    for dtype in (quantizer.dtype, *(d for d in ("bfloat16", "float16") if d != quantizer.dtype)):
        other = replace(quantizer, dtype=dtype)
        if dtype != quantizer.dtype:
            agreed, finding, wrong = check_dtype(
                other, replace(candidate, source=dtype), scale_layout, shape
            )
            findings, counterexamples = [*findings, finding], [*counterexamples, *wrong]
            if agreed is None:
                continue
            by_dtype[dtype] = agreed
        subjects.check_no_reuse(other.subject, noise(), noise()[::-1], dtype, arrays_of)
        for check_one in (check_shapes, check_ragged_blocks, check_strides):
            if not counterexamples:
                more, counterexamples = check_one(
                    other, by_dtype[dtype], scale_layout, large=dtype == quantizer.dtype
                )
                findings += [
                    f if dtype == quantizer.dtype else replace(f, what=f"{f.what} of {dtype}")
                    for f in more
                ]
    return findings, counterexamples


def check_shapes(
    quantizer: Quantizer, candidate: Candidate, scale_layout: ScaleLayout, *, large: bool = True
) -> tuple[list[Finding], list[Counterexample]]:
    """Compare tensors of other shapes with the candidate.

    A NaN that XLA's own max loses is reported, and no fault (P-3).
    """
    sizes = [
        *(RAGGED if by_name(scale_layout.granularity).reduced is None else ()),
        *(SHAPES if large else SHAPES[:-1]),
    ]
    sizes += (
        [planted_tensors.WHOLE]
        if scale_layout.granularity == "tensorwise" and not quantizer.memory
        else []
    )
    shapes = [shape[::-1] if scale_layout.axis == 0 else shape for shape in sizes]
    accepted, refused, counterexamples, lost = _compared(quantizer, candidate, scale_layout, shapes)
    evidence = (
        f"{_listed(accepted)}: the same policy, also with the largest element, a NaN or an "
        "infinity of either sign last in its group or inside"
    )
    evidence += f"; it raises for {_listed(refused)}" if refused else ""
    text = "not all alike" if counterexamples else "all alike"
    unasked = [f"shapes {_listed(refused)}, for which it raises"] if refused else []
    unasked += (
        [f"more than {max(a * b for a, b in accepted):,} elements"] if accepted and large else []
    )
    findings = [
        Finding(
            "shapes",
            not counterexamples,
            str(counterexamples[0]) if counterexamples else evidence,
            words=text,
            unasked=tuple(unasked),
        )
    ]
    findings += [
        Finding("NaN inside", False, str(w), words="lost where XLA's max loses it") for w in lost
    ]
    return findings, counterexamples


def check_ragged_blocks(
    quantizer: Quantizer, candidate: Candidate, scale_layout: ScaleLayout, *, large: bool = True
) -> tuple[list[Finding], list[Counterexample]]:
    """Compare tensors whose last block is ragged with the candidate for zeros behind them (S-6).

    A quantizer may refuse them, or return another shape: that is reported, and no fault.
    """
    shapes = ragged_blocks.shapes(scale_layout)
    if not shapes:
        return [], []
    accepted, refused, counterexamples, _ = _compared(quantizer, candidate, scale_layout, shapes)
    evidence = f"{_listed(accepted)}: as with zeros behind" if accepted else ""
    evidence += (
        f"{'; ' * bool(accepted)}it raises, or gives another shape, for {_listed(refused)}"
        if refused
        else ""
    )
    text = (
        "not all alike" if counterexamples else "as with zeros behind" if accepted else "not taken"
    )
    unasked = (f"ragged last blocks: it does not take {_listed(refused)}",) if refused else ()
    evidence = str(counterexamples[0]) if counterexamples else evidence
    return [
        Finding(
            "ragged blocks",
            not counterexamples if accepted else None,
            evidence,
            words=text,
            unasked=unasked,
        )
    ], counterexamples


def _compared(
    quantizer: Quantizer,
    candidate: Candidate,
    scale_layout: ScaleLayout,
    shapes: Sequence[tuple[int, int]],
) -> tuple[
    list[tuple[int, int]], list[tuple[int, int]], list[Counterexample], list[Counterexample]
]:
    """The shapes taken and refused, the first counterexample, and the first of a lost NaN (P-3)."""
    accepted, refused, counterexamples, lost = (
        [],
        [],
        list[Counterexample](),
        list[Counterexample](),
    )
    for shape in shapes:
        try:
            for tensor in planted_tensors.tensors(shape, scale_layout, quantizer):
                unexplained = _counterexample(
                    tensor, quantizer.ask(tensor.x), candidate, scale_layout, quantizer.dtype
                )
                if (
                    unexplained
                    and "NaN" in tensor.planted
                    and policy_match.loses_nan(
                        quantizer, ragged_blocks.padded(tensor.x, scale_layout), scale_layout
                    )
                ):
                    lost = lost or unexplained
                else:
                    counterexamples = counterexamples or unexplained
        except RefusedError:
            refused.append(shape)
        except WrongShapeError:
            if not ragged_blocks.is_ragged(shape, scale_layout):
                raise
            refused.append(shape)
        else:
            accepted.append(shape)
    return accepted, refused, counterexamples, lost


def check_strides(
    quantizer: Quantizer, candidate: Candidate, scale_layout: ScaleLayout, *, large: bool = True
) -> tuple[list[Finding], list[Counterexample]]:
    """Compare tensors that are not contiguous in memory with the candidate."""
    tensors = [
        planted_tensors.random((128, 256), quantizer),
        *planted_tensors.tensors((128, 256), scale_layout, quantizer),
    ]
    accepted, refused, counterexamples = [], [], list[Counterexample]()
    for view in VIEWS if quantizer.subject.framework != "jax" else ():
        try:
            outputs_of_view = [quantizer.ask(tensor.x, view=view) for tensor in tensors]
        except RefusedError:
            refused.append(view)
            continue
        accepted.append(view)
        for tensor, output in zip(tensors, outputs_of_view, strict=True):
            counterexamples = counterexamples or [
                replace(w, input=f"{w.input}, {view} in memory")
                for w in _counterexample(tensor, output, candidate, scale_layout, quantizer.dtype)
            ]
    return [strides_finding(accepted, refused, counterexamples)], counterexamples


def check_dtype(
    quantizer: Quantizer, candidate: Candidate, scale_layout: ScaleLayout, shape: tuple[int, int]
) -> tuple[Candidate | None, Finding, list[Counterexample]]:
    """Find the candidate for another dtype: the same policy, or one that computes in that dtype
    (S-13).

    None if the dtype is not taken, or no such policy agrees.
    """
    dtype, what = quantizer.dtype, f"from {quantizer.dtype}"
    amaxes = quantizer_inputs.identifying(candidate.fmt, dtype)
    at, along = scale_layout.granularity, scale_layout.axis
    try:
        quantizer.once(np.ones(shape, np.float32))
        responses = outputs.ask(quantizer, amaxes, shape, at, along)
    except RefusedError as error:
        refused = Finding(
            what, None, str(error), words="not taken", unasked=(f"{dtype}, for which it raises",)
        )
        return None, refused, []
    answers = Answers(
        quantizer=quantizer,
        responses=responses,
        scale_layout=scale_layout,
        fmt=candidate.fmt,
        shape=shape,
    )
    same_decisions = [
        p for p in policy_data.POLICIES.values() if _decisions(p) == _decisions(candidate.policy)
    ]
    agreements = [
        candidates.agreement(replace(candidate, policy=p), *answers.rows)
        for p in sorted(same_decisions, key=lambda p: p != candidate.policy)
    ]
    agreed = next((a for a in agreements if (a.both | ~answers.considered).all()), None)
    if agreed:
        evidence = f"{answers.considered.sum()} groups match it"
        finding = Finding(what, agreed.candidate.policy.name, evidence)
        return agreed.candidate, finding, []
    wrong = _counterexample_among(answers, agreements[0].both | ~answers.considered, candidate)
    finding = Finding(what, None, str(wrong[0]), words="something else")
    # S-13 leaves quotients in float16 open
    stated = dtype == "bfloat16" or candidate.policy.stored == "scale"
    return None, finding, wrong if stated else []


def _decisions(policy: ScalePolicy) -> dict[str, Any]:
    """All fields of a policy except its name and what it computes in."""
    return {
        f.name: getattr(policy, f.name) for f in fields(policy) if f.name not in ("name", "compute")
    }


def _counterexample(
    tensor: PlantedTensor,
    output: QuantizerOutput,
    candidate: Candidate,
    scale_layout: ScaleLayout,
    dtype: str,
) -> list[Counterexample]:
    """The first element whose code or scale is not the candidate's; empty if there is none."""
    x = ragged_blocks.padded(tensor.x, scale_layout)
    group = quantizer_inputs.groups(x.shape, scale_layout.granularity, scale_layout.axis)
    expected = candidate.quantize(x, scale_layout)
    other = _other_counts(tensor, output, scale_layout, int(group.max()) + 1)
    if other:
        return other
    # kind and largest play no part in comparing scales and codes.
    none, output = (
        np.zeros(int(group.max()) + 1, np.float32),
        ragged_blocks.padded_output(output, expected),
    )
    response = Response(
        x=x, group=group, kind=np.zeros(none.size, np.int64), largest=none, output=output
    )
    differs = candidates.mismatches(output, expected, candidate)
    differs |= ~candidates.equal_scales(response, expected, scale_layout)[group]
    for name in (n for n, kind in scale_layout.kinds.items() if kind == "amax"):
        amax = np.reshape(scaling.amax(x, scale_layout.granularity, axis=scale_layout.axis), -1)
        differs |= ~np.isclose(
            outputs.per_group(response, name, scale_layout), amax, rtol=0, atol=0, equal_nan=True
        )[group]
    differs[tensor.x.shape[0] :], differs[:, tensor.x.shape[1] :] = False, False
    if not differs.any():
        return []
    at = np.unravel_index(int(np.argmax(differs)), x.shape)
    place = "" if tensor.at is None else f" as {_element_text(tensor.at[group[at]], tensor.x)}"
    got = {
        name: outputs.per_group(response, name, scale_layout)[group[at]]
        for name in scale_layout.kinds
    }
    got_text, wanted_text = counterexamples.output_texts(
        output, at, got, expected, group[at], scale_layout
    )
    return [
        Counterexample(
            input=f"x{_index(at)} = {show(x[at])} of {tensor}{place}",
            bits=(bits_of(x[at], dtype),),
            dtype=dtype,
            got=got_text + _as_without(tensor, candidate, scale_layout, group[at], got),
            expected=f"{wanted_text} by {candidate.words}",
            clause="S-2, S-5, S-6",
        )
    ]


def _other_counts(
    tensor: PlantedTensor, output: QuantizerOutput, scale_layout: ScaleLayout, count: int
) -> list[Counterexample]:
    """The first array of scales that has not one for each group, where the last block is ragged."""
    if not ragged_blocks.is_ragged(tensor.x.shape, scale_layout):
        return []
    wrong = ((name, output.scales[name].shape) for name in scale_layout.kinds)
    return [
        Counterexample(
            input=str(tensor),
            dtype=output.dtype,
            got=f"{name or 'scales'} {list(shape)}",
            expected=f"{count} scales, one of each block, the last one too",
            clause="S-6, S-16",
        )
        for name, shape in wrong
        if np.prod(shape, dtype=np.int64) != count and shape != tensor.x.shape
    ][:1]


def _as_without(
    tensor: PlantedTensor,
    candidate: Candidate,
    scale_layout: ScaleLayout,
    group: int,
    got: Mapping[str, float],
) -> str:
    """In words, whether the kernel overlooked the planted element: the scale is as without it."""
    name = scale_layout.scale
    if tensor.at is None or name is None:
        return ""
    x = tensor.x.copy()
    x.reshape(-1)[tensor.at] = 0
    without = np.reshape(
        getattr(
            candidate.quantize(ragged_blocks.padded(x, scale_layout), scale_layout),
            scale_layout.kinds[name],
        ),
        -1,
    )[group]
    return (
        f" (as without x{_index(np.unravel_index(tensor.at[group], x.shape))})"
        if without == got[name]
        else ""
    )


def _counterexample_among(
    answers: Answers, right: np.ndarray, candidate: Candidate
) -> list[Counterexample]:
    """The counterexample of the first response with a group that is not right."""
    begin = 0
    for a in answers.responses:
        wrong = ~right[begin : begin + a.amax.size]
        begin += a.amax.size
        if wrong.any():
            return _counterexample(
                PlantedTensor(x=a.x),
                a.output,
                candidate,
                answers.scale_layout,
                answers.quantizer.dtype,
            )
    return []


def _element_text(at: int, x: np.ndarray) -> str:
    index = np.unravel_index(at, x.shape)
    return f"x{_index(index)} = {show(x[index])}"


def _index(at: tuple) -> list[int]:
    return [int(i) for i in at]


def _listed(shapes: list[tuple[int, int]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)
