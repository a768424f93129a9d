"""Attention from equal queries, keys and values: how far from the exact result roundings can take it, and which of them was taken (SEMANTICS B-11)."""

from dataclasses import dataclass

import numpy as np

from fp8ref import llama
from fp8ref.formats import BFLOAT16
from fp8ref.sim import cast

U = 2.0**-8  # of bfloat16, whose numbers have 8 bits: a rounding errs by at most U of its result


@dataclass(frozen=True, kw_only=True)
class Attended:
    """[B, T, H * D], float64. before, after: with probabilities normalised before and after their rounding; magnitude: sum p |v|; spread: that of p."""

    exact: np.ndarray
    before: np.ndarray
    after: np.ndarray
    magnitude: np.ndarray
    spread: np.ndarray

    def used(self, out: np.ndarray) -> float:
        """The largest distance of an output from the exact one, in units of B-11's bound."""
        bound = (np.exp(2 * self.spread) * (1 + 2 * U) - 1) * self.magnitude + 2 * U * np.abs(out)
        distance = np.abs(out - self.exact)
        return float(np.where(distance == 0, 0, distance / np.maximum(bound, 1e-300)).max())


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, config: llama.LlamaConfig) -> Attended:
    """Of the projections [B, T, heads * head_dim], before the rotary embedding, of which k and v may have fewer heads."""
    dim, groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    cos, sin = (t.astype(np.float64) for t in llama.rotary_tables(config, q.shape[1]))
    q, k, v = (np.asarray(x, np.float64).reshape(*x.shape[:2], -1, dim).swapaxes(1, 2) for x in (q, k, v))  # [B, H, T, D]
    k, v = (np.repeat(x, groups, axis=1) for x in (k, v))

    def rotated(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Exact; rounded; the magnitudes of its two terms together, of which float32 roundings are fractions."""
        first, second = np.split(x, 2, axis=-1)
        half = np.concatenate([-second, first], axis=-1)
        exact = x * cos + half * sin
        return exact, _rounded(exact), np.abs(x * cos) + np.abs(half * sin)

    (exact_q, near_q, size_q), (exact_k, near_k, size_k) = rotated(q), rotated(k)
    causal = np.tril(np.ones((q.shape[2], q.shape[2]), bool))
    p = _softmax(exact_q, exact_k, causal)
    weights, total = _exponentials(near_q, near_k, causal)
    # Each factor of a score errs by U; a third U is room for float32, U^2 and the exponential.
    scores = np.where(causal, size_q @ size_k.swapaxes(-1, -2), 0).max(-1, keepdims=True) / np.sqrt(dim)
    found = {
        "exact": p @ v,
        "before": _rounded(_rounded(weights / total) @ v),
        "after": _rounded(_rounded(weights) @ v / total),
        "magnitude": p @ np.abs(v),
        "spread": np.broadcast_to(3 * U * scores, v.shape),
    }
    return Attended(**{name: x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1) for name, x in found.items()})  # [B, T, H * D]


def _exponentials(q: np.ndarray, k: np.ndarray, causal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scores = np.where(causal, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)  # [B, H, T, T]
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights, weights.sum(-1, keepdims=True)


def _softmax(q: np.ndarray, k: np.ndarray, causal: np.ndarray) -> np.ndarray:
    weights, total = _exponentials(q, k, causal)
    return weights / total


def _rounded(x: np.ndarray) -> np.ndarray:
    return cast.round_to(x, BFLOAT16).astype(np.float64)
