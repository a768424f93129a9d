"""How much of its own GEMM rate the simulator's attention reaches: python
benchmarks/speed/attention_rate.py [--json FILE]

The forward pass of one head without a mask, and its two products alone, scores and probabilities
times values, by ``gemm.matmul`` under the variant's plan, take turns. A ratio is the products' time
over attention's, the median of those of neighbors in this one run: what is left of 1 goes to
scales, casts, exponentials and sums of tiles. Times are processor times of one thread, NumPy's BLAS
included: threads that wait for each other on a busy machine take as much of it as threads that
multiply.
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

# read when numpy is imported
os.environ |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")

import numpy as np
from rich.console import Console
from rich.table import Table

from fp8ref.sim import threads
from fp8ref.sim.attention import attention
from fp8ref.sim.gemm import gemm
from fp8ref.sim.quantize import scaling
from fp8ref.spec.attention.variants import VARIANTS

NAMES = ("fa3", "fa4", "cudnn")
ASKED = 0.5
REPETITIONS = 5
FEATURES = 128


def seconds(function) -> float:
    begun = time.process_time()
    function()
    return time.process_time() - begun


def measure(name: str, tokens: int, features: int, repetitions: int) -> dict:
    """Medians of seconds, and of their ratio."""
    variant, rng = VARIANTS[name], np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, tokens, features)).astype(np.float32) for _ in range(3))
    p = np.exp(rng.standard_normal((tokens, tokens))).astype(np.float32)
    operands = [
        scaling.quantize(x, variant.fmt)
        for x in (q[0, 0], k[0, 0], p, np.ascontiguousarray(v[0, 0].T))
    ]

    def products() -> None:
        for a, b in (operands[:2], operands[2:]):
            gemm.matmul(a, b, accumulate=variant.plan)

    taken = []
    with threads.using(1):
        for i in range(repetitions + 1):
            pair = seconds(lambda: attention.forward(q, k, v, variant=variant)), seconds(products)
            taken += [pair] if i else []  # the first one warms up, or compiles
    whole, alone = (statistics.median(times) for times in zip(*taken, strict=True))
    ratio = statistics.median(y / x for x, y in taken)
    return {
        "variant": name,
        "plan": variant.plan,
        "tokens": tokens,
        "seconds": whole,
        "seconds_of_products": alone,
        "ratio": ratio,
        "asked": ASKED,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1024, 2048], help="multiples of 32"
    )
    parser.add_argument(
        "--features", type=int, default=FEATURES, help="of the head, a multiple of 32"
    )
    parser.add_argument("--variants", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--json", type=Path, help="write the table to this file")
    known = parser.parse_args()
    rows = [
        measure(name, tokens, known.features, known.repetitions)
        for tokens in known.tokens
        for name in known.variants
    ]
    table = Table(
        "variant", "plan", "tokens", "attention, ms", "its products, ms", "ratio", f"asked: {ASKED}"
    )
    for r in rows:
        times = (f"{1e3 * r[key]:.0f}" for key in ("seconds", "seconds_of_products"))
        table.add_row(
            r["variant"],
            r["plan"],
            str(r["tokens"]),
            *times,
            f"{r['ratio']:.2f}",
            "reached" if r["ratio"] >= ASKED else "MISSED",
        )
    Console(width=110).print(table)
    if known.json:
        versions = {
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "numpy": np.__version__,
        }
        known.json.write_text(
            json.dumps({"machine": versions, "features": known.features, "rows": rows}, indent=1)
            + "\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
