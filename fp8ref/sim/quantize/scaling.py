"""Quantize a tensor to 8 or 4 bits: amax, scale, codes; and dequantize it (spec S).

Order of ``quantize``: amax of each block (S-2); the policy's scale, by ``scales.py``; RN32(x *
scale); clip to +-max; round to nearest even (S-5). ``dequantize`` multiplies by scale_inv (S-8).

What shares a scale is a block (``spec.granularity.Blocks``): granularities by name, heads of
attention, moments, gradients. ``block_amax_plain`` and ``quantize_blocks_plain`` are the
definitions. Their compiled twins are in ``kernels.scaling``, and take any tensor and blocks as a
matrix over a coarser grid of scales (``scale_grid``).

Every cast of the simulator is made of three functions: ``scale_blocks`` scales, ``saturate`` clips
and rounds, ``quantize_blocks`` does both. ``quantize`` and ``quantize_with`` call the last. These
modules of ``sim`` make codes by a function directly, the first five because they count numbers
between the two parts, or because the numbers are scaled already:

    attention.attention: saturate
    attention.gradients.gradients: saturate, scale_blocks
    attention.probability_value: saturate
    distributed.gradient_reduction: saturate, scale_blocks
    states.moments: saturate, scale_blocks
    attention.operands.heads: quantize_blocks
    llama: quantize_blocks
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fp8ref import formats
from fp8ref import policy as policies
from fp8ref.formats import FLOAT32, Format
from fp8ref.policy import ScalePolicy
from fp8ref.shared import errors
from fp8ref.shared.errors import require
from fp8ref.sim import threads
from fp8ref.sim.kernels import scaling as kernels
from fp8ref.sim.kernels.cast import encodes
from fp8ref.sim.kernels.compiled import ELEMENTS, worth
from fp8ref.sim.quantize import cast, two_level
from fp8ref.sim.quantize.cast import Rounding
from fp8ref.sim.quantize.scale_grid import Grid, grid_of
from fp8ref.sim.quantize.scales import Scales, magnitudes, scales_from_amax
from fp8ref.sim.quantize.scales import scale_from_amax as scale_from_amax
from fp8ref.sim.quantize.scales import scale_inv_from_scale as scale_inv_from_scale
from fp8ref.spec import granularity as granularities
from fp8ref.spec.granularity import Blocks

__all__ = ["Scales", "amax", "dequantize", "quantize", "quantize_with", "scale_from_amax"]

_PIECE = 1 << 18  # elements whose float32 bits are held at a time


class Quantized(NamedTuple):
    """A quantized tensor: hp ~ decode(codes) * scale_inv, the scales spread over their blocks.

    codes        uint8, of the hp tensor's shape; of 4 bits too, one a byte.
    scale        float32 of shape ``granularity.scale_shape``: multiplied into FP8.
    scale_inv    float32 of that shape: multiplies out of it.
    fmt, granularity, axis
                 how it was quantized; axis is the reduced one.
    tensor_scale_inv
                 float32 (), or a row's [M, 1], of two levels of scales (S-22): it multiplies out
                 too; None: one level.
    """

    codes: np.ndarray
    scale: np.ndarray
    scale_inv: np.ndarray
    fmt: Format
    granularity: str
    axis: int
    tensor_scale_inv: np.ndarray | None = None

    @property
    def blocks(self) -> Blocks:
        """The elements that share a scale."""
        return granularities.lengths(self.granularity, self.codes.ndim, self.axis)


def amax(x, granularity: str = "tensorwise", *, axis: int = -1, ragged: bool = False) -> np.ndarray:
    """The largest magnitude of every group that shares a scale (spec S-2).

    ragged    the last block along axis may be shorter (S-6): as along a linear's rows.

    Shapes:   x float32, float16 or bfloat16, any rank; float32 of ``scale_shape(granularity,
              x.shape, axis)``; axis is the reduced one.
    Specials: NaN if any element of the group is NaN; else Inf if any is infinite; subnormals count.
    Raises:   ValueError: x empty (S-7); an unknown granularity; an axis that is not there, or that
              blocks do not divide; float64, whose amax need not be a float32.
    """
    x = tensor(x)
    granularities.blocks(granularity, x.shape, axis, ragged=ragged)
    amaxes = block_amax(x, granularities.lengths(granularity, x.ndim, axis))
    shape = granularities.scale_shape(granularity, x.shape, axis, ragged=True)
    return amaxes.reshape(shape)[()]


def quantize(
    x,
    fmt: Format | str,
    *,
    granularity: str = "tensorwise",
    policy: str | ScalePolicy = "torchao",
    axis: int = -1,
    rounding: Rounding = "nearest_even",
    seed: int | None = None,
    ragged: bool = False,
) -> Quantized:
    """Scale x into fmt's range and round, saturating.

    ragged    as in ``amax``.
    rounding  as in ``cast.encode``; stochastic, by a seed and the flat index of x.
    Shapes:   x float32, float16 or bfloat16 [..., K] (axis is the reduced one); codes uint8 of x's
              shape; scales of ``scale_shape``.
    Units:    x ~ decode(codes) * scale_inv.
    Order:    amax; scale; RN32(f32(x) * scale); clip to +-fmt.max; round; scale_inv = RN32(1 /
              scale). A policy that stores scale_inv divides by it instead (S-13). One of two levels
              makes scales from the amaxes of a block and of the tensor or row (S-22).
    Specials: -0 kept. Policy ``torchao``: zero amax -> codes 0; NaN anywhere in a group -> all its
              codes NaN; Inf -> scale 0: finite -> +-0, Inf -> NaN. Other policies: S-10. A policy
              that would keep a previous scale takes 1 (S-11).
    Raises:   ValueError: as amax, scales_from_amax and cast.encode; a fmt that is neither FP8 nor
              e2m1fn.
    Source:   spec S-5; torchao 0.18 float8/float8_training_tensor.py,
              hp_tensor_and_scale_to_float8.
    """
    policy = policies.by_name(policy)
    fmt = target(fmt)
    x = _round_float32(tensor(x), policy.compute)
    block_amaxes, tensor_amax = amax(x, granularity, axis=axis, ragged=ragged), None
    if rule := policy.two_level:
        if rule.error or rule.tensor_granularity == "rowwise":
            errors.one_of(f"granularity of {policy.name}", granularity, rule.granularities)
        tensor_amax = amax(x, rule.tensor_granularity, axis=axis)
    scales, tensor_scale_inv = scales_of(x, block_amaxes, tensor_amax, fmt, policy, axis)
    blocks = granularities.lengths(granularity, x.ndim, axis)
    codes = quantize_blocks(
        x, scales, fmt, blocks, divides_in=policy.divides_in, rounding=rounding, seed=seed
    )
    return Quantized(
        codes, scales.scale, scales.scale_inv, fmt, granularity, axis, tensor_scale_inv
    )


def scales_of(
    x: np.ndarray,
    amaxes: np.ndarray,
    tensor_amax: np.ndarray | None,
    fmt: Format,
    policy: ScalePolicy,
    axis: int,
) -> tuple[Scales, np.ndarray | None]:
    """The scales of blocks, of their amaxes, and ``tensor_scale_inv``, of two levels (S-22) also of
    the amax of the tensor that x is, or is a part of. Raises as ``quantize``."""
    rule = policy.two_level
    if rule is None or tensor_amax is None:
        return scales_from_amax(amaxes, fmt, policy), None
    levels = two_level.scales_from_amaxes(amaxes, tensor_amax, fmt, policy)
    if rule.error:
        levels = two_level.four_over_six(x, amaxes, tensor_amax, policy, axis)
    whole = levels.tensor_scale_inv if rule.tensor != "none" else None
    return Scales(levels.scale, levels.scale_inv), whole


def quantize_with(
    x,
    scales: Scales,
    fmt: Format | str,
    *,
    granularity: str = "tensorwise",
    policy: str | ScalePolicy = "torchao",
    axis: int = -1,
    rounding: Rounding = "nearest_even",
    seed: int | None = None,
) -> Quantized:
    """Quantize by given scales, such as a delayed state's. Units, order, rounding and specials as
    quantize; the last block along axis may be shorter.

    Shapes:   x as in quantize; both of scales float32 of ``scale_shape``. Of the policy only S-13
              counts: whether tensors are divided by scale_inv, and in which dtype.
    Raises:   ValueError: x or fmt as in quantize; scales that are not a ``Scales``, of another
              shape, not float32, or negative.
    Source:   spec S-5, S-13.
    """
    policy = policies.by_name(policy)
    fmt = target(fmt)
    value = _round_float32(tensor(x), policy.compute)
    if not isinstance(scales, Scales):
        raise ValueError(
            f"scales are a Scales(scale, scale_inv); got {type(scales).__name__}. Use "
            "scales_from_amax."
        )
    for name, scale in scales._asdict().items():
        magnitudes(scale, name)
    shape = granularities.scale_shape(granularity, value.shape, axis, ragged=True)
    if np.shape(scales.scale) != shape or np.shape(scales.scale_inv) != shape:
        raise ValueError(
            f"{granularity} scales of x.shape={value.shape} have shape {shape}; got "
            f"{np.shape(scales.scale)}, {np.shape(scales.scale_inv)}."
        )
    blocks = granularities.lengths(granularity, value.ndim, axis)
    codes = quantize_blocks(
        value, scales, fmt, blocks, divides_in=policy.divides_in, rounding=rounding, seed=seed
    )
    return Quantized(codes, scales.scale, scales.scale_inv, fmt, granularity, axis)


def block_amax(x: np.ndarray, blocks: Blocks) -> np.ndarray:
    """The largest magnitude of every block of x (spec S-2): float32 of ``block_counts``. The last
    block along an axis may be shorter, as if x were padded with zeros (S-6). Specials as ``amax``.
    """
    if not worth(_amax_kernel(x.shape, blocks), x.size, ELEMENTS):
        return block_amax_plain(x, blocks)
    return _compiled_amax(x, blocks)


def block_amax_plain(x: np.ndarray, blocks: Blocks) -> np.ndarray:
    """The definition of ``block_amax``, in NumPy alone."""
    with np.errstate(invalid="ignore"):  # a signalling NaN is an input like others
        value = np.abs(x.astype(np.float32))
    value = np.where(np.isnan(value), np.float32(np.nan), value)
    sizes = granularities.block_sizes(value.shape, blocks)
    # a last block that is shorter is filled with zeros
    missing = [-n % size for n, size in zip(value.shape, sizes, strict=True)]
    value = np.pad(value, [(0, n) for n in missing]) if any(missing) else value
    # [n, m] -> [n / bn, bn, m / bm, bm], reduced over the blocks' own axes
    split = [k for n, size in zip(value.shape, sizes, strict=True) for k in (n // size, size)]
    amaxes = value.reshape(split).max(axis=tuple(range(1, len(split), 2)))
    return amaxes.reshape(granularities.block_counts(x.shape, blocks))[()]


def spread(scale: np.ndarray, shape: tuple[int, ...], blocks: Blocks) -> np.ndarray:
    """Scales repeated over their blocks, which may end short, to match a shape."""
    for axis, (n, size) in enumerate(zip(shape, blocks, strict=True)):
        if size is not None and size > 1:
            scale = np.repeat(scale, size, axis=axis)
            scale = scale.take(range(n), axis=axis) if n % size else scale
    return scale


def scale_blocks(
    x: np.ndarray, scales: Scales, blocks: Blocks, divides_in: Format | None = None
) -> np.ndarray:
    """What a cast rounds, float32 of x's shape: RN32(f32(x) * scale); or the quotient by scale_inv
    in the dtype ``divides_in`` (S-13)."""
    # 0 / 0, Inf * 0; the clip takes an overflow
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        value = x.astype(np.float32)
        if divides_in is None:
            return value * spread(scales.scale, x.shape, blocks)
        scale_inv = _round_float32(scales.scale_inv, divides_in)
        return _round_float32(value / spread(scale_inv, x.shape, blocks), divides_in)


def quantize_blocks(
    x: np.ndarray,
    scales: Scales,
    fmt: Format,
    blocks: Blocks,
    *,
    divides_in: Format | None = None,
    rounding: Rounding = "nearest_even",
    seed: int | None = None,
    start: int = 0,
) -> np.ndarray:
    """Cast x by a scale for each block: ``scale_blocks``, then ``saturate`` (spec S-5). The
    docstring of the module lists who calls these two alone.

    divides_in  the dtype in which x is divided by scale_inv (S-13); None: multiplied by scale.
    start       the flat index of x's first element, for stochastic rounding.
    Shapes:     x float32, float16 or bfloat16, rounded to divides_in; scales float32 of
                ``block_counts``, not checked; codes as ``saturate``.
    """
    if (
        divides_in is None
        and rounding == "nearest_even"
        and seed is None
        and encodes(fmt)
        and worth(_encoder(fmt, x.shape, blocks), x.size, ELEMENTS)
    ):
        return _compiled_encode(x, scales.scale, fmt, blocks)
    scaled = scale_blocks(x, scales, blocks, divides_in)
    return saturate(scaled, fmt, rounding=rounding, seed=seed, start=start)


def quantize_blocks_plain(
    x: np.ndarray, scales: Scales, fmt: Format, blocks: Blocks, divides_in: Format | None = None
) -> np.ndarray:
    """The definition of ``quantize_blocks`` to nearest even, in NumPy alone."""
    scaled = scale_blocks(x, scales, blocks, divides_in)
    return cast.encode_plain(np.clip(scaled, -fmt.max, fmt.max), fmt)


def saturate(
    scaled: np.ndarray,
    fmt: Format,
    *,
    rounding: Rounding = "nearest_even",
    seed: int | None = None,
    start: int = 0,
) -> np.ndarray:
    """Cast numbers that are scaled already, or need no scale: clip to +-fmt.max; round (S-5). uint8
    codes; of a format of more than 8 bits float32 numbers. start as ``quantize_blocks``."""
    clipped = np.clip(scaled, -np.float32(fmt.max), np.float32(fmt.max))
    if seed is None:
        to_fmt = cast.encode if fmt.bits <= 8 else cast.round_to
        return to_fmt(clipped, fmt, rounding=rounding)
    plain = cast.encode_plain if fmt.bits <= 8 else cast.round_to_plain
    return plain(clipped, fmt, rounding=rounding, seed=seed, start=start)


def dequantize(q: Quantized) -> np.ndarray:
    """RN32(decode(codes) * scale_inv), float32 of the codes' shape (spec S-8); of two levels, by
    RN32(tensor_scale_inv * scale_inv) (S-22).

    Shapes:   codes of any shape, scale_inv of ``scale_shape``, spread over its blocks.
    Specials: a NaN code or scale gives NaN, and so does a zero under an infinite scale_inv (S-3);
              overflow to infinity.
    Raises:   ValueError: q not a Quantized, or with invalid scales (see ``check_scales``).
    """
    check_scales(q)
    with np.errstate(invalid="ignore", over="ignore"):  # 0 * Inf, under an infinite amax
        scale_inv = q.scale_inv if q.tensor_scale_inv is None else q.tensor_scale_inv * q.scale_inv
        return cast.decode(q.codes, q.fmt) * spread(scale_inv, q.codes.shape, q.blocks)


def check_scales(q: Quantized, name: str = "operand") -> None:
    """ValueError unless q is a Quantized whose scale_inv is float32, has the granularity's shape,
    is not negative, and is NaN only over codes that are NaN or zero (S-5, S-14), or of a format
    without NaN; and the tensor's scale likewise."""
    cast.check_subnormals()
    if not isinstance(q, Quantized):
        raise ValueError(f"{name} is a Quantized; got {type(q).__name__}. Use scaling.quantize.")
    if not isinstance(q.codes, np.ndarray) or q.codes.dtype != np.uint8:
        raise ValueError(
            f"codes are uint8; got {getattr(q.codes, 'dtype', type(q.codes).__name__)} in {name}. "
            "Use cast.encode."
        )
    formats.check(q.fmt)
    dtype = getattr(q.scale_inv, "dtype", type(q.scale_inv).__name__)
    text = f"scales are float32 arrays; got {dtype} in {name}. Use .astype(np.float32)."
    require(dtype == np.float32, text)
    shape = granularities.scale_shape(q.granularity, q.codes.shape, q.axis, ragged=True)
    if q.scale_inv.shape != shape:
        raise ValueError(
            f"{q.granularity} scales of codes {q.codes.shape} have shape {shape}; got "
            f"{q.scale_inv.shape} in {name}."
        )
    if np.any(q.scale_inv < 0):
        raise ValueError(
            f"scales are not negative; got {np.min(q.scale_inv)} in {name}. Negate codes instead."
        )
    if q.tensor_scale_inv is not None:
        scale = magnitudes(q.tensor_scale_inv, "tensor_scale_inv")
        shapes: list[tuple[int, ...]] = [()]
        if q.granularity == "nvfp4_1x16":
            shapes.append(granularities.scale_shape("rowwise", q.codes.shape, q.axis))
        if scale.shape not in shapes:
            raise ValueError(
                f"tensor_scale_inv has shape {' or '.join(map(str, shapes))}; got {scale.shape} in "
                f"{name}."
            )
    nan = np.isnan(q.scale_inv)
    if nan.any() and q.fmt.has_nan:
        values = cast.decode(q.codes, q.fmt)
        under_nan = spread(nan, q.codes.shape, q.blocks)
        if np.any(under_nan & ~np.isnan(values) & (values != 0)):
            raise ValueError(
                f"a NaN scale needs codes that are NaN or zero; got others in {name}. Find the "
                "source of the NaN (S-5, S-14)."
            )


