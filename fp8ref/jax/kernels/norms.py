"""RMSNorm with its cast, by Triton's kernels (spec M-11); ``plain.normed`` is its plain form."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fp8ref.formats import Format
from fp8ref.jax.kernels import casts
from fp8ref.jax.kernels.launch import TritonKernels, run
from fp8ref.jax.quantize.scales import Scales
from fp8ref.jax.quantize.scaling import Quantized

__all__ = ["gradient", "normed", "quantize", "statistics"]


def statistics(
    h: jax.Array, residual: jax.Array | None, weight: jax.Array, eps: float, kernels: TritonKernels
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(h + residual, which is what is normed, each row's factor float32 [M], the norm's amax).

    Shapes:   h and residual [..., N] of one dtype; weight [N].
    """
    from fp8ref.kernels import norms

    shape = math.prod(h.shape[:-1]), h.shape[-1]
    launch = norms.statistics(shape, eps=eps, residual=residual is not None)
    rows = [x.reshape(shape) for x in (h, residual) if x is not None]
    sums = [] if residual is None else [(shape, h.dtype)]
    row_kinds = [(shape[:1], jnp.float32), (shape[:1], jnp.int32)]
    *total, factors, parts = run(launch, [*rows, weight], [*sums, *row_kinds], kernels)
    return (total[0].reshape(h.shape) if total else h), factors, casts.largest(parts)


def quantize(
    h: jax.Array,
    factors: jax.Array,
    weight: jax.Array,
    by: Scales,
    fmt: Format,
    kernels: TritonKernels,
) -> Quantized:
    """The norm of h, rounded to its dtype, by ``casts.quantize``; factors of ``statistics``."""
    from fp8ref.kernels import norms

    shape = math.prod(h.shape[:-1]), h.shape[-1]
    launch = norms.cast(shape, e5m2=fmt.name == "e5m2")
    inputs = [h.reshape(shape), factors, weight, by.scale]
    outputs = run(launch, inputs, casts.results(shape, launch.programs), kernels)
    return casts.quantized(*outputs, by=by, fmt=fmt, shape=h.shape, axis=-1)


def normed(
    h: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array,
    eps: float,
    by: Scales,
    fmt: Format,
    kernels: TritonKernels,
) -> tuple[jax.Array, jax.Array, Quantized]:
    """(h + residual, factors, the norm by ``quantize``) in one launch: by is known before."""
    from fp8ref.kernels import norms

    shape, e5m2 = (math.prod(h.shape[:-1]), h.shape[-1]), fmt.name == "e5m2"
    launch = norms.statistics_and_cast(shape, eps=eps, e5m2=e5m2, residual=residual is not None)
    rows = [x.reshape(shape) for x in (h, residual) if x is not None]
    sums = [(shape, h.dtype)] * len(rows[1:])
    kinds = [*sums, (shape[:1], jnp.float32), *casts.results(shape, launch.programs)]
    *total, factors, q, t, parts = run(launch, [*rows, weight, by.scale], kinds, kernels)
    x = casts.quantized(q, t, parts, by=by, fmt=fmt, shape=h.shape, axis=-1)
    return (total[0].reshape(h.shape) if total else h), factors, x


def gradient(
    readers: Sequence[jax.Array],
    total: jax.Array,
    h: jax.Array,
    factors: jax.Array,
    weight: jax.Array,
    kernels: TritonKernels,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradient of h, that of the norm's weight in float32, and the first's amax; by those of
    two or three readers of the norm, and of the sum that h goes into."""
    from fp8ref.kernels import norm_gradients

    shape = math.prod(h.shape[:-1]), h.shape[-1]
    launch = norm_gradients.gradient(shape, len(readers))
    kinds = [(shape, h.dtype), ((launch.programs, shape[1]), jnp.float32)]
    rows = [x.reshape(shape) for x in (*readers, total, h)]
    parts = ((launch.programs,), jnp.int32)
    h_gradient, weight_gradient, amaxes = run(
        launch, [*rows, factors, weight], [*kinds, parts], kernels
    )
    return h_gradient.reshape(h.shape), weight_gradient.sum(0), casts.largest(amaxes)
