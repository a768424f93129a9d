"""AdamW (SEMANTICS T-1): torch's, torch's fused, or torchao's with moments in FP8 (T-6). Weights decay in matrices only."""

import gc
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fp8ref.run.config import OptimizerConfig

BLOCK, SMALLEST = 256, 4096  # torchao's: values that share a scale, and those below which a piece's moments stay float32


def build(params: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of config.kind; its learning rate is that of ``set_learning_rate``."""
    params = list(params)
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    if config.kind == "adamw_fp8":
        from torchao.optim import AdamWFp8

        return AdamWFp8(groups, betas=betas, eps=config.eps)
    return torch.optim.AdamW(groups, betas=betas, eps=config.eps, **{"fused" if config.kind == "adamw_fused" else "foreach": True})


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """From the next step on. torchao's is a tensor, or each new rate would compile its step again."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def check_none_holds(model: nn.Module) -> None:
    """ValueError if an optimizer holds a model's parameters, which are about to be replaced: it would train what nothing uses."""
    parameters = {id(p): name for name, p in model.named_parameters()}
    for found in gc.get_objects():
        if issubclass(type(found), torch.optim.Optimizer):
            held = [parameters[id(p)] for group in found.param_groups for p in group["params"] if id(p) in parameters]
            if held:
                raise ValueError(
                    f"an optimizer is built after a model is cut, which replaces parameters; a {type(found).__name__} already holds {held[0]}. "
                    "Build it afterwards."
                )


def check_states(optimizer: torch.optim.Optimizer) -> None:
    """Whether the moments of torchao's optimizer lie as its own would on these parameters (T-6). Call it after ``load_state_dict``.

    torch loads states of another sharding without a word: the next step would go wrong, or would keep float32 what should be FP8.
    Raises:   ValueError: moments of another shape, or another format, than this sharding's.
    """
    from torchao.optim import AdamWFp8
    from torchao.optim.subclass_fp8 import OptimStateFp8

    for group in optimizer.param_groups:
        for p in group["params"]:
            for key in ("exp_avg", "exp_avg_sq"):
                if key not in optimizer.state[p]:
                    continue
                piece, moment = local(p), local(optimizer.state[p][key])
                expected = isinstance(optimizer, AdamWFp8) and piece.numel() >= SMALLEST and piece.numel() % BLOCK == 0
                if moment.shape != piece.shape or isinstance(moment, OptimStateFp8) != expected:
                    formats = {True: "FP8", False: "float32"}
                    raise ValueError(
                        f"{key} of a parameter whose piece here is {tuple(piece.shape)} is {formats[expected]} of that shape; got "
                        f"{formats[isinstance(moment, OptimStateFp8)]} {tuple(moment.shape)}. Load states into the sharding that saved them."
                    )


def local(x: torch.Tensor) -> torch.Tensor:
    """This rank's piece."""
    return x.to_local() if isinstance(x, DTensor) else x