def tensor(x) -> np.ndarray:
    """x as an array; ValueError unless it is of float32 or a narrower floating-point dtype."""
    cast.check_subnormals()
    x = cast.array(x)
    cast.check_dtype(x)
    if x.dtype == np.float64:
        raise ValueError(
            "quantize takes float32, float16 or bfloat16; got float64. Use x.astype(np.float32)."
        )
    return x


def target(fmt: Format | str) -> Format:
    """The format, by name too; ValueError unless tensors are quantized to it."""
    fmt = formats.by_name(fmt)
    if fmt.bits > 8 or not fmt.signed:
        raise ValueError(
            f"quantize takes fmt {', '.join(formats.NARROW_FORMATS)}; got {fmt}. Use cast.encode."
        )
    return fmt


def _round_float32(x: np.ndarray, fmt: Format) -> np.ndarray:
    """x rounded to the dtype in which a policy divides."""
    return x if fmt == FLOAT32 else cast.round_to(x, fmt)


def _amax_kernel(shape: tuple[int, ...], blocks: Blocks) -> Callable:
    return kernels.amax_of_columns if grid_of(shape, blocks).width == 1 else kernels.amax


def _encoder(fmt: Format, shape: tuple[int, ...], blocks: Blocks) -> Callable:
    return kernels.encoder(fmt, grid_of(shape, blocks).width == 1)


