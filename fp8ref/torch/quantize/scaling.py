"""Quantize to FP8: amax, also over ranks, and over which; scale, codes (spec S, P-2, P-3, P-5).

Every cast of this backend is made of two functions: ``scale_blocks`` scales; ``quantize_blocks``
scales, clips and rounds, or without a scale clips and rounds what is scaled already. ``quantize``,
``quantize_with`` and ``requantize`` call the last. Optimizer states are scaled by their own steps,
and rounded by ``storage.codes``. Attention's ``heads.codes`` is ``quantize_blocks`` of an FP8
format. torchao's ``Float8Linear`` casts by itself. These modules of ``torch`` make codes by a
function directly:

    attention.fast.operands: heads.codes
    attention.fast.output: heads.codes
    attention.gradients.fast: heads.codes
    attention.gradients.mx: heads.codes
    attention.gradients.stated: heads.codes
    attention.operands.heads: quantize_blocks
    attention.operands.kept: heads.codes
    attention.output: heads.codes
    distributed.fp8_exchange: quantize_blocks, scale_blocks
    distributed.gradient_reduction: quantize_blocks
    experts.operands: quantize_blocks
    states.moments: storage.codes
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed._functional_collectives  # defines the operators of _c10d
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn import functional

from fp8ref.formats import Format
from fp8ref.policy import ScalePolicy
from fp8ref.recipe import CUT_AXES, Role, Style
from fp8ref.spec import granularity as granularities
from fp8ref.spec import support
from fp8ref.spec.gemm import MX_BLOCKS
from fp8ref.spec.granularity import Blocks
from fp8ref.torch.quantize import cast, float_values, philox, scales, two_level
from fp8ref.torch.quantize.philox import Draw
from fp8ref.torch.quantize.scales import scale_from_amax

__all__ = [
    "Groups",
    "Quantized",
    "all_reduce_max",
    "amax",
    "block_amax",
    "block_max",
    "dequantize",
    "merge_amax",
    "quantize",
    "quantize_blocks",
    "quantize_with",
    "scale_blocks",
    "scale_from_amax",
    "spread",
]
_c10d = torch.ops._c10d_functional


class Quantized(NamedTuple):
    """A tensor in FP8 or e2m1fn: hp ~ decode(codes) * scale_inv.

    codes        native float8, of the hp tensor's shape; of e2m1fn its numbers in e4m3fn.
    scale, scale_inv
                 float32 of ``granularity.scale_shape``: the factor into FP8, and the factor out of
                 it.
    axis         the reduced one.
    transposed   the codes of a matrix [M, K] once more as [K, M], contiguous, for GEMMs along axis
                 0; None: these transpose by themselves.
    tensor_scale_inv
                 float32 () of two levels of scales, which multiplies out too (S-22); None: one.
    """

    codes: Tensor
    scale: Tensor
    scale_inv: Tensor
    fmt: Format
    granularity: str
    axis: int
    transposed: Tensor | None = None
    tensor_scale_inv: Tensor | None = None

    @property
    def code_bits(self) -> Tensor:
        """The codes as uint8, those of e2m1fn from 0 to 15, as the simulator has them."""
        return cast.code_bits(self.codes, self.fmt)

    @property
    def factor(self) -> Tensor:
        """What multiplies codes out: scale_inv, of two levels times tensor_scale_inv (S-22)."""
        whole = self.tensor_scale_inv
        return self.scale_inv if whole is None else whole * self.scale_inv

    @property
    def blocks(self) -> Blocks:
        """The block of elements that shares a scale."""
        return _blocks(self.granularity, tuple(self.codes.shape), self.axis)


def block_max(magnitudes: Tensor, blocks: Blocks) -> Tensor:
    """The largest of each block of magnitudes, in their dtype, as if zeros filled the last blocks.

    Shapes:   the number of blocks along each axis; () where one block is the whole tensor.
    """
    whole = [i for i, size in enumerate(blocks) if size is None]
    if len(whole) == len(blocks):
        return magnitudes.amax()
    if all(size in (None, 1) for size in blocks):
        # From the front: Python's hash(-2) is hash(-1), and amaxes of one tensor along either dim
        # then hide from the compiler that linears repeat them.
        return magnitudes.amax(dim=whole, keepdim=True)
    sizes = granularities.block_sizes(tuple(magnitudes.shape), blocks)
    missing = [-n % size for n, size in zip(magnitudes.shape, sizes, strict=True)]
    if any(missing):
        # last dim first
        magnitudes = functional.pad(magnitudes, [n for extra in missing[::-1] for n in (0, extra)])
    parts = [
        n
        for length, size in zip(magnitudes.shape, sizes, strict=True)
        for n in (length // size, size)
    ]
    return magnitudes.reshape(parts).amax(dim=tuple(range(1, len(parts), 2)))


def block_amax(x: Tensor, blocks: Blocks) -> Tensor:
    """The largest magnitude of each block of x, in x's dtype, which holds every amax exactly.

    Shapes and specials as ``block_max`` and ``amax``.
    """
    return block_max(x.detach().abs(), blocks)


def spread(scale: Tensor, shape: tuple[int, ...], blocks: Blocks) -> Tensor:
    """Scales repeated over their blocks, so that they broadcast to a tensor of this shape."""
    if scale.ndim == 0:
        return scale
    for i, size in enumerate(blocks):
        if size not in (None, 1):
            scale = scale.repeat_interleave(size, dim=i).narrow(i, 0, shape[i])
    return scale


def scale_blocks(x: Tensor, scale: Tensor, blocks: Blocks = ()) -> Tensor:
    """RN32(f32(x) * scale), float32 of x's shape, by the scales of x's blocks.

    blocks    (): the scale broadcasts to x as it is.
    """
    return x.detach().to(torch.float32) * spread(scale, tuple(x.shape), blocks)


def quantize_blocks(x: Tensor, scale: Tensor | None, fmt: Format, blocks: Blocks = ()) -> Tensor:
    """The codes of x, native float8: ``scale_blocks``, clip to +-fmt.max, round to nearest even.

    scale     None: x is in the units of codes, as ``scale_blocks`` returns it.
    Source:   spec S-5; torchao's hp_tensor_and_scale_to_float8.
    """
    if scale is None:
        return cast.to_fp8(x, fmt)
    return float_values.in_pieces(
        lambda part, scale: cast.to_fp8(scale_blocks(part, scale, blocks), fmt),
        x.detach(),
        cast.native(fmt),
        scale,
        rows=blocks[0] or 1 if blocks else 1,
    )


def amax(
    x: Tensor, granularity: str = "tensorwise", *, axis: int = -1, ragged: bool = False
) -> Tensor:
    """The largest magnitude of every group that shares a scale, on this rank (spec S-2).

    ragged    the last block along axis may be shorter (S-6): as along a linear's rows.

    Shapes:   x hp, any rank; float32 of ``scale_shape(granularity, x.shape, axis)``; axis is the
              reduced one.
    Specials: NaN if any element is NaN; else Inf if any is infinite; subnormals count, unless
              torch.set_flush_denormal.
    Gradient: none.
    Raises:   ValueError: x empty or not float32, float16 or bfloat16; blocks that do not divide the
              reduced axis.
    """
    return _largest(x, granularity, axis, ragged).float()


def _largest(x: Tensor, granularity: str, axis: int, ragged: bool) -> Tensor:
    """As ``amax``, in x's dtype, which holds every amax exactly."""
    cast.checked(x)
    # refuses empty tensors and absent axes
    granularities.blocks(granularity, tuple(x.shape), axis, ragged=ragged)
    return block_amax(x, _blocks(granularity, tuple(x.shape), axis))


