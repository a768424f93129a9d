"""The gradient of a rotary embedding with its cast, by Triton's kernels (spec M-11);
``plain.rotate``'s is its plain form. g is [B, T, H, D], D a power of two; cos and sin [T, D]."""

import math

from jax import Array

from fp8ref.formats import Format
from fp8ref.jax.kernels import casts
from fp8ref.jax.kernels.launch import TritonKernels, run
from fp8ref.jax.quantize.scales import Scales
from fp8ref.jax.quantize.scaling import Quantized


def amax(g: Array, cos: Array, sin: Array, kernels: TritonKernels) -> Array:
    """The amax, float32 (), of the rounded gradient."""
    from fp8ref.kernels import rotary

    return casts.largest(*run(rotary.amax(*_heads(g)), [g, cos, sin], kernels))


def quantize(
    g: Array, tables: tuple[Array, Array], by: Scales, fmt: Format, kernels: TritonKernels
) -> Quantized:
    """The gradient [B, T, H D], rounded, by ``casts.quantize``; tables are cos and sin."""
    from fp8ref.kernels import rotary

    launch = rotary.cast(*_heads(g), e5m2=fmt.name == "e5m2")
    outputs = run(launch, [g, *tables, by.scale], kernels)
    return casts.quantized(*outputs, by=by, fmt=fmt, shape=(*g.shape[:2], math.prod(g.shape[2:])))


def _heads(g: Array) -> tuple[tuple[int, int, int, int], tuple[int, int, int]]:
    """Shape and strides."""
    batch, tokens, heads, width = g.shape
    return (batch, tokens, heads, width), (tokens * heads * width, heads * width, width)
