"""The kernels of ``fp8ref.kernels`` alone in JAX: their bits, and the bandwidth that they and XLA's
kernels of the same operations reach.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fp8ref.jax.kernels import launch as launches
from fp8ref.jax.kernels.launch import TritonKernels
from fp8ref.kernels.jit import Launch
from measuring import kernel_cases, timing
from measuring.kernel_cases import Case, Typed
from on_jax import ceilings
from on_jax.bench import Bench

CHAINED = 8  # launches of one program, as in ``linears``
FORMATS = {"e4m3fn": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


def codes(x: jax.Array, fmt: str) -> jax.Array:
    limit = kernel_cases.LARGEST[fmt]
    return jnp.clip(x, -limit, limit).astype(FORMATS[fmt])


OPERATIONS = kernel_cases.Operations(
    float32=lambda x: x.astype(jnp.float32),
    bfloat16=lambda x: x.astype(jnp.bfloat16),
    codes=codes,
    amax=lambda x, axes: jnp.max(jnp.abs(x), axes, keepdims=True),
    transposed=jnp.transpose,
    silu=jax.nn.silu,
    reshaped=jnp.reshape,
)


def bits(bench: Bench) -> dict:
    """How many codes and scales differ from the simulator's."""

    def run(launch: Launch, inputs: list[np.ndarray], outputs: Sequence[Typed]) -> list[np.ndarray]:
        results = launches.bind(launch, [jnp.asarray(x) for x in inputs], outputs, TritonKernels())
        return [np.asarray(x) for x in results]

    return {"rows": [], "bits": kernel_cases.bits(run, bench.sizes.exact)}


def run(bench: Bench) -> dict:
    """As ``kernel_cases.timed``; XLA compiles the plain operations."""

    chained = 1 if bench.dry else CHAINED

    def calls(case: Case) -> kernel_cases.Calls:
        def launch(*inputs: jax.Array) -> list[jax.Array]:
            return launches.bind(case.launch, inputs, case.outputs, TritonKernels())

        sets = [_inputs(bench, case) for _ in range(max(chained, timing.sets(case.bytes)))]
        plain = functools.partial(case.plain, OPERATIONS)
        chains = [ceilings.rotated(bench, f, sets, chained=chained) for f in (launch, plain)]
        return chains[0], chains[1], chained

    shapes = [(bench.sizes.tokens, columns) for columns in bench.sizes.kernel_columns]
    return kernel_cases.timed(bench, shapes, calls)


def _inputs(bench: Bench, case: Case) -> list[jax.Array]:
    return [
        bench.random(*shape)
        if dtype == "bfloat16"
        else jnp.full(shape, kernel_cases.SCALE, jnp.float32)
        for shape, dtype in case.inputs
    ]