def _blocks(granularity: str, shape: tuple[int, ...], axis: int) -> Blocks:
    """The block of a granularity by name, of a tensor of this shape."""
    blocks = granularities.lengths(granularity, len(shape), axis)
    # the scale of a single row keeps its dim, that of a tensor has none
    return shape if blocks == (None,) and granularity != "tensorwise" else blocks


def merge_amax(amax: Tensor, group: str) -> Tensor:
    """The elementwise maximum of every rank's amax, float32 of any shape (P-2).

    Specials: Inf or NaN on any rank is Inf or NaN on all, NaN before Inf. A flag is reduced beside
              each amax, 1 for Inf and 2 for NaN, because gloo's maximum loses NaNs (P-3).
    """
    flag = torch.where(amax.isnan(), 2.0, torch.where(amax.isinf(), 1.0, 0.0)).to(amax.dtype)
    flagged = torch.stack([torch.where(flag > 0, 0.0, amax), flag])
    merged, flag = all_reduce_max(flagged, group).unbind()
    return torch.where(flag == 2, math.nan, torch.where(flag == 1, math.inf, merged))


def all_reduce_max(x: Tensor, group: str) -> Tensor:
    """The elementwise maximum of finite values over the ranks of a process group, by name."""
    return _c10d.wait_tensor(_c10d.all_reduce(x, "max", group))


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Names of the process groups whose ranks hold parts of one linear's tensors; None: this rank
    alone.

    batch     ranks that cut M of input and grad_output.
    tensor    ranks that cut the linear by ``style``.
    every     both together.
    """

    batch: str | None = None
    tensor: str | None = None
    every: str | None = None
    style: Style | None = None

    def sharing(self, role: Role, granularity: str, axis: int) -> str | None:
        """The name of the process group whose ranks merge this operand's amaxes; None: this rank's
        own is enough (P-5).

        axis      the one that the GEMM reduces, -2 or -1.
        """
        kind = granularities.by_name(granularity)
        if kind.reduced is not None:  # ranks cut no block
            return None
        along = None if self.style is None else CUT_AXES[self.style].get(role)
        # the axes of which one scale is all: both under tensorwise, the reduced one under rowwise
        spans = [i for i in (-2, -1) if kind.other is None or i == axis]
        # Every rank of the batch has the whole weight.
        rows = self.batch is not None and role != "weight" and -2 in spans
        parts = self.tensor is not None and along is not None and along - 2 in spans
        if rows and parts:
            return self.every
        return self.batch if rows else self.tensor if parts else None

    def parts(self, role: Role) -> list[tuple[int, int]]:
        """(which part this rank has, of how many) along both axes of a role's tensor."""
        along = None if self.style is None else CUT_AXES[self.style].get(role)
        groups = [self.tensor if along == axis else None for axis in (0, 1)]
        if role != "weight":
            groups[0] = self.batch
        resolved = [name and _resolve_process_group(name) for name in groups]  # type: ignore[arg-type]
        return [(group.rank(), group.size()) if group else (0, 1) for group in resolved]


