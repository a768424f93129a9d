"""Certificates: casts and scales of every library at hand against the simulator, over all float32 inputs.

``certify(exhaustive=True)`` goes through the 2^32 inputs of a cast and the 2^31 non-negative ones of a scale; without, through one
in 1009 of them and through every float16, every bfloat16, and every tie of the format with its neighbours. What a library
decides differently from C-4 and C-5, on overflow and on NaN, is listed with its count; a difference in range is a failure.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from rich.table import Table

from fp8ref.check import subjects, synthetic
from fp8ref.check.compare import Report
from fp8ref.formats import E4M3FN, E5M2, FP8_FORMATS, Format
from fp8ref.run import progress
from fp8ref.sim import cast, parallel, scales

CHUNK = 1 << 22  # inputs of a task
PIECE = 1 << 17  # of those, how many at a time
STRIDE = 1009
SCALES = (("e4m3fn", "torchao"), ("e4m3fn", "torchao_pow2"), ("e4m3fn", "torchao_mask"), ("e5m2", "torchao"))


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
        self.compared += other.compared
        self.differ += other.differ
        for key, example in other.first.items():
            self.first.setdefault(key, example)


def certify(*, exhaustive: bool = False, workers: int | None = None) -> "Certificate":
    """Compare every library that is installed; workers processes, by default one a processor, share the exhaustive inputs."""
    tasks = list(_tasks(exhaustive))
    result = Certificate(exhaustive=exhaustive)
    with progress.bar("certify", len(tasks)) as advance:
        for task, tally in _run(tasks, (workers or parallel.threads()) if exhaustive else 1):
            result.tallies.setdefault((task.fmt, task.kind), Tally()).add(tally)
            advance(f"{task.fmt} {task.kind}")
    return result


@dataclass
class Certificate:
    exhaustive: bool
    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)

    def report(self) -> Report:
        """One check for each format, cast or policy, and library: all inputs whose result the specification and every library agree to define."""
        report = Report()
        for (fmt, kind), tally in self.tallies.items():
            for (subject, where), compared in tally.compared.items():
                if where not in ("in range", "scale") and subject not in subjects.OURS:
                    continue
                check = report.check(f"{fmt}/{'cast' if kind == 'cast' else 'scale.' + kind}/{subject}")
                differ = sum(n for (s, w, *_), n in tally.differ.items() if (s, w) == (subject, where))
                check.compared += compared
                check.equal += compared - differ
                check.worst = max(check.worst, float(differ > 0))
                check.detail = check.detail or tally.first.get((subject, where), "")
        return report

    def disagreements(self) -> list[dict]:
        """Every class of inputs on which a library decides otherwise: which codes for which, and how often."""
        classes: dict[tuple, dict] = {}
        for (fmt, kind), tally in self.tallies.items():
            for (subject, where, ours, theirs), count in sorted(tally.differ.items()):
                of_class = classes.setdefault(
                    (fmt, kind, subject, where),
                    {"format": fmt, "what": kind, "library": subject, "inputs": where, "compared": tally.compared[subject, where]}
                    | {"differ": 0, "specified": [], "found": []},
                )
                of_class["differ"] += count
                for key, code in (("specified", ours), ("found", theirs)):
                    if code not in of_class[key]:
                        of_class[key].append(code)
        return list(classes.values())

    def print(self) -> None:
        console, report = progress.console(), self.report()
        table = Table("what", "library", "compared", "equal", "", title="inputs in range, and all inputs of fp8ref's own")
        for check in report.checks.values():
            what, subject = check.name.rsplit("/", 1)
            table.add_row(what, subject, f"{check.compared:,}", f"{check.equal:,}", "ok" if check.ok else "FAILS")
        console.print(table)
        table = Table("format", "library", "inputs", "specified", "found", "differ", "of", title="decided otherwise (SEMANTICS C-4, C-5)")
        for row in self.disagreements():
            table.add_row(
                row["format"], row["library"], row["inputs"], *(" ".join(row[k]) for k in ("specified", "found")),
                f"{row['differ']:,}", f"{row['compared']:,}",
            )  # fmt: skip
        console.print(table)
        for check in report.failures:
            console.print(f"{check.name}: {check.detail}", markup=False, soft_wrap=True)
        console.print("all float32 inputs" if self.exhaustive else f"one in {STRIDE} float32 inputs, all bfloat16, float16 and ties")

    def write(self, path: Path) -> None:
        written = self.report().to_dict() | {"exhaustive": self.exhaustive, "disagreements": self.disagreements()}
        path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def special_inputs(fmt: Format) -> np.ndarray:
    """Every float16 and bfloat16 value, and the numbers of the format, its ties and their float32 neighbours; float32."""
    half = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        wide = [half.view(np.float16).astype(np.float32), (half.astype(np.uint32) << np.uint32(16)).view(np.float32)]
    return np.concatenate([synthetic.casts(fmt), *wide])


def examine(task: Task) -> Tally:
    """Compare one part of the inputs, on one thread."""
    fmt, tally = FP8_FORMATS[task.fmt], Tally()
    with parallel.using(1):
        for bits in _inputs(task, fmt):
            tally.add(_examine_casts(bits, fmt) if task.kind == "cast" else _examine_scales(bits, fmt, task.kind))
    return tally


def _inputs(task: Task, fmt: Format) -> Iterator[np.ndarray]:
    """The task's inputs as float32 bits, in pieces whose float64 temporaries stay in a cache."""
    if task.special:
        bits = special_inputs(fmt).view(np.uint32)
        yield bits if task.kind == "cast" else bits & np.uint32(0x7FFFFFFF)
    else:
        step = PIECE * task.stride
        for begin in range(task.begin, task.end, step):
            yield np.arange(begin, min(begin + step, task.end), task.stride, dtype=np.int64).astype(np.uint32)


