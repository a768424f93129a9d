"""Check that the identified policy also holds for other shapes, dtypes and strides.

In each shape the largest element, NaNs and infinities are planted in turn: last in each group, inside
of each group, and for one shape in many places. Kernels go wrong there: at tails, lanes and blocks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from fp8ref import policy as policy_data
from fp8ref.conformance import subject as subjects
from fp8ref.conformance.finding import Counterexample, Finding, bits_of, show, strides_finding
from fp8ref.conformance.inputs import quantizer_inputs
from fp8ref.conformance.inputs.dtypes import rounded
from fp8ref.conformance.quantizer import candidates, counterexamples, outputs, policy_match
from fp8ref.conformance.quantizer.candidates import Candidate
from fp8ref.conformance.quantizer.granularity import noise
from fp8ref.conformance.quantizer.outputs import Quantizer, QuantizerOutput, Response, ScaleLayout, arrays_of
from fp8ref.conformance.subject import VIEWS, RefusedError
from fp8ref.granularity import by_name
from fp8ref.policy import ScalePolicy
from fp8ref.sim import scaling

SHAPES = ((1, 128), (3, 256), (128, 128), (131, 128), (3, 28672), (1031, 1152))
"""Shapes whose K is as S-6 asks.

Among them are one row, a square, rows that no block divides, long rows, and over a million
elements.
"""

RAGGED = ((1, 1), (2, 3), (3, 17), (4, 1000))
"""Shapes for scales of lines and of whole tensors, where K is free."""

_LARGE = 1 << 20
_WHOLE = (20, 264)
# What is planted in each group: its value at the last element, and at one inside
_PLANTED = {
    "the largest last": (4.0, None),
    "the largest inside": (None, 4.0),
    "NaN last": (np.nan, None),
    "NaN inside": (None, np.nan),
    "an infinity last": (np.inf, None),
    "an infinity inside": (None, np.inf),
    "two NaNs": (np.nan, np.nan),
    "a NaN inside and an infinity last": (np.inf, np.nan),
}


@dataclass(frozen=True, kw_only=True)
class PlantedTensor:
    """A tensor x, float32 [M, K], possibly with something planted in each group.

    planted  what, in words; at: for each group, the flat index of the planted element.
    """

    x: np.ndarray
    planted: str = ""
    at: np.ndarray | None = None

    def __str__(self) -> str:
        return f"x {list(self.x.shape)}" + (f" in [1, 2) / 256, {self.planted} in each group" if self.planted else "")


def check(
    quantizer: Quantizer, candidate: Candidate, scale_layout: ScaleLayout, shape: tuple[int, int]
) -> tuple[list[Finding], list[Counterexample]]:
    """Check the dtypes, and in each the shapes and strides, up to the first counterexample.

    shape  of the tensors by which the policy of another dtype is checked.
    """
    findings, found = list[Finding](), list[Counterexample]()
    by_dtype = {quantizer.dtype: candidate}
    for dtype in (quantizer.dtype, *(d for d in ("bfloat16", "float16") if d != quantizer.dtype)):
        other = replace(quantizer, dtype=dtype)
        if dtype != quantizer.dtype:
            of, finding, wrong = check_dtype(other, candidate, scale_layout, shape)
            findings, found = [*findings, finding], [*found, *wrong]
            if of is None:
                continue
            by_dtype[dtype] = of
        subjects.check_no_reuse(other.subject, noise(), noise()[::-1], dtype, arrays_of)
        for check_one in (check_shapes, check_strides):
            if not found:
                more, found = check_one(other, by_dtype[dtype], scale_layout, large=dtype == quantizer.dtype)
                findings += [f if dtype == quantizer.dtype else replace(f, what=f"{f.what} of {dtype}") for f in more]
    return findings, found


def check_shapes(
    quantizer: Quantizer, candidate: Candidate, scale_layout: ScaleLayout, *, large: bool = True
) -> tuple[list[Finding], list[Counterexample]]:
    """Compare tensors of other shapes with the candidate.

    A NaN that XLA's own max loses is reported, and no fault (P-3).
    """
    taken, refused, found, lost = [], [], list[Counterexample](), list[Counterexample]()
    sizes = [*(RAGGED if by_name(scale_layout.granularity).reduced is None else ()), *(SHAPES if large else SHAPES[:-1])]
    sizes += [_WHOLE] if scale_layout.granularity == "tensorwise" and not quantizer.memory else []
    for rows, columns in sizes:
        shape = (columns, rows) if scale_layout.axis == 0 else (rows, columns)
        try:
            for tensor in _tensors(shape, scale_layout, quantizer):
                unexplained = _counterexample(tensor, quantizer.ask(tensor.x), candidate, scale_layout, quantizer.dtype)
                if unexplained and "NaN" in tensor.planted and policy_match.loses_nan(quantizer, tensor.x, scale_layout):
                    lost = lost or unexplained
                else:
                    found = found or unexplained
        except RefusedError:
            refused.append(shape)
        else:
            taken.append(shape)
    evidence = (
        f"{_listed(taken)}: the same policy, also with the largest element, a NaN or an infinity of either sign last in its group or inside"
    )
    evidence += f"; it raises for {_listed(refused)}" if refused else ""
    text = "not all alike" if found else "all alike"
    findings = [Finding(what="shapes", value=not found, words=text, evidence=str(found[0]) if found else evidence)]
    findings += [Finding(what="NaN inside", value=False, words="lost where XLA's max loses it", evidence=str(w)) for w in lost]
    return findings, found


def check_strides(
    quantizer: Quantizer, candidate: Candidate, scale_layout: ScaleLayout, *, large: bool = True
) -> tuple[list[Finding], list[Counterexample]]:
    """Compare tensors that are not contiguous in memory with the candidate."""
    tensor = _random((128, 256), quantizer)
    taken, refused, found = [], [], list[Counterexample]()
    for view in VIEWS if quantizer.subject.framework != "jax" else ():
        try:
            output = quantizer.ask(tensor.x, view=view)
        except RefusedError:
            refused.append(view)
            continue
        taken.append(view)
        found = found or [
            replace(w, input=f"{w.input}, {view} in memory")
            for w in _counterexample(tensor, output, candidate, scale_layout, quantizer.dtype)
        ]
    return [strides_finding(taken, refused, found)], found


def check_dtype(
    quantizer: Quantizer, candidate: Candidate, scale_layout: ScaleLayout, shape: tuple[int, int]
) -> tuple[Candidate | None, Finding, list[Counterexample]]:
    """Find the candidate for another dtype: the same policy, or one that computes in that dtype (S-13).

    None if the dtype is not taken, or no such policy agrees.
    """
    dtype = quantizer.dtype
    try:
        quantizer.once(np.ones(shape, np.float32))
        responses = outputs.ask(
            quantizer, quantizer_inputs.identifying(candidate.fmt, dtype), shape, scale_layout.granularity, scale_layout.axis
        )
    except RefusedError as error:
        return None, Finding(what=f"from {dtype}", value=None, words="not taken", evidence=str(error)), []
    same_decisions = [p for p in policy_data.POLICIES.values() if _decisions(p) == _decisions(candidate.policy)]
    agreements = [
        candidates.agreement(replace(candidate, policy=p), responses, scale_layout)
        for p in sorted(same_decisions, key=lambda p: p != candidate.policy)
    ]
    considered = policy_match.considered(quantizer, responses, scale_layout)
    agreed = next((a.candidate for a in agreements if (a.both | ~considered).all()), None)
    if agreed:
        evidence = f"{considered.sum()} groups match it"
        return agreed, Finding(what=f"from {dtype}", value=agreed.policy.name, evidence=evidence), []
    wrong = _counterexample_among(responses, agreements[0].both | ~considered, candidate, scale_layout, dtype)
    finding = Finding(what=f"from {dtype}", value=None, words="something else", evidence=str(wrong[0]))
    stated = dtype == "bfloat16" or candidate.policy.stored == "scale"  # S-13 leaves quotients in float16 open
    return None, finding, wrong if stated else []


def _decisions(policy: ScalePolicy) -> dict[str, Any]:
    """All fields of a policy except its name and what it computes in."""
    return {f.name: getattr(policy, f.name) for f in fields(policy) if f.name not in ("name", "compute")}


def _tensors(shape: tuple[int, int], scale_layout: ScaleLayout, quantizer: Quantizer) -> Iterator[PlantedTensor]:
    """Tensors with values planted in each group, then in many places, then random ones."""
    rng = np.random.default_rng(0)
    group = quantizer_inputs.groups(shape, scale_layout.granularity, scale_layout.axis).reshape(-1)
    order = np.argsort(group, kind="stable")
    size = np.bincount(group)
    end = np.searchsorted(group[order], np.arange(size.size), side="right") - 1
    last, inside = order[end], order[end - (size * rng.uniform(0, 1, size.size)).astype(np.int64)]
    # order lists the elements group by group, so that end is the last element of each group.
    for name, (at_last, at_inside) in _PLANTED.items():
        special = not {at_last, at_inside} <= {4.0, None}
        # With a memory, a quantizer may keep scales after these: one call cannot tell.
        if not (special and quantizer.memory) and (group.size < _LARGE or name == "the largest last"):
            planted = [(at, value) for at, value in ((last, at_last), (inside, at_inside)) if value is not None]
            yield _with(shape, rng, name, planted)
    if shape in (_WHOLE, _WHOLE[::-1]):
        # 35 shares no divisor with 32, 128 and 264: it meets all lanes and blocks, most columns.
        # Then the start of every row.
        for i, at in enumerate((*range(0, group.size, 35), *range(0, group.size, shape[1]))):
            yield _with(shape, rng, f"the largest at {at}", [(np.array([at]), 4.0 if i % 2 else -4.0)])
    yield _random(shape, quantizer)


def _random(shape: tuple[int, int], quantizer: Quantizer) -> PlantedTensor:
    """Random numbers of few bits, whose products with a scale are often ties."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-4, 5, shape)).astype(np.float32)
    return PlantedTensor(x=rounded(rounded(x, "bfloat16"), quantizer.dtype))


