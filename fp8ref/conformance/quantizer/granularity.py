"""Identify a quantizer's granularity and memory, by what one large element changes.

Granularity: the elements whose codes change share its scale. Memory: the later calls that change.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fp8ref.conformance.kit.finding import Counterexample, Finding, bits_of, listed
from fp8ref.conformance.kit.subject import SHAPE, ConformanceError, compare_each
from fp8ref.conformance.quantizer.outputs import Quantizer, QuantizerOutput
from fp8ref.spec.granularity import GRANULARITIES, blocks

_AT = (130, 200)  # its blocks are others for every granularity and axis
_OTHER_SHAPES = ((1, 128), (128, 1), (3, 256))  # no whole tiles of rows
_LARGE = 2.0**40
_CALLS = 20  # more than the amax histories in use, of 16


class FoundGranularity(NamedTuple):
    """The granularity and axis found.

    granularity  None if none of the specification's fits; the finding then names the block.
    axis         None where the granularity does not depend on it.
    """

    granularity: str | None
    axis: int | None
    finding: Finding


def identify_memory(quantizer: Quantizer) -> tuple[Quantizer, Finding]:
    """Find how many earlier calls have a part in the scale.

    Raises:   ConformanceError: repeated calls with one tensor do not settle, the codes are those of
              an earlier call, or more than 20 calls are remembered.
    """
    small, large = np.ones(SHAPE, np.float32), np.full(SHAPE, 1024, np.float32)
    _steady_output(quantizer, noise(), "x random in [1, 2)")
    steady = _steady_output(quantizer, small, "x of ones")
    # After one call of 1024s, count the calls of ones until the output settles again.
    quantizer.once(large)
    after = [quantizer.once(small) for _ in range(_CALLS)]
    unlike = [i for i, output in enumerate(after) if not equal_outputs(output, steady)]
    count = unlike[-1] + 1 if unlike else 0
    # A scale of an earlier call is a memory. Codes of an earlier call are a fault.
    last = after[-1].tensor.tobytes()
    if count and last == quantizer.once(small / 2).tensor.tobytes():
        raise ConformanceError(
            f"a quantizer gives the codes of its own input; {quantizer.subject.name}, called "
            f"with x of 0.5s {list(SHAPE)} after x of ones, gives the codes of the ones. A "
            "scale may come from an earlier call, but a code may not. Quantize the x that is "
            "given."
        )
    if not count:
        shapes = _check_other_shapes(quantizer)
        evidence = f"a call of ones gives the same after a call of 1024s{shapes}"
        return quantizer, Finding("memory", 0, evidence, words="none")
    if count == _CALLS:
        raise ConformanceError(
            f"{quantizer.subject.name} remembers more than {_CALLS} calls: after x of 1024s, "
            f"its output for x of ones {list(SHAPE)} still differs {_CALLS} calls later. Give "
            "it a shorter history."
        )
    witness = Counterexample(
        "x of ones, after x of 1024s",
        _text(after[0]),
        f"{_text(steady)}, as after x of ones alone",
        "S-2",
        bits=(bits_of(1, quantizer.dtype), bits_of(1024, quantizer.dtype)),
        dtype=quantizer.dtype,
    )
    evidence = (
        f"{witness}; from call {count + 1} on the output is constant. One call cannot show "
        "whether it takes the maximum of earlier amaxes, or what it keeps"
    )
    words = f"stale: from {count} earlier call{'s' if count > 1 else ''}"
    finding = Finding("memory", count, evidence, words=words, witness=witness)
    return replace(quantizer, memory=count), finding


def _check_other_shapes(quantizer: Quantizer) -> str:
    """Ask for ones of one shape after ones of another, and after 1024s; say for which shapes.

    Raises:   ConformanceError: numbers of the earlier call have a part in the later one.
    """

    def compare(pair: tuple[tuple[int, int], tuple[int, int]]) -> list[Counterexample]:
        answers = []
        for number in (1, 1024):
            quantizer.once(np.full(pair[0], number, np.float32))
            answers.append(quantizer.once(np.ones(pair[1], np.float32)))
        if equal_outputs(*answers):
            return []
        raise ConformanceError(
            f"{quantizer.subject.name} keeps numbers of an earlier call with another shape: x of "
            f"ones {list(pair[1])} gives {_text(answers[1])} after x of 1024s {list(pair[0])}, and "
            f"{_text(answers[0])} after ones. Clear the memory that it pads with."
        )

    accepted = compare_each([(SHAPE, s) for s in _OTHER_SHAPES], compare)[0]
    return f", of {listed(pair[1] for pair in accepted)} too" if accepted else ""


def noise() -> np.ndarray:
    """Random numbers in [1, 2) that are exact in every dtype; float32 of SHAPE."""
    return (1 + np.random.default_rng(0).integers(0, 128, SHAPE) / 128).astype(np.float32)


def _steady_output(quantizer: Quantizer, x: np.ndarray, tensor_name: str) -> QuantizerOutput:
    """The output on which repeated calls with x settle; ConformanceError if they do not."""
    for _ in range(_CALLS):
        quantizer.once(x)
    before, now = quantizer.once(x), quantizer.once(x)
    if equal_outputs(before, now):
        return now
    at = np.unravel_index(int(np.argmax(before.tensor != now.tensor)), SHAPE)
    raise ConformanceError(
        f"{quantizer.subject.name} does not repeat itself: after {_CALLS} calls with {tensor_name} "
        f"{list(SHAPE)}, two more calls gave {before.tensor[at]} and {now.tensor[at]} for "
        f"x{[int(i) for i in at]} = {x[at]:g} (bits {bits_of(x[at], quantizer.dtype)}). Make "
        "its result depend on its input alone."
    )


def identify_granularity(quantizer: Quantizer) -> FoundGranularity:
    """Find the block whose codes change when one element becomes large, of either sign."""
    x = noise()
    before = quantizer.ask(x)
    # An amax that is the negated smallest element, by mistake, changes only with a negative one.
    for large in (_LARGE, -_LARGE):
        changed = x.copy()
        changed[_AT] = large
        different = before.tensor != quantizer.ask(changed).tensor
        different[_AT] = True
        if different.sum() > 1:
            break
    rows, columns = (np.flatnonzero(different.any(axis=axis)) for axis in (1, 0))
    # The changed elements should fill their bounding box, and that be a block of some granularity.
    box = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
    whole = bool(different[box].all())
    evidence = f"x {list(SHAPE)} in [1, 2): x{list(_AT)} = {'-' if large < 0 else ''}2^40 changes "
    evidence += f"rows {rows[0]} to {rows[-1]}, columns {columns[0]} to {columns[-1]}"
    for name in GRANULARITIES:
        for axis in (-1, 0):
            sizes = blocks(name, SHAPE, axis)
            begins = [at // size * size for at, size in zip(_AT, sizes, strict=True)]
            expected = tuple(slice(i, i + size) for i, size in zip(begins, sizes, strict=True))
            if whole and expected == box:
                free = GRANULARITIES[name].other == GRANULARITIES[name].reduced  # squares
                finding = Finding("granularity", name, evidence)
                return FoundGranularity(name, None if free else axis, finding)
    alone = different.sum() == 1
    text = "no scale of its own amax"
    if not alone:
        text = f"blocks of {len(rows)} x {len(columns)}" + ("" if whole else ", not all of them")
    return FoundGranularity(None, None, Finding("granularity", None, evidence, words=text))


def equal_outputs(a: QuantizerOutput, b: QuantizerOutput) -> bool:
    """Whether two outputs are equal, bit for bit."""
    scales = [(scale, b.scales.get(name)) for name, scale in a.scales.items()]
    pairs = [(a.tensor, b.tensor), *scales]
    return all(
        q is not None and p.shape == q.shape and p.tobytes() == q.tobytes() for p, q in pairs
    )


def _text(output: QuantizerOutput) -> str:
    """The first element and the first of each array of scales, as text."""
    first = output.tensor.flat[0]
    shown = f"code 0x{int(first):02X}" if output.codes is not None else f"{first:g}"
    return shown + "".join(
        f", {name} {scale.flat[0]:.9g}" for name, scale in output.scales.items() if scale.size
    )
