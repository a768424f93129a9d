"""Record what a Flax NNX model gives to jax.nn.dot_product_attention, also by its own layers."""

import contextlib
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fp8ref.study import recording as recordings
from fp8ref.study.recording import Attended, Recording

TAKEN = (
    "a study takes causal or full attention [B, T, H, D] of as many keys as queries, without "
    "bias, window or lengths, and no mask but the causal one"
)
"""Why a call is left out."""

_NAME = "name_in_study"
"""The attribute of a module that holds its path, and the number of the recording."""

_NUMBERS = itertools.count()
"""A number for each recording: a static attribute of another value makes jit trace again."""


@contextlib.contextmanager
def record(model: nnx.Module, recording: Recording, *, heads: int, tokens: int) -> Iterator[None]:
    """Keep, in this context, of each layer the first call, of it the first sequence, so many query
    heads with their keys and values, so many first tokens, and the gradient of their output.

    The function of jax.nn is replaced as long as it lasts. Traced functions report from inside the
    compiled program. One that takes the model is traced again for each recording, by its number;
    one that closes over the model and was traced before is not.
    """
    modules = [
        (path, layer)
        for path, layer in nnx.iter_graph(model, graph=True)
        if isinstance(layer, nnx.Module)
    ]
    inner, kept, number = jax.nn.dot_product_attention, _Kept(recording), next(_NUMBERS)
    traced_layers: set[str] = set()  # while traced: callbacks come later

    @functools.wraps(inner)
    def attending(query, key, value, *args, **more):
        out = inner(query, key, value, *args, **more)
        layer = _caller()
        mask = args[1] if len(args) > 1 else more.get("mask")
        bias, scale = args[0] if args else None, more.get("scale")
        square = query.ndim == 4 and query.shape[1] == key.shape[1]
        if not square or bias is not None or _has_others(more):
            if layer not in traced_layers:  # the first call decides
                recording.refused[layer] = TAKEN
            return out
        traced_layers.add(layer)
        n, key_heads = recordings.heads_of(query.shape[2], key.shape[2], heads)
        few = [
            x[:1, :tokens, :h].swapaxes(1, 2).astype(jnp.float32)
            for x, h in ((query, n), (key, key_heads), (value, key_heads))
        ]
        seen = None
        if mask is not None:
            shape = query.shape[1], key.shape[1]
            seen = jnp.broadcast_to(mask, (*mask.shape[:-2], *shape))[:1].reshape(-1, *shape)
        keep = functools.partial(kept.call, layer, bool(more.get("is_causal")), scale)
        jax.debug.callback(keep, *few, seen)
        return _reporting(out, few[0], functools.partial(kept.gradient, layer), n, tokens)

    for path, layer in modules:  # static attributes, which a traced copy of the model has too
        name = ".".join(map(str, path)) or type(model).__name__
        setattr(layer, _NAME, nnx.static((name, number)))
    jax.nn.dot_product_attention = attending
    try:
        yield
        jax.effects_barrier()
    finally:
        jax.nn.dot_product_attention = inner
        for _, layer in modules:
            delattr(layer, _NAME)


def _has_others(options: dict) -> bool:
    """Whether a call has options by name that a study does not take."""
    usual = ("mask", "scale", "is_causal", "implementation")
    others = [x for name, x in options.items() if name not in usual]
    traced_scale = not isinstance(options.get("scale"), int | float | None)
    return traced_scale or any(x is not None and x is not False for x in others)


def _reporting(out: jax.Array, q: jax.Array, keep: Callable, heads: int, tokens: int) -> jax.Array:
    """The output, whose gradient is handed to ``keep`` with its call's queries."""

    @jax.custom_vjp
    def same(out, q):
        return out

    def backward(q, grad):
        jax.debug.callback(keep, q, grad[:1, :tokens, :heads].swapaxes(1, 2).astype(jnp.float32))
        return grad, jnp.zeros_like(q)

    same.defvjp(lambda out, q: (out, q), backward)
    return same(out, q)


class _Kept:
    """Fills a recording from callbacks in any order: a gradient waits for its call."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._waiting: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}

    def call(self, layer: str, causal: bool, scale: float | None, q, k, v, mask) -> None:
        """Keep a layer's first call."""
        recording = self._recording
        if layer in recording.attention or layer in recording.refused:
            return
        if mask is not None:
            lower = np.tril(np.ones(mask.shape[-2:], bool))
            causal_masks = [
                bool(np.array_equal(head_mask, lower)) for head_mask in np.asarray(mask, bool)
            ]
            if not (all(causal_masks) or np.asarray(mask).all()):
                recording.refused[layer] = TAKEN
                return
            causal |= all(causal_masks)
        own = None if scale is None or math.isclose(scale, q.shape[-1] ** -0.5) else float(scale)
        q, k, v = (np.array(x, np.float32) for x in (q, k, v))
        recording.attention[layer] = Attended(layer=layer, q=q, k=k, v=v, causal=causal, scale=own)
        for waiting in self._waiting.pop(layer, []):
            self.gradient(layer, *waiting)

    def gradient(self, layer: str, q, do) -> None:
        """Keep the gradient of the call that had these queries."""
        first = self._recording.attention.get(layer)
        if first is None:
            self._waiting.setdefault(layer, []).append((np.array(q), np.array(do)))
        elif first.do is None and np.array_equal(first.q, q, equal_nan=True):
            self._recording.attention[layer] = dataclasses.replace(
                first, do=np.array(do, np.float32)
            )


def _caller() -> str:
    """The name of the innermost module among the callers: the ``self`` of a method."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        of = frame.f_locals.get("self")
        if isinstance(of, nnx.Module) and (name := getattr(of, _NAME, None)) is not None:
            return str(name[0])
        frame = frame.f_back
    return "the model"
