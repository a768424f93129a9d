"""One linear of a Llama-8B block in JAX, forward and backward, by every variant; and each GEMM of
it alone, for the ledger.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from fp8ref.recipe import RECIPES, REDUCED_AXES, Gemm, GemmSpec
from measuring import rounding, timing
from on_jax import ceilings
from on_jax.bench import Bench
from on_jax.variants import ALL, Variant
from reporting import ledger
from reporting.report import OURS

CHAINED = (
    8  # GEMMs of one program: a single small one takes no longer than the host takes to ask for it
)
DTYPES = {"e4m3fn": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


def run(bench: Bench, shape: tuple[int, int, int]) -> dict:
    """shape: (M, N, K) of x [M, K] by w [N, K].

    Rows of linears, ``speedup`` over bfloat16, and of GEMMs.
    """
    m, n, k = shape
    count = timing.sets(2 * m * (k + n))
    sets = [(bench.random(m, k), bench.random(m, n, scale=1e-3)) for _ in range(count)]
    weight = bench.random(n, k, scale=k**-0.5)
    calls: dict[str, timing.Call] = {}
    errors: dict[str, str] = {}
    accuracy: dict[str, list[float]] = {}
    expected: Sequence[jax.Array] | None = None
    for name in ALL:
        try:
            call, found = passes(bench, name, weight, sets)
            expected = expected or found
            accuracy[name] = rounding.check(differences(found, expected), rounding.LINEAR)
            calls[name] = call
        except Exception as error:  # the others are still to be measured
            errors[name] = timing.message(error)
    measured = bench.timed(calls)
    measured.errors.update(errors)
    rows = timing.rows(measured, "bf16")
    del calls
    gemms = timing.rows(timing.each(bench.timed(products(bench, shape)), CHAINED), "output bf16")
    return {"shape": list(shape), "rows": rows, "gemms": gemms, "relative_errors": accuracy}


def passes(
    bench: Bench, name: str, weight: jax.Array, sets: list
) -> tuple[timing.Call, Sequence[jax.Array]]:
    """A call, and (output, gradient by x, by w [N, K]) of the first inputs, after scales have seen
    such.
    """
    variant = Variant(name)
    w, state = weight.T if variant.turned else weight, variant.initial(["linear"])

    def both(w, x, g, state):
        def linear(w, x, run):
            return run.linear(x, w, variant.recipe, "linear")

        y, by_w, by_x, after = variant.gradients(linear, w, x, g, state)
        return y, by_x, by_w, after

    f: Callable = bench.compiled(both, w, *sets[0], state, options=variant.options)
    for _ in range(2):
        state = f(w, *sets[0], state)[-1]
    y, by_x, by_w, _ = f(w, *sets[0], state)
    return lambda i: f(w, *sets[i % len(sets)], state), (
        y,
        by_x,
        by_w.T if variant.turned else by_w,
    )


def differences(found: Sequence[jax.Array], expected: Sequence[jax.Array]) -> list[float]:
    """Relative ones, in the Frobenius norm."""
    return [float(_relative(a, b)) for a, b in zip(found, expected, strict=True)]


@jax.jit
def _relative(a: jax.Array, b: jax.Array) -> jax.Array:
    wide = b.astype(jnp.float32)
    return jnp.linalg.norm(a.astype(jnp.float32) - wide) / jnp.linalg.norm(wide)


def products(bench: Bench, shape: tuple[int, int, int]) -> dict[str, timing.Call]:
    """Every GEMM that a recipe runs on a linear of this shape, CHAINED times a call, by
    ``ledger.gemm_name``.
    """
    found: dict[str, timing.Call] = {}
    for recipe in ("bf16", *OURS):
        for which, spec in RECIPES[recipe].gemms.items():
            if ledger.gemm_name(which, spec) not in found:
                found[ledger.gemm_name(which, spec)] = product(bench, shape, which, spec)
    return found


def product(bench: Bench, shape: tuple[int, int, int], which: Gemm, spec: GemmSpec) -> timing.Call:
    m, n, k = ledger.dims(which, *shape)
    # what is reduced is a tensor's first axis in part of the GEMMs
    if spec.a is None or spec.b is None:
        first, second = REDUCED_AXES[which]
        count = max(CHAINED, timing.sets(2 * (m * k + n * k + m * n)))
        pairs = [
            (
                bench.random(*((m, k) if first else (k, m))),
                bench.random(*((n, k) if second else (k, n))),
            )
            for _ in range(count)
        ]

        axes = first - 2, second - 2  # of [rows, columns], from the end
        multiply = functools.partial(ceilings.multiplied_hp, axes=axes)
        return ceilings.rotated(bench, multiply, pairs, chained=CHAINED)
    scales = (
        "unit"
        if spec.epilogue == "unit_round_scale_round"
        else "rowwise"
        if spec.rowwise
        else "tensorwise"
    )
    return ceilings.gemm(
        bench,
        (m, n, k),
        [DTYPES[cast.fmt.name] for cast in (spec.a, spec.b)],
        spec.accumulate,
        scales=scales,
        chained=CHAINED,
    )
