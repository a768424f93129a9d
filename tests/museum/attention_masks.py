"""Faults of attention: windows, causal masks, softcaps and heads of keys."""

import numpy as np
from museum import ask
from museum.attention import attend, full, heads_of, places, scores, weighted, windowed
from museum.exhibit import Exhibit


def in_window(i, j, window):
    """The keys that queries see: window[0] before the query, window[1] behind it."""
    before, behind = window or (None, None)
    visible = np.ones(np.broadcast_shapes(i.shape, j.shape), bool)
    if before is not None:
        visible &= j >= i - before
    if behind is not None:
        visible &= j <= i + behind
    return visible


def unmasked_first_tile(q, k, v, window=None):
    """The window's first tile of 32 keys is computed as if all its keys were inside."""
    i, j = places(q, k)
    before, behind = window or (None, None)
    visible = in_window(i, j, (None, behind))
    if before is not None:
        visible &= j >= (i - before) // 32 * 32
    return attend(q, k, v, visible)


def keys_of_causal(q, k, v, window=None):
    """With a window, a tile of 16 queries gets no keys behind its own, as if it were causal."""
    i, j = places(q, k)
    visible = in_window(i, j, window)
    if window and window[0] is not None:
        visible &= j <= i // 16 * 16 + 15
    return attend(q, k, v, visible)


def causal_window(q, k, v, causal=False, window=None):
    i, j = places(q, k)
    return attend(q, k, v, in_window(i, j, window) & ((j <= i) | (not causal)))


def forgotten_causal(q, k, v, causal=False, window=None):
    """With a window the causal mask is forgotten, and the window is as wide behind the query."""
    if causal and window and window[0] is not None:
        causal, window = False, (window[0], window[0])
    return causal_window(q, k, v, causal, window)


def capped(q, k, v, causal, softcap, hidden):
    """The softmax of softcap * tanh(scores / softcap); hidden: the score of masked keys."""
    i, j = places(q, k)
    s = scores(q, k)
    if softcap:
        s = softcap * np.tanh(s / softcap)
    v = heads_of(np.asarray(v), q.shape[1]).astype(np.float64)
    return weighted(np.where((j <= i) | (not causal), s, hidden), v)


def cap_before_mask(q, k, v, causal=False, softcap=0.0):
    return capped(q, k, v, causal, softcap, -np.inf)


def cap_behind_mask(q, k, v, causal=False, softcap=0.0):
    """The tanh of minus infinity is -1: masked keys have the score -softcap."""
    return capped(q, k, v, causal, softcap, -softcap if softcap else -np.inf)


def keys_of(q, k, v, head):
    """Attention in which query heads use these heads of keys."""
    return attend(q, k[:, head], v[:, head])


def divided_by_key_heads(q, k, v):
    """Query head j uses head j // Hkv; j // (H / Hkv) is meant."""
    count = k.shape[1]
    return keys_of(q, k, v, np.minimum(np.arange(q.shape[1]) // count, count - 1))


def tiled_heads(q, k, v):
    """Heads of keys are tiled: 0 1 0 1, not 0 0 1 1."""
    return keys_of(q, k, v, np.arange(q.shape[1]) % k.shape[1])


EXHIBITS = (
    Exhibit(
        name="aiter-5741",
        link="https://github.com/ROCm/aiter/issues/5741",
        library="aiter",
        year=2026,
        title="The window's first tile is computed without a mask",
        fault=unmasked_first_tile,
        twin=windowed,
        ask=ask.probed(),
        named="window: unmasked in tiles of 32 keys: the left edge is that of a tile",
    ),
    Exhibit(
        name="flashinfer-4992",
        link="https://github.com/flashinfer-ai/flashinfer/pull/4992",
        library="FlashInfer",
        year=2026,
        title="With a window that is not causal the last keys of a tile are left out",
        fault=keys_of_causal,
        twin=windowed,
        ask=ask.probed(),
        named="window: keys behind those of a tile of 16 queries are missing",
    ),
    Exhibit(
        name="vllm-51257",
        link="https://github.com/vllm-project/vllm/pull/51257",
        library="vLLM (FA4)",
        year=2026,
        title="With a window the causal mask is forgotten",
        fault=forgotten_causal,
        twin=causal_window,
        ask=ask.attention("exact"),
        named="window: the causal mask is forgotten: a window of (64, 64)",
    ),
    Exhibit(
        name="emx-onnx-cgen-731",
        link="https://github.com/emmtrix/emx-onnx-cgen/pull/731",
        library="emx-onnx-cgen",
        year=2026,
        title="The softcap comes behind the mask, and masked keys have weight",
        fault=cap_behind_mask,
        twin=cap_before_mask,
        ask=ask.probed(),
        named="softcap argument: after the mask: hidden keys have the score -cap",
    ),
    Exhibit(
        name="onnxim-34",
        link="https://github.com/PSAL-POSTECH/ONNXim/pull/34",
        library="ONNXim",
        year=2026,
        title="The index of a query head is divided by the number of key heads",
        fault=divided_by_key_heads,
        twin=full,
        ask=ask.probed(),
        named="heads: query head j uses head j // Hkv",
    ),
    Exhibit(
        name="jax-js-180",
        link="https://github.com/ekzhang/jax-js/pull/180",
        library="jax-js",
        year=2026,
        title="Heads of keys are tiled, not repeated",
        fault=tiled_heads,
        twin=full,
        ask=ask.probed(),
        named="heads: query head j uses head j mod Hkv",
    ),
)
