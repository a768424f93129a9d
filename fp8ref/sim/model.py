"""The trainer's Llama, forward pass only (SEMANTICS M-3): every rounding site named, everything between them in float64.

Slow and plain, for checking: the rounding is an argument, so that the same pass gives the nearest-even result, or, with
stochastic rounding, one sample of what rounding alone does to it (SEMANTICS B-2, B-3).
"""

from collections.abc import Mapping

import numpy as np

from fp8ref import llama
from fp8ref import policy as policies
from fp8ref.formats import BFLOAT16
from fp8ref.recipe import CastSpec, GemmSpec, Recipe
from fp8ref.sim import cast, delayed, scales, scaling


class Rounding:
    """Rounds at the sites of M-3 and in FP8 casts: nearest even, or stochastically when a seed is given."""

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self._site = 0

    def _mode(self) -> dict:
        if self._seed is None:
            return {"rounding": "nearest_even"}
        self._site += 1  # every site draws afresh
        return {"rounding": "stochastic", "seed": (self._seed << 32) + self._site}

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """To the compute dtype."""
        return cast.round_to(x, BFLOAT16, **self._mode()).astype(np.float64)

    def qdq(self, x: np.ndarray, spec: CastSpec) -> np.ndarray:
        """Through FP8 and back along the last axis: the values that the GEMM multiplies, scales included. Delayed ones are a first step's."""
        x = x.astype(np.float32)
        if spec.delayed is not None:
            found = delayed.scales(delayed.init(spec.delayed), spec.delayed, spec.fmt)
        else:
            found = scales.scales_from_amax(scaling.amax(x, spec.granularity, axis=-1), spec.fmt, spec.policy)
        scale, scale_inv = (scaling.spread(part, x.shape, spec.granularity, -1) for part in found)
        scaled = x * scale if policies.by_name(spec.policy).stored == "scale" else x / scale_inv
        codes = cast.encode(np.clip(scaled, -spec.fmt.max, spec.fmt.max), spec.fmt, **self._mode())
        return cast.decode(codes, spec.fmt).astype(np.float64) * scale_inv


def forward(
    tokens: np.ndarray,
    weights: Mapping[str, np.ndarray],
    config: llama.LlamaConfig,
    recipes: Mapping[str, Recipe],
    *,
    seed: int | None = None,
) -> np.ndarray:
    """Logits of a batch.

    Shapes:   tokens [B, T] integers below vocab_size; weights as ``llama.parameter_shapes``; recipes: linear's name -> its recipe;
              logits float64 [B, T, vocab_size], values of bfloat16.
    Order:    SEMANTICS M-3; sums in float64, so that only the stated roundings are left.
    Raises:   ValueError: a token outside the vocabulary.
    """
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise ValueError(f"tokens lie in [0, {config.vocab_size}); got {tokens.min()} to {tokens.max()}.")
    rounding = Rounding(seed)
    w = {name: value.astype(np.float64) if name == "model.embed_tokens.weight" else rounding(value) for name, value in weights.items()}
    cos, sin = _rotary(config, tokens.shape[1])

    def linear(name: str, x: np.ndarray) -> np.ndarray:  # [B, T, K] x [N, K] -> [B, T, N]
        return rounding(_product(x, w[f"{name}.weight"], recipes[name].output, rounding))

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        return rounding(x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * w[f"{name}.weight"])

    h = rounding(w["model.embed_tokens.weight"][tokens])  # [B, T, hidden]
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        x = norm(f"{layer}.input_layernorm", h)
        q, k, v = (_heads(linear(f"{layer}.self_attn.{p}_proj", x), config.head_dim) for p in "qkv")
        q, k = (rounding(t * cos + _rotate_half(t) * sin) for t in (q, k))
        h = rounding(h + linear(f"{layer}.self_attn.o_proj", _attention(q, k, v, rounding)))
        x = norm(f"{layer}.post_attention_layernorm", h)
        gate, up = linear(f"{layer}.mlp.gate_proj", x), linear(f"{layer}.mlp.up_proj", x)
        h = rounding(h + linear(f"{layer}.mlp.down_proj", rounding(gate / (1 + np.exp(-gate)) * up)))
    x = norm("model.norm", h)
    if config.tie_word_embeddings:
        return rounding(x @ rounding(w["model.embed_tokens.weight"]).T)
    return linear("lm_head", x)


def loss(logits: np.ndarray, targets: np.ndarray) -> float:
    """Mean over all tokens of logsumexp(logits) - logits[target] (SEMANTICS M-5). logits [B, T, V], targets [B, T]."""
    top = logits.max(-1)
    logsumexp = top + np.log(np.exp(logits - top[..., None]).sum(-1))
    return float((logsumexp - np.take_along_axis(logits, targets[..., None], -1)[..., 0]).mean())


def _product(x: np.ndarray, w: np.ndarray, spec: GemmSpec, rounding: Rounding) -> np.ndarray:
    if spec.a is None or spec.b is None:
        return x @ w.T
    flat = x.reshape(-1, x.shape[-1])
    return (rounding.qdq(flat, spec.a) @ rounding.qdq(w, spec.b).T).reshape(*x.shape[:-1], len(w))


def _rotary(config: llama.LlamaConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [length, head_dim], float32 values (SEMANTICS M-4), written apart from the backends' table."""
    i = np.arange(config.head_dim) % (config.head_dim // 2)
    angle = np.arange(length)[:, None] / config.rope_theta ** (2 * i / config.head_dim)
    return np.cos(angle).astype(np.float32).astype(np.float64), np.sin(angle).astype(np.float32).astype(np.float64)


def _heads(x: np.ndarray, head_dim: int) -> np.ndarray:
    """[B, T, heads * head_dim] -> [B, heads, T, head_dim]"""
    return x.reshape(*x.shape[:2], -1, head_dim).swapaxes(1, 2)


def _rotate_half(x: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([-second, first], axis=-1)


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, rounding: Rounding) -> np.ndarray:
    """Causal attention, key and value heads shared by groups of query heads. [B, H, T, D] -> [B, T, H * D]"""
    groups = q.shape[1] // k.shape[1]
    k, v = (np.repeat(t, groups, axis=1) for t in (k, v))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])  # [B, H, T, T]
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    out = rounding(rounding(p / p.sum(-1, keepdims=True)) @ v)
    return out.swapaxes(1, 2).reshape(out.shape[0], out.shape[2], -1)