def quantize(
    x: Tensor,
    fmt: Format,
    *,
    granularity: str = "tensorwise",
    policy: str | ScalePolicy = "torchao",
    axis: int = -1,
    group: str | None = None,
    ragged: bool = False,
    draw: Draw | None = None,
) -> Quantized:
    """Scale x into fmt's range and round, saturating.

    ragged    as in ``amax``.

    group     name of a process group whose ranks hold parts of the groups that share a scale: their
              amaxes merge (P-2). Of two levels of scales it is the tensor's amax.
    draw      of stochastic rounding; None: to nearest even.
    Shapes:   x hp [..., K] (axis is the reduced one); codes native float8 of x's shape; scales of
              ``scale_shape``.
    Units:    x ~ decode(codes) * scale_inv.
    Order:    amax; scale; RN32(f32(x) * scale); clip to +-fmt.max; round; scale_inv = RN32(1 /
              scale), exactly 2^k under an e8m0 policy, or of two levels (S-22).
    Specials: as the simulator's quantize.
    Gradient: none; the codes and scales are detached.
    Raises:   ValueError: as amax and scale_from_amax; blocks of MX by a policy that is not e8m0; as
              ``two_level.check``.
    Source:   spec S-5; torchao's hp_tensor_and_scale_to_float8.
    """
    policy = scales.implemented(policy)
    if policy.two_level is not None:
        two_level.check(fmt, granularity, policy)
    elif granularity in MX_BLOCKS:
        support.require("scale policies of MX", "torch", policy)
    largest = _largest(x, granularity, axis, ragged)
    if policy.two_level is not None:
        whole = largest.amax().float()
        if group is not None:
            whole = merge_amax(whole, group)
        *levels, whole_inv = two_level.scales(x, largest.float(), whole, policy, axis)
        q = _quantized(x, levels[0], levels[1], fmt, granularity, axis, draw)
        return q._replace(tensor_scale_inv=whole_inv)
    if group is not None:
        largest = merge_amax(largest.float(), group)
    elif policy.makes_scale_inv:
        # whose ratio is one of float32 numbers; other policies widen it by themselves
        largest = largest.float()
    scale, scale_inv = scales.scales_from_amax(largest, fmt, policy)
    return _quantized(x, scale, scale_inv, fmt, granularity, axis, draw)


