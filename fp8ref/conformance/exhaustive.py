"""All float32 inputs, in pieces: of every library's casts and scales, or of one custom cast.

``run`` shares tasks among processes and tallies where a library differs: ``fp8ref certify``.
``simplest_difference`` asks one function in this process: ``fp8ref conform --exhaustive``.
"""

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import TypeVar

import numpy as np

from fp8ref.conformance.inputs import cast_inputs
from fp8ref.conformance.inputs.kinds import CAST_RANGES
from fp8ref.conformance.kit.arrays import same_bits
from fp8ref.conformance.kit.explain import simplest
from fp8ref.conformance.libraries import profiles as libraries
from fp8ref.formats import FP8_FORMATS, Format
from fp8ref.shared import console
from fp8ref.shared import parents as parent_process
from fp8ref.sim import threads
from fp8ref.sim.kernels.compiled import compiled
from fp8ref.sim.quantize import cast, scales

_Description = TypeVar("_Description")

INPUTS = 1 << 32  # how many float32 numbers there are, by their bits

PIECE = 1 << 17  # inputs at a time, whose float64 temporaries stay in a cache


@dataclass(frozen=True, kw_only=True)
class Task:
    """A part of the inputs: bits begin, begin + stride, ... below end; or ``edges_and_16_bit``."""

    kind: str  # "cast" or a scale policy
    fmt: str
    begin: int = 0
    end: int = 0
    stride: int = 1
    special: bool = False


@dataclass
class Tally:
    """Counts of a part of the inputs.

    compared  how many inputs, by (library, kind of input).
    differ    how many differ, by (library, kind of input, simulator's code, library's code).
    first     an example in words, by (library, kind of input).
    """

    compared: Counter = field(default_factory=Counter)
    differ: Counter = field(default_factory=Counter)
    first: dict = field(default_factory=dict)

    def add(self, other: "Tally") -> None:
        """Add the counts of another part; the first example of each kind stays."""
        self.compared += other.compared
        self.differ += other.differ
        for key, example in other.first.items():
            self.first.setdefault(key, example)


def pieces(begin: int, end: int, *, stride: int = 1) -> Iterator[np.ndarray]:
    """The bits begin, begin + stride, ... below end, at most PIECE at a time; uint32."""
    step = PIECE * stride
    for first in range(begin, end, step):
        # int64 until here: the last piece ends at 2^32, which uint32 does not hold
        yield np.arange(first, min(first + step, end), stride, dtype=np.int64).astype(np.uint32)


