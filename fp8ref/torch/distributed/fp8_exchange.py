"""Codes of gradients that ranks exchange, and their sums (P-21), for ``gradient_reduction``."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from fp8ref.formats import E4M3FN, Format
from fp8ref.policy import ScalePolicy
from fp8ref.spec import gradient_reduction
from fp8ref.spec.gradient_reduction import PreScale, Result
from fp8ref.torch.quantize import cast as casts
from fp8ref.torch.quantize import scales, scaling

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class GradientCast:
    """How gradients are cast before ranks exchange them.

    prescale  the factor of the shared scale.
    Raises:   ValueError: a format that is not FP8; a policy that fp8ref.torch does not implement,
              or without a scale to multiply by; an unknown prescale.
    """

    fmt: Format = E4M3FN
    policy: str | ScalePolicy = "torchao"
    prescale: PreScale = "one"

    def __post_init__(self) -> None:
        gradient_reduction.check_format(self.fmt)
        gradient_reduction.check_policy(scales.implemented(self.policy))
        gradient_reduction.factor(self.prescale, 1)

    def scale(self, amax: Tensor, factor: Tensor | float) -> Tensor:
        """``sim.gradient_reduction.shared_scales`` of merged amaxes, times a factor; the policy's
        eps is its floor (``scales``)."""
        amax = torch.where(amax <= gradient_reduction.LARGEST, amax, math.nan)
        return scales.scale_from_amax(amax, self.fmt, self.policy) * factor


def sums(
    pieces: Sequence[Tensor],
    narrow: Sequence[bool],
    group: ProcessGroup,
    cast: GradientCast,
    divisor: float,
    factors: tuple[Tensor, Tensor] | None = None,
) -> list[Tensor]:
    """Sums over ranks of tensors [ranks, n], divided, float32 [n] each: those that are narrow in
    FP8, the others in float32, all by one all-to-all. factors: as of ``FP8ReduceScatter``."""
    wide = [p.float() for p, is_narrow in zip(pieces, narrow, strict=True) if not is_narrow]
    inverses, codes = [], []
    if any(narrow):
        held = [p for p, is_narrow in zip(pieces, narrow, strict=True) if is_narrow]
        amax = scaling.merge_amax(
            torch.stack(torch._foreach_norm(held, math.inf)).float(), group.group_name
        )
        factor = float(gradient_reduction.factor(cast.prescale, group.size()))
        scale = cast.scale(amax, factor if factors is None else factor * factors[0])
        inverses = list((scale.reciprocal() * float(gradient_reduction.share_of(divisor))).unbind())
        scaled_up = [scaling.scale_blocks(p, s) for p, s in zip(held, scale.unbind(), strict=True)]
        if factors is not None:
            factors[1].add_(torch.stack([_saturated(p, cast.fmt) for p in scaled_up]))
        codes = [scaling.quantize_blocks(p, None, cast.fmt).view(torch.uint8) for p in scaled_up]
    received = _exchanged(torch.cat([*codes, *(p.view(torch.uint8) for p in wide)], dim=1), group)
    split = received.split(
        [sum(c.shape[1] for c in codes), sum(4 * p.shape[1] for p in wide)], dim=1
    )
    in_fp8: Sequence[Tensor] = ()
    if codes:
        in_fp8 = _added(split[0], casts.native(cast.fmt)).split([c.shape[1] for c in codes])
    in_f32: Sequence[Tensor] = ()
    if wide:
        in_f32 = _added(split[1], torch.float32).split([p.shape[1] for p in wide])
    sums = (total * scale_inv for total, scale_inv in zip(in_fp8, inverses, strict=True))
    others = iter(in_f32)
    return [next(sums) if is_narrow else next(others) / divisor for is_narrow in narrow]


def sum_piece(
    padded: Tensor,
    g: Tensor,
    group: ProcessGroup,
    cast: GradientCast,
    mu: Tensor | float,
    mean: bool,
    result: Result,
    count: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """This rank's piece of the sum [n] in the units of codes, its codes under result ``codes``,
    what multiplies it (scale_inv, for the mean divided by the ranks), and the saturated elements of
    all ranks."""
    gradient_reduction.check_result(result)
    fmt, factor = cast.fmt, float(gradient_reduction.factor(cast.prescale, group.size()))
    if not isinstance(mu, Tensor):
        mu = float(gradient_reduction.constant_mu(mu))
    scale = cast.scale(scaling.merge_amax(scaling.amax(g), group.group_name), factor * mu)
    scaled = scaling.scale_blocks(casts.checked(padded).reshape(group.size(), -1), scale)
    saturated = _saturated(scaled, fmt) if count else None
    pieces = scaling.quantize_blocks(scaled, None, fmt).view(torch.uint8)
    total, codes = _added(_exchanged(pieces, group), casts.native(fmt)), None
    if result == "codes":
        saturated = None if saturated is None else saturated + _saturated(total, fmt)
        codes = scaling.quantize_blocks(total, None, fmt).view(torch.uint8)
        total = casts.decode(codes, fmt)
    if saturated is not None:
        distributed.all_reduce(saturated, group=group)
    scale_inv = scale.reciprocal()
    if mean:
        scale_inv = scale_inv * float(gradient_reduction.share_of(group.size()))
    return total, codes, scale_inv, saturated


def _saturated(scaled: Tensor, fmt: Format) -> Tensor:
    return (scaled.abs() > gradient_reduction.saturates_above(fmt)).sum()


def _exchanged(pieces: Tensor, group: ProcessGroup) -> Tensor:
    """uint8 [ranks, n], a piece per rank -> this rank's piece of every rank."""
    received = torch.empty_like(pieces)
    distributed.all_to_all_single(received, pieces.contiguous(), group=group)
    return received


def _added(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [ranks, ...] of numbers of a dtype -> their float32 sum [n], in rank order."""
    first, *others = parts.contiguous().view(dtype).unbind()
    total = first.to(torch.float32, copy=True)
    for part in others:
        total += part.float()
    return total


def group_of(group: ProcessGroup | None) -> ProcessGroup:
    """The group, by default that of all ranks. ValueError if there is none."""
    group = group or distributed.group.WORLD
    if group is None:
        raise ValueError(
            "gradients need a process group; there is none. Call "
            "torch.distributed.init_process_group first."
        )
    return group


def gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    """x [n] of all ranks, one after the other."""
    return _c10d.wait_tensor(
        _c10d.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)
    )
