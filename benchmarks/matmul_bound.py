"""How near a simulated tensor core is to what its arithmetic allows: python benchmarks/matmul_bound.py [--size 1024]

A step cuts off each of its products. That takes two products, a conversion and an addition of floating point for each, where a float32 GEMM takes
one fused multiply-add. Ratios are of medians of interleaved repetitions in this one run, on two threads.
"""

import argparse
import os
import statistics
import time

os.environ["OMP_WAIT_POLICY"] = "passive"  # read when torch is imported

import numpy as np
import torch
from numba import njit
from rich.console import Console
from rich.table import Table

from fp8ref.formats import E4M3FN
from fp8ref.sim import gemm, scaling, threads
from fp8ref.sim.kernels.bits import truncate

f32, i32 = np.float32, np.int32
REPETITIONS = 9


@njit(nogil=True, error_model="numpy")
def four_operations(a, b, unit, sums):
    """For each row of a, and each product of a step: two products, a conversion and an addition, of numbers in cache."""
    for i in range(a.shape[0]):
        for k in range(0, b.shape[0], 4):
            a0, a1, a2, a3 = a[i, k], a[i, k + 1], a[i, k + 2], a[i, k + 3]
            b0, b1, b2, b3 = b[k], b[k + 1], b[k + 2], b[k + 3]
            for j in range(sums.size):
                s = unit[j]
                x = i32(truncate(f32(f32(a0 * b0[j]) * s)) + truncate(f32(f32(a1 * b1[j]) * s)))
                y = i32(truncate(f32(f32(a2 * b2[j]) * s)) + truncate(f32(f32(a3 * b3[j]) * s)))
                sums[j] = i32(sums[j] + i32(x + y))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1024, help="M, N and K, a multiple of 32")
    size = parser.parse_args().size
    rng = np.random.default_rng(2)
    a, b = (scaling.quantize(rng.standard_normal((size, size)).astype(f32), E4M3FN) for _ in range(2))
    wide = [torch.from_numpy(q.codes).view(torch.float8_e4m3fn).float() for q in (a, b)]
    lanes = min(512, size)
    steps = size // 32 * (size // lanes)  # of all rows and these columns
    step = wide[0].numpy()[:, :32].copy(), wide[1].numpy()[:lanes, :32].T.copy(), np.ones(lanes, f32)

    def bound() -> None:
        half = steps // 2
        threads.run(lambda x, y: [four_operations(*step, np.zeros(lanes, i32)) for _ in range(x, y)], steps, unit=half, grain=half)

    torch.set_num_threads(2)
    taken: dict[str, list[float]] = {"torch float32": [], "four operations a product": [], "hopper_fast": []}
    runs = (lambda: wide[0] @ wide[1].T, bound, lambda: gemm.matmul(a, b, accumulate="hopper_fast"))
    for i in range(REPETITIONS + 1):  # the first one warms up
        for name, run in zip(taken, runs, strict=True):
            begun = time.perf_counter()
            run()
            taken[name] += [time.perf_counter() - begun] if i else []
    median = {name: statistics.median(seconds) for name, seconds in taken.items()}
    table = Table(f"{size}^3", "GMAC/s", "of torch float32", "of four operations")
    for name, seconds in median.items():
        ratios = (median[peer] / seconds for peer in ("torch float32", "four operations a product"))
        table.add_row(name, f"{size**3 / seconds / 1e9:.1f}", *(f"{ratio:.2f}" for ratio in ratios))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
