"""Check that a cast gives the same codes in other shapes and strides, and for 16-bit numbers."""

import numpy as np

from fp8ref.conformance.cast import behavior, outputs
from fp8ref.conformance.cast.behavior import AnyBehavior
from fp8ref.conformance.cast.outputs import Responses
from fp8ref.conformance.kit import arrays, finding
from fp8ref.conformance.kit.explain import has_code, simplest
from fp8ref.conformance.kit.subject import Subject, compare_each

SHAPES: tuple[tuple[int, ...], ...] = (
    *((), (0,), (1,), (3,), (127,), (1025,), ((1 << 20) + 13,)),
    *((33, 65), (64, 64), (3, 5, 17)),
)
"""Shapes of inputs: most sizes are no multiple of vectors, warps or blocks.

One has more than a million elements.
"""


def check_every_16_bit(
    subject: Subject, explained: Responses, cast_behavior: AnyBehavior
) -> list[finding.Counterexample]:
    """The simplest number of bfloat16 or float16, all NaN payloads among them, whose code is not
    the one of the behavior; none of another dtype. All NaN codes count as equal (C-5).

    Raises:   ConformanceError: as ``outputs.ask``.
    """
    source = explained.source
    if source not in ("bfloat16", "float16"):
        return []
    bits = np.arange(1 << 16, dtype=np.uint16)
    # given by its bits: a conversion from float32 would make one NaN of all
    output = outputs.ask(subject, bits.view(arrays.numpy_dtype(source)), source)
    if source == "float16":
        x = bits.view(np.float16)
    else:
        x = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    a = Responses(x=x, source=source, output=output, fmt=explained.fmt)
    differs = a.mismatches(cast_behavior, canonical=True)
    if not differs.any():
        return []
    return [a.counterexample(simplest(x, differs), cast_behavior, "by the behavior found")]


def check_shapes(
    subject: Subject, a: Responses, cast_behavior: AnyBehavior
) -> tuple[finding.Finding, list[finding.Counterexample]]:
    """Compare arrays of other shapes with the behavior found. A shape that raises is no fault."""

    def compare(shape: tuple[int, ...]) -> list[finding.Counterexample]:
        # at maps each element to the input in a.x whose code is known.
        at = np.arange(int(np.prod(shape))) % a.x.size
        output = outputs.ask(subject, a.x[at].reshape(shape), a.source)
        return _counterexample(a, at.reshape(shape), output, cast_behavior)

    accepted, refused, wrong = compare_each(SHAPES, compare)
    return finding.shapes_finding(accepted, refused, wrong, "the same codes"), wrong


def check_strides(
    subject: Subject, a: Responses, cast_behavior: AnyBehavior
) -> tuple[finding.Finding, list[finding.Counterexample]]:
    """Compare arrays that are not contiguous in memory with the behavior found."""
    # a step of 7: next to each other are unrelated numbers
    at = np.arange(33 * 65).reshape(33, 65) * 7 % a.x.size
    x = a.x[at]

    def compare(view: str) -> list[finding.Counterexample]:
        output = outputs.read(subject, subject.ask(x, a.source, view=view), x, a.source)
        return _counterexample(a, at, output, cast_behavior, f", {view} in memory")

    accepted, refused, wrong = compare_each(subject.views, compare)
    return finding.strides_finding(accepted, refused, wrong), wrong


def _counterexample(
    a: Responses,
    at: np.ndarray,
    output: outputs.Output,
    cast_behavior: AnyBehavior,
    layout_text: str = "",
) -> list[finding.Counterexample]:
    """The first element with another code than the behavior found gives; all NaN codes are one."""
    expected = behavior.encode(a.x, a.fmt, cast_behavior, source=a.source).astype(np.int64)[at]
    differs = a.canonical(output.codes(a.fmt)) != a.canonical(expected)
    differs &= has_code(a.x[at], a.fmt)
    if not differs.any():
        return []
    index = np.unravel_index(int(np.argmax(differs)), at.shape)
    value = a.x[at[index]]
    return [
        finding.Counterexample(
            f"x{list(map(int, index))} = {finding.show(value)} of x {list(at.shape)}{layout_text}",
            outputs.output_text(output, int(np.argmax(differs)), a.fmt),
            f"{outputs.code_text(expected[index], a.fmt)}, as elsewhere",
            "C-1",
            bits=(finding.bits_of(value, a.source),),
            dtype=a.source,
        )
    ]
