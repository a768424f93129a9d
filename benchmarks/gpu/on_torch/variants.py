"""Linears that are compared: bfloat16, fp8ref's by each recipe, torchao used directly, a minimal
tensorwise one as written by hand, and Transformer Engine's where it is installed.
"""

import importlib.util
from collections.abc import Callable

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, Float8LinearRecipeName, convert_to_float8_training

from fp8ref import torch as ft
from on_torch.bench import Bench
from reporting.report import OURS

TORCHAO = tuple(name.value for name in Float8LinearRecipeName)
MINIMAL = "minimal tensorwise"
PLAIN = ", plain"  # ends the name of a variant whose casts are plain operations
CUDA_GRAPHS = ", CUDA graphs"  # ends the name of one whose compiled graphs are recorded as such
BY_NVIDIA = {
    "Transformer Engine delayed": "DelayedScaling",
    "Transformer Engine tensorwise": "Float8CurrentScaling",
}
"""{variant: Transformer Engine's recipe}."""

TRANSFORMER_ENGINE = tuple(BY_NVIDIA if importlib.util.find_spec("transformer_engine") else ())
ALL = (
    "bf16",
    "bf16 again",
    *(f"fp8ref {recipe}" for recipe in OURS),
    *(f"torchao {recipe}" for recipe in TORCHAO),
    *TRANSFORMER_ENGINE,
    MINIMAL,
)


def convert(model: nn.Module, variant: str) -> nn.Module:
    """The model with its linears exchanged for those of a variant, of the very same Parameters."""
    kind, _, recipe = variant.removesuffix(CUDA_GRAPHS).partition(" ")
    if kind == "fp8ref":
        plain = recipe.endswith(PLAIN)
        return ft.convert(model, recipe.removesuffix(PLAIN), kernels="plain" if plain else "auto")
    if kind == "torchao":
        return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    if kind in ("minimal", "Transformer"):
        made = MinimalLinear if kind == "minimal" else transformer_engine_linear
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear):
                parent, _, key = name.rpartition(".")
                setattr(model.get_submodule(parent), key, made(module))
    return model


def transformer_engine_linear(linear: nn.Linear) -> nn.Module:
    """Transformer Engine's, of the same Parameter."""
    import transformer_engine.pytorch as te

    made = te.Linear(
        linear.in_features,
        linear.out_features,
        bias=False,
        params_dtype=linear.weight.dtype,
        device="meta",
    )
    made.weight = linear.weight
    return made


def compiled(bench: Bench, function: Callable, variant: str) -> Callable:
    """A function of a variant's model, compiled as one graph; under Transformer Engine's recipe,
    between its layers, which dynamo leaves out.
    """
    graphs = variant.endswith(CUDA_GRAPHS)
    run = bench.compiled(function, whole=variant not in BY_NVIDIA, cuda_graphs=graphs)
    if variant not in BY_NVIDIA:
        return run
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    recipe = getattr(recipes, BY_NVIDIA[variant])()

    def under_recipe(*arguments):
        # renamed in Transformer Engine 2.8
        new = hasattr(te, "autocast")
        with te.autocast(recipe=recipe) if new else te.fp8_autocast(fp8_recipe=recipe):
            return run(*arguments)

    return under_recipe


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
