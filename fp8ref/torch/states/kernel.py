"""A step of AdamW of a matrix in one Triton kernel, to the bits of ``update`` (spec O-2 to O-6).

It serves layouts whose moments and masters have no scales, in float32 and bfloat16. What else the
kernel has in registers, the amax of the weight and its codes, it leaves to linears
(``kernels.weights``).
"""

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8ref.formats import BFLOAT16
from fp8ref.spec.kernels import Choice
from fp8ref.spec.states.layouts import Layout, Moment
from fp8ref.torch.kernels import choice, launch, weights
from fp8ref.torch.kernels.weights import Left
from fp8ref.torch.states import update
from fp8ref.torch.states.update import Work
from fp8ref.torch.tensors.local_part import local_part

if TYPE_CHECKING:
    from fp8ref.kernels.jit import Launch

__all__ = ["step", "takes"]


def takes(p: Tensor, layout: Layout, kernels: Choice) -> bool:
    """Whether the kernel makes the step of a parameter: a matrix whose part here is contiguous,
    under a layout that rounds to nearest and has no scales.

    ValueError as ``choice.explain``.
    """
    kinds = Moment(), Moment(fmt=BFLOAT16)
    if layout.average != "products" or layout.bounded or not set(layout.kept) <= set(kinds):
        return False
    x = local_part(p.detach())
    plain = type(x) is Tensor and x.ndim == 2 and x.is_contiguous() and x.numel() > 0
    return plain and choice.resolve(kernels, x.device)


def step(p: Tensor, work: Work) -> None:
    """The update of a parameter's part here, in place, as ``Update.update``; it leaves the amax of
    the weight, and its codes if a linear asked for them."""
    local, trace = local_part(p.detach()), weights.trace(p)
    own = trace.dtype == local.dtype
    weight = local if own else torch.empty_like(local, dtype=trace.dtype)
    m, v = (kept.codes for kept in work.kept[:2])
    inputs = (local, work.g, m, v, update.numbers((*work.at, 1.0), local.device))
    built = _launch(tuple(local.shape), own, trace.e5m2 if trace.scale is not None else None)
    parts = local.new_empty(built.programs, dtype=torch.int32)
    if trace.scale is None:
        launch.run(built, *inputs, local, m, v, weight, parts)
        left = Left(weight, parts)
    else:
        codes = torch.empty_like(local, dtype=torch.uint8)
        transposed = codes.new_empty((codes.shape[1], codes.shape[0]))
        launch.run(built, *inputs, trace.scale, local, m, v, weight, codes, transposed, parts)
        scaled = weights.versions(trace.scale)
        left = Left(weight, parts, (codes, transposed), trace.scale, scaled)
    if not local.is_inference():
        torch.autograd.graph.increment_version([local, m, v])
    trace.left, trace.counted = left, weights.versions(p)


@functools.lru_cache(maxsize=1024)
def _launch(shape: tuple[int, int], own: bool, e5m2: bool | None) -> "Launch":
    from fp8ref.kernels import adamw

    if e5m2 is None:
        return adamw.step(shape, own=own)
    return adamw.step_and_cast(shape, own=own, e5m2=e5m2)