def _with(shape: tuple[int, int], rng: np.random.Generator, name: str, planted: list[tuple[np.ndarray, float]]) -> PlantedTensor:
    """Small random numbers with values planted at flat indices, of alternating sign."""
    x = ((1 + rng.integers(0, 8, shape) / 8) / 256).astype(np.float32)
    for at, value in planted:
        sign = np.where(np.arange(at.size) % 2, -1, 1) * np.copysign(1, value)
        x.reshape(-1)[at] = np.copysign(np.float32(value if not np.isfinite(value) else value / 256), sign)
    return PlantedTensor(x=x, planted=name, at=planted[0][0])


def _counterexample(
    tensor: PlantedTensor, output: QuantizerOutput, candidate: Candidate, scale_layout: ScaleLayout, dtype: str
) -> list[Counterexample]:
    """The first element whose code or scale is not the candidate's; empty if there is none."""
    x = tensor.x
    group = quantizer_inputs.groups(x.shape, scale_layout.granularity, scale_layout.axis)
    # kind and largest play no part in comparing scales and codes.
    none = np.zeros(int(group.max()) + 1, np.float32)
    response = Response(x=x, group=group, kind=np.zeros(none.size, np.int64), largest=none, output=output)
    expected = candidate.quantize(x, scale_layout)
    differs = candidates.mismatches(output, expected, candidate)
    differs |= ~candidates.equal_scales(response, expected, scale_layout)[group]
    for name in (n for n, kind in scale_layout.kinds.items() if kind == "amax"):
        amax = np.reshape(scaling.amax(x, scale_layout.granularity, axis=scale_layout.axis), -1)
        differs |= ~np.isclose(outputs.per_group(response, name, scale_layout), amax, rtol=0, atol=0, equal_nan=True)[group]
    if not differs.any():
        return []
    at = np.unravel_index(int(np.argmax(differs)), x.shape)
    place = "" if tensor.at is None else f" as {_element_text(tensor.at[group[at]], x)}"
    got = {name: outputs.per_group(response, name, scale_layout)[group[at]] for name in scale_layout.kinds}
    got_text, wanted_text = counterexamples.output_texts(output, at, got, expected, group[at], scale_layout)
    return [
        Counterexample(
            input=f"x{_index(at)} = {show(x[at])} of {tensor}{place}",
            bits=(bits_of(x[at], dtype),),
            dtype=dtype,
            got=got_text + _as_without(tensor, candidate, scale_layout, group[at], got),
            expected=f"{wanted_text} by {candidate.policy.name}",
            clause="S-2, S-5, S-6",
        )
    ]