def simplest_difference(
    differing: Callable[[np.ndarray], tuple[np.ndarray, Callable[[int], _Description]]],
    *,
    inputs: int | None = None,
) -> tuple[int, _Description | None]:
    """How many of all float32 inputs differ, and the simplest of them, described.

    differing  x float32 [n] -> where x differs, bool [n], and a function that describes the
               difference at an index.
    inputs     how many, from bits 0 on; by default all.
    """
    inputs = INPUTS if inputs is None else inputs
    count = 0
    best: tuple[np.float32, _Description] | None = None
    with console.bar("all float32 inputs", -(-inputs // PIECE)) as advance:
        for bits in pieces(0, inputs):
            x = bits.view(np.float32)
            differs, describe = differing(x)
            if differs.any():
                count += int(differs.sum())
                at = simplest(x, differs)
                # described at once: a description may need answers that the next piece replaces
                if best is None or simplest(np.array([best[0], x[at]]), np.ones(2, bool)) == 1:
                    best = x[at], describe(at)
            advance(f"{count:,} unlike" if count else "")
    return count, best[1] if best else None


def run(tasks: Sequence[Task], workers: int) -> Iterator[tuple[Task, Tally]]:
    """Each task with its tally, in order, by so many processes."""
    if workers == 1:
        yield from ((task, examine(task)) for task in tasks)
        return
    # Fresh interpreters of one thread each: XLA and torch would otherwise start a pool in each.
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_one_thread
    ) as pool:
        yield from zip(tasks, pool.map(examine, tasks), strict=True)


def _one_thread() -> None:
    parent_process.follow_parent()
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false"
    libraries.one_thread()


def examine(task: Task) -> Tally:
    """Run every library on a task's inputs, on one thread, and tally its differences."""
    fmt, tally = FP8_FORMATS[task.fmt], Tally()
    with threads.using(1):
        for bits in _inputs(task, fmt):
            if task.kind == "cast":
                tally.add(_examine_casts(bits, fmt))
            else:
                tally.add(_examine_scales(bits, fmt, task.kind))
    return tally


def _inputs(task: Task, fmt: Format) -> Iterator[np.ndarray]:
    """The task's inputs as float32 bits; an amax has no sign."""
    if task.special:
        bits = cast_inputs.edges_and_16_bit(fmt).view(np.uint32)
        yield bits if task.kind == "cast" else bits & np.uint32(0x7FFFFFFF)
    else:
        yield from pieces(task.begin, task.end, stride=task.stride)


def _examine_casts(bits: np.ndarray, fmt: Format) -> Tally:
    x, tally = bits.view(np.float32), Tally()
    encode = functools.partial(cast.encode, x, fmt)
    specified = {kind: encode(saturate=kind) for kind in (True, False)}
    kind = np.empty(bits.size, np.uint8)
    counts = _classify(bits, specified[False], fmt.max_code, kind)
    for library, function in libraries.casts(fmt).items():
        library_codes, expected = function.run(x), specified[function.saturates]
        compared = {(library, CAST_RANGES[k]): int(n) for k, n in enumerate(counts) if n}
        tally.compared.update(compared)
        if np.array_equal(library_codes, expected):
            continue
        for k, code, other, count, index in _run_lengths(kind, expected, library_codes).tolist():
            codes = f"0x{code:02X}", f"0x{other:02X}"
            tally.differ[library, CAST_RANGES[k], *codes] += count
            tally.first.setdefault((library, CAST_RANGES[k]), _example(bits[index], *codes))
    return tally


@compiled
def _classify(bits, unsaturated, max_code, kind):
    """Write each input's index of CAST_RANGES to kind [n]; return how many there are of each."""
    counts = np.zeros(4, np.int64)
    for i in range(bits.size):
        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
        special_range = 2 if magnitude == 0x7F800000 else 3 if magnitude > 0x7F800000 else 1
        # unsaturated, what rounds above max becomes Inf or NaN, whose codes are above max_code
        kind[i] = special_range if (unsaturated[i] & 0x7F) > max_code else 0
        counts[kind[i]] += 1
    return counts


@compiled
def _run_lengths(kind, expected, codes):
    """Runs of neighbors that differ alike: (kind, expected code, found code, count, first index).

    Neighboring inputs nearly always differ alike, so that a few rows stand for millions of inputs.
    """
    runs = np.empty((kind.size, 5), np.int64)
    n = 0
    for i in range(kind.size):
        if expected[i] != codes[i]:
            last = runs[max(n - 1, 0)]
            alike = last[0] == kind[i] and last[1] == expected[i] and last[2] == codes[i]
            if n and alike:
                last[3] += 1
            else:
                row = runs[n]
                row[0], row[1], row[2], row[3], row[4] = kind[i], expected[i], codes[i], 1, i
                n += 1
    return runs[:n]


def _examine_scales(bits: np.ndarray, fmt: Format, policy: str) -> Tally:
    amax, tally = bits.view(np.float32), Tally()
    expected = scales.scale_from_amax(amax, fmt, policy)
    for library, function in libraries.scales(fmt, policy).items():
        library_scales = function.run(amax)
        tally.compared[library, "scale"] = amax.size
        differ = ~same_bits(library_scales, expected)
        if differ.any():
            index = int(np.argmax(differ))
            tally.differ[library, "scale", "", ""] = int(differ.sum())
            both = repr(expected[index]), repr(library_scales[index])
            tally.first[library, "scale"] = _example(bits[index], *both)
    return tally


def _example(bits, specified: str, got: str) -> str:
    return (
        f"specified {specified}, found {got}; input {np.uint32(bits).view(np.float32):.9g} "
        f"(float32 bits 0x{int(bits):08X})"
    )
