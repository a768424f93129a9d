"""How fast the simulator is, as ratios to what a user could pick instead: python
benchmarks/speed/sim.py [--json FILE]

Every ratio is of medians of interleaved repetitions in this one run, so that a slow moment of the
machine meets both sides. torch's threads sleep between its calls (OMP_WAIT_POLICY): spinning, as
they do by default, they take the processors from whatever is timed next. Peers are installed by
fp8ref[test].
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_WAIT_POLICY"] = "passive"  # read when torch is imported

import ml_dtypes
import mmaemu
import numpy as np
import torch
from gfloat import RoundMode, encode_ndarray, round_ndarray
from gfloat.formats import format_info_ocp_e4m3
from numba import njit
from rich.console import Console
from rich.table import Table

from fp8ref.formats import E4M3FN
from fp8ref.sim import threads as parallel
from fp8ref.sim.gemm import gemm
from fp8ref.sim.kernels.bits import AT_A_TIME, fetch_ahead
from fp8ref.sim.quantize import cast, scaling

REPETITIONS = 9


def medians(*functions: Callable[[], object], repetitions: int = REPETITIONS) -> list[float]:
    """Median seconds of each, after one call to warm up, taking turns."""
    for function in functions:
        function()
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repetitions):
        for function, taken in zip(functions, times, strict=True):
            begin = time.perf_counter()
            function()
            taken.append(time.perf_counter() - begin)
    return [statistics.median(taken) for taken in times]


@njit(nogil=True)
def memory_bound(bits, out):
    """Read 4 bytes, write 1: what any cast from float32 does at least.

    It fetches ahead, as the casts do.
    """
    for begin in range(0, bits.size, AT_A_TIME):
        fetch_ahead(bits, begin, AT_A_TIME)
        part, coded = bits[begin : begin + AT_A_TIME], out[begin : begin + AT_A_TIME]
        for i in range(part.size):
            coded[i] = np.uint8(part[i] >> np.uint32(24))


def on_threads(count: int, function: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        torch.set_num_threads(count)
        with parallel.using(count):
            function()

    return run


def encode_rows(size: int) -> list[dict]:
    x = (np.random.default_rng(0).standard_normal(size) * 30).astype(np.float32)
    tensor, few = torch.from_numpy(x), x[: size >> 8]
    info = format_info_ocp_e4m3

    def with_ml_dtypes() -> None:
        with np.errstate(all="ignore"):
            x.astype(ml_dtypes.float8_e4m3fn)

    def with_gfloat() -> None:
        encode_ndarray(info, round_ndarray(info, few, RoundMode.TiesToEven, sat=True))

    def bound() -> None:
        half = size // 2
        out = np.empty(size, np.uint8)
        bits = x.view(np.uint32)
        parallel.run(lambda a, b: memory_bound(bits[a:b], out[a:b]), size, unit=half, grain=half)

    rows = []
    for threads in (1, 2):
        ours, theirs, limit, random = medians(
            on_threads(threads, lambda: cast.encode(x, E4M3FN)),
            on_threads(threads, lambda: tensor.to(torch.float8_e4m3fn)),
            on_threads(threads, bound),
            on_threads(threads, lambda: cast.encode(x, E4M3FN, rounding="stochastic", seed=1)),
        )
        work = (
            f"encode 2^{size.bit_length() - 1} f32 -> e4m3fn, {threads} thread{'s' * (threads > 1)}"
        )
        rate = f"{size / ours / 1e6:.0f} M/s"
        rows.append(row(work, rate, "torch .to", theirs / ours, 1.2))
        if threads == 1:
            once, slow, slower = medians(
                on_threads(1, lambda: cast.encode(x, E4M3FN)),
                with_ml_dtypes,
                with_gfloat,
                repetitions=3,
            )
            rows.append(row(work, rate, "ml_dtypes astype", slow / once, 15))
            rows.append(
                row(work, rate, "gfloat round + encode", slower * (size / few.size) / once, 100)
            )
            rows.append(row(work, rate, "memory bound", limit / ours, 0.78))
        rows.append(
            row(
                f"stochastic rounding, {threads} thread{'s' * (threads > 1)}",
                f"{size / random / 1e6:.0f} M/s",
                "nearest even",
                ours / random,
                0.4,
            )
        )
    return rows


def quantize_rows(size: int) -> list[dict]:
    x = np.random.default_rng(1).standard_normal((size, size)).astype(np.float32)
    tensor = torch.from_numpy(x)

    def eager() -> torch.Tensor:
        amax = tensor.abs().amax(dim=1, keepdim=True)
        return (tensor * (448 / amax)).clamp(-448, 448).to(torch.float8_e4m3fn)

    ours, theirs = medians(
        on_threads(2, lambda: scaling.quantize(x, E4M3FN, granularity="rowwise")),
        on_threads(2, eager),
        repetitions=5,
    )
    return [
        row(
            f"quantize rowwise {size} x {size}, 2 threads",
            f"{x.size / ours / 1e6:.0f} M/s",
            "torch eager",
            theirs / ours,
            1,
        )
    ]


def matmul_rows(size: int) -> list[dict]:
    rng = np.random.default_rng(2)
    a, b = (
        scaling.quantize(rng.standard_normal((size, size)).astype(np.float32), E4M3FN)
        for _ in range(2)
    )
    left, right = (torch.from_numpy(q.codes).view(torch.float8_e4m3fn) for q in (a, b))
    wide = left.float(), right.float().T.contiguous()

    def simulate(plan: str) -> Callable[[], object]:
        return on_threads(2, lambda: gemm.matmul(a, b, accumulate=plan))

    fast, slow, native = medians(
        simulate("hopper_fast"), simulate("hopper_slow"), on_threads(2, lambda: wide[0] @ wide[1])
    )
    once, emulated = medians(
        simulate("hopper_fast"),
        on_threads(
            2,
            lambda: mmaemu.accumulate(left, right, use_fast_accum=True, profile="hopper", splitk=1),
        ),
        repetitions=3,
    )
    work, rate = f"matmul hopper_fast {size}^3, 2 threads", f"{size**3 / fast / 1e9:.1f} GMAC/s"
    return [
        row(work, rate, "mmaemu", emulated / once, 10),
        row(work, rate, "torch f32 matmul", native / fast, 0.3),
        row(
            "matmul hopper_slow",
            f"{size**3 / slow / 1e9:.1f} GMAC/s",
            "hopper_fast",
            fast / slow,
            0.8,
        ),
    ]


def memory_rows(size: int) -> list[dict]:
    """What encode allocates next to its output, in MiB, for an input that needs copies of its
    parts.
    """
    x = np.ones((2, size // 2), np.float32)[:, ::-1]
    cast.encode(x[:, :1], E4M3FN)
    tracemalloc.start()
    out = cast.encode(x, E4M3FN)
    peak = tracemalloc.get_traced_memory()[1] - out.nbytes
    tracemalloc.stop()
    return [
        row(
            "memory next to encode's output, strided input",
            f"{peak / 2**20:.1f} MiB",
            "64 MiB",
            64 * 2**20 / peak,
            1,
        )
    ]


def row(work: str, rate: str, peer: str, ratio: float, asked: float) -> dict:
    return {
        "work": work,
        "rate": rate,
        "peer": peer,
        "ratio": ratio,
        "asked": asked,
        "reached": ratio >= asked,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the table to this file")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    arguments = parser.parse_args()
    small = arguments.quick
    rows = (
        encode_rows(1 << (18 if small else 24))
        + quantize_rows(512 if small else 4096)
        + matmul_rows(128 if small else 1024)
    )
    rows += memory_rows(1 << (20 if small else 26))
    table = Table("work", "fp8ref", "peer", "ratio", "asked", "")
    for r in rows:
        table.add_row(
            r["work"],
            r["rate"],
            r["peer"],
            f"{r['ratio']:.2f}x",
            f"{r['asked']:g}x",
            "reached" if r["reached"] else "MISSED",
        )
    Console(width=130).print(table)
    if arguments.json:
        machine = {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        }
        versions = {m.__name__: m.__version__ for m in (np, torch, ml_dtypes, mmaemu)}
        arguments.json.write_text(
            json.dumps({"machine": machine, "versions": versions, "rows": rows}, indent=1) + "\n",
            encoding="utf-8",
        )
    return 0 if small or all(r["reached"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
