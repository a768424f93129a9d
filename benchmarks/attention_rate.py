"""How much of the simulator's own GEMM rate its attention reaches: python benchmarks/attention_rate.py [--tokens 1024 2048]

Forward passes of a variant, one head without a mask, and the two products alone, scores and probabilities times values, by ``gemm.matmul`` under the
variant's plan take turns. A ratio is the products' time over attention's, the median of those of neighbors in this one run; the issue is that exponentials, casts
and sums of tiles take no more than the products. Times are processor times of one thread.
"""

import argparse
import statistics
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from fp8ref.attention import VARIANTS
from fp8ref.formats import FLOAT32
from fp8ref.sim import attention, gemm, scaling, threads

NAMES = ("fa3", "fa4", "cudnn")
ASKED = 0.5
REPETITIONS = 5
FEATURES = 128


def seconds(function) -> float:
    begun = time.process_time()
    function()
    return time.process_time() - begun


def measure(name: str, tokens: int, repetitions: int) -> tuple[float, float, float]:
    """(seconds of attention, of both products, their ratio), medians."""
    variant, rng = VARIANTS[name], np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, tokens, FEATURES)).astype(np.float32) for _ in range(3))
    p = rng.random((tokens, tokens)).astype(np.float32) ** 4
    a, b, left, right = (scaling.quantize(x, variant.fmt) for x in (q[0, 0], k[0, 0], p, np.ascontiguousarray(v[0, 0].T)))

    def products() -> None:
        gemm.matmul(a, b, accumulate=variant.plan, out_dtype=FLOAT32)
        gemm.matmul(left, right, accumulate=variant.plan, out_dtype=FLOAT32)

    taken = []
    with threads.using(1):
        for i in range(repetitions + 1):  # the first one warms up, or compiles
            pair = seconds(lambda: attention.forward(q, k, v, variant=variant)), seconds(products)
            taken += [pair] if i else []
    return statistics.median(t for t, _ in taken), statistics.median(t for _, t in taken), statistics.median(y / x for x, y in taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--variants", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    known = parser.parse_args()
    table = Table("variant", "plan", "tokens", "attention, ms", "its products, ms", "ratio", f"asked: {ASKED}")
    for tokens in known.tokens:
        for name in known.variants:
            whole, products, ratio = measure(name, tokens, known.repetitions)
            reached = "reached" if ratio >= ASKED else "MISSED"
            table.add_row(name, VARIANTS[name].plan, str(tokens), f"{1e3 * whole:.1f}", f"{1e3 * products:.1f}", f"{ratio:.2f}", reached)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
