"""RMSNorm's statistics, and its codes in both orders, as operators of PyTorch.

Shapes:   h and residual [M, K], contiguous, of one dtype; weight [K]; codes [M, K] and [K, M].
"""

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8ref.torch.kernels import launch
from fp8ref.torch.kernels.memory import codes, parts

if TYPE_CHECKING:
    from fp8ref.kernels.jit import Launch

__all__ = ["add_statistics", "cast", "statistics"]


@functools.lru_cache(maxsize=256)
def _launch(name: str, shape: tuple[int, int], **options) -> "Launch":
    from fp8ref.kernels import norms

    return getattr(norms, name)(shape, **options)


@torch.library.custom_op("fp8ref::norm_statistics", mutates_args=())
def statistics(h: Tensor, weight: Tensor, eps: float, twice: bool) -> tuple[Tensor, Tensor]:
    """Each row's factor, float32 [M], and the amax of its norm, int32 [M]."""
    out = _empty_statistics(h, weight, eps, twice)
    launch.run(_launch("statistics", tuple(h.shape), eps=eps, twice=twice), h, weight, *out)
    return out


@statistics.register_fake
def _empty_statistics(h: Tensor, weight: Tensor, eps: float, twice: bool) -> tuple[Tensor, Tensor]:
    return h.new_empty(len(h), dtype=torch.float32), h.new_empty(len(h), dtype=torch.int32)


@torch.library.custom_op("fp8ref::add_norm_statistics", mutates_args=())
def add_statistics(
    h: Tensor, residual: Tensor, weight: Tensor, eps: float, twice: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """h + residual, and ``statistics`` of that."""
    out = _empty_add_statistics(h, residual, weight, eps, twice)
    made = _launch("statistics", tuple(h.shape), eps=eps, twice=twice, residual=True)
    launch.run(made, h, residual, weight, *out)
    return out


@add_statistics.register_fake
def _empty_add_statistics(
    h: Tensor, residual: Tensor, weight: Tensor, eps: float, twice: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(h), *_empty_statistics(h, weight, eps, twice)


@torch.library.custom_op("fp8ref::norm_cast", mutates_args=())
def cast(
    h: Tensor, factor: Tensor, weight: Tensor, scale: Tensor, e5m2: bool, twice: bool
) -> tuple[Tensor, Tensor]:
    """Codes of the norm by a scale (), and transposed codes."""
    out = _empty_cast(h, factor, weight, scale, e5m2, twice)
    made = _launch("cast", tuple(h.shape), e5m2=e5m2, twice=twice)
    launch.run(made, h, factor, weight, scale, *out, parts(h, made.programs))
    return out


@cast.register_fake
def _empty_cast(
    h: Tensor, factor: Tensor, weight: Tensor, scale: Tensor, e5m2: bool, twice: bool
) -> tuple[Tensor, Tensor]:
    return codes(h, h.shape, e5m2)
