"""What a certificate does with a part of its inputs: run every library on them, and count where it differs from the simulator."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numba import njit

from fp8ref.conformance import libraries
from fp8ref.conformance.inputs import cast_inputs
from fp8ref.conformance.inputs.kinds import CAST_RANGES
from fp8ref.formats import FP8_FORMATS, Format
from fp8ref.sim import cast, scales, threads

PIECE = 1 << 17  # inputs at a time


@dataclass(frozen=True, kw_only=True)
class Task:
    """A part of the inputs, and what is done with it: bits begin, begin + stride, ... below end, or the inputs of ``special``."""

    kind: str  # "cast" or a scale policy
    fmt: str
    begin: int = 0
    end: int = 0
    stride: int = 1
    special: bool = False


@dataclass
class Tally:
    """By (subject, kind of input, simulator's code, subject's code) for differing codes; by (subject, kind of input) for what was compared."""

    compared: Counter = field(default_factory=Counter)
    differ: Counter = field(default_factory=Counter)
    first: dict = field(default_factory=dict)

    def add(self, other: "Tally") -> None:
        """Count what another part counted; the first example of each kind stays."""
        self.compared += other.compared
        self.differ += other.differ
        for key, example in other.first.items():
            self.first.setdefault(key, example)


def examine(task: Task) -> Tally:
    """Compare one part of the inputs, on one thread."""
    fmt, tally = FP8_FORMATS[task.fmt], Tally()
    with threads.using(1):
        for bits in _inputs(task, fmt):
            tally.add(_examine_casts(bits, fmt) if task.kind == "cast" else _examine_scales(bits, fmt, task.kind))
    return tally


def _inputs(task: Task, fmt: Format) -> Iterator[np.ndarray]:
    """The task's inputs as float32 bits, in pieces whose float64 temporaries stay in a cache."""
    if task.special:
        bits = cast_inputs.edges_and_16_bit(fmt).view(np.uint32)
        yield bits if task.kind == "cast" else bits & np.uint32(0x7FFFFFFF)
    else:
        step = PIECE * task.stride
        for begin in range(task.begin, task.end, step):
            yield np.arange(begin, min(begin + step, task.end), task.stride, dtype=np.int64).astype(np.uint32)


def _examine_casts(bits: np.ndarray, fmt: Format) -> Tally:
    x, tally = bits.view(np.float32), Tally()
    specified = {saturate: cast.encode(x, fmt, saturate=saturate) for saturate in (True, False)}
    kind = np.empty(bits.size, np.uint8)
    counts = _sort(bits, specified[False], fmt.max_code, kind)
    for subject, (encode, saturates) in libraries.casts(fmt).items():
        found, expected = encode(x), specified[saturates]
        tally.compared.update({(subject, CAST_RANGES[k]): int(n) for k, n in enumerate(counts) if n})
        if np.array_equal(found, expected):
            continue
        for k, code, other, count, index in _runs(kind, expected, found).tolist():
            codes = f"0x{code:02X}", f"0x{other:02X}"
            tally.differ[subject, CAST_RANGES[k], *codes] += count
            tally.first.setdefault((subject, CAST_RANGES[k]), _example(bits[index], *codes))
    return tally


@njit(cache=True)
def _sort(bits, unsaturated, max_code, kind):
    """kind [n], an index of CAST_RANGES for each input, and how many there are of each."""
    counts = np.zeros(4, np.int64)
    for i in range(bits.size):
        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
        of_special = 2 if magnitude == 0x7F800000 else 3 if magnitude > 0x7F800000 else 1
        kind[i] = of_special if (unsaturated[i] & 0x7F) > max_code else 0
        counts[kind[i]] += 1
    return counts


@njit(cache=True)
def _runs(kind, expected, found):
    """Runs of neighbours that differ in one way: rows of (kind, expected code, found code, how many, index of the first)."""
    runs = np.empty((kind.size, 5), np.int64)
    n = 0
    for i in range(kind.size):
        if expected[i] != found[i]:
            if n and runs[n - 1, 0] == kind[i] and runs[n - 1, 1] == expected[i] and runs[n - 1, 2] == found[i]:
                runs[n - 1, 3] += 1
            else:
                row = runs[n]
                row[0], row[1], row[2], row[3], row[4] = kind[i], expected[i], found[i], 1, i
                n += 1
    return runs[:n]


def _examine_scales(bits: np.ndarray, fmt: Format, policy: str) -> Tally:
    amax, tally = bits.view(np.float32), Tally()
    expected = scales.scale_from_amax(amax, fmt, policy)
    for subject, scale_from_amax in libraries.scales(fmt, policy).items():
        found = scale_from_amax(amax)
        tally.compared[subject, "scale"] = amax.size
        if np.array_equal(found.view(np.uint32), expected.view(np.uint32)):
            continue
        differ = (found.view(np.uint32) != expected.view(np.uint32)) & ~(np.isnan(found) & np.isnan(expected))
        if differ.any():
            index = int(np.argmax(differ))
            tally.differ[subject, "scale", "", ""] = int(differ.sum())
            tally.first[subject, "scale"] = _example(bits[index], repr(expected[index]), repr(found[index]))
    return tally


def _example(bits, specified: str, found: str) -> str:
    return f"specified {specified}, found {found}; input {np.uint32(bits).view(np.float32):.9g} (float32 bits 0x{int(bits):08X})"
