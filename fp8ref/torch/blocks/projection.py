"""One linear of a part of a block: its tensors in a pass, and its three GEMMs (spec L)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from fp8ref.recipe import ROLES
from fp8ref.torch.blocks.sources import Source, operands
from fp8ref.torch.linear.linear import (
    Operand,
    _gathered,
    _gemm,
    _in_columns,
    _kept,
    _multiply,
    _Operand,
    _operand,
    _Spec,
    _States,
)
from fp8ref.torch.quantize.scaling import Quantized

__all__ = ["TENSORS", "Projection"]

KEPT = 7
"""The tensors of a weight's codes, if ``weight_codes`` has them."""

TENSORS = 2 + 2 * len(ROLES) + KEPT
"""How many tensors of a linear a part's function takes: weight, seen, scales, a guess of the
weight's scale, kept codes."""


class Projection(NamedTuple):
    """A linear in a pass.

    weight    [N, K], in high precision or gathered as codes; None in the backward pass.
    kept      the tensors of its codes, if ``weight_codes`` has them.
    """

    spec: _Spec
    states: _States
    weight: torch.Tensor | None = None
    kept: tuple[torch.Tensor | None, ...] = ()

    @classmethod
    def of(cls, spec: _Spec, tensors: Sequence[torch.Tensor | None]) -> "Projection":
        """From its TENSORS."""
        weight, *states = tensors
        n = len(ROLES)
        guess, *codes = states[2 * n :]
        kept = () if codes[0] is None else tuple(codes)
        return cls(spec, _States(states[:n], states[n : 2 * n], (None, guess, None)), weight, kept)

    def output(
        self, x: _Operand, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[torch.Tensor, Operand]:
        """The output [..., N] of an input [M, K] that had this shape [..., K]; and the weight as
        the backward pass takes it."""
        spec, w = self.spec, self.weight
        assert w is not None
        gathered = isinstance(w, Float8TrainingTensor)
        if isinstance(w, Float8TrainingTensor):
            weight = _Operand("weight", _gathered(w, spec), self.states.scales[1])
        elif self.kept:
            weight = _kept(spec, self.kept, self.states)
        else:
            weight = _operand(spec, "weight", w, self.states)
        a, b = (each.cast(spec.uses["output", each.role]) for each in (x, weight))
        y = _multiply(spec, "output", a, b, dtype)  # [M, K] @ [K, N] -> [M, N]
        saved: Operand = w
        if weight.columns is not None and not spec.sharded:
            saved = weight.columns
        elif spec.cast_once["weight"] is not None:
            assert isinstance(b, Quantized)
            # The weight is kept, which the model has anyway, and cast again by the same scale.
            saved = b if gathered else b._replace(codes=w, transposed=None)
        return torch.ops.aten._unsafe_view(y, (*shape[:-1], y.shape[-1])), saved

    def saved_input(self, x: _Operand) -> Operand | None:
        """The input's codes for the backward pass; None: it computes and casts the input again."""
        if x.columns is not None:
            return x.columns
        if self.spec.cast_once["input"] is None:
            return None
        return x.cast(self.spec.uses["output", "input"])

    def grad_operand(self, g: Source) -> _Operand:
        """grad_output [M, N] as both GEMMs of gradients take it, observed."""
        (operand,) = operands(g, "grad_output", [(self.spec, self.states)])
        if self.spec.cast_once["grad_output"] is None or operand.columns is not None:
            return operand
        codes = operand.cast(self.spec.uses["grad_input", "grad_output"])
        return operand._replace(tensor=codes)

    def grad_input(self, g: _Operand, saved: Operand, dtype: torch.dtype) -> torch.Tensor:
        """[M, N] @ [N, K] -> [M, K]; saved: the weight, as ``output`` returned it."""
        if isinstance(saved, Quantized):
            saved = _in_columns(self.spec, saved)
        weight = _Operand("weight", saved, self.states.scales[1])
        return _gemm(self.spec, "grad_input", g, weight, dtype)

    def grad_weight(self, g: _Operand, x: Operand, dtype: torch.dtype) -> torch.Tensor:
        """[N, M] @ [M, K] -> [N, K]; x: the input's codes, or the input."""
        input = _Operand("input", x, self.states.scales[0])
        return _gemm(self.spec, "grad_weight", g, input, dtype)
