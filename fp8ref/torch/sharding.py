"""amax over ranks (SEMANTICS P-2, P-3)."""

import math

import torch
import torch.distributed._functional_collectives  # defines the operators below

_c10d = torch.ops._c10d_functional


def merge_amax(amax: torch.Tensor, group: str) -> torch.Tensor:
    """The largest of every rank's amax, float32 of any shape; group is a process group's name.

    Specials: Inf or NaN on any rank is Inf or NaN on all, NaN before Inf: a flag beside each amax says it, for gloo's maximum loses NaNs (P-3).
    """
    return _unflagged(all_reduce_max(_flagged(amax), group))


def all_reduce_max(x: torch.Tensor, group: str) -> torch.Tensor:
    """The elementwise maximum over a group's ranks, of finite values; group is a process group's name."""
    return _c10d.wait_tensor(_c10d.all_reduce(x, "max", group))


def _flagged(amax: torch.Tensor) -> torch.Tensor:
    """[2, ...]: amaxes, 0 unless finite, and flags: 1 of an infinite one, 2 of a NaN, else 0."""
    flag = torch.where(amax.isnan(), 2.0, torch.where(amax.isinf(), 1.0, 0.0))
    return torch.stack([torch.where(flag > 0, 0.0, amax), flag])


def _unflagged(merged: torch.Tensor) -> torch.Tensor:
    amax, flag = merged.unbind()
    return torch.where(flag == 2, math.nan, torch.where(flag == 1, math.inf, amax))
