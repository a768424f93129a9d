"""FP8 codes of a tensor in both orders, from one reading, and its amax (spec S-5, M-11)."""

import math

import jax.numpy as jnp
from jax import Array, lax

from fp8ref.formats import Format
from fp8ref.jax.kernels.launch import TritonKernels, run
from fp8ref.jax.quantize import cast
from fp8ref.jax.quantize.scales import Scales
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.recipe import CastSpec, Recipe


def takes(spec: CastSpec) -> bool:
    """Whether kernels make a linear's casts of this kind: to e4m3fn or e5m2, by one scale for the
    tensor, which multiplies."""
    return (
        spec.fmt.name in ("e4m3fn", "e5m2")
        and spec.granularity == "tensorwise"
        and spec.plain
        and spec.policy.stored != "scale_inv"
    )


def share(recipe: Recipe) -> float:
    """Of a linear's casts, the share that kernels make."""
    specs = [spec for gemm in recipe.gemms.values() for spec in gemm.operands]
    by_kernels = [takes(spec) for spec in specs if spec is not None]
    return sum(by_kernels) / max(1, len(by_kernels))


def quantize(x: Array, by: Scales, fmt: Format, axis: int, kernels: TritonKernels) -> Quantized:
    """``scaling.quantize(x, fmt, by=by)``, with the transposed codes and the amax of x: the same
    codes, but that NaN has one code."""
    from fp8ref.kernels import casts

    shape = matrix_shape(x)
    launch = casts.cast(shape, (shape[1], 1), e5m2=fmt.name == "e5m2")
    outputs = run(launch, [x.reshape(shape), by.scale], kernels)
    return quantized(*outputs, by=by, fmt=fmt, shape=x.shape, axis=axis)


def matrix_shape(x: Array) -> tuple[int, int]:
    """[M, N] of [..., N]."""
    return math.prod(x.shape[:-1]), x.shape[-1]


def quantized(
    codes: Array,
    transposed: Array,
    parts: Array,
    *,
    by: Scales,
    fmt: Format,
    shape: tuple[int, ...],
    axis: int = -1,
) -> Quantized:
    """The outputs of a kernel that casts, of a tensor of this shape."""
    dtype = cast.DTYPES[fmt.name]
    return Quantized(
        codes=lax.bitcast_convert_type(codes, dtype).reshape(shape),
        transposed=lax.bitcast_convert_type(transposed, dtype),
        amax=largest(parts),
        scale=by.scale,
        scale_inv=by.scale_inv,
        fmt=fmt,
        granularity="tensorwise",
        axis=axis,
    )


def largest(parts: Array) -> Array:
    """The amax, float32 (), of partial ones: the largest bits."""
    return lax.bitcast_convert_type(jnp.max(parts), jnp.float32)
