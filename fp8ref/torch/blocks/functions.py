"""The parts of a block as autograd.Functions: each keeps for its backward pass the residual stream,
its rstd, codes, and what its linears computed; neither the norm nor the product of SwiGLU."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8ref.torch.blocks import operations
from fp8ref.torch.blocks.operations import Norm
from fp8ref.torch.blocks.sources import Kernels, Source
from fp8ref.torch.kernels import fused
from fp8ref.torch.linear.passes import TENSORS, Operand, Pass, load, save
from fp8ref.torch.linear.spec import Spec

__all__ = ["FIRST", "Part", "Tables", "Tensors", "bind", "numbered"]

BLOCK = 128
"""The width of a head that is a block of its line."""

FIRST = 5
"""How many tensors a function takes before those of its linears."""

FUSED = ("tensorwise", "rowwise", "blockwise_1x128")
"""The scales by which kernels cast a norm as they compute it."""

Tensors = Sequence[Any]
"""Tensors, or None in place of those that a part does without."""

Tables = tuple[Tensor, Tensor]
"""cos and sin of a rotary embedding, [T, D]; of pairs [T, D / 2]."""


@dataclass(frozen=True)
class Part:
    """The constants of a part of a block.

    linears   of each linear its recipe and groups.
    norm      None: the part's input is normalized already, or not at all.
    mlp       whether the part is [gate, up] -> SwiGLU -> down; else linears with one input.
    twice     whether silu(gate) is rounded before it is multiplied by up.
    rotated   how many of the outputs are rotated, from the first.
    form      what rotates (``kernels.rotary``).
    """

    linears: tuple[Spec, ...]
    norm: Norm | None
    mlp: bool = False
    twice: bool = False
    rotated: int = 0
    form: str = "halves"

    @property
    def readers(self) -> int:
        """How many of the linears read the part's input, from the first."""
        return 2 if self.mlp else len(self.linears)


@torch.compiler.assume_constant_result
def numbered(numbers: tuple[int, ...], eps: float | None, norm_twice: bool, mlp: bool, *more):
    """``bind`` of a part whose linears have these ``spec_number``s; dynamo calls it as it traces,
    with constants. more: the part's twice, rotated and form."""
    norm = None if eps is None else Norm(eps, norm_twice)
    return bind(Part(tuple(map(Spec.numbered, numbers)), norm, mlp, *more))


@functools.lru_cache(maxsize=256)
def bind(part: Part) -> type[torch.autograd.Function]:
    """The function of a part; one class for each, since a compiled graph passes tensors only.

    (h [..., K], residual or None, norm's weight [K], cos, sin, *TENSORS of each linear) ->
    (h + residual, output or outputs).
    """

    @torch._dynamo.allow_in_graph
    class PartFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h: Tensor, *tensors: Tensor | None):
            ctx.set_materialize_grads(False)
            return _forward(ctx, part, h, tensors)

        @staticmethod
        def backward(ctx, *grads: Tensor | None):
            return _backward(ctx, part, grads)

    return PartFunction


