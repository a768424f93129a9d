"""Quantize a tensor: amax, scale, codes; dequantize it (spec S), guarded against XLA's rewrites.

Four guards keep XLA to the specification. Operands pass ``reduce_precision`` (cast.to_f32). The
scale passes an optimization barrier before its reciprocal; otherwise 1 / (448 / amax) is folded
into amax / 448, an ulp off. Powers of two are taken from bits, because XLA's log2 and exp2 are
approximations. So is the amax, because XLA's float maximum on a CPU drops NaNs.

Every cast of this backend is made of three functions: ``scale_blocks`` scales, ``saturate`` clips
and rounds, ``quantize_blocks`` does both. ``quantize``, ``quantize_with``, ``quantize_divided`` and
``quantize_by_state`` call the last. Optimizer states are scaled by their own steps, and rounded by
``cast.to_stored``. Attention's ``operands.narrow`` is ``saturate`` of scaled numbers, for a GEMM.
These modules of ``jax`` make codes by a function directly:

    attention.gradients.gradients: operands.narrow
    attention.gradients.mx: operands.narrow, quantize_blocks
    attention.operands.heads: quantize_blocks
    attention.operands.operands: saturate
    attention.output: operands.narrow
    distributed.gradient_reduction: quantize_blocks, saturate, scale_blocks
    experts.operands: quantize_blocks
    states.moments: cast.to_stored

``linear.paired_codes`` makes codes of finer codes, without a scale (P-6). ``kernels`` makes the
codes of ``quantize`` in both orders by Triton's kernels (M-11).
"""

import functools
import operator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8ref import policy as policies
from fp8ref.formats import FP4_FORMATS, Format
from fp8ref.jax.quantize import cast, philox, scales, two_level
from fp8ref.jax.quantize.scales import Scales, TwoLevelScales, scale_from_amax
from fp8ref.policy import ScalePolicy
from fp8ref.recipe import CastSpec
from fp8ref.shared import errors
from fp8ref.spec import granularity as granularities
from fp8ref.spec import support
from fp8ref.spec.gemm import MX_BLOCKS
from fp8ref.spec.granularity import Blocks

__all__ = [
    "Quantized",
    "amax",
    "block_amax",
    "blocks",
    "dequantize",
    "quantize",
    "quantize_blocks",
    "quantize_by_state",
    "quantize_divided",
    "quantize_with",
    "saturate",
    "scale_blocks",
    "scale_from_amax",
    "spread",
]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scale", "scale_inv", "tensor_scale_inv", "transposed", "amax"],
    meta_fields=["fmt", "granularity", "axis"],
)
@dataclass(frozen=True, kw_only=True)
class Quantized:
    """An FP8 tensor: hp ~ decode(codes) * scale_inv. A pytree, of which fmt, granularity and axis
    are static.

    codes        native float8, of the hp tensor's shape; of e2m1fn its numbers in e4m3fn.
    scale, scale_inv
                 float32 of ``granularity.scale_shape``: what multiplied into FP8, what multiplies
                 out of it.
    tensor_scale_inv
                 float32 (), of two levels of scales: multiplies out too (S-22). None: one level.
    axis         the reduced one; under rowwise it may be several.
    transposed   the codes as [columns, rows], contiguous, leading dims flattened to rows; None: not
                 made.
    amax         of the hp tensor, taken while it was cast; None: not taken.
    """

    codes: Array
    scale: Array
    scale_inv: Array
    fmt: Format
    granularity: str
    axis: int | tuple[int, ...]
    tensor_scale_inv: Array | None = None
    transposed: Array | None = None
    amax: Array | None = None

    @property
    def code_bits(self) -> Array:
        """The codes as uint8, those of e2m1fn from 0 to 15, as the simulator has them."""
        return cast.code_bits(self.codes, self.fmt)

    @property
    def both_scale_inv(self) -> Array:
        """scale_inv, or of two levels RN32(tensor_scale_inv * scale_inv) (S-22)."""
        whole = self.tensor_scale_inv
        return self.scale_inv if whole is None else whole * self.scale_inv

    @property
    def blocks(self) -> Blocks:
        """The block of the elements that share a scale."""
        return blocks(self.granularity, self.codes.shape, self.axis)


