"""RMSNorm with its cast, by Triton's kernels (spec M-11); ``plain.normed`` is its plain form."""

from collections.abc import Sequence

from jax import Array

from fp8ref.formats import Format
from fp8ref.jax.kernels import casts
from fp8ref.jax.kernels.launch import TritonKernels, run
from fp8ref.jax.quantize.scales import Scales
from fp8ref.jax.quantize.scaling import Quantized


def statistics(
    h: Array, residual: Array | None, weight: Array, eps: float, kernels: TritonKernels
) -> tuple[Array, Array, Array]:
    """(h + residual, which is what is normed, each row's factor float32 [M], the norm's amax).

    Shapes:   h and residual [..., N] of one dtype; weight [N].
    """
    from fp8ref.kernels import norms

    rows = [x.reshape(casts.matrix_shape(x)) for x in (h, residual) if x is not None]
    launch = norms.statistics(casts.matrix_shape(h), eps=eps, residual=residual is not None)
    *total, factors, parts = run(launch, [*rows, weight], kernels)
    return (total[0].reshape(h.shape) if total else h), factors, casts.largest(parts)


def quantize(
    h: Array, factors: Array, weight: Array, by: Scales, fmt: Format, kernels: TritonKernels
) -> Quantized:
    """The norm of h, rounded to its dtype, by ``casts.quantize``; factors of ``statistics``."""
    from fp8ref.kernels import norms

    rows = h.reshape(casts.matrix_shape(h))
    launch = norms.cast(casts.matrix_shape(h), e5m2=fmt.name == "e5m2")
    outputs = run(launch, [rows, factors, weight, by.scale], kernels)
    return casts.quantized(*outputs, by=by, fmt=fmt, shape=h.shape)


def normed(
    h: Array,
    residual: Array | None,
    weight: Array,
    eps: float,
    by: Scales,
    fmt: Format,
    kernels: TritonKernels,
) -> tuple[Array, Array, Quantized]:
    """(h + residual, factors, the norm by ``quantize``) in one launch: by is known before."""
    from fp8ref.kernels import norms

    rows = [x.reshape(casts.matrix_shape(x)) for x in (h, residual) if x is not None]
    launch = norms.statistics_and_cast(
        casts.matrix_shape(h), eps=eps, e5m2=fmt.name == "e5m2", residual=residual is not None
    )
    *total, factors, q, t, parts = run(launch, [*rows, weight, by.scale], kernels)
    x = casts.quantized(q, t, parts, by=by, fmt=fmt, shape=h.shape)
    return (total[0].reshape(h.shape) if total else h), factors, x


def gradient(
    readers: Sequence[Array],
    total: Array,
    h: Array,
    factors: Array,
    weight: Array,
    kernels: TritonKernels,
) -> tuple[Array, Array, Array]:
    """The gradient of h, that of the norm's weight in float32, and the first's amax; by those of
    two or three readers of the norm, and of the sum that h goes into."""
    from fp8ref.kernels import norm_gradients

    rows = [x.reshape(casts.matrix_shape(x)) for x in (*readers, total, h)]
    launch = norm_gradients.gradient(casts.matrix_shape(h), len(readers))
    h_gradient, weight_gradient, amaxes = run(launch, [*rows, factors, weight], kernels)
    return h_gradient.reshape(h.shape), weight_gradient.sum(0), casts.largest(amaxes)
