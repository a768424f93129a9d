"""A grouped linear: three grouped GEMMs by any grouped recipe (spec X), for experts.

    y = grouped.apply(x, w, offs, recipe="rowwise")  # [M, K] x [E, N, K] -> [M, N]

``offs`` are the groups' cumulative ends, as ``torch._grouped_mm`` takes them. Read it from top to
bottom, as ``linear``: ``operands`` quantizes, ``gemm`` multiplies; ``experts`` puts it in a model.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp8ref.recipe import OPERANDS, ROLES, Gemm, Recipe, Role
from fp8ref.selection.grouped import GroupedRecipe
from fp8ref.torch import delayed
from fp8ref.torch.experts import arguments
from fp8ref.torch.experts import gemm as grouped_gemm
from fp8ref.torch.experts import operands as operands
from fp8ref.torch.experts.operands import Groups
from fp8ref.torch.gemm import gemm
from fp8ref.torch.quantize.scaling import Quantized
from fp8ref.torch.tensors import linear_input

__all__ = ["ALONE", "Bound", "Exchange", "Slot", "apply", "bind", "observers", "quantize_operand"]

_Tensors = tuple[Tensor, Tensor]
_Operands = tuple[Quantized, Quantized]
observers: list[Callable[[Gemm, _Tensors, _Operands, Groups, Tensor], None]] = []
"""Functions called with (which, tensors, operands, groups, out) of every eager grouped FP8 GEMM.

