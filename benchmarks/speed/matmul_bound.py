"""How near a simulated tensor core is to what its arithmetic allows: python
benchmarks/speed/matmul_bound.py [--size 1024]

A step cuts off each of its products. One by one, that takes two products, a conversion and an
addition of floating point each; the kernel takes two multiply-adds, rounded toward zero. A float32
GEMM takes one. Seconds are of one thread's processor time, the least of interleaved repetitions in
this one run: other processes only add to them.
"""

import argparse
import time

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from rich.console import Console
from rich.table import Table

from fp8ref.formats import E4M3FN
from fp8ref.sim import threads
from fp8ref.sim.gemm import accumulate, gemm
from fp8ref.sim.gemm.accumulate import ACCUMULATIONS
from fp8ref.sim.kernels.chains.chains import aligned
from fp8ref.sim.kernels.chains.steps import PARTS, TO_NEAREST, TOWARD_ZERO, set_rounding, step
from fp8ref.sim.kernels.chains.vectors import LANES, Sizes
from fp8ref.sim.quantize import cast, scaling

f32, i32 = np.float32, np.int32
REPETITIONS = 15
ROWS = 256  # of a tile in cache


@intrinsic
def truncate(typing_context, value):
    """The integer part of a float32 as int32; |value| < 2^31, or the result is undefined."""

    def generate(context, builder, signature, arguments):
        return builder.fptosi(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@njit(nogil=True, error_model="numpy")
def one_by_one(a, b, unit, sums, repeats):
    """For each row of a, and each product of a step: two products, a conversion and an addition, of
    numbers in cache.
    """
    for i in range(a.shape[0] * repeats):
        row = a[i % a.shape[0]]
        for k in range(0, b.shape[0], 4):
            a0, a1, a2, a3 = row[k], row[k + 1], row[k + 2], row[k + 3]
            b0, b1, b2, b3 = b[k], b[k + 1], b[k + 2], b[k + 3]
            for j in range(sums.size):
                s = unit[j]
                x = i32(truncate(f32(f32(a0 * b0[j]) * s)) + truncate(f32(f32(a1 * b1[j]) * s)))
                y = i32(truncate(f32(f32(a2 * b2[j]) * s)) + truncate(f32(f32(a3 * b3[j]) * s)))
                sums[j] = i32(sums[j] + i32(x + y))


@njit(nogil=True, error_model="numpy")
def whole_steps(a, of_a, signs, parts, of_b, acc, sizes, rows, repeats):
    """The kernel's steps, of numbers in cache."""
    for _ in range(repeats):
        set_rounding(i32(TOWARD_ZERO))
        step(a, of_a, signs, parts, of_b, acc, sizes, 0, 0, 0, rows)
        set_rounding(i32(TO_NEAREST))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1024, help="M, N and K, a multiple of 32")
    size = parser.parse_args().size
    rng = np.random.default_rng(2)
    q = [scaling.quantize(rng.standard_normal((size, size)).astype(f32), E4M3FN) for _ in range(2)]
    a, b = (cast.decode(x.codes, E4M3FN) for x in q)
    wide = torch.from_numpy(a), torch.from_numpy(b)
    repeats = max(1, size**3 // (ROWS * 32 * LANES))
    rows = np.resize(a, (ROWS, 32))
    tile = np.resize(b, (32, LANES)).astype(f32)
    room = [
        aligned(n, kind)
        for n, kind in ((32 * PARTS * LANES, f32), (32 * LANES, np.uint8), (ROWS * LANES, f32))
    ]
    for array, value in zip(room, (np.repeat(tile, PARTS, 0).reshape(-1), 0x7F, 0), strict=True):
        array[:] = value
    signs = rng.integers(0, 1 << 32, ROWS, dtype=np.uint32)
    sizes = np.array(
        Sizes(*[0] * len(Sizes._fields))._replace(width=32, fraction_bits=13, output_bits=13)
    )
    of_cache = (
        np.abs(rows).reshape(-1),
        np.full(ROWS * 32, 0x05050505, np.uint32),
        signs,
        *room,
        sizes,
    )
    plan = ACCUMULATIONS["hopper_fast"]
    runs = {
        "torch float32": lambda: wide[0] @ wide[1].T,
        "four operations a product, in cache": lambda: one_by_one(
            rows, tile, np.ones(LANES, f32), np.zeros(LANES, i32), repeats
        ),
        "the kernel's steps, in cache": lambda: whole_steps(*of_cache, ROWS, repeats),
        "hopper_fast, sums": lambda: accumulate.chains(a, b, E4M3FN, E4M3FN, plan),
        "hopper_fast, from codes to outputs": lambda: gemm.matmul(*q, accumulate=plan),
    }
    torch.set_num_threads(1)
    seconds = dict.fromkeys(runs, np.inf)
    with threads.using(1):
        for i in range(REPETITIONS + 1):  # the first one warms up
            for name, run in runs.items():
                begun = time.process_time()
                run()
                seconds[name] = min(seconds[name], time.process_time() - begun) if i else np.inf
    table = Table(f"{size}^3, 1 thread", "GMAC/s", "of torch float32")
    for name, taken in seconds.items():
        table.add_row(
            name, f"{size**3 / taken / 1e9:.1f}", f"{seconds['torch float32'] / taken:.2f}"
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
