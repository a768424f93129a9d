"""What XLA gets out of the device at most: large GEMMs, a copy, and programs that do next to
nothing.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fp8ref.formats import by_name
from fp8ref.jax.gemm import gemm as products
from fp8ref.jax.quantize.scaling import Quantized
from measuring import timing
from on_jax.bench import Bench

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
RATES = {  # keys of ``ceilings`` and the GEMMs that they are read off
    "bf16_flops": "bf16",
    "fp8_flops": "tensorwise fast",
    "fp8_slow_flops": "tensorwise slow",
    "fp8_e5m2_slow_flops": "tensorwise slow, e5m2 x e4m3",
    "fp8_rowwise_flops": "rowwise fast",
}


def run(bench: Bench) -> dict:
    """Rows of GEMMs, and ``ceilings``: FLOP/s, bytes/s (read and written), seconds from program to
    program and from kernel to kernel of one.
    """
    rows = timing.rows(bench.timed(gemms(bench)), "bf16")
    seconds = {row["name"]: row["seconds"] for row in rows if "seconds" in row}
    rates = {
        key: 2 * bench.sizes.square**3 / seconds[name]
        for key, name in RATES.items()
        if name in seconds
    }
    copied = timing.rows(bench.timed({"copy": copying(bench)}), "copy")
    gaps = timing.rows(bench.timed(launching(bench)), "programs one by one")
    gap = {row["name"]: row["seconds"] / bench.sizes.launches for row in gaps if "seconds" in row}
    of_copy = copied[0].get("seconds")
    ceilings = rates | {
        "bandwidth": 2 * bench.sizes.copied / of_copy if of_copy else None,
        "launch_seconds": gap.get("programs one by one"),
        "launch_in_graph_seconds": gap.get("kernels of one program"),
        "square": bench.sizes.square,
        "copied_bytes": bench.sizes.copied,
    }
    return {"rows": rows, "copy": copied, "launches": gaps, "ceilings": ceilings}


def gemm(
    bench: Bench,
    shape: tuple[int, int, int],
    types,
    accumulate: str,
    *,
    scales: str,
    chained: int = 1,
) -> timing.Call:
    """[M, K] by [N, K], both contiguous along K, scaled ("tensorwise", "rowwise", "unit") and
    rounded to bfloat16; so many of them a call.
    """
    m, n, k = shape
    count = max(chained, timing.sets(2 * (m * k + n * k + m * n)))
    pairs = [
        (bench.codes(m, k, dtype=types[0]), bench.codes(n, k, dtype=types[1])) for _ in range(count)
    ]
    given = ((m, 1), (1, n)) if scales == "rowwise" else ((), ())
    rows, columns = (jnp.full(s, 1.0 if scales == "unit" else 1.2e-3, jnp.float32) for s in given)
    multiply = functools.partial(multiplied, accumulate=accumulate)
    return rotated(bench, multiply, pairs, rows, columns, chained=chained)


def multiplied_hp(a: jax.Array, b: jax.Array, axes: tuple[int, int] = (-1, -1)) -> jax.Array:
    """A GEMM in bfloat16, reduced along these axes, that writes bfloat16."""
    return products.matmul_hp(a, b, axes=axes, out_dtype=jnp.bfloat16)


def multiplied(
    a: jax.Array, b: jax.Array, rows: jax.Array, columns: jax.Array, *, accumulate: str
) -> jax.Array:
    """A GEMM that writes bfloat16, as fp8ref's linears have it: XLA gives cuBLASLt's the scales of
    tensors; those of rows and columns multiply its result in a kernel of their own.
    """
    by_tensor = not rows.ndim
    one = jnp.ones((), jnp.float32)
    a, b = (
        Quantized(
            codes=codes,
            scale=one,
            scale_inv=scale if by_tensor else one,
            fmt=by_name(codes.dtype.name.removeprefix("float8_")),
            granularity="tensorwise",
            axis=1,
        )
        for codes, scale in ((a, rows), (b, columns))
    )
    out = products.matmul(a, b, accumulate=accumulate, out_dtype=jnp.bfloat16)
    return out if by_tensor else (out * rows * columns).astype(jnp.bfloat16)


def rotated(
    bench: Bench, function: Callable, pairs: Sequence, *more: jax.Array, chained: int = 1
) -> timing.Call:
    """A call is a program of so many calls of function(*pair, *more), on pairs that are rotated:
    different ones, or XLA would compute once what is asked for twice.
    """
    assert len(pairs) >= chained, (len(pairs), chained)

    def chain(pairs, *more):
        return [function(*pair, *more) for pair in pairs]

    taken = [[pairs[(i + j) % len(pairs)] for j in range(chained)] for i in range(len(pairs))]
    f = bench.compiled(chain, taken[0], *more)
    return lambda i: f(taken[i % len(pairs)], *more)


def gemms(bench: Bench) -> dict[str, timing.Call]:
    size = bench.sizes.square
    shape = size, size, size
    count = timing.sets(6 * size * size)
    pairs = [(bench.random(size, size), bench.random(size, size)) for _ in range(count)]
    product = bench.compiled(multiplied_hp, *pairs[0])
    return {
        "bf16": lambda i: product(*pairs[i % count]),
        "tensorwise fast": gemm(bench, shape, (E4M3, E4M3), "fast", scales="tensorwise"),
        "tensorwise slow": gemm(bench, shape, (E4M3, E4M3), "slow", scales="tensorwise"),
        "tensorwise slow, e5m2 x e4m3": gemm(
            bench, shape, (E5M2, E4M3), "slow", scales="tensorwise"
        ),
        "rowwise fast": gemm(bench, shape, (E4M3, E4M3), "fast", scales="rowwise"),
    }


def copying(bench: Bench) -> timing.Call:
    """Each element read and written; negated, or XLA would hand back the argument itself."""
    sources = [bench.random(bench.sizes.copied // 2) for _ in range(2)]
    negated = bench.compiled(lambda x: -x, sources[0])
    return lambda i: negated(sources[i % 2])


def launching(bench: Bench) -> dict[str, timing.Call]:
    """So many programs of one small kernel, and one program of so many that wait for each other and
    cannot be fused.
    """
    x, launches = jnp.ones((8, 128), jnp.float32), bench.sizes.launches
    one = bench.compiled(lambda x: x + 1, x)

    def kernels(x):
        for _ in range(launches):
            x = lax.optimization_barrier(x + 1)
        return x

    many = bench.compiled(kernels, x)

    def programs(i: int) -> jax.Array:
        y = x
        for _ in range(launches):
            y = one(y)
        return y

    return {"programs one by one": programs, "kernels of one program": lambda i: many(x)}
