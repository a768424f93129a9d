"""Counterexamples: the simplest tensors on which a quantizer is not what was expected.

From an amax with a wrong answer, the smallest tensor is searched for, then its simplest number.
"""

import dataclasses
import itertools
from collections.abc import Mapping

import numpy as np

from fp8ref.conformance.inputs.dtypes import rounded
from fp8ref.conformance.inputs.kinds import AMAX_RANGES, NONZERO_RANGES
from fp8ref.conformance.kit.arrays import equal
from fp8ref.conformance.kit.explain import simplest
from fp8ref.conformance.kit.finding import Counterexample, bits_of, show
from fp8ref.conformance.quantizer import candidates, outputs, shrinking
from fp8ref.conformance.quantizer.candidates import (
    Agreement,
    Candidate,
    Comparison,
    Expected,
    by_group,
)
from fp8ref.conformance.quantizer.granularity import FoundGranularity
from fp8ref.conformance.quantizer.outputs import QuantizerOutput, ScaleLayout
from fp8ref.conformance.quantizer.policy_match import Answers, PolicyMatch
from fp8ref.formats import Format
from fp8ref.policy import ScalePolicy
from fp8ref.sim.quantize import cast, scaling

SHAPES = (
    *((1, 1), (1, 32), (32, 1), (1, 128), (128, 1)),
    *((4, 4), (16, 16), (32, 32), (128, 128), (256, 384)),
)
"""The shapes of counterexamples, in the order in which they are tried."""

_SHAPES_OF_ONES = (
    *((2, 2), (4, 4), (2, 32), (2, 64), (32, 32)),
    *((2, 256), (64, 64), (128, 128), (256, 256), (256, 384)),
)


def smallest_for_policy(comparison: Comparison, largest: float, kind: str) -> Counterexample | None:
    """The simplest tensor that differs from the candidate, found from a group's largest element.

    None if no tensor made of that element differs.
    """
    # negative only if positive shows nothing
    signs = (abs(largest), largest) if largest < 0 else (largest,)
    # The smallest shape first, then zeros before other numbers next to the largest.
    for shape in SHAPES:
        for beside, largest in itertools.product((False, True), signs):
            x = _single_value(shape, largest, comparison.dtype, beside=beside)
            if _first_difference(comparison, x) is not None:
                # No simpler number stands for a zero, a subnormal, an infinity or a NaN.
                ordinary = kind in ("ordinary", "tiny", "huge")
                number = _simplest_value(comparison, x) if ordinary else largest
                x = _single_value(shape, number, comparison.dtype, beside=beside)
                return _counterexample(comparison, x)
    return None


def smallest_for_granularity(comparison: Comparison) -> Counterexample | None:
    """The smallest tensor of ones with one 512 that shows another granularity or axis.

    None if no tensor does.
    """
    scale_layout, dtype = comparison.scale_layout, comparison.dtype
    for shape in _SHAPES_OF_ONES:
        x = np.ones(shape, np.float32)
        x[0, -1] = 512
        try:
            output, expected = comparison.quantizer.ask(x), comparison.expected(x)
        except ValueError:  # one of them does not take this shape
            continue
        # Ones become other codes where they share the scale of 512.
        differs = candidates.mismatches(output, expected, comparison.candidate)
        if differs.any():
            at = np.unravel_index(int(np.argmax(differs)), shape)
            return Counterexample(
                f"x {list(shape)} of ones, x[0, {shape[1] - 1}] = 512",
                f"{_element_text(output, at, expected.fmt)} at element {index_of(at)}",
                f"{_code_text(expected.codes[at], expected.fmt, output)} as "
                f"{scale_layout.granularity}, axis {scale_layout.axis}",
                "S-6",
                bits=(bits_of(1, dtype), bits_of(512, dtype)),
                dtype=dtype,
            )
    return None