def _examine_casts(bits: np.ndarray, fmt: Format) -> Tally:
    x, tally = bits.view(np.float32), Tally()
    specified = {saturate: cast.encode(x, fmt, saturate=saturate) for saturate in (True, False)}
    kinds = ("in range", "above max", "infinite", "NaN")
    magnitude = specified[False] & ~np.uint8(fmt.sign_bit)
    overflow = magnitude > fmt.max_code
    kind = np.where(overflow, np.where(np.isnan(x), 3, np.where(np.isinf(x), 2, 1)), 0).astype(np.uint8)
    counts = np.bincount(kind, minlength=4)
    for subject, (encode, saturates) in subjects.casts(fmt).items():
        found, expected = encode(x), specified[saturates]
        tally.compared.update({(subject, kinds[k]): int(n) for k, n in enumerate(counts) if n})
        at = np.flatnonzero(found != expected)
        keys = (kind[at].astype(np.int64) << 16) | (expected[at].astype(np.int64) << 8) | found[at]
        for key in np.flatnonzero(binned := np.bincount(keys, minlength=1)):
            where = kinds[key >> 16]
            tally.differ[subject, where, f"0x{key >> 8 & 255:02X}", f"0x{key & 255:02X}"] = int(binned[key])
            index = at[np.argmax(keys == key)]
            tally.first.setdefault((subject, where), _example(bits[index], f"0x{expected[index]:02X}", f"0x{found[index]:02X}"))
    return tally


def _examine_scales(bits: np.ndarray, fmt: Format, policy: str) -> Tally:
    amax, tally = bits.view(np.float32), Tally()
    expected = scales.scale_from_amax(amax, fmt, policy)
    for subject, scale_from_amax in subjects.scales(fmt, policy).items():
        found = scale_from_amax(amax)
        tally.compared[subject, "scale"] = amax.size
        differ = (found.view(np.uint32) != expected.view(np.uint32)) & ~(np.isnan(found) & np.isnan(expected))
        if differ.any():
            index = int(np.argmax(differ))
            tally.differ[subject, "scale", "", ""] = int(differ.sum())
            tally.first[subject, "scale"] = _example(bits[index], repr(expected[index]), repr(found[index]))
    return tally


def _example(bits, specified: str, found: str) -> str:
    return f"specified {specified}, found {found}; input {np.uint32(bits).view(np.float32):.9g} (float32 bits 0x{int(bits):08X})"


def _tasks(exhaustive: bool) -> Iterator[Task]:
    stride, chunk = (1, CHUNK) if exhaustive else (STRIDE, CHUNK * STRIDE)
    for kind, fmt, size in [("cast", f.name, 1 << 32) for f in (E4M3FN, E5M2)] + [(p, f, 1 << 31) for f, p in SCALES]:
        if not exhaustive:  # every input, each counted once, holds these
            yield Task(kind=kind, fmt=fmt, special=True)
        # Successive strided chunks start where the stride left off: chunk is a multiple of it.
        yield from (Task(kind=kind, fmt=fmt, begin=i, end=min(i + chunk, size), stride=stride) for i in range(0, size, chunk))


def _run(tasks: list[Task], workers: int) -> Iterator[tuple[Task, Tally]]:
    if workers == 1:
        yield from ((task, examine(task)) for task in tasks)
        return
    # Fresh interpreters, each with one thread: XLA and torch would otherwise start a pool a process.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        yield from zip(tasks, pool.map(examine, tasks), strict=True)


def _one_thread() -> None:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    subjects.one_thread()