def _forward(ctx, part: Part, h: Tensor, tensors: Tensors):
    """(h + residual or None, *outputs); of an MLP its one output."""
    linears = [
        Pass.of(spec, tensors[FIRST - 1 + i * TENSORS :][:TENSORS])
        for i, spec in enumerate(part.linears)
    ]
    x, n = _Input.of(part, h, tensors), part.readers
    outputs, saved = _outputs(x.source(), linears[:n], h)
    kept: Sequence[Tensor] = ()
    if part.mlp:
        kept = outputs
        outputs, more = _outputs(_product(part, *kept), linears[n:], h)
        saved += more
    elif part.rotated:
        kept, tables = tensors[2:4], _whole_tables(part, *tensors[2:4])
        width = tables[0].shape[-1]  # [B, T, H D] -> [B, T, H, D]
        outputs = [y.view(*y.shape[:-1], y.shape[-1] // width, width) for y in outputs]
        for i in range(part.rotated):
            outputs[i] = _rotated(part, part.linears[i], outputs[i], *tables)
    save(ctx, linears, saved, (x.h, x.rstd, x.weight, *kept))
    return None if tensors[0] is None else x.h, *outputs


def _outputs(source: Source, linears: Sequence[Pass], h: Tensor) -> tuple[list, list]:
    """The outputs [..., N] of linears of one input, like h [..., K], and what each saves."""
    inputs = source.shared("input", linears)
    results = [each.output(a, h.shape, h.dtype) for each, a in zip(linears, inputs, strict=True)]
    return [y for y, _ in results], [saved for _, saved in results]


def _backward(ctx, part: Part, grads: Tensors) -> tuple[Tensor | None, ...]:
    """The gradients of all inputs of a part's function."""
    linears, (h, rstd, norm_weight, *kept) = load(ctx, part.linears)
    x, n = _Input(part.norm, h, rstd, norm_weight), part.readers
    needs = ctx.needs_input_grad
    needs_x, needs_weights = any(needs[:3]), needs[FIRST::TENSORS]
    grad_sum, *grad_outputs = grads
    operands: Iterator[tuple[int, Operand]] = iter(())
    grad_down: list[Tensor | None] = [None] * (len(linears) - n)
    if not part.mlp:
        operands = _projected(part, linears, grad_outputs, kept)
    elif (g := grad_outputs[0]) is not None:
        down = enumerate(Source(g.device, lambda: [_rows(g)]).operands("grad_output", linears[n:]))
        product, needed = _product(part, *kept), (True, *needs_weights[n:])
        d, grad_down = _gradients(linears[n:], down, product, needed, g.dtype)
        assert d is not None
        both = _product_gradients(part, d, *kept).operands("grad_output", linears[:n])
        operands = reversed(list(enumerate(both)))
    needed = needs_x, *needs_weights[:n]
    grad_x, grad_weights = _gradients(linears[:n], operands, x.source(), needed, x.h.dtype)
    grad_h, grad_norm = x.gradients(grad_x, grad_sum)
    results = [grad_h, grad_h, grad_norm, *[None] * (len(needs) - 3)]
    results[FIRST::TENSORS] = [*grad_weights, *grad_down]
    return tuple(grad if needed else None for grad, needed in zip(results, needs, strict=True))


def _gradients(
    linears: Sequence[Pass],
    operands: Iterable[tuple[int, Operand]],
    source: Source,
    needed: Sequence[bool],
    dtype: torch.dtype,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradients of linears' one input and of their weights, as far as they are needed.

    operands  the numbers of linears, and the gradients of their outputs, from the last: so does
              autograd add them up.
    """
    total: Tensor | None = None
    grad_weights: list[Tensor | None] = [None] * len(linears)
    for i, g in operands:
        if needed[0]:
            grad = linears[i].grad_input(g, dtype)
            total = grad if total is None else total + grad
        if needed[1 + i]:
            x = linears[i].input
            grad_weights[i] = linears[i].grad_weight(g, source.value if x is None else x, dtype)
    return total, grad_weights


@dataclass
class _Input:
    """A part's input in the forward or backward pass: the residual stream and its norm.

    rstd      float32 [..., 1]; None without a norm.
    amax      partial amaxes of the norm, if a kernel made them, in the forward pass.
    """

    norm: Norm | None
    h: Tensor
    rstd: Any = None
    weight: Any = None
    amax: Any = None

    @classmethod
    def of(cls, part: Part, h: Tensor, tensors: Tensors) -> "_Input":
        """From the tensors of a part's function."""
        residual, weight = tensors[:2]
        norm = part.norm
        casts = [spec.by_kernels("input", h.device) for spec in part.linears[: part.readers]]
        if norm is None or not any(cast and cast.granularity in FUSED for cast in casts):
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

    def source(self) -> Source:
        """The input of the linears, [M, K]."""
        rows, norm = _rows(self.h), self.norm
        if norm is None:
            return Source(rows.device, lambda: [rows])
        return Source(
            rows.device,
            lambda: [_rows(norm.value(self.h, self.rstd, self.weight))],
            Kernels.of("norm")._replace(amax=self._amax),
            (rows, self.rstd.flatten(), self.weight),
            {"twice": norm.twice},
        )

    def _amax(self, *tensors: Tensor, twice: bool) -> Tensor:
        """As an operator of ``Kernels``: the amaxes that came with the statistics."""
        return self.amax

    def gradients(
        self, g: Tensor | None, grad_sum: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
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


def _whole_tables(part: Part, *tables: Tensor) -> Sequence[Tensor]:
    """cos and sin as kernels read them: float32 [T, D]."""
    if part.form == "pairs":
        tables = tuple(table.repeat_interleave(2, -1) for table in tables)
    return [table.float().contiguous() for table in tables]


def _rotated(part: Part, spec: Spec, y: Tensor, *tables: Tensor) -> Tensor:
    """Heads [B, T, H, D], rotated by tables."""
    if spec.runs_kernels(y.device) and _is_power_of_two(y.shape[-1]):
        return fused.rotate(y, *tables, form=part.form)
    cos, sin = (table[:, None] for table in tables)  # [T, D] -> [T, 1, D]
    return operations.rotate(y, cos, sin, part.form)


def _is_power_of_two(width: int) -> bool:
    return not width & (width - 1)


def _projected(
    part: Part, linears: Sequence[Pass], grads: Tensors, tables: Sequence[Tensor]
) -> Iterator[tuple[int, Operand]]:
    """The gradients of linears' outputs as operands, from the last: of heads [B, T, H, D] that
    tables had rotated, or [..., N]."""
    whole = _whole_tables(part, *tables) if part.rotated else ()
    for i in reversed(range(len(linears))):
        if (g := grads[i]) is not None:
            turns = i < part.rotated
            source = _rotary_gradient(part, g, *whole) if turns else _rows_of_heads(g)
            yield i, source.operands("grad_output", [linears[i]])[0]


def _rows_of_heads(g: Tensor) -> Source:
    """The gradient [M, N] of a linear's output, of heads [B, T, H, D] or [..., N]."""
    return Source(g.device, lambda: [_rows(g if g.ndim != 4 else g.flatten(-2))])


def _rotary_gradient(part: Part, g: Tensor, *tables: Tensor) -> Source:
    """The gradient [M, N] of a linear's output, from that of its rotated heads [B, T, H, D]."""

    def plain() -> list[Tensor]:
        cos, sin = (table[:, None] for table in tables)
        return [_rows(operations.rotate_gradient(g, cos, sin, part.form).flatten(-2))]

    if g.stride(-1) != 1 or not _is_power_of_two(g.shape[-1]):
        return Source(g.device, plain)
    kernels = Kernels.of("rotary_gradient")
    if g.shape[-1] != BLOCK:
        kernels = kernels._replace(lines=None)
    return Source(g.device, plain, kernels, (g, *tables), {"form": part.form})


def _product(part: Part, gate: Tensor, up: Tensor) -> Source:
    """silu(gate) * up, [M, N]."""
    gate, up = _rows(gate), _rows(up)
    return Source(
        gate.device,
        lambda: [operations.swiglu(gate, up, twice=part.twice)],
        Kernels.of("swiglu"),
        (gate, up),
        {"twice": part.twice},
    )


def _product_gradients(part: Part, d: Tensor, gate: Tensor, up: Tensor) -> Source:
    """The gradients of gate and up, [M, N], from that of their product, which one kernel casts."""
    gate, up = _rows(gate), _rows(up)
    return Source(
        d.device,
        lambda: operations.swiglu_gradient(d, gate, up, twice=part.twice),
        Kernels.of("swiglu_gradient")._replace(amax=fused.swiglu_gradient_amaxes),
        (d, gate, up),
        {"twice": part.twice},
    )


def _rows(x: Tensor) -> Tensor:
    """[..., K] -> [M, K]."""
    return x.reshape(-1, x.shape[-1])