def _single_value(
    shape: tuple[int, int], largest: float, dtype: str, *, beside: bool
) -> np.ndarray:
    """One number, followed by zeros or, with ``beside``, by other numbers, smaller in magnitude."""
    x = np.zeros(shape, np.float32)
    if beside and np.isfinite(largest):
        x.reshape(-1)[:] = np.float32(largest) * np.linspace(0.1, 0.95, x.size, dtype=np.float32)
    elif beside:
        x[:] = 1
    x.flat[0] = largest
    return rounded(x, dtype)


def _first_difference(
    comparison: Comparison, x: np.ndarray
) -> tuple[QuantizerOutput, scaling.Quantized, int] | None:
    """Output, expected output, and the first flat index that differs (0 for a scale).

    None if nothing differs, or one of them does not take x.
    """
    try:
        output, expected = comparison.quantizer.ask(x), comparison.expected(x)
    except ValueError:
        return None
    for name, kind in comparison.scale_layout.scales.items():
        ours, theirs = by_group(expected, kind)[0], output.scales[name].reshape(-1)[0]
        if ours != theirs and not (np.isnan(ours) and np.isnan(theirs)):
            return output, expected, 0
    differs = candidates.mismatches(output, expected, comparison.candidate)
    return (output, expected, int(np.argmax(differs))) if differs.any() else None


def _simplest_value(comparison: Comparison, x: np.ndarray) -> float:
    """The most ordinary number for which x, scaled with it, still differs."""
    largest = float(x.flat[0])
    for number in shrinking.numbers(largest):
        scaled = (x.astype(np.float64) * (float(number) / largest)).astype(np.float32)
        scaled.flat[0] = number
        tried = rounded(scaled, comparison.dtype)
        if _first_difference(comparison, tried) is not None:
            return float(tried.flat[0])
    return largest


def _counterexample(comparison: Comparison, x: np.ndarray) -> Counterexample:
    """The first difference of a tensor that differs."""
    difference = _first_difference(comparison, x)
    assert difference is not None
    output, expected, at = difference
    index, dtype = np.unravel_index(at, x.shape), comparison.dtype
    others = "" if at == 0 else f", and x{index_of(index)} = {show(x[index])}"
    alone = x.size > 1 and not np.any(x.reshape(-1)[1:])
    got = _element_text(output, index, expected.fmt)
    want = _code_text(expected.codes[index], expected.fmt, output)
    for name, kind in comparison.scale_layout.scales.items():
        got += f", {kind} {show(output.scales[name].flat[0])}"
        want += f", {kind} {show(by_group(expected, kind)[0])}"
    numbers = [x.flat[0]] if at == 0 else [x.flat[0], x[index]]
    return Counterexample(
        f"x {list(x.shape)} = {show(x.flat[0])}" + (", then zeros" if alone else others),
        got,
        f"{want} by {comparison.candidate.words}",
        comparison.candidate.clause,
        bits=tuple(bits_of(v, dtype) for v in numbers),
        dtype=dtype,
    )


def output_texts(
    output: QuantizerOutput,
    at: tuple,
    scales: Mapping[str, float],
    q: scaling.Quantized,
    group: int,
    scale_layout: ScaleLayout,
) -> tuple[str, str]:
    """One element and its scales as text: those of the quantizer, and those expected."""
    shown = [f", {name or 'scale'} {show(scale)}" for name, scale in scales.items()]
    kinds = scale_layout.scales.values()
    own = [f", {kind} {show(by_group(q, kind)[group])}" for kind in kinds]
    got = _element_text(output, at, q.fmt) + "".join(shown)
    return got, _code_text(q.codes[at], q.fmt, output) + "".join(own)


def index_of(at: tuple) -> list[int]:
    """An index of NumPy as text has it."""
    return [int(i) for i in at]


def _element_text(output: QuantizerOutput, at: tuple, fmt: Format) -> str:
    """One element of an output as text."""
    if output.codes is None:
        return show(output.tensor[at])
    return _code_text(output.codes[at], fmt, output)


