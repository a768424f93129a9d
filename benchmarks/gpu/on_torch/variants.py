"""Linears that are compared: bfloat16, fp8ref's by each recipe, torchao used directly, and a
minimal tensorwise one as written by hand.
"""

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, Float8LinearRecipeName, convert_to_float8_training

from fp8ref import torch as ft
from reporting.report import OURS

TORCHAO = tuple(name.value for name in Float8LinearRecipeName)
MINIMAL = "minimal tensorwise"
ALL = (
    "bf16",
    "bf16 again",
    *(f"fp8ref {recipe}" for recipe in OURS),
    *(f"torchao {recipe}" for recipe in TORCHAO),
    MINIMAL,
)


def convert(model: nn.Module, variant: str) -> nn.Module:
    """The model with its linears exchanged for those of a variant, of the very same Parameters."""
    kind, _, recipe = variant.partition(" ")
    if kind == "fp8ref":
        return ft.convert(model, recipe)
    if kind == "torchao":
        return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    if kind == "minimal":
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear):
                parent, _, key = name.rpartition(".")
                setattr(model.get_submodule(parent), key, MinimalLinear(module))
    return model


def quantized(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes by the amax of the whole tensor, and what multiplies out of them."""
    limit = torch.finfo(dtype).max
    scale = limit / x.abs().max().float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-limit, limit).to(dtype), scale.reciprocal()


@torch._dynamo.allow_in_graph
class Multiply(torch.autograd.Function):
    """x [M, K] by w [N, K] -> [M, N]. Accumulates as torchao does: fast forward, slow backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        (x8, sx), (w8, sw) = quantized(x, torch.float8_e4m3fn), quantized(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, sx, w8, sw)
        return torch._scaled_mm(
            x8, w8.t(), scale_a=sx, scale_b=sw, out_dtype=x.dtype, use_fast_accum=True
        )

    @staticmethod
    def backward(ctx, g: torch.Tensor):
        x8, sx, w8, sw = ctx.saved_tensors
        g8, sg = quantized(g, torch.float8_e5m2)
        to_input = torch._scaled_mm(
            g8, w8.t().contiguous().t(), scale_a=sg, scale_b=sw, out_dtype=g.dtype
        )
        to_weight = torch._scaled_mm(
            g8.t().contiguous(), x8.t().contiguous().t(), scale_a=sg, scale_b=sx, out_dtype=g.dtype
        )
        return to_input, to_weight


class MinimalLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Multiply.apply(x.reshape(-1, x.shape[-1]), self.weight).reshape(*x.shape[:-1], -1)