``observe.gemms`` adds and removes them.
"""


class Slot:
    """Takes codes of grad_output from the backward pass behind a grouped linear to its own (X-14).

    q         the rows in FP8, of an axis that does not matter; None until then.
    """

    q: Quantized | None = None


class Exchange(NamedTuple):
    """How ranks share a grouped linear, and which of its tensors moved in FP8.

    shared    name of a process group whose ranks have the same weights, and rows of the same
              groups: an amax that covers rows is of a group's rows on all of them, unless blocks
              cut the rows (X-3, X-13). All of them call ``apply``, also those without rows.
    apart     whether ranks have other experts: then the layer is used, and its weights are
              observed, though this rank has no rows (X-9).
    input_codes
              the rows in FP8, by one scale or that of each group, where x only stands for them, in
              dtype and shape; whose codes all GEMMs take that would cast x (X-14). Observed before,
              by what made them.
    grad_codes
              where the backward pass finds grad_output in FP8 in the same way.
    """

    shared: str | None = None
    apart: bool = False
    input_codes: Quantized | None = None
    grad_codes: Slot | None = None


ALONE = Exchange()
"""One rank, whose rows are in high precision."""


class Bound(NamedTuple):
    """A grouped recipe that this backend runs, and its autograd.Function."""

    recipe: GroupedRecipe
    function: type[torch.autograd.Function]


def apply(
    x: Tensor,
    w: Tensor,
    offs: Tensor,
    *,
    recipe: "str | Recipe | GroupedRecipe | Bound",
    states: Mapping[Role, delayed.RoleState] | nn.ModuleDict | None = None,
    observe: bool = True,
    exchange: Exchange = ALONE,
    name: str = "a grouped linear",
) -> Tensor:
    """output [M, N] = each group's rows of x [M, K] x its w of [E, N, K]; gradients by the recipe.

    Shapes:   x [M, K] and w [E, N, K] of one dtype, float32, float16 or bfloat16, unless
              torch.autocast casts both (L-7); offs int32 or int64 [E]; output [M, N] of x's dtype.
    Order:    spec X-2, X-3, X-7; rows of no group are replaced by zeros first.
    Specials: a row of no group is not read; its output and gradient are +0. grad_weight of a group
              without rows is +0. offs that descend or go beyond M are not looked at on a GPU.
    recipe    or ``bind(recipe)``, made once: inside torch.compile only that is taken.
    states    of delayed scaling, by role; ``delayed.update`` rolls them (X-9).
    observe   whether amaxes are observed, where gradients are enabled; False in evaluation.
    name      for errors.
    Gradient: once; a backward pass with create_graph=True is refused (L-8).
    Raises:   ValueError: shapes, dtypes or devices that do not fit; on a CPU offs that descend or
              go beyond M; under FP8 N or K that is no multiple of 16 (L-5); a recipe that
              ``arguments.check_recipe`` refuses; delayed scaling without states.
    """
    bound = recipe if isinstance(recipe, Bound) else bind(recipe)
    arguments.check_kinds(x, w, offs, name)
    if (dtype := linear_input.autocast_dtype(x)) is not None:
        x, w = x.to(dtype), w.to(dtype)
    linear_input.check_transforms(name, x, w, otherwise="give each expert an nn.Linear")
    arguments.check_tensors(x, w, offs, bound.recipe, name)
    by_role = arguments.states_of(states, bound.recipe, name)
    rows = len(x)
    # a row of no group, as other ranks wait
    if not rows and len(w) and (exchange.shared is not None or exchange.apart):
        x = torch.cat([x, x.new_zeros(1, x.shape[1])])
    if exchange.input_codes is not None:
        exchange = exchange._replace(input_codes=_filled(exchange.input_codes, len(x)))
    if not len(x) or not len(w):
        # Zeros, and gradients that are zeros.
        return x.new_zeros(len(x), w.shape[1]) + (x[:0].sum() + w[:0].sum())
    offs = offs.to(torch.int32)
    calibrating = delayed.calibrating()
    observes = calibrating or (observe and torch.is_grad_enabled())
    if observes:
        _observe(x, w, offs, by_role, exchange, name)
    if calibrating:
        bound, by_role = bind("bf16"), {}
    seen = by_role["grad_output"].seen if observes and "grad_output" in by_role else None
    q = exchange.input_codes
    codes = (None,) * 3 if q is None else (q.codes, q.scale, q.scale_inv)
    scales = (by_role[role].scale if role in by_role else None for role in ROLES)
    # the codes are saved as tensors
    y = bound.function.apply(x, w, offs, seen, exchange._replace(input_codes=None), *codes, *scales)
    return y if len(y) == rows else y[:rows]  # else of FSDP2 units a view, of which it warns


def _observe(
    x: Tensor,
    w: Tensor,
    offs: Tensor,
    states: Mapping[Role, delayed.RoleState],
    exchange: Exchange,
    name: str,
) -> None:
    """Merge amaxes of weights and rows into the states; FP8 rows were observed before."""
    if delayed.calibrating() and exchange.input_codes is not None:
        raise ValueError(
            f"calibrate needs rows in high precision; {name} gets FP8. Calibrate before experts "
            "move in FP8."
        )
    if not states:
        return
    groups = operands.groups_of(offs, len(x))
    tensors: dict[Role, Tensor] = {"weight": w}
    if exchange.input_codes is None:
        tensors["input"] = groups.only(x)
    for role, tensor in tensors.items():
        if role in states:
            merge_(states[role].seen, tensor, groups, exchange.apart)


def bind(recipe: str | Recipe | GroupedRecipe) -> Bound:
    """What ``apply`` takes in place of a recipe. ValueError as ``arguments.check_recipe``."""
    recipe = arguments.check_recipe(recipe)
    return Bound(recipe, _function(recipe))


def quantize_operand(
    which: Gemm,
    role: Role,
    tensor: Tensor,
    groups: Groups,
    recipe: GroupedRecipe,
    scale: Tensor | None = None,
    shared: str | None = None,
) -> Quantized | Tensor:
    """A role's tensor as a GEMM takes it: x or g [M, columns], zeros in rows of no group, or w [E,
    N, K]; itself in high precision. scale is that of a delayed state; shared as in ``apply``."""
    spec, at = recipe.recipe.gemms[which], OPERANDS[which].index(role)
    cast_spec = (spec.a, spec.b)[at]
    if cast_spec is None:
        return tensor
    scale = scale if cast_spec.delayed else None
    if role == "weight":  # [E, N, K]: K is reduced by the output, N by grad_input
        return operands.quantize_weights(
            tensor, cast_spec, -1 if which == "output" else -2, recipe.amax, scale
        )
    axis = -2 if which == "grad_weight" else -1
    return operands.quantize_rows(tensor, cast_spec, axis, groups, recipe.amax, scale, shared)


@torch.no_grad()
def merge_(seen: Tensor, x: Tensor, groups: Groups, apart: bool = False) -> None:
    """Merge the observation of a tensor, with zeros in rows of no group, into seen, unless no group
    has rows (X-9), and no other rank may have some."""
    observation = delayed.observe(x)
    # as delayed.merge_
    torch._foreach_copy_(
        [seen], [torch.maximum(seen, observation if apart else observation * (groups.ends[-1] > 0))]
    )


@functools.lru_cache(maxsize=256)
def _function(recipe: GroupedRecipe) -> type[torch.autograd.Function]:
    """A recipe's grouped linear as an autograd.Function; one class each, as in ``linear``."""

    @torch._dynamo.allow_in_graph
    class GroupedFunction(torch.autograd.Function):
        @staticmethod
        @linear_input.without_autocast
        def forward(
            ctx,
            x: Tensor,
            w: Tensor,
            offs: Tensor,
            seen: Tensor | None,
            exchange: Exchange,
            *tensors: Tensor | None,  # of input_codes, and the scales of states
        ):
            ctx.save_for_backward(x, w, offs, *tensors)
            # attributes: other uses may write seen before the backward pass
            ctx.seen, ctx.exchange = seen, exchange
            codes, scale, scale_inv, *scales = tensors
            groups = operands.groups_of(offs, len(x))
            rows = _codes(codes, scale, scale_inv, recipe) or groups.only(x)
            by_role: dict[Role, Tensor | Quantized] = {"input": rows, "weight": w}
            # [M, K] x [E, N, K] -> [M, N]
            return _gemm("output", by_role, groups, recipe, scales, exchange.shared, x.dtype)

        @staticmethod
        @linear_input.without_autocast
        def backward(ctx, grad_output: Tensor):
            return _backward(ctx, recipe, grad_output)

    return GroupedFunction