def _code_text(code: np.uint8, fmt: Format, output: QuantizerOutput) -> str:
    """A code as text; next to an output of values it stands for a value."""
    value = show(cast.decode(np.array([code], np.uint8), fmt)[0])
    if output.codes is not None:
        return f"code 0x{int(code):02X} ({value})"
    return f"the value of code 0x{int(code):02X} ({value})"


def simplest_by_kind(
    kinds: np.ndarray, wrong: np.ndarray, scales: np.ndarray, largest: np.ndarray
) -> list[tuple[str, float]]:
    """For each kind of amax with a wrong group, the kind and its simplest largest element.

    scales    where the scales are wrong, which an element alone shows; codes may need another.
    """
    amaxes = []
    for i, kind in enumerate(AMAX_RANGES):
        among = wrong & (kinds == i)
        if among.any():
            by_scale = among & scales
            at = simplest(largest, by_scale if by_scale.any() else among)
            amaxes.append((kind, float(largest[at])))
    return amaxes


def unexpected_policy(
    matched: PolicyMatch, expected: ScalePolicy, fmt: Format, *, right_cast: bool
) -> list[Counterexample]:
    """Counterexamples to an expected policy to a format: to its scales and its codes.

    right_cast  False for a cast that is not that of S-5: scales alone are compared, if any.
    """
    answers, found_fmt = matched.answers, matched.answers.fmt
    plain = Candidate(policy=expected, scale_fmt=fmt, fmt=found_fmt)
    tried = [plain]
    if answers.flushing:
        tried = [plain, dataclasses.replace(plain, flushes=True)]
    agreements = [candidates.agreement(candidate, *answers.rows) for candidate in tried]
    agreed = max(agreements, key=answers.score)
    # The same scales are not enough: x * (1 / s) and x / s give other codes.
    right = agreed.both if right_cast else agreed.deciding
    if (right | ~answers.considered).all() and found_fmt is fmt:
        return []
    counterexamples = for_policy(matched, agreed)
    if found_fmt is not fmt:
        code = Counterexample(
            "x of ones", f"codes of {found_fmt}", f"codes of {fmt}", "F-2", bits=("0x3F800000",)
        )
        counterexamples.insert(0, code)
    return counterexamples


def unexpected_granularity(
    matched: PolicyMatch, group: FoundGranularity, expected: Expected, fmt: Format
) -> list[Counterexample]:
    """A counterexample to an expected granularity and axis, if another was found."""
    answers, axis = matched.answers, expected.axis
    same_axis = axis is None or group.axis in (None, axis)
    if same_axis and expected.granularity in (None, group.granularity):
        return []
    assert group.granularity is not None
    assert expected.policy is not None
    scale_layout = dataclasses.replace(
        answers.scale_layout,
        granularity=expected.granularity or group.granularity,
        axis=-1 if axis is None else axis,
    )
    candidate = Candidate(policy=expected.policy, scale_fmt=fmt, fmt=answers.fmt)
    comparison = dataclasses.replace(answers.comparison(candidate), scale_layout=scale_layout)
    counterexample = smallest_for_granularity(comparison)
    return [counterexample] if counterexample else []


def transposed_scales(output: QuantizerOutput, scale_layout: ScaleLayout) -> list[Counterexample]:
    """Returned scales that are transposed, and so would broadcast to the wrong blocks."""
    shape = output.tensor.shape
    x, dtype = f"x {list(shape)}", output.dtype
    expected = f"{list(scale_layout.shape(shape))}, each scale at the place of its block"
    shapes = [output.scales[name].shape for name in scale_layout.kinds]
    transposed = [s for s in shapes if scale_layout.is_transposed(s, shape)]
    return [
        Counterexample(x, f"scales {list(s)}", expected, "S-6", dtype=dtype) for s in transposed
    ]