def _compiled_amax(x: np.ndarray, blocks: Blocks) -> np.ndarray:
    """``block_amax_plain`` as a kernel, for float32, float16 and bfloat16."""
    g = grid_of(x.shape, blocks)
    kernel = _amax_kernel(x.shape, blocks)
    partial: list[np.ndarray] = []

    def rows(begin: int, end: int) -> None:
        bits = np.zeros(g.scales, np.uint32)
        _in_pieces(x, g, begin, end, lambda a, b, piece: kernel(piece, g.group[a:b], g.width, bits))
        partial.append(bits)

    threads.run(rows, g.rows, grain=max(1, (1 << 17) // g.columns))
    # Bits of magnitudes order as magnitudes do, NaNs on top: integers give the maximum.
    amaxes = np.maximum.reduce(partial).view(np.float32)
    amaxes = amaxes.reshape(granularities.block_counts(x.shape, blocks))
    return np.where(np.isnan(amaxes), np.float32(np.nan), amaxes)[()]


def _compiled_encode(x: np.ndarray, scale: np.ndarray, fmt: Format, blocks: Blocks) -> np.ndarray:
    """uint8 codes of RN32(f32(x) * scale), saturated, to nearest even; scale is not checked."""
    g = grid_of(x.shape, blocks)
    codes = np.empty(x.shape, np.uint8)
    matrix = codes.reshape(g.rows, g.columns)
    scales = np.ascontiguousarray(scale).reshape(g.scales)
    kernel = _encoder(fmt, x.shape, blocks)

    def rows(begin: int, end: int) -> None:
        def encode(a: int, b: int, piece: np.ndarray) -> None:
            kernel(piece, g.group[a:b], g.width, scales, matrix[a:b])

        _in_pieces(x, g, begin, end, encode)

    threads.run(rows, g.rows, grain=max(1, (1 << 17) // g.columns))
    return codes


def _in_pieces(
    x: np.ndarray, g: Grid, begin: int, end: int, work: Callable[[int, int, np.ndarray], None]
) -> None:
    """work(begin row, end row, float32 bits of these rows), in pieces of limited memory."""
    matrix = x.reshape(g.rows, g.columns)
    step = max(1, _PIECE // g.columns)
    for a in range(begin, end, step):
        b = min(a + step, end)
        work(a, b, cast.float32_bits(np.ascontiguousarray(matrix[a:b])).reshape(b - a, g.columns))
