"""Weights cast once for all passes of a step, such as its microbatches.

    with cast_once(model):
        for x, y in microbatches:
            loss(model(x), y).backward()
    optimizer.step()

Without it each forward pass casts its weights again. A weight whose last change was a step of
``states.AdamW`` by its Triton kernel has its amax from there; under delayed scaling its codes too,
after ``delayed.update(model, before_step=True)``. The codes, in both orders, take two bytes a
parameter until the context ends; compiled graphs take them as inputs.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fp8ref.torch.kernels import choice, weights
from fp8ref.torch.linear import both_orders
from fp8ref.torch.linear.both_orders import Pair
from fp8ref.torch.linear.linear import Linear, is_sharded
from fp8ref.torch.linear.weight_codes import WeightCodes
from fp8ref.torch.quantize.cast import DTYPES

__all__ = ["cast_once"]


@contextmanager
def cast_once(model: nn.Module) -> Iterator[None]:
    """In this context a model's linears multiply by weights that are cast as it begins.

    Linears:  fp8ref's own where Triton kernels cast. Weights that are sharded, parametrized or in
              FP8 already are cast by each pass, as without the context.
    Raises:   ValueError: a weight, or its delayed scale, that changes within the context: by the
              next pass, and for compiled graphs as the context ends. A write through ``.data`` is
              not seen.
    """
    linears = {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
    try:
        with torch.no_grad():
            for linear in linears.values():
                linear.kept = _codes(linear)
        yield
        for name, linear in linears.items():
            if linear.kept is not None:
                linear.kept.check(name)
    finally:
        for linear in linears.values():
            linear.kept = None


def _codes(linear: Linear) -> WeightCodes | None:
    """A weight's codes, if kernels make them."""
    spec = linear.spec
    if "weight" not in spec.pairs or "parametrizations" in linear._modules or is_sharded(linear):
        return None
    w = linear.weight
    plain = type(w) in (torch.Tensor, nn.Parameter)
    if not plain or not choice.resolve(spec.kernels, w.device):
        return None
    state = linear.state("weight")
    scale = None if state is None else state.scale
    return WeightCodes.of(_pair(linear, w, scale), w, scale)


def _pair(linear: Linear, w: torch.Tensor, scale: torch.Tensor | None) -> Pair:
    """A weight cast for its two GEMMs, by what the optimizer's step left of it, if it did."""
    uses = linear.spec.pairs["weight"]
    cast, amax = uses[0].cast, None
    assert cast is not None
    left = weights.fresh(w)
    if scale is not None:
        weights.trace(w).ask(scale, e5m2=cast.fmt.name == "e5m2")
        if left is not None and left.is_cast_by(scale):
            rows, columns = (x.view(DTYPES[cast.fmt.name]) for x in left.codes)
            both = (scale, scale.reciprocal())
            return both_orders.pair(cast, (rows, *both, columns, *both), left.parts)
    elif left is not None and cast.granularity == "tensorwise":
        amax = left.amax
    guess = linear.guesses(w.device)[1]
    return both_orders.quantize(w.detach(), uses, scale, amax, guess)
