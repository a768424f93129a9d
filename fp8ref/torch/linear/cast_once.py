"""Weights cast once for all passes of a step, such as its microbatches.

    with cast_once(model):
        for x, y in microbatches:
            loss(model(x), y).backward()
    optimizer.step()

Without it each forward pass casts its weights again. Weights by one scale each are cast as a list,
by one launch for all, or two (``kernels.cast_lists``). A weight whose last change was a step of
``states.AdamW`` by its Triton kernel has its amax from there; under delayed scaling its codes too,
after ``delayed.update(model, before_step=True)``. The codes, in both orders, take two bytes a
parameter until the context ends; compiled graphs take them as inputs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fp8ref.torch.kernels import cast_lists, choice, weights
from fp8ref.torch.kernels.cast_lists import Weight
from fp8ref.torch.linear import both_orders
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
            _keep([linear for linear in linears.values() if _is_kept(linear)])
        yield
        for name, linear in linears.items():
            if linear.kept is not None:
                linear.kept.check(name)
    finally:
        for linear in linears.values():
            linear.kept = None


def _is_kept(linear: Linear) -> bool:
    """Whether kernels cast a weight that is whole."""
    spec, w = linear.spec, linear.weight
    if "weight" not in spec.pairs or "parametrizations" in linear._modules or is_sharded(linear):
        return False
    return type(w) in (Tensor, nn.Parameter) and choice.resolve(spec.kernels, w.device)


def _keep(linears: Sequence[Linear]) -> None:
    """Cast weights, those with one scale each as a list."""
    casts = {linear: _cast(linear) for linear in linears}
    listed = cast_lists.cast({name: w for name, w in casts.items() if isinstance(w, Weight)})
    for linear, each in casts.items():
        tensors = listed[linear] if isinstance(each, Weight) else each
        state = linear.state("weight")
        scale = None if state is None else state.scale
        linear.kept = WeightCodes.of(tensors, linear.weight, scale)


def _cast(linear: Linear) -> Weight | tuple[Tensor | None, ...]:
    """The tensors of ``WeightCodes``, or what a weight is cast by in a list: what the optimizer's
    step left of it, if it did."""
    w, uses, state = linear.weight.detach(), linear.spec.pairs["weight"], linear.state("weight")
    cast, left = uses[0].cast, weights.fresh(linear.weight)
    assert cast is not None
    fmt, power = cast.fmt.name, cast.policy.power_of_two is not None
    if state is not None and w.numel():
        weights.trace(linear.weight).ask(state.scale, e5m2=fmt == "e5m2")
        if left is None or not left.is_cast_by(state.scale):
            return Weight(w, fmt, scale=state.scale)
        rows, columns = (x.view(DTYPES[fmt]) for x in left.codes)
        scales = state.scale, state.scale.reciprocal()
        return rows, *scales, columns, *scales, left.parts
    if not w.numel() or cast.granularity != "tensorwise" or not both_orders.kernels_scale(uses):
        return *both_orders.quantize(w, uses).tensors, None
    if left is None:
        return Weight(w, fmt, power, guess=linear.guesses(w.device)[1])
    return Weight(w, fmt, power, parts=left.parts)
