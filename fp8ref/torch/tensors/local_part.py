"""This rank's part of a DTensor, for code that computes on plain tensors.

    w = local_part(linear.weight)   # a shard or a copy, as it is placed
    g = local_part(p.grad, p)       # placed as the parameter: terms of a sum are summed first

A bare ``to_local`` of a gradient that is still a sum over ranks gives one rank's term of it.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(x: Tensor, like: Tensor | None = None) -> Tensor:
    """This rank's elements of a DTensor; another tensor as it is. Gradients flow through it.

    A backward pass fails, as autograd's own, if a parameter was changed in place since.

    like      a tensor with the placements that the reader needs: x is redistributed to them if it
              has others, on every rank. None: as x is placed.
    Raises:   ValueError: terms of a sum over ranks, with no like to say where the sum belongs; as
              ``check_alike``.
    """
    if like is not None:
        check_alike(x, like)
    if not isinstance(x, DTensor):
        return x
    if isinstance(like, DTensor) and x.placements != like.placements:
        x = x.redistribute(placements=like.placements)
    if any(placement.is_partial() for placement in x.placements):
        raise ValueError(
            f"elements of a tensor are needed; got {tuple(x.shape)} placed as {x.placements}, "
            "of which each rank has a term of a sum. Redistribute it to Replicate() or Shard() "
            "first."
        )
    part = x.to_local()
    counts = x.is_leaf and part.requires_grad and not torch.compiler.is_compiling()
    return _Unchanged.apply(part, (x,)) if counts and type(part) is Tensor else part


class _Unchanged(torch.autograd.Function):
    """A part, whose backward pass fails if its whole was changed in place, even where only the
    part's own gradient is asked for.

    What changes a DTensor in place raises its version, and not that of its local tensor, which
    another function saves.
    """

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
            f"a gradient is {needed}, as its parameter {tuple(like.shape)}; got {got}. "
            "Distribute the gradient as the parameter, or take its full_tensor()."
        )
