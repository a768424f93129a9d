"""Record what a PyTorch model gives to scaled_dot_product_attention."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fp8ref.study import recording as recordings
from fp8ref.study.recording import Attended, Recording

TAKEN = (
    "a study takes causal or full attention of [B, H, T, D] without dropout, of as many keys "
    "as queries"
)
"""Why a call is left out."""


@contextlib.contextmanager
def record(model: nn.Module, recording: Recording, *, heads: int, tokens: int) -> Iterator[None]:
    """Keep, in this context, of each layer the first call, of it the first sequence, so many query
    heads with their keys and values, so many first tokens, and the gradient of their output."""
    with _naming(model) as within, _Watching(recording, within, heads, tokens):
        yield


class _Watching(TorchFunctionMode):
    def __init__(self, recording: Recording, within: list[str], heads: int, tokens: int) -> None:
        super().__init__()
        self._recording, self._within = recording, within
        self._heads, self._tokens = heads, tokens

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is functional.scaled_dot_product_attention:
            self._keep(out, _Call(*args, **(kwargs or {})))
        return out

    def _keep(self, out: torch.Tensor, call: "_Call") -> None:
        layer, recording = (self._within or [""])[-1] or "the model", self._recording
        if layer in recording.refused:
            return
        query, key, value, scale = call.query, call.key, call.value, call.scale
        causal = call.is_causal or _lower(call.attn_mask)
        square = query.ndim == 4 and query.shape[2] == key.shape[2]
        if not square or call.dropout_p or not (causal or call.attn_mask is None):
            if layer not in recording.attention:  # the first call decides
                recording.refused[layer] = TAKEN
            return
        n, key_heads = recordings.heads_of(query.shape[1], key.shape[1], self._heads)
        q, k, v = (
            _numpy(x[:1, :h, : self._tokens])
            for x, h in ((query, n), (key, key_heads), (value, key_heads))
        )
        first = recording.attention.get(layer)
        if first is not None and (
            first.do is not None or not np.array_equal(first.q, q, equal_nan=True)
        ):
            # not the first call again, which reentrant checkpointing runs twice
            return
        own = None if scale is None or math.isclose(scale, q.shape[-1] ** -0.5) else scale
        recording.attention[layer] = Attended(layer=layer, q=q, k=k, v=v, causal=causal, scale=own)
        if out.requires_grad:
            out.register_hook(lambda grad: self._keep_grad(layer, grad[:1, :n, : self._tokens]))

    def _keep_grad(self, layer: str, grad: torch.Tensor) -> None:
        first = self._recording.attention[layer]
        if first.do is None:
            self._recording.attention[layer] = dataclasses.replace(first, do=_numpy(grad))


class _Call(NamedTuple):
    """The arguments of scaled_dot_product_attention."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


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

    def leave(*_: object) -> None:
        within.pop()

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: within.append(name)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield within
    finally:
        for handle in handles:
            handle.remove()


def _numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().float().cpu().numpy()
