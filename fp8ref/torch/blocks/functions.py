"""The parts of a block as autograd.Functions: each keeps for its backward pass the residual stream,
its rstd, codes, and what its linears computed; neither the norm nor the product of SwiGLU."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fp8ref.torch.blocks import operations
from fp8ref.torch.blocks.operations import Norm
from fp8ref.torch.blocks.projection import TENSORS, Projection
from fp8ref.torch.blocks.sources import ByRows, Codes, Source, fuses, operands
from fp8ref.torch.kernels import choice, fused
from fp8ref.torch.linear import both_orders
from fp8ref.torch.linear.linear import _Operand, _Spec, _States, check_differentiated_once

__all__ = ["FIRST", "Part", "Tables", "Tensors", "bind", "numbered"]

BLOCK = 128
"""The width of a head that is a block of its line."""

FIRST = 5
"""How many tensors a function takes before those of its linears."""


Tensors = Sequence[Any]
"""Tensors, or None in place of those that a part does without."""

Tables = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of a rotary embedding, float32 [T, D]."""


@dataclass(frozen=True)
class Part:
    """The constants of a part of a block.

    linears   of each linear its recipe and groups.
    norm      None: the part's input is normalized already, or not at all.
    mlp       whether the part is [gate, up] -> SwiGLU -> down; else linears with one input.
    twice     whether silu(gate) is rounded before it is multiplied by up.
    rotated   how many of the outputs are rotated, from the first.
    """

    linears: tuple[_Spec, ...]
    norm: Norm | None
    mlp: bool = False
    twice: bool = False
    rotated: int = 0


@torch.compiler.assume_constant_result
def numbered(numbers: tuple[int, ...], eps: float | None, norm_twice: bool, mlp: bool, *more):
    """``bind`` of a part whose linears have these ``spec_number``s; dynamo calls it as it traces,
    with constants. more: the part's twice and rotated."""
    norm = None if eps is None else Norm(eps, norm_twice)
    return bind(Part(tuple(map(_Spec.numbered, numbers)), norm, mlp, *more))


@functools.lru_cache(maxsize=256)
def bind(part: Part) -> type[torch.autograd.Function]:
    """The function of a part; one class for each, since a compiled graph passes tensors only.

    (h [..., K], residual or None, norm's weight [K], cos, sin, *TENSORS of each linear) ->
    (h + residual, output or outputs).
    """

    @torch._dynamo.allow_in_graph
    class PartFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h: torch.Tensor, *tensors: torch.Tensor | None):
            ctx.set_materialize_grads(False)
            return (_mlp if part.mlp else _projections)(ctx, part, h, tensors)

        @staticmethod
        def backward(ctx, *grads: torch.Tensor | None):
            check_differentiated_once()
            return (_mlp_backward if part.mlp else _projections_backward)(ctx, part, grads)

    return PartFunction


@dataclass
class _Input:
    """A part's input in the forward or backward pass: the residual stream and its norm.

    rstd      float32 [..., 1]; None without a norm.
    amax      partial amaxes of the norm, if a kernel made them, in the forward pass.
    """

    norm: Norm | None
    h: torch.Tensor
    rstd: Any = None
    weight: Any = None
    amax: Any = None

    @classmethod
    def of(cls, part: Part, h: torch.Tensor, tensors: Tensors) -> "_Input":
        residual, weight = tensors[:2]
        norm = part.norm
        kinds = ("tensorwise", "rowwise", "blockwise_1x128")
        readers = part.linears[:2] if part.mlp else part.linears
        if norm is None or not any(
            fuses(spec, "input", h.device, k) for spec in readers for k in kinds
        ):
            s = h if residual is None else h + residual
            return cls(norm, s, None if norm is None else norm.rstd(s), weight)
        rows = _rows(h).contiguous()
        if residual is None:
            s = rows
            factor, amax = fused.norm_statistics(rows, weight, eps=norm.eps, twice=norm.twice)
        else:
            s, factor, amax = fused.sum_and_statistics(
                rows, _rows(residual).contiguous(), weight, eps=norm.eps, twice=norm.twice
            )
        return cls(norm, s.view(h.shape), factor.view(*h.shape[:-1], 1), weight, amax)

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What the backward pass needs."""
        return self.h, self.rstd, self.weight

    def source(self) -> Source:
        """The input of the linears, [M, K]."""
        rows, norm, rstd, weight = _rows(self.h), self.norm, self.rstd, self.weight
        if norm is None:
            return Source(rows.device, lambda: rows)
        return Source(
            rows.device,
            lambda: _rows(norm.value(self.h, rstd, weight)),
            lambda: self.amax,
            self._cast,
            lambda e5m2: self._by(fused.norm_lines)(e5m2=e5m2),
            ByRows(lambda: self._by(fused.norm_amax_lines)(), self._by(fused.norm_cast_lines)),
        )

    def _by(self, operator: Callable[..., Any]) -> Callable[..., Any]:
        """An operator of the norm, which takes scales and options."""
        assert self.norm is not None
        tensors = _rows(self.h), self.rstd.flatten(), self.weight
        return functools.partial(operator, *tensors, twice=self.norm.twice)

    def _cast(self, scale: torch.Tensor, e5m2: bool) -> Codes:
        assert self.norm is not None
        rows, factor = _rows(self.h), self.rstd.flatten()
        tensors, twice = (rows, factor, self.weight, scale), self.norm.twice
        return Codes._make((*fused.norm_cast(*tensors, e5m2=e5m2, twice=twice)[:2], self.amax))

    def gradients(
        self, g: torch.Tensor | None, grad_sum: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The gradients of the residual stream and of norm's weight, from those of the linears'
        input [M, K] and of the residual stream behind the part."""
        grad_weight = None
        if g is not None:
            g = g.reshape(self.h.shape)
            if self.norm is not None:
                g, grad_weight = self.norm.gradient(g, self.h, self.rstd, self.weight)
        if g is None or grad_sum is None:
            return grad_sum if g is None else g, grad_weight
        return grad_sum + g, grad_weight