def blocks(granularity: str, shape: tuple[int, ...], axis: int | tuple[int, ...]) -> Blocks:
    """The block of a granularity by name, of a tensor of this shape that is reduced along axis.

    Raises:   ValueError: several axes of anything but rowwise; as ``spec.granularity.lengths``.
    """
    axes = axis if isinstance(axis, tuple) else (axis,)
    if len(axes) == 1 or granularity in ("tensorwise", "rowwise"):
        each = [granularities.lengths(granularity, len(shape), one) for one in axes]
        sizes = tuple(None if None in along else along[0] for along in zip(*each, strict=True))
    else:
        raise ValueError(
            f"blocks need one reduced axis; got {granularity!r}, axis={axis}. Flatten x first."
        )
    # the scale of a single row keeps its dims, that of a tensor has none
    return shape if granularity != "tensorwise" and set(sizes) == {None} else sizes


def block_amax(
    x: Array, blocks: Blocks, *, over: tuple[str, ...] = (), with_producer: bool = False
) -> Array:
    """The largest magnitude of each block of x, as if zeros filled the last ones.

    Shapes:   x hp, any rank; float32 of the number of blocks along each axis, () where one block is
              the tensor.
    Order, devices, with_producer and specials as in ``amax``.
    """
    bits = cast.bits(x)
    whole = tuple(i for i, size in enumerate(blocks) if size is None)
    if len(whole) == len(blocks):
        bits = _largest(bits, x.dtype)
    elif all(size in (None, 1) for size in blocks):
        bits = _largest(bits, x.dtype, axis=whole, keepdims=True, with_producer=with_producer)
    else:
        bits = _largest_of_blocks(bits, x.dtype, blocks)
    if over:
        bits = lax.pmax(bits.astype(jnp.int32), over).astype(bits.dtype)
    return cast.from_magnitude_bits(bits, x.dtype)


def spread(scale: Array, shape: tuple[int, ...], blocks: Blocks) -> Array:
    """Repeat scales over their blocks, so that they broadcast against a tensor of this shape."""
    if jnp.ndim(scale) == 0:
        return scale
    for i, size in enumerate(blocks):
        if size not in (None, 1):
            scale = lax.slice_in_dim(jnp.repeat(scale, size, axis=i), 0, shape[i], axis=i)
    return scale


def scale_blocks(
    x: Array, by: Scales | TwoLevelScales, blocks: Blocks, policy: ScalePolicy | None = None
) -> Array:
    """What a cast rounds: RN32(f32(x) * scale), or under a policy that stores scale_inv the
    quotient by it (S-13); float32 of x's shape."""
    if policy and policy.stored == "scale_inv":
        return cast.to_f32(x) / spread(by.scale_inv, x.shape, blocks)
    times = scales.times_e8m0 if policy and policy.e8m0 else operator.mul
    return times(cast.to_f32(x), spread(by.scale, x.shape, blocks))


def quantize_blocks(
    x: Array,
    by: Scales | TwoLevelScales,
    fmt: Format,
    blocks: Blocks,
    *,
    policy: ScalePolicy | None = None,
    random: philox.Random | None = None,
) -> Array:
    """The codes of x, native float8, by a scale for each block: ``scale_blocks``, ``saturate``
    (S-5). policy None: by products."""
    return saturate(scale_blocks(x, by, blocks, policy), fmt, random)


def saturate(scaled: Array, fmt: Format, random: philox.Random | None = None) -> Array:
    """The codes, native float8, of numbers that are scaled already, or need no scale: clip to
    +-fmt.max; round to nearest even, or stochastically (S-5, C-2)."""
    if random is None:
        return cast.to_fp8(scaled, fmt)
    return cast.from_code_bits(philox.codes(scaled, fmt, random).astype(jnp.uint8), fmt)


