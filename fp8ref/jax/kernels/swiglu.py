"""SwiGLU and its gradients with their casts, by Triton's kernels (spec M-11); ``plain.swiglu`` is
the plain form. gate, up and the product's gradient are [..., N] of one dtype."""

from jax import Array

from fp8ref.formats import Format
from fp8ref.jax.kernels import casts
from fp8ref.jax.kernels.launch import TritonKernels, run
from fp8ref.jax.quantize.scales import Scales
from fp8ref.jax.quantize.scaling import Quantized


def amax(gate: Array, up: Array, kernels: TritonKernels) -> Array:
    """The amax, float32 (), of the rounded product."""
    from fp8ref.kernels import swiglu

    tensors = _rows(gate, up)
    return casts.largest(*run(swiglu.amax(casts.matrix_shape(gate)), tensors, kernels))


def quantize(gate: Array, up: Array, by: Scales, fmt: Format, kernels: TritonKernels) -> Quantized:
    """The product, rounded to gate's dtype, by ``casts.quantize``."""
    from fp8ref.kernels import swiglu

    tensors = _rows(gate, up)
    launch = swiglu.cast(casts.matrix_shape(gate), e5m2=fmt.name == "e5m2")
    outputs = run(launch, [*tensors, by.scale], kernels)
    return casts.quantized(*outputs, by=by, fmt=fmt, shape=gate.shape)


def gradient_amaxes(
    d: Array, gate: Array, up: Array, kernels: TritonKernels
) -> tuple[Array, Array]:
    """The amaxes of gate's rounded gradient and of up's; d is the product's gradient."""
    from fp8ref.kernels import swiglu

    tensors = _rows(d, gate, up)
    gate_parts, up_parts = run(swiglu.gradient_amaxes(casts.matrix_shape(gate)), tensors, kernels)
    return casts.largest(gate_parts), casts.largest(up_parts)


def quantize_gradients(
    tensors: tuple[Array, Array, Array],
    by: tuple[Scales, Scales],
    fmt: Format,
    kernels: TritonKernels,
) -> tuple[Quantized, Quantized]:
    """gate's gradient and up's, each rounded, by ``casts.quantize``; of (d, gate, up)."""
    from fp8ref.kernels import swiglu

    inputs, shape = _rows(*tensors), tensors[1].shape
    launch = swiglu.cast_gradients(casts.matrix_shape(tensors[1]), e5m2=fmt.name == "e5m2")
    *codes, gate_parts, up_parts = run(launch, [*inputs, *(each.scale for each in by)], kernels)
    return (
        casts.quantized(codes[0], codes[1], gate_parts, by=by[0], fmt=fmt, shape=shape),
        casts.quantized(codes[2], codes[3], up_parts, by=by[1], fmt=fmt, shape=shape),
    )


def _rows(*tensors: Array) -> list[Array]:
    return [x.reshape(casts.matrix_shape(x)) for x in tensors]
