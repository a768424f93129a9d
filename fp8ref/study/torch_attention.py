"""Record what a PyTorch model gives to scaled_dot_product_attention."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fp8ref.study.attention_error import Attended


def record(model: nn.Module, run: Callable[[nn.Module], Any], *, heads: int, tokens: int) -> tuple[list[Attended], dict[str, str]]:
    """(calls, why others were left out) of run(model): of each layer the first call, the first sequence, so many query heads with
    their keys and values, and so many first tokens."""
    calls: dict[str, Attended] = {}
    refused: dict[str, str] = {}
    with torch.no_grad(), _naming(model) as within, _Watching(calls, refused, within, heads, tokens):
        run(model)
    return list(calls.values()), refused


class _Watching(TorchFunctionMode):
    def __init__(self, calls: dict[str, Attended], refused: dict[str, str], within: list[str], heads: int, tokens: int) -> None:
        super().__init__()
        self._calls, self._refused, self._within, self._heads, self._tokens = calls, refused, within, heads, tokens

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is functional.scaled_dot_product_attention:
            self._keep(*args, **(kwargs or {}))
        return out

    def _keep(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False) -> None:
        layer = self._within[-1] if self._within else "the model"
        if layer in self._calls or layer in self._refused:
            return
        causal = is_causal or _lower(attn_mask)
        if query.ndim != 4 or query.shape[2] != key.shape[2] or dropout_p or not (causal or attn_mask is None):
            self._refused[layer] = "a study takes causal or full attention of [B, H, T, D] without dropout, of as many keys as queries"
            return
        groups = query.shape[1] // key.shape[1]  # query heads of a key head
        shared = max(1, self._heads // groups)
        q, k, v = (_numpy(x[:1, :n, : self._tokens]) for x, n in ((query, shared * groups), (key, shared), (value, shared)))
        self._calls[layer] = Attended(layer, q, k, v, causal, None if scale is None or math.isclose(scale, q.shape[-1] ** -0.5) else scale)


def _lower(mask: torch.Tensor | None) -> bool:
    """Whether a mask is that of causal attention."""
    if mask is None or mask.ndim < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    seen = mask if mask.dtype == torch.bool else mask == 0
    return bool((seen == torch.ones_like(seen).tril()).all())


@contextlib.contextmanager
def _naming(model: nn.Module) -> Iterator[list[str]]:
    """The names of the modules that are running, the innermost last."""
    within: list[str] = []
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: within.append(name)))
        handles.append(module.register_forward_hook(lambda *_: within.pop() and None))
    try:
        yield within
    finally:
        for handle in handles:
            handle.remove()


def _numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().float().cpu().numpy()