def _projections(ctx, part: Part, h: torch.Tensor, tensors: Tensors):
    """(h + residual, *outputs) of linears of one input."""
    linears = _linears(part, tensors)
    x = _Input.of(part, h, tensors)
    tables = (tensors[2].contiguous(), tensors[3].contiguous()) if part.rotated else None
    inputs = operands(x.source(), "input", [(each.spec, each.states) for each in linears])
    outputs, weights = [], []
    for each, a in zip(linears, inputs, strict=True):
        y, weight = each.output(a, h.shape, h.dtype)
        outputs.append(y)
        weights.append(weight)
    if tables is not None:
        width = tables[0].shape[-1]  # [B, T, H D] -> [B, T, H, D]
        outputs = [y.view(*y.shape[:-1], y.shape[-1] // width, width) for y in outputs]
        for i in range(part.rotated):
            outputs[i] = _rotated(part.linears[i], outputs[i], tables)
    saved = [each.saved_input(a) for each, a in zip(linears, inputs, strict=True)]
    _keep(ctx, (x.tensors, tables, saved, weights), linears)
    return _behind(tensors, x), *outputs


def _projections_backward(ctx, part: Part, grads: Tensors):
    (x_tensors, tables, inputs, weights), linears = _kept(ctx, part)
    x = _Input(part.norm, *x_tensors)
    source, (grad_sum, *grad_outputs) = x.source(), grads
    grad_weights: list[torch.Tensor | None] = [None] * len(linears)
    total = None
    # autograd adds up the gradients of one input from the last linear to the first
    for i in reversed(range(len(linears))):
        g = grad_outputs[i]
        if g is None:
            continue
        rotated_by = tables if i < part.rotated else None
        operand = linears[i].grad_operand(_output_gradient(g, rotated_by))
        if any(ctx.needs_input_grad[:3]):
            one = linears[i].grad_input(operand, weights[i], g.dtype)
            total = one if total is None else total + one
        if ctx.needs_input_grad[FIRST + i * TENSORS]:
            a = source.value if inputs[i] is None else inputs[i]
            grad_weights[i] = linears[i].grad_weight(operand, a, g.dtype)
    return _gradients(ctx, *x.gradients(total, grad_sum), grad_weights)


def _rotated(spec: _Spec, y: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Heads [B, T, H, D], rotated by tables."""
    if choice.resolve(spec.kernels, y.device) and _is_power_of_two(y.shape[-1]):
        return fused.rotate(y, *tables)
    return operations.rotate(y, *_by_head(tables))


def _is_power_of_two(width: int) -> bool:
    return not width & (width - 1)


def _output_gradient(g: torch.Tensor, tables: Tables | None) -> Source:
    """The gradient [M, N] of a linear's output, from that of the part's, [..., N] or heads
    [B, T, H, D], which tables had rotated if there are any."""
    if tables is None:
        return Source(g.device, lambda: _rows(g if g.ndim != 4 else g.flatten(-2)))
    cos, sin = tables

    def plain() -> torch.Tensor:
        return _rows(operations.rotate_gradient(g, *_by_head(tables)).flatten(-2))

    if g.stride(-1) != 1 or not _is_power_of_two(g.shape[-1]):
        return Source(g.device, plain)
    return Source(
        g.device,
        plain,
        lambda: fused.rotary_gradient_amax(g, cos, sin),
        lambda scale, e5m2: Codes._make(fused.rotary_gradient_cast(g, cos, sin, scale, e5m2=e5m2)),
        functools.partial(_rotated_lines, g, cos, sin) if g.shape[-1] == BLOCK else None,
        ByRows(
            lambda: fused.rotary_gradient_amax_lines(g, cos, sin),
            functools.partial(fused.rotary_gradient_cast_lines, g, cos, sin),
        ),
    )


def _rotated_lines(g: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, e5m2: bool):
    return fused.rotary_gradient_lines(g, cos, sin, e5m2=e5m2)


def _mlp(ctx, part: Part, h: torch.Tensor, tensors: Tensors):
    """(h + residual, output [..., K]) of gate, up and down."""
    gate, up, down = linears = _linears(part, tensors)
    x = _Input.of(part, h, tensors)
    inputs = operands(x.source(), "input", [(each.spec, each.states) for each in (gate, up)])
    (y_gate, w_gate), (y_up, w_up) = (
        each.output(a, h.shape, h.dtype) for each, a in zip((gate, up), inputs, strict=True)
    )
    product = _product(part, y_gate, y_up)
    inputs += operands(product, "input", [(down.spec, down.states)])
    out, w_down = down.output(inputs[2], h.shape, h.dtype)
    saved = [each.saved_input(a) for each, a in zip(linears, inputs, strict=True)]
    _keep(ctx, (x.tensors, (y_gate, y_up), saved, (w_gate, w_up, w_down)), linears)
    return _behind(tensors, x), out


def _mlp_backward(ctx, part: Part, grads: Tensors):
    (x_tensors, outputs, inputs, weights), linears = _kept(ctx, part)
    x = _Input(part.norm, *x_tensors)
    grad_sum, grad_out = grads
    if grad_out is None:
        return _gradients(ctx, *x.gradients(None, grad_sum), [None] * 3)
    dtype, source, needs = grad_out.dtype, x.source(), ctx.needs_input_grad
    values = [source, source, _product(part, *outputs)]
    grad_weights: list[torch.Tensor | None] = [None] * 3

    def weight_gradient(i: int, g: _Operand) -> None:
        if needs[FIRST + i * TENSORS]:
            a = values[i].value if inputs[i] is None else inputs[i]
            grad_weights[i] = linears[i].grad_weight(g, a, dtype)

    g = linears[2].grad_operand(Source(grad_out.device, lambda: _rows(grad_out)))
    grad_product = linears[2].grad_input(g, weights[2], dtype)
    weight_gradient(2, g)
    pair = _product_gradients(part, grad_product, outputs, linears)
    total = None
    for i in (1, 0):  # as autograd adds them up
        g = linears[i].grad_operand(pair[i])
        if any(needs[:3]):
            one = linears[i].grad_input(g, weights[i], dtype)
            total = one if total is None else total + one
        weight_gradient(i, g)
    return _gradients(ctx, *x.gradients(total, grad_sum), grad_weights)


def _product(part: Part, gate: torch.Tensor, up: torch.Tensor) -> Source:
    """silu(gate) * up, [M, N]."""
    gate, up = _rows(gate), _rows(up)
    return Source(
        gate.device,
        lambda: operations.swiglu(gate, up, twice=part.twice),
        lambda: fused.swiglu_amax(gate, up, twice=part.twice),
        lambda scale, e5m2: Codes._make(
            fused.swiglu_cast(gate, up, scale, e5m2=e5m2, twice=part.twice)
        ),
        lambda e5m2: fused.swiglu_lines(gate, up, e5m2=e5m2, twice=part.twice),
        ByRows(
            lambda: fused.swiglu_amax_lines(gate, up, twice=part.twice),
            functools.partial(fused.swiglu_cast_lines, gate, up, twice=part.twice),
        ),
    )


def _product_gradients(
    part: Part, d: torch.Tensor, outputs: Sequence[torch.Tensor], linears: Sequence[Projection]
) -> list[Source]:
    """The gradients of gate and up, [M, N], from that of their product, which one kernel casts."""
    gate, up = map(_rows, outputs)
    plain = functools.cache(lambda: operations.swiglu_gradient(d, gate, up, twice=part.twice))
    amaxes = functools.cache(lambda: fused.swiglu_gradient_amaxes(d, gate, up, twice=part.twice))
    pair = [
        Source(d.device, lambda: plain()[0], lambda: amaxes()[0]),
        Source(d.device, lambda: plain()[1], lambda: amaxes()[1]),
    ]
    scaled = [dataclasses.replace(each) for each in pair]  # what pair refers to, without a cycle
    specs = [each.spec for each in linears[:2]]
    fmts = {cast and cast.fmt for cast in (spec.recipe.grad_input.a for spec in specs)}

    def casts_both(granularity: str) -> bool:
        return len(fmts) == 1 and all(
            fuses(spec, "grad_output", d.device, granularity) for spec in specs
        )

    if casts_both("rowwise"):
        line_amaxes = functools.cache(
            lambda: fused.swiglu_gradient_amax_lines(d, gate, up, twice=part.twice)
        )

        @functools.cache
        def by_rows(e5m2: bool) -> tuple[torch.Tensor, ...]:
            uses = [spec.pairs["grad_output"] for spec in specs]
            lines = [
                line.scale.contiguous()
                for i in (0, 1)
                for line in both_orders.line_scales(line_amaxes()[2 * i : 2 * i + 2], uses[i])
            ]
            return fused.swiglu_gradient_cast_lines(
                d, gate, up, *lines, e5m2=e5m2, twice=part.twice
            )

        pair[0].by_rows = ByRows(lambda: line_amaxes()[:2], lambda *_, e5m2: by_rows(e5m2)[:2])
        pair[1].by_rows = ByRows(lambda: line_amaxes()[2:], lambda *_, e5m2: by_rows(e5m2)[2:])
    if casts_both("blockwise_1x128"):
        lines = functools.cache(
            lambda e5m2: fused.swiglu_gradient_lines(d, gate, up, e5m2=e5m2, twice=part.twice)
        )
        pair[0].lines, pair[1].lines = (lambda e5m2: lines(e5m2)[:6], lambda e5m2: lines(e5m2)[6:])
    if not casts_both("tensorwise"):
        return pair

    @functools.cache
    def codes(e5m2: bool) -> tuple[torch.Tensor, ...]:
        scales = [
            source.scale("grad_output", each.spec, each.states)[0]
            for source, each in zip(scaled, linears, strict=False)
        ]
        return fused.swiglu_gradient_cast(d, gate, up, *scales, e5m2=e5m2, twice=part.twice)

    pair[0].cast = lambda _, e5m2: Codes._make(codes(e5m2)[i] for i in (0, 1, 4))
    pair[1].cast = lambda _, e5m2: Codes._make(codes(e5m2)[i] for i in (2, 3, 5))
    return pair


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[..., K] -> [M, K]."""
    return x.reshape(-1, x.shape[-1])


def _by_head(tables: Tables) -> list[torch.Tensor]:
    """[T, D] -> [T, 1, D]."""
    return [table[:, None] for table in tables]


def _linears(part: Part, tensors: Tensors) -> list[Projection]:
    own = tensors[FIRST - 1 :]
    return [
        Projection.of(spec, tuple(own[i * TENSORS : (i + 1) * TENSORS]))
        for i, spec in enumerate(part.linears)
    ]


def _behind(tensors: Tensors, x: _Input) -> torch.Tensor | None:
    """The residual stream behind a part; None where nothing was added to its input."""
    return None if tensors[0] is None else x.h


def _keep(ctx, tree: Any, linears: Sequence[Projection]) -> None:
    """Save a tree of tensors for the backward pass, and the linears."""
    # Attributes, not saved tensors: other uses may write observations before the backward pass,
    # which autograd would refuse.
    ctx.seen = [each.states.seen for each in linears]
    scales = [tuple(each.states.scales) for each in linears]
    leaves, ctx.tree = pytree.tree_flatten((tree, scales))
    ctx.others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    ctx.save_for_backward(*(leaf if isinstance(leaf, torch.Tensor) else None for leaf in leaves))


def _kept(ctx, part: Part) -> tuple[Any, list[Projection]]:
    """What ``_keep`` saved."""
    leaves = [
        other if tensor is None else tensor
        for tensor, other in zip(ctx.saved_tensors, ctx.others, strict=True)
    ]
    tree, scales = pytree.tree_unflatten(leaves, ctx.tree)
    linears = [
        Projection(spec, _States(seen, each))
        for spec, each, seen in zip(part.linears, scales, ctx.seen, strict=True)
    ]
    return tree, linears


def _gradients(
    ctx,
    grad_h: torch.Tensor | None,
    grad_norm: torch.Tensor | None,
    grad_weights: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of all inputs of a function."""
    grads: list[torch.Tensor | None] = [None] * len(ctx.needs_input_grad)
    grads[:3] = [grad_h, grad_h, grad_norm]
    for i, grad in enumerate(grad_weights):
        grads[FIRST + i * TENSORS] = grad
    return tuple(
        grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=True)
    )
