"""SwiGLU and its gradients with their casts, by Triton's kernels (spec M-11); ``plain.swiglu`` is
the plain form. gate, up and the product's gradient are [..., N] of one dtype."""

import math

import jax
import jax.numpy as jnp

from fp8ref.formats import Format
from fp8ref.jax.kernels import casts
from fp8ref.jax.kernels.launch import TritonKernels, run
from fp8ref.jax.quantize.scales import Scales
from fp8ref.jax.quantize.scaling import Quantized

__all__ = ["amax", "gradient_amaxes", "quantize", "quantize_gradients"]


def amax(gate: jax.Array, up: jax.Array, kernels: TritonKernels) -> jax.Array:
    """The amax, float32 (), of the rounded product."""
    from fp8ref.kernels import swiglu

    launch = swiglu.amax(_shape(gate))
    [parts] = run(launch, _rows(gate, up), [((launch.programs,), jnp.int32)], kernels)
    return casts.largest(parts)


def quantize(
    gate: jax.Array, up: jax.Array, by: Scales, fmt: Format, kernels: TritonKernels
) -> Quantized:
    """The product, rounded to gate's dtype, by ``casts.quantize``."""
    from fp8ref.kernels import swiglu

    launch = swiglu.cast(_shape(gate), e5m2=fmt.name == "e5m2")
    kinds = casts.results(_shape(gate), launch.programs)
    outputs = run(launch, [*_rows(gate, up), by.scale], kinds, kernels)
    return casts.quantized(*outputs, by=by, fmt=fmt, shape=gate.shape, axis=-1)


def gradient_amaxes(
    d: jax.Array, gate: jax.Array, up: jax.Array, kernels: TritonKernels
) -> tuple[jax.Array, jax.Array]:
    """The amaxes of gate's rounded gradient and of up's; d is the product's gradient."""
    from fp8ref.kernels import swiglu

    launch = swiglu.gradient_amaxes(_shape(gate))
    kinds = [((launch.programs,), jnp.int32)] * 2
    parts = run(launch, _rows(d, gate, up), kinds, kernels)
    return casts.largest(parts[0]), casts.largest(parts[1])


def quantize_gradients(
    tensors: tuple[jax.Array, jax.Array, jax.Array],
    by: tuple[Scales, Scales],
    fmt: Format,
    kernels: TritonKernels,
) -> tuple[Quantized, Quantized]:
    """gate's gradient and up's, each rounded, by ``casts.quantize``; of (d, gate, up)."""
    from fp8ref.kernels import swiglu

    shape = _shape(tensors[1])
    launch = swiglu.cast_gradients(shape, e5m2=fmt.name == "e5m2")
    *codes, parts = casts.results(shape, launch.programs)
    inputs = [*_rows(*tensors), *(scales.scale for scales in by)]
    outputs = run(launch, inputs, [*codes, *codes, parts, parts], kernels)

    def result(i: int) -> Quantized:
        made = *outputs[2 * i : 2 * i + 2], outputs[4 + i]
        return casts.quantized(*made, by=by[i], fmt=fmt, shape=tensors[1].shape, axis=-1)

    return result(0), result(1)


def _shape(x: jax.Array) -> tuple[int, int]:
    return math.prod(x.shape[:-1]), x.shape[-1]


def _rows(*tensors: jax.Array) -> list[jax.Array]:
    return [x.reshape(_shape(x)) for x in tensors]