def scales_of(
    x: Array, cast: CastSpec, amax: Array, tensor_amax: Array | None, axis: int
) -> Scales | TwoLevelScales:
    """The scales of a cast, of the amaxes of x's blocks, and of two levels (S-22) of the tensor."""
    rule = cast.policy.two_level
    if rule is None or tensor_amax is None:
        return scales.scales_from_amax(amax, cast.fmt, cast.policy)
    text = f"scales of two levels are of e2m1fn; got {cast.fmt}, policy {cast.policy.name!r}."
    errors.require(cast.fmt.name in FP4_FORMATS, text)
    if rule.error:
        return two_level.four_over_six(x, amax, tensor_amax, cast.policy, axis)
    return two_level.scales_from_amaxes(amax, tensor_amax, cast.policy)


def amax(
    x: Array,
    granularity: str = "tensorwise",
    *,
    axis: int | tuple[int, ...] = -1,
    over: tuple[str, ...] = (),
    with_producer: bool = False,
    ragged: bool = False,
) -> Array:
    """The largest magnitude of every group that shares a scale (spec S-2).

    ragged    the last block along axis may be shorter (S-6): as along a linear's rows.

    Shapes:   x hp, any rank; float32 of ``scale_shape(granularity, x.shape, axis)``; axis is the
              reduced one, or under rowwise several.
    Order:    the maximum is of the magnitudes' bits: XLA's maximum of the numbers on a CPU drops
              NaNs, of large tensors and between devices, and flushes subnormals.
    Devices:  ``over`` names mesh axes, inside shard_map, along which the maximum is taken too
              (P-2). Under jit on a sharded array XLA does that.
    with_producer
              of rowwise scales on an NVIDIA GPU: the same bits, in a form that XLA takes into the
              kernel that makes x, if there is one.
    Specials: NaN if any element is NaN, on any device; else Inf if any is infinite; subnormals
              count.
    Raises:   ValueError: x empty or not float32, float16 or bfloat16; blocks that do not divide the
              reduced axis.
    """
    cast.check_array(x)
    for each in axis if isinstance(axis, tuple) else (axis,):
        # refuses empty tensors, absent axes and blocks that do not divide
        granularities.blocks(granularity, x.shape, each, ragged=ragged)
    sizes = blocks(granularity, x.shape, axis)
    return block_amax(x, sizes, over=over, with_producer=with_producer)


def over_devices(amaxes: Array, over: tuple[str, ...]) -> Array:
    """Amaxes, float32 of any shape, of all devices along mesh axes, inside shard_map (P-2, P-9):
    one all-reduce; none of no axes.
    """
    if not over:
        return amaxes
    bits = lax.pmax(cast.magnitude_bits(amaxes), over)
    return cast.from_magnitude_bits(bits, jnp.float32)


def quantize(
    x: Array,
    fmt: Format,
    *,
    granularity: str = "tensorwise",
    policy: str | ScalePolicy = "torchao",
    axis: int | tuple[int, ...] = -1,
    over: tuple[str, ...] = (),
    by: Scales | TwoLevelScales | None = None,
    random: philox.Random | None = None,
) -> Quantized:
    """Scale x into fmt's range and round to nearest even, or stochastically, saturating.

    Shapes:   x hp [..., K] (axis is the reduced one); codes native float8 of x's shape; scales of
              ``scale_shape``.
    Units:    x ~ decode(codes) * scale_inv.
    Order:    amax, along the mesh axes ``over`` too; scale; RN32(f32(x) * scale); clip to
              +-fmt.max; round; scale_inv = RN32(1 / scale), or exactly 2^k under an e8m0 policy.
              Two levels of scales: S-22.
    random    of stochastic rounding; None: to nearest even.
    by        the scales of this policy, if they are made already: no amax is taken, and the last
              block along axis may be shorter.
    Specials: as the simulator's quantize.
    Gradient: none through the scale; through the codes that of XLA's conversions. ``linear.apply``
              defines its own.
    Raises:   ValueError: as amax and scale_from_amax; blocks of MX by a policy that is not e8m0.
    Source:   spec S-5, S-22, P-4.
    """
    policy = scales.implemented(policy)
    if granularity in MX_BLOCKS:
        support.require("scale policies of MX", "jax", policy)
    if by is None:
        largest = amax(x, granularity, axis=axis, over=over)
        whole = None if policy.two_level is None else amax(x, over=over)
        spec = CastSpec(fmt=fmt, granularity=granularity, policy=policy)
        by = scales_of(x, spec, largest, whole, axis)  # type: ignore[arg-type]
    block = blocks(granularity, x.shape, axis)
    codes = quantize_blocks(x, by, fmt, block, policy=policy, random=random)
    return Quantized(codes=codes, **by._asdict(), fmt=fmt, granularity=granularity, axis=axis)