def _backward(ctx, recipe: GroupedRecipe, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    """grad_input [M, K] and grad_weight [E, N, K]; None where not needed."""
    if torch.is_grad_enabled():  # autograd would follow neither codes nor scales
        raise ValueError(
            "gradients of a grouped linear in FP8 are not differentiated again; got "
            "create_graph=True. Leave it out, or keep the experts in high precision (L-8)."
        )
    x, w, offs, codes, scale, scale_inv, *scales = ctx.saved_tensors
    groups = operands.groups_of(offs, len(x))
    shared, apart, _, slot = ctx.exchange
    g: Tensor | Quantized
    if slot is None:
        g = groups.only(grad_output)
        if ctx.seen is not None:
            merge_(ctx.seen, g, groups, apart)
    else:
        assert slot.q is not None, "grad_output moved in codes, and the slot has none"
        g, slot.q = _filled(slot.q, len(x)), None
    grad_input = grad_weight = None
    if ctx.needs_input_grad[0]:
        tensors: dict[Role, Tensor | Quantized] = {"grad_output": g, "weight": w}
        # [M, N] x [E, N, K] -> [M, K]
        grad_input = _gemm("grad_input", tensors, groups, recipe, scales, shared, x.dtype)
    if ctx.needs_input_grad[1]:
        tensors = {
            "grad_output": g,
            "input": _codes(codes, scale, scale_inv, recipe) or groups.only(x),
        }
        # [M, N] x [M, K] -> [E, N, K]
        grad_weight = _gemm("grad_weight", tensors, groups, recipe, scales, shared, x.dtype)
    return grad_input, grad_weight, *(None for _ in ctx.needs_input_grad[2:])


def _gemm(
    which: Gemm,
    tensors: Mapping[Role, Tensor | Quantized],
    groups: Groups,
    recipe: GroupedRecipe,
    scales: Sequence[Tensor | None],
    shared: str | None,
    dtype: torch.dtype,
) -> Tensor:
    """One of three grouped GEMMs: quantize, multiply, round (G-8), cast to the operands' dtype."""
    spec, roles = recipe.recipe.gemms[which], OPERANDS[which]

    def operand(role: Role) -> Quantized | Tensor:
        tensor = tensors[role]
        if isinstance(tensor, Quantized):
            return tensor._replace(axis=-2 if which == "grad_weight" else -1)
        return quantize_operand(
            which, role, tensor, groups, recipe, scales[ROLES.index(role)], shared
        )

    a, b = map(operand, roles)
    if isinstance(a, Quantized) and isinstance(b, Quantized):
        out = grouped_gemm.multiply(which, a, b, groups, spec, gemm.output_dtype(spec, dtype))
        for observer in observers:
            observer(which, (tensors[roles[0]], tensors[roles[1]]), (a, b), groups, out)  # type: ignore[arg-type]
        return out.to(dtype)
    # An operand cast beside one that is not is dequantized, and rounded to its dtype (L-4).
    a, b = (
        operands.dequantized(v, groups).to(dtype) if isinstance(v, Quantized) else v for v in (a, b)
    )
    return grouped_gemm.each_group_hp(which, a, b, groups.ends)


def _codes(
    codes: Tensor | None, scale: Tensor | None, scale_inv: Tensor | None, recipe: GroupedRecipe
) -> Quantized | None:
    """input_codes from autograd's saved tensors, if any."""
    if codes is None:
        return None
    cast_spec = recipe.recipe.output.a
    assert cast_spec is not None
    assert scale is not None
    assert scale_inv is not None
    return Quantized(codes, scale, scale_inv, cast_spec.fmt, cast_spec.granularity, -1)


def _filled(q: Quantized, rows: int) -> Quantized:
    """Codes padded with zero rows, which are of no group."""
    missing = rows - len(q.codes)
    if not missing:
        return q
    codes = torch.nn.functional.pad(q.codes.view(torch.uint8), (0, 0, 0, missing))
    return q._replace(codes=codes.view(q.codes.dtype))
