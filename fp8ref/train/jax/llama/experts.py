"""Experts in place of an MLP in JAX (spec M-8): router, grouped linears, weighted sum.

Functions of arrays; ``llama.MixtureMLP`` has parameters, ``fp8ref.jax.experts.grouped`` multiplies.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Balance(NamedTuple):
    """Of a layer's forward pass: rows, float32 [E], those that each expert took; probabilities,
    float32 [E], summed over tokens."""

    rows: jax.Array
    probabilities: jax.Array


def route(
    x: jax.Array, weight: jax.Array, chosen: int, *, normalizes: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The experts of each token and their weights, in float32.

    Shapes:   x [T, hidden], weight [E, hidden] -> experts int32 [T, k], weights [T, k],
              probabilities [T, E].
    """
    numbers = ((1,), (1,)), ((), ())
    # [T, E]
    logits = lax.dot_general(
        x, weight, numbers, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    probabilities = jax.nn.softmax(logits, axis=-1)
    # of equal probabilities the first expert's counts as larger
    values, experts = lax.top_k(probabilities, chosen)
    if normalizes:
        values = values / values.sum(-1, keepdims=True)
    return experts, values, probabilities


def mixture(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    count: int,
    run_groups: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """The weighted sum of a token's experts, float32 [T, hidden], and the rows of each, int32 [E].

    run_groups   rows [T k, hidden] in groups of these sizes -> [T k, hidden]: all experts.
    """
    tokens, chosen = experts.shape
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)  # in a group by token, then by choice
    sizes = jnp.bincount(flat, length=count)
    # Copies in float32, so that a token's gradients are summed in it; a permutation sums none.
    copies = jnp.broadcast_to(x.astype(jnp.float32)[:, None], (tokens, chosen, x.shape[1])).reshape(
        tokens * chosen, -1
    )
    rows = run_groups(copies.at[order].get(unique_indices=True).astype(x.dtype), sizes)
    places = jnp.arange(len(order), dtype=order.dtype)
    back = jnp.zeros_like(order).at[order].set(places, unique_indices=True)
    outputs = rows.at[back].get(unique_indices=True).reshape(tokens, chosen, -1)
    return (weights[..., None] * outputs.astype(jnp.float32)).sum(1), sizes


def balancing_loss(balances: Sequence[Balance], chosen: int) -> jax.Array:
    """E times the sum over experts of their share of the tokens times their mean probability, each
    over all layers together; float32 (). chosen: a token's experts (M-8)."""
    rows, probabilities = (
        sum(v.reshape(-1, v.shape[-1]).sum(0) for v in layer_values)
        for layer_values in zip(*balances, strict=True)
    )
    tokens = rows.sum() / chosen  # of all layers
    return rows.shape[0] * (rows / tokens * (probabilities / tokens)).sum()