def quantize_with(
    x: Tensor,
    scale: Tensor,
    fmt: Format,
    *,
    granularity: str = "tensorwise",
    axis: int = -1,
    draw: Draw | None = None,
) -> Quantized:
    """quantize by a given scale, such as a delayed state's; not for e8m0 policies (S-14).

    Shapes:   x as in quantize; scale float32 of ``scale_shape``.
    Order:    as in quantize, from x * scale on; scale_inv = RN32(1 / scale).
    Raises:   ValueError: a scale of another shape; x empty or not float32, float16 or bfloat16; a
              fmt that is not FP8.
    """
    cast.checked(x)
    if not isinstance(scale, Tensor):
        raise ValueError(
            f"a scale is a torch.Tensor of float32; got {type(scale).__name__}. Convert with "
            "torch.as_tensor."
        )
    shape = granularities.scale_shape(granularity, tuple(x.shape), axis)
    if tuple(scale.shape) != shape:
        raise ValueError(
            f"{granularity} scales of x.shape={tuple(x.shape)} have shape {shape}; got "
            f"{tuple(scale.shape)}."
        )
    return _quantized(x, scale, scale.reciprocal(), fmt, granularity, axis, draw)


def requantize(x: Tensor, like: Quantized) -> Quantized:
    """The hp tensor x by the scales of ``like``, which quantized it before: the same codes."""
    return _quantized(x, like.scale, like.scale_inv, like.fmt, like.granularity, like.axis)


def dequantize(q: Quantized) -> Tensor:
    """RN32(decode(codes) * scale_inv), float32 of the codes' shape (spec S-8); of two levels, by
    RN32(tensor_scale_inv * scale_inv) (S-22).

    Specials: a NaN code or scale gives NaN, and so does a zero under an infinite scale_inv.
    Raises:   ValueError: q not a Quantized.
    """
    if not isinstance(q, Quantized):
        raise ValueError(
            f"dequantize takes a Quantized; got {type(q).__name__}. Use scaling.quantize."
        )
    blocks = q.blocks
    return float_values.in_pieces(
        lambda codes, s: cast.decode(codes, q.fmt) * spread(s, tuple(codes.shape), blocks),
        q.codes,
        torch.float32,
        q.factor,
        rows=blocks[0] or 1 if blocks else 1,
    )


def _quantized(
    x: Tensor,
    scale: Tensor,
    scale_inv: Tensor,
    fmt: Format,
    granularity: str,
    axis: int,
    draw: Draw | None = None,
) -> Quantized:
    blocks = _blocks(granularity, tuple(x.shape), axis)
    if draw is None:
        codes = quantize_blocks(x, scale, fmt, blocks)
    else:
        codes = _drawn(x, scale, fmt, blocks, axis, draw)
    return Quantized(codes, scale, scale_inv, fmt, granularity, axis)


def _drawn(x: Tensor, scale: Tensor, fmt: Format, blocks: Blocks, axis: int, draw: Draw) -> Tensor:
    """The codes of x, native float8, rounded stochastically: by the places that elements have with
    the reduced axis last (S-24)."""
    scaled = scale_blocks(x, scale, blocks).movedim(axis, -1)
    size, out = scaled[:1].numel(), []
    for rows in float_values.slices(scaled, 8 * float_values.SMALL):
        part, begin = scaled[rows], (rows.start or 0) * size
        start = draw.start  # a number may be a torch.SymInt
        start = start[rows].reshape(-1) if isinstance(start, Tensor) else start + begin
        drawn = philox.codes(part.reshape(-1), fmt, draw.key, start, draw.bits).to(torch.uint8)
        out.append(cast.from_code_bits(drawn, fmt).view(part.shape))
    return (torch.cat(out) if len(out) > 1 else out[0]).movedim(-1, axis)
