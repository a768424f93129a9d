"""The kernels of ``fp8ref.kernels`` alone in JAX: their bits, and the bandwidth that they and XLA's
kernels of the same operations reach.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fp8ref.jax.kernels import launch as launches
from fp8ref.jax.kernels.launch import TritonKernels
from fp8ref.kernels.jit import Launch
from measuring import kernel_cases, timing
from measuring.kernel_cases import PLAIN, Case, Typed
from on_jax import ceilings
from on_jax.bench import Bench

CHAINED = 8  # launches of one program, as in ``linears``
FORMATS = {"e4m3fn": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


class Operations:
    """As ``kernel_cases.Operations``."""

    def wide(self, x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32)

    def rounded(self, x: jax.Array) -> jax.Array:
        return x.astype(jnp.bfloat16)

    def codes(self, x: jax.Array, fmt: str) -> jax.Array:
        limit = kernel_cases.LARGEST[fmt]
        return jnp.clip(x, -limit, limit).astype(FORMATS[fmt])

    def amax(self, x: jax.Array, axes: Sequence[int]) -> jax.Array:
        return jnp.max(jnp.abs(x), tuple(axes), keepdims=True)

    def transposed(self, x: jax.Array) -> jax.Array:
        return x.T

    def silu(self, x: jax.Array) -> jax.Array:
        return jax.nn.silu(x)

    def reshaped(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return x.reshape(shape)


def bits(bench: Bench) -> dict:
    """How many codes and scales differ from the simulator's."""

    def run(launch: Launch, inputs: list[np.ndarray], outputs: Sequence[Typed]) -> list[np.ndarray]:
        results = launches.run(launch, [jnp.asarray(x) for x in inputs], outputs, TritonKernels())
        return [np.asarray(x) for x in results]

    return {"rows": [], "bits": kernel_cases.bits(run, bench.sizes.exact)}


def run(bench: Bench) -> dict:
    """Rows of launches and of XLA's kernels: seconds, and bytes that must move a second."""
    rows = []
    for columns in bench.sizes.kernel_columns:
        for case in kernel_cases.cases((bench.sizes.tokens, columns)):
            name = f"{case.name}, {bench.sizes.tokens} x {columns}"
            sets = [_inputs(bench, case) for _ in range(max(CHAINED, timing.sets(case.bytes)))]
            calls = {
                name: ceilings.rotated(bench, launched(case), sets, chained=CHAINED),
                name + PLAIN: ceilings.rotated(
                    bench, functools.partial(case.plain, Operations()), sets, chained=CHAINED
                ),
            }
            measured = timing.each(bench.timed(calls), CHAINED)
            rows += kernel_cases.rates(case, timing.rows(measured, name + PLAIN))
    return {"rows": [], "kernels": rows}


def launched(case: Case) -> Callable:
    """Inputs -> outputs."""

    def launch(*inputs: jax.Array) -> list[jax.Array]:
        return launches.run(case.launch, inputs, case.outputs, TritonKernels())

    return launch


def _inputs(bench: Bench, case: Case) -> list[jax.Array]:
    return [
        bench.random(*shape)
        if dtype == "bfloat16"
        else jnp.full(shape, kernel_cases.SCALE, jnp.float32)
        for shape, dtype in case.inputs
    ]