def quantize_with(
    x: Array,
    scale: Array,
    fmt: Format,
    *,
    granularity: str = "tensorwise",
    axis: int = -1,
    random: philox.Random | None = None,
) -> Quantized:
    """Quantize by a given scale, such as a delayed state's; scale_inv = RN32(1 / scale), so not for
    e8m0 policies (S-14).

    Shapes:   x as in quantize; scale float32 of ``scale_shape``.
    Raises:   ValueError: a scale of another shape; x empty or not float32, float16 or bfloat16; a
              fmt that is not FP8.
    """
    cast.check_array(x)
    cast.check_array(scale, "a scale is an array of float32")
    shape = granularities.scale_shape(granularity, x.shape, axis)
    if scale.shape != shape:
        raise ValueError(
            f"{granularity} scales of x.shape={x.shape} have shape {shape}; got {scale.shape}."
        )
    by = scales.with_inverse(scale)
    codes = quantize_blocks(x, by, fmt, blocks(granularity, x.shape, axis), random=random)
    return Quantized(codes=codes, **by._asdict(), fmt=fmt, granularity=granularity, axis=axis)


def quantize_divided(
    x: Array, scale_inv: Array, fmt: Format, *, axis: int = -1, random: philox.Random | None = None
) -> Quantized:
    """quantize by policy ``flax`` (spec S-13), tensorwise: RN32(f32(x) / scale_inv), clip,
    round. scale_inv is of shape ().

    Raises:   ValueError: x not float32, float16 or bfloat16; a fmt that is not FP8.
    On a CPU XLA makes the division a product with RN32(1 / scale_inv) under jit, as it does in
    flax.
    """
    cast.check_array(x)
    cast.check_array(scale_inv, "a scale_inv is an array of float32")
    by = Scales(1 / scale_inv, scale_inv)
    flax = policies.POLICIES["flax"]
    codes = quantize_blocks(x, by, fmt, (None,) * x.ndim, policy=flax, random=random)
    return Quantized(codes=codes, **by._asdict(), fmt=fmt, granularity="tensorwise", axis=axis)


def quantize_by_state(
    x: Array, stored: Array, spec: CastSpec, *, axis: int, random: philox.Random | None = None
) -> Quantized:
    """Quantize by the number that a delayed state holds (H-1): a scale (``quantize_with``), or a
    scale_inv (``quantize_divided``), as the policy of its cast says."""
    if spec.policy.stored == "scale_inv":
        return quantize_divided(x, stored, spec.fmt, axis=axis, random=random)
    kind = spec.granularity
    return quantize_with(x, stored, spec.fmt, granularity=kind, axis=axis, random=random)


