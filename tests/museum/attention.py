"""Faults of attention: q [B, H, Tq, D], k and v [B, Hkv, Tk, D]."""

import functools

import numpy as np
from museum import ask
from museum.arithmetic import F
from museum.exhibit import Exhibit

from fp8ref.sim import attention as simulated


def heads_of(x, count):
    """Heads of keys, repeated for the query heads that share them."""
    return np.repeat(x, count // x.shape[1], axis=1)


def places(q, k):
    """The positions of queries [Tq, 1], of which the last is the last key's, and of keys [Tk]."""
    tq, tk = q.shape[2], k.shape[2]
    return np.arange(tq)[:, None] + tk - tq, np.arange(tk)


def attend(q, k, v, visible=True, *, sinks=None):
    """Softmax attention in float64; a query without keys gives 0."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    v = heads_of(v, q.shape[1])
    return weighted(np.where(visible, scores(q, k), -np.inf), v, sinks)


def scores(q, k):
    """q k in float64, times the float32 number 1 / sqrt(D)."""
    k = heads_of(k, q.shape[1]).astype(np.float64)
    return q.astype(np.float64) @ k.swapaxes(-1, -2) * float(F(q.shape[-1] ** -0.5))


def weighted(scores, v, sinks=None, *, times=1):
    """The softmax of scores, and of sinks [H] that join its sum so many times, times v."""
    logits = -np.inf if sinks is None else np.asarray(sinks, np.float64)[:, None, None]
    top = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), logits)
    top = np.where(np.isfinite(top), top, 0)
    p = np.exp(scores - top)
    total = p.sum(-1, keepdims=True) + times * np.exp(logits - top)
    return ((p @ v) / np.where(total == 0, 1, total)).astype(F)


def full(q, k, v):
    return attend(q, k, v)


def causal(q, k, v, causal=False):
    """The last query sees the last key."""
    i, j = places(q, k)
    return attend(q, k, v, (j <= i) | (not causal))


def causal_from_start(q, k, v, causal=False):
    """The first query sees the first key alone, even if there are more keys than queries."""
    i, j = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])
    return attend(q, k, v, (j <= i) | (not causal))


def windowed(q, k, v, window=None, *, left=0, right=0):
    """Keys from window[0] before the query to window[1] behind it; None leaves a side open."""
    i, j = places(q, k)
    before, behind = window or (None, None)
    visible = np.ones((q.shape[2], k.shape[2]), bool)
    if before is not None:
        visible &= j >= i - before - left
    if behind is not None:
        visible &= j <= i + behind + right
    return attend(q, k, v, visible)


def key_too_many(q, k, v, window=None):
    return windowed(q, k, v, window, left=1)


def exclusive_right(q, k, v, window=None):
    """j - i < right."""
    return windowed(q, k, v, window, right=-1)


def tokens_as_keys(q, k, v, window=None):
    """A window of so many tokens, the query among them, for a kernel that counts keys beside it."""
    return windowed(q, k, v, window and (window[0] and window[0] + 1, window[1]))


def of_descale(x, descale):
    """Numbers of codes under one scale for each [sequence, head of keys]."""
    descale = np.asarray(descale, np.float64)[..., None, None]
    return np.asarray(x).astype(np.float64) * heads_of(descale, np.shape(x)[1])


def dequantized(q, k, v, q_descale, k_descale, v_descale):
    return attend(of_descale(q, q_descale), of_descale(k, k_descale), of_descale(v, v_descale))


def dropped_descales(q, k, v, q_descale, k_descale, v_descale):
    """One of two kernels does not get them."""
    return attend(q, k, v)


def misplaced_descales(q, k, v, q_descale, k_descale, v_descale):
    """Passed by position, k's and v's land in parameters that are no scales."""

    def run(q, k, v, *unused, k_descale=None, v_descale=None):
        k_descale, v_descale = (
            np.ones(np.shape(k)[:2]) if x is None else x for x in (k_descale, v_descale)
        )
        return dequantized(q, k, v, q_descale, k_descale, v_descale)

    return run(q, k, v, k_descale, v_descale)


def first_descale(q, k, v, q_descale, k_descale, v_descale):
    """k's and v's are dereferenced once."""
    k_descale, v_descale = (np.full_like(x, x[0, 0]) for x in (k_descale, v_descale))
    return dequantized(q, k, v, q_descale, k_descale, v_descale)


def first_sequence(q, k, v, q_descale, k_descale, v_descale):
    """Every sequence reads the descales of the first."""
    scales = (np.broadcast_to(x[:1], x.shape) for x in (q_descale, k_descale, v_descale))
    return dequantized(q, k, v, *scales)


def heads_by_tile(q, k, v):
    """Tiles of two query heads read one head of keys, where a group has three."""
    count = q.shape[1] // k.shape[1]
    tiles = -(-count // 2)
    used = np.minimum(np.arange(q.shape[1]) // 2 // tiles, k.shape[1] - 1)
    if count != 3:
        return attend(q, k, v)
    return attend(q, k[:, used], v[:, used])


def of_documents(q, k, v, documents=None, *, pads=None, zeroes=True):
    """Queries see keys of their document; those of -1 are padding. pads: (queries' documents,
    keys' documents) -> more that is visible."""
    if documents is None:
        return attend(q, k, v)
    of_q, of_k = (np.asarray(ids)[:, None] for ids in documents)
    row, column = of_q[..., :, None], of_k[..., None, :]
    visible = (row == column) & (row >= 0)
    visible = visible if pads is None else visible | pads(row, column)
    k = np.where(of_k[..., None] < 0, F(0), k)
    v = np.where(of_k[..., None] < 0, F(0), v) if zeroes else v
    return attend(np.where(of_q[..., None] < 0, F(0), q), k, v, visible)


def unread_nan(q, k, v, documents=None):
    """P is 0 in rows of V that nothing uses, and 0 times their NaN is NaN."""
    return of_documents(q, k, v, documents, zeroes=False)


def padding_seen(q, k, v, documents=None):
    """Padding takes part as if it were of every document."""
    return of_documents(q, k, v, documents, pads=lambda row, column: (column < 0) & (row >= 0))


def documents(q, k, v, documents=None):
    return of_documents(q, k, v, documents)


def sinks_unscaled(q, k, v, q_descale, k_descale, v_descale, sinks=None):
    """The sink is merged beside scores without k's scale."""
    if sinks is None:
        return dequantized(q, k, v, q_descale, k_descale, v_descale)
    factor = np.repeat(np.asarray(k_descale, np.float64), q.shape[1] // k.shape[1], axis=1)[0]
    q, k, v = of_descale(q, q_descale), of_descale(k, k_descale), of_descale(v, v_descale)
    return attend(q, k, v, sinks=np.asarray(sinks, np.float64) * factor)


def sinks_scaled(q, k, v, q_descale, k_descale, v_descale, sinks=None):
    q, k, v = of_descale(q, q_descale), of_descale(k, k_descale), of_descale(v, v_descale)
    return attend(q, k, v, sinks=sinks)


def sink_of_splits(q, k, v, causal=False, sinks=None, *, twice=True):
    """Keys in two splits. The first publishes the sink where it has no key; the second, seeing an
    empty one before it, seeds its sum with the sink as well."""
    i, j = places(q, k)
    visible = np.broadcast_to((j <= i) | (not causal), (q.shape[2], k.shape[2]))
    half = k.shape[2] // 2
    first, second = visible[:, half:].any(-1), visible[:, :half].any(-1)  # from the last keys
    masked = np.where(visible, scores(q, k), -np.inf)
    times = 1 + ((~first & second)[:, None] & twice)
    return weighted(masked, heads_of(v, q.shape[1]).astype(np.float64), sinks, times=times)


def one_sink(q, k, v, causal=False, sinks=None):
    return sink_of_splits(q, k, v, causal, sinks, twice=False)


def merged(q, k, v, *, base):
    """Two parts of the keys, merged by log-sum-exps in base 2, read in a base."""
    every, v = scores(q, k), heads_of(v, q.shape[1]).astype(np.float64)
    outputs, logs = [], []
    for part in np.array_split(np.arange(k.shape[2]), [max(1, k.shape[2] // 4)]):
        if part.size:
            own = every[..., part]
            outputs.append(weighted(own, v[..., part, :]).astype(np.float64))
            top = own.max(-1, keepdims=True)
            logs.append((top + np.log(np.exp(own - top).sum(-1, keepdims=True))) / np.log(2))
    top = np.maximum.reduce(logs)
    weights = [base ** (log - top) for log in logs]
    total = sum(w * o for w, o in zip(weights, outputs, strict=True))
    return (total / sum(weights)).astype(F)


FLASH = "https://github.com/Dao-AILab/flash-attention/"
VLLM = "https://github.com/vllm-project/vllm/"

EXHIBITS = (
    Exhibit(
        name="fa-2250",
        link=FLASH + "pull/2250",
        library="FlashAttention-3",
        year=2026,
        title="The FP8 accumulator of Hopper holds the whole key length",
        fault=functools.partial(simulated.forward, variant="fa3"),
        twin=functools.partial(simulated.forward, variant="fa3_promoted"),
        ask=ask.required_attention("fa3_promoted"),
        named="promotion: none",
    ),
    Exhibit(
        name="fa-2577",
        link=FLASH + "issues/2577",
        library="FlashAttention-4",
        year=2026,
        title="P leaves e4m3's range when rescaling is put off",
        fault=functools.partial(simulated.forward, variant="fa4_threshold4"),
        twin=functools.partial(simulated.forward, variant="fa4"),
        ask=ask.probed(),
        named="range of P: left, and clipped",
    ),
    Exhibit(
        name="sageattention-131",
        link="https://github.com/thu-ml/SageAttention/issues/131",
        library="SageAttention",
        year=2025,
        title="The causal mask is aligned to the start where queries are fewer than keys",
        fault=causal_from_start,
        twin=causal,
        ask=ask.attention("exact"),
        named="causal mask: aligned to the start",
    ),
    Exhibit(
        name="mslk-263",
        link="https://github.com/meta-pytorch/MSLK/issues/263",
        library="MSLK",
        year=2026,
        title="The window's left edge is off by one key",
        fault=key_too_many,
        twin=windowed,
        ask=ask.probed(),
        named="window: off by one: left edge +1",
    ),
    Exhibit(
        name="maxtext-4289",
        link="https://github.com/AI-Hypercomputer/maxtext/pull/4289",
        library="MaxText (TPU Splash)",
        year=2026,
        title="A window of W tokens is given to a kernel that counts W keys beside the query",
        fault=tokens_as_keys,
        twin=windowed,
        ask=ask.probed(),
        named="window: off by one: left edge +1",
    ),
    Exhibit(
        name="transformers-47010",
        link="https://github.com/huggingface/transformers/pull/47010",
        library="transformers",
        year=2026,
        title="The window's right edge is exclusive",
        fault=exclusive_right,
        twin=windowed,
        ask=ask.probed(),
        named="window: off by one: right edge -1",
    ),
    Exhibit(
        name="vllm-51363",
        link=VLLM + "pull/51363",
        library="vLLM",
        year=2026,
        title="Descales are dropped on the way to one of two kernels",
        fault=dropped_descales,
        twin=dequantized,
        ask=ask.probed(),
        named="q_descale: ignored; k_descale: ignored; v_descale: ignored",
    ),
    Exhibit(
        name="flashinfer-1023",
        link="https://github.com/flashinfer-ai/flashinfer/issues/1023",
        library="FlashInfer",
        year=2025,
        title="k_scale and v_scale passed by position land in another parameter",
        fault=misplaced_descales,
        twin=dequantized,
        ask=ask.probed(),
        named="k_descale: ignored; v_descale: ignored",
    ),
    Exhibit(
        name="sgl-kernel-xpu-252",
        link="https://github.com/sgl-project/sgl-kernel-xpu/pull/252",
        library="sgl-kernel (XPU)",
        year=2026,
        title="Descales of each batch and head are read as one number",
        fault=first_descale,
        twin=dequantized,
        ask=ask.probed(),
        named="v_descale: of another sequence or head",
    ),
    Exhibit(
        name="rocm-libraries-10474",
        link="https://github.com/ROCm/rocm-libraries/pull/10474",
        library="CK Tile",
        year=2026,
        title="Every sequence of a packed batch uses the first one's descales",
        fault=first_sequence,
        twin=dequantized,
        ask=ask.probed(),
        named="v_descale: of another sequence or head",
    ),
    Exhibit(
        name="vllm-40792",
        link=VLLM + "pull/40792",
        library="vLLM",
        year=2026,
        title="Query heads are mapped to the wrong KV head where the group is no multiple of the tile",
        fault=heads_by_tile,
        twin=full,
        ask=ask.probed(),
        named="heads: tiles of 2 or 4 query heads use one head",
    ),
    Exhibit(
        name="fa-1745",
        link=FLASH + "issues/1745",
        library="FlashAttention-3",
        year=2025,
        title="NaN in unused V rows reaches real outputs",
        fault=unread_nan,
        twin=documents,
        ask=ask.attention("exact"),
        named="documents of -1, NaN in their memory",
    ),
    Exhibit(
        name="te-2892",
        link="https://github.com/NVIDIA/TransformerEngine/issues/2892",
        library="Transformer Engine",
        year=2026,
        title="Padding tokens take part as if they were a sequence",
        fault=padding_seen,
        twin=documents,
        ask=ask.attention("exact"),
        named="documents of -1, numbers in their memory",
    ),
    Exhibit(
        name="b12x-119",
        link="https://github.com/local-inference-lab/b12x/issues/119",
        library="b12x, sparkinfer",
        year=2026,
        title="The sink is merged in another scale than the scores",
        fault=sinks_unscaled,
        twin=sinks_scaled,
        ask=ask.probed(),
        named="sinks argument: multiplied by k_descale",
    ),
    Exhibit(
        name="rocm-libraries-12227",
        link="https://github.com/ROCm/rocm-libraries/issues/12227",
        library="CK Tile",
        year=2026,
        title="With split keys the sink is counted twice",
        fault=sink_of_splits,
        twin=one_sink,
        ask=ask.attention("exact"),
        unnamed="causal mask with sinks",
    ),
    Exhibit(
        name="sglang-35045",
        link="https://github.com/sgl-project/sglang/pull/35045",
        library="SGLang",
        year=2026,
        title="A base-2 log-sum-exp is merged as a natural one",
        fault=lambda q, k, v: merged(q, k, v, base=np.e),
        twin=lambda q, k, v: merged(q, k, v, base=2.0),
        ask=ask.attention("exact"),
        unnamed="of variant 'exact' (A-10)",
    ),
)
