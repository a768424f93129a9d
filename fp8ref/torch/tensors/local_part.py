"""This rank's part of a DTensor, for code that computes on plain tensors.

    w = local_part(linear.weight)                  # a shard or a copy, as it is placed
    m = local_like(codes, p)                       # refused unless it is placed as the parameter
    g = local_like(p.grad, p, redistribute=True)   # placed so first, terms of a sum summed

A bare ``to_local`` of a gradient that is still a sum over ranks gives one rank's term of it.
"""

import hashlib

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

__all__ = ["check_alike", "cut_groups", "digest", "local_like", "local_part"]


def local_part(x: Tensor) -> Tensor:
    """This rank's elements of a DTensor; another tensor as it is. Gradients flow through it.

    A backward pass fails, as autograd's own, if a parameter was changed in place since.

    Raises:   ValueError: terms of a sum over ranks: nothing says where the sum belongs.
    """
    if not isinstance(x, DTensor):
        return x
    if any(placement.is_partial() for placement in x.placements):
        raise ValueError(
            f"elements are needed, not terms of a sum; got {tuple(x.shape)} placed as "
            f"{x.placements}. Redistribute it to Replicate() or Shard()."
        )
    part = x.to_local()
    counts = x.is_leaf and part.requires_grad and not torch.compiler.is_compiling()
    return _Unchanged.apply(part, (x,)) if counts and type(part) is Tensor else part


def digest(x: Tensor) -> str:
    """The SHA-256 of the bytes of ``local_part``."""
    part = local_part(x).contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(part.cpu().numpy().data).hexdigest()


def local_like(x: Tensor, parameter: Tensor, *, redistribute: bool = False) -> Tensor:
    """This rank's elements of what belongs to a parameter, cut as the parameter is: of a moment,
    codes or a gradient.

    redistribute  a tensor of other placements, such as a gradient that is still a sum over ranks,
                  is placed as the parameter first, on every rank. False: it is refused.
    Raises:   ValueError: other placements; as ``check_alike``.
    """
    check_alike(x, parameter)
    if isinstance(x, DTensor) and isinstance(parameter, DTensor):
        if redistribute and x.placements != parameter.placements:
            x = x.redistribute(placements=parameter.placements)
        if x.placements != parameter.placements:
            raise ValueError(
                f"a parameter's state is placed as it is, {parameter.placements}; got "
                f"{tuple(x.shape)} placed as {x.placements}. Redistribute it, or load it into its "
                "old sharding."
            )
    return local_part(x)


def cut_groups(x: Tensor) -> tuple[ProcessGroup, ...]:
    """The process groups whose ranks hold pieces of a DTensor; none of another tensor."""
    if not isinstance(x, DTensor):
        return ()
    cut = [i for i, placement in enumerate(x.placements) if not placement.is_replicate()]
    return tuple(x.device_mesh.get_group(i) for i in cut)


class _Unchanged(torch.autograd.Function):
    """A part whose backward pass fails if the whole was changed in place. Such a change raises a
    DTensor's version, not that of the local tensor that another function saves."""

    @staticmethod
    def forward(ctx, part: Tensor, whole: tuple[Tensor]) -> Tensor:
        ctx.save_for_backward(*whole)
        return part.view_as(part)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        assert ctx.saved_tensors  # which fails if the version is another
        return grad, None


def check_alike(x: Tensor, like: Tensor) -> None:
    """ValueError unless x is a DTensor on like's mesh, or both are plain tensors."""
    meshes = [y.device_mesh if isinstance(y, DTensor) else None for y in (x, like)]
    if meshes[0] != meshes[1]:
        got, needed = (
            "a plain tensor" if mesh is None else f"a DTensor on {mesh}" for mesh in meshes
        )
        raise ValueError(
            f"a gradient or a state is {needed}, as its parameter {tuple(like.shape)}; got {got}. "
            "Distribute it alike, or use full_tensor()."
        )