def for_policy(matched: PolicyMatch, agreed: Agreement) -> list[Counterexample]:
    """A counterexample for each kind of amax with a wrong group.

    Of kinds that the same deviation explains, only the first: one cause is shown once. So it is of
    finite amaxes above zero where no deviation is found.
    """
    answers = matched.answers
    largest = np.concatenate([a.largest for a in answers.responses])
    kind = np.concatenate([a.kind for a in answers.responses])
    wrong = matched.mismatches(agreed)
    unnamed = not matched.agreements and not matched.deviation
    counterexamples: list[Counterexample] = []
    for k, a in simplest_by_kind(kind, wrong, ~agreed.deciding, largest):
        # Shown already: the same policy and deviation explain these groups too. Without a
        # deviation, what is wrong at an ordinary amax is not told from what is at others.
        explained = matched.explained[wrong & (kind == AMAX_RANGES.index(k))].all()
        if counterexamples and (explained or (unnamed and k in NONZERO_RANGES)):
            continue
        shown = smallest_for_policy(answers.comparison(agreed.candidate), a, k)
        counterexamples += [shown] if shown is not None and shown not in counterexamples else []
    if not counterexamples and wrong.any():
        counterexamples.append(_in_context(matched, agreed))
    return counterexamples


def _in_context(matched: PolicyMatch, agreed: Agreement) -> Counterexample:
    """The first wrong group in the tensor that was asked, if no group shows the fault by itself."""
    scale_layout, dtype = matched.answers.scale_layout, matched.answers.quantizer.dtype
    begin = 0
    for a in matched.answers.responses:
        wrong = matched.mismatches(agreed)[begin : begin + a.amax.size]
        begin += a.amax.size
        if wrong.any():
            break
    group = int(np.argmax(wrong))
    expected = agreed.candidate.quantize(a.x, scale_layout)
    inside = a.group == group
    differs = inside & candidates.mismatches(a.output, expected, agreed.candidate)
    at = np.unravel_index(int(np.argmax(differs if differs.any() else inside)), a.x.shape)
    scales = {n: outputs.per_group(a, n, scale_layout)[group] for n in scale_layout.kinds}
    got, expected_text = output_texts(a.output, at, scales, expected, group, scale_layout)
    return Counterexample(
        f"x{index_of(at)} = {show(a.x[at])} of x {list(a.x.shape)}, whose group "
        f"has amax {show(a.amax[group])}, next to groups of every kind",
        got,
        f"{expected_text} by {agreed.candidate.words}",
        "S-6",
        bits=(bits_of(a.x[at], dtype),),
        dtype=dtype,
    )


def misnamed_arrays(answers: Answers, policy: ScalePolicy) -> list[Counterexample]:
    """Arrays named scale, scale_inv or amax that hold something else.

    Policies that make scale_inv first, or that divide, may call a scale_inv ``scale``.
    """
    counterexamples = []
    responses, scale_layout = answers.responses, answers.scale_layout
    for name, kind in scale_layout.kinds.items():
        plain = name.strip("_").lower()
        stores_scale = policy.stored == "scale" and not policy.makes_scale_inv
        named = plain == "scale_inv" or (plain == "scale" and stores_scale)
        if named and kind != plain:
            counterexamples.append(_misnamed(name, f"a {kind}", f"a {plain}", "S-1"))
    for name in responses[0].output.scales:
        largest = np.concatenate([outputs.per_group(a, name, scale_layout) for a in responses])
        amax = np.concatenate([a.amax for a in responses])
        if name.strip("_").lower() == "amax" and not np.array_equal(largest, amax, equal_nan=True):
            at = simplest(amax, ~equal(largest, amax))
            wanted = f"{show(amax[at])}, the largest magnitude of its group"
            counterexamples.append(_misnamed(name, show(largest[at]), wanted, "S-2"))
    return counterexamples


def _misnamed(name: str, got: str, expected: str, clause: str) -> Counterexample:
    return Counterexample(f"its output {name!r}", got, expected, clause)
