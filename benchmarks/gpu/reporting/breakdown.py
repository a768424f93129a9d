"""A profiled step by kind of kernel, and the time in which none ran.

A kernel that casts counts as a cast, whatever inductor fused with it.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# The first that matches a kernel's name says what it is. The names are those of cuBLASLt (nvjet: q
# and r stand for e4m3 and e5m2), CUTLASS, PyTorch and inductor, which writes the operators that it
# fused into the name of a Triton kernel; XLA's own GEMMs in Triton are of FP8 or not, which their
# names do not tell; of XLA's other fusions names tell little: a cast is one of "other (XLA)",
# unless it is a transposition too. Kernels of fp8ref.kernels have their functions' names.
KINDS = (
    ("optimizer", r"multi_tensor_apply|adam|_foreach|^_step(_and_cast)?(_\d+)?$"),
    (
        "cast (fp8ref)",
        r"^_(re)?cast|^_scaled(_\d+)?$"
        r"|^_(amax|lines|squares|statistics|gradient|rotate|merge|transpose)(_|$)",
    ),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("gemm (XLA's Triton)", r"gemm_fusion|triton_gemm|nested_gemm"),
    ("cast/amax (triton)", r"^triton_(?!tem).*_(amax|abs|clamp|float8|_scaled_mm|reciprocal)(_|$)"),
    ("other (triton)", r"^triton_(?!tem)"),
    ("gemm fp8", r"e4m3|e5m2|float8|fp8|_scaled_mm|nvjet_(sm\d+_)?[qr]{2}"),
    ("gemm other", r"nvjet|gemm|cublas|cutlass|xmma|wgmma|triton_tem|splitk|aten::(add)?mm$"),
    ("copy/transposes", r"memcpy|memset|copy|transpose|contiguous|CatArray|concat"),
    ("other (XLA)", r"fusion|wrapped_"),
    ("cast/amax (other)", r"amax|abs|clamp|reciprocal"),
)
OTHER, IDLE = "other", "idle"
NAMES = (*(name for name, _ in KINDS), OTHER, IDLE)


@dataclass(frozen=True)
class Event:
    """begin and end in seconds; line: the stream or thread that it ran on."""

    name: str
    begin: float
    end: float
    line: str = ""


def kind(name: str) -> str:
    return next(
        (found for found, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), OTHER
    )


def read(trace: Path, categories: Iterable[str]) -> list[Event]:
    """The events of a Chrome trace that torch.profiler wrote, of categories such as kernel,
    gpu_memcpy, gpu_memset.
    """
    wanted = set(categories)
    return [
        Event(e["name"], e["ts"] * 1e-6, (e["ts"] + e["dur"]) * 1e-6, str(e.get("tid")))
        for e in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        if e.get("ph") == "X" and e.get("cat") in wanted
    ]


def own(events: Iterable[Event]) -> list[tuple[Event, float]]:
    """Each event and the seconds of it in which none ran on its line that lies within it: operators
    call operators. Kernels contain none.
    """
    ordered = sorted(events, key=lambda e: (e.line, e.begin, -e.end))
    seconds = [e.end - e.begin for e in ordered]
    around: list[int] = []
    for i, e in enumerate(ordered):
        while around and (ordered[around[-1]].line != e.line or ordered[around[-1]].end <= e.begin):
            around.pop()
        if around and e.end <= ordered[around[-1]].end:
            seconds[around[-1]] -= e.end - e.begin
        around.append(i)
    return list(zip(ordered, seconds, strict=True))


def seconds(events: Sequence[Event], steps: int) -> dict[str, float]:
    """Seconds of a step by kind, and idle: from the first event's begin to the last one's end,
    without those in which one ran.

    Raises:   ValueError: no events.
    """
    if not events:
        raise ValueError("the profiler recorded no kernel. Look whether it may read this device's.")
    found = dict.fromkeys(NAMES, 0.0)
    for e, taken in own(events):
        found[kind(e.name)] += taken
    begun = reached = min(e.begin for e in events)
    busy = 0.0
    for e in sorted(events, key=lambda e: e.begin):
        busy += max(0.0, e.end - max(e.begin, reached))
        reached = max(reached, e.end)
    found[IDLE] = max(0.0, reached - begun - busy)
    return {name: value / steps for name, value in found.items()}


def longest(events: Sequence[Event], steps: int, count: int = 15) -> list[dict]:
    """The kernels that took most of a step, by name, so that a reader can check what kind each was
    taken for.
    """
    total: dict[str, tuple[float, int]] = {}
    for e, taken in own(events):
        before, calls = total.get(e.name, (0.0, 0))
        total[e.name] = before + taken, calls + 1
    ordered = sorted(total.items(), key=lambda item: -item[1][0])[:count]
    return [
        {"name": name[:160], "kind": kind(name), "seconds": s / steps, "calls": calls / steps}
        for name, (s, calls) in ordered
    ]