def dequantize(q: Quantized) -> Array:
    """RN32(decode(codes) * scale_inv), float32 of the codes' shape (spec S-8); of two levels by
    RN32(tensor_scale_inv * scale_inv) (S-22).

    Specials: a NaN code or scale gives NaN, and so does a zero under an infinite scale_inv. On a
              CPU XLA takes a scale_inv of 2^-127 for zero.
    Raises:   ValueError: q not a Quantized.
    """
    if not isinstance(q, Quantized):
        raise ValueError(
            f"dequantize takes a Quantized; got {type(q).__name__}. Use scaling.quantize."
        )
    return cast.decode(q.codes, q.fmt) * spread(q.both_scale_inv, q.codes.shape, q.blocks)


# traced once for all tensors of a shape
@functools.partial(jax.jit, static_argnames=("dtype", "axis", "keepdims", "with_producer"))
def _largest(
    bits: Array,
    dtype,
    axis: int | tuple[int, ...] | None = None,
    keepdims: bool = False,
    with_producer: bool = False,
) -> Array:
    """The maximum of ``cast.magnitude_bits``: of integers on NVIDIA GPUs, else of floats, XLA's
    only fast maximum on a CPU."""
    return lax.platform_dependent(
        bits,
        cuda=functools.partial(_absolute_max, axis=axis, keepdims=keepdims, dtype=dtype)
        if with_producer
        else functools.partial(_integer_max, axis=axis, keepdims=keepdims),
        default=functools.partial(_float_max, axis=axis, keepdims=keepdims, dtype=dtype),
    )


def _integer_max(bits: Array, axis: int | tuple[int, ...] | None, keepdims: bool) -> Array:
    """The maximum over integers. The reduction across memory reads the bits (signed: positive
    numbers; unsigned: negative), else XLA would write magnitudes to memory."""
    largest = functools.partial(jnp.max, axis=axis, keepdims=keepdims)
    reduced = range(bits.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    if bits.ndim - 1 in (each % bits.ndim for each in reduced):
        return largest(cast.without_sign(bits))
    unsigned = largest(lax.bitcast_convert_type(bits, f"u{bits.dtype}"))
    negative = lax.bitcast_convert_type(unsigned, bits.dtype)
    return jnp.maximum(largest(bits), cast.without_sign(negative))


def _absolute_max(bits: Array, axis: int | tuple[int, ...] | None, keepdims: bool, dtype) -> Array:
    """One reduction, which XLA fuses into the kernel of a gradient; with masks or two it reads the
    gradient again. In PTX the absolute is a mask."""
    magnitudes = jnp.abs(lax.bitcast_convert_type(bits, dtype))
    return jnp.max(lax.bitcast_convert_type(magnitudes, bits.dtype), axis=axis, keepdims=keepdims)


def _float_max(bits: Array, axis: int | tuple[int, ...] | None, keepdims: bool, dtype) -> Array:
    """The float maximum drops NaNs and flushes subnormals, so the bits are mapped, in order, to
    normal finite numbers: t = bits - 2^(n - 2) becomes the number t steps above the least normal
    one, or below its negative; the result is mapped back."""
    size = jnp.iinfo(bits.dtype)
    half, least, sign = 1 << (size.bits - 2), 1 << jnp.finfo(dtype).nmant, size.bits - 1
    t = cast.without_sign(bits) - half
    ordered = (least + (t ^ (t >> sign))) | ((t >> sign) & size.min)
    numbers = lax.bitcast_convert_type(ordered, dtype)
    largest = jnp.max(numbers, axis=axis, keepdims=keepdims)
    largest = lax.bitcast_convert_type(largest, bits.dtype)
    return (((largest & size.max) - least) ^ (largest >> sign)) + half


def _largest_of_blocks(bits: Array, dtype, blocks: Blocks) -> Array:
    sizes = granularities.block_sizes(bits.shape, blocks)
    # zeros fill the last block
    bits = jnp.pad(bits, [(0, -n % size) for n, size in zip(bits.shape, sizes, strict=True)])
    split = [(n // size, size) for n, size in zip(bits.shape, sizes, strict=True)]
    bits = bits.reshape([part for pair in split for part in pair])
    return _largest(bits, dtype, axis=tuple(range(1, bits.ndim, 2)))