def _as_without(tensor: PlantedTensor, candidate: Candidate, scale_layout: ScaleLayout, group: int, got: Mapping[str, float]) -> str:
    """In words, whether the kernel overlooked the planted element: the scale is as without it."""
    name = scale_layout.scale
    if tensor.at is None or name is None:
        return ""
    x = tensor.x.copy()
    x.reshape(-1)[tensor.at] = 0
    without = np.reshape(getattr(candidate.quantize(x, scale_layout), scale_layout.kinds[name]), -1)[group]
    return f" (as without x{_index(np.unravel_index(tensor.at[group], x.shape))})" if without == got[name] else ""


def _counterexample_among(
    responses: list[Response], right: np.ndarray, candidate: Candidate, scale_layout: ScaleLayout, dtype: str
) -> list[Counterexample]:
    """The counterexample of the first response with a group that is not right."""
    begin = 0
    for a in responses:
        wrong = ~right[begin : begin + a.amax.size]
        begin += a.amax.size
        if wrong.any():
            return _counterexample(PlantedTensor(x=a.x), a.output, candidate, scale_layout, dtype)
    return []


def _element_text(at: int, x: np.ndarray) -> str:
    index = np.unravel_index(at, x.shape)
    return f"x{_index(index)} = {show(x[index])}"


def _index(at: tuple) -> list[int]:
    return [int(i) for i in at]


def _listed(shapes: list[tuple[int, int]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)
