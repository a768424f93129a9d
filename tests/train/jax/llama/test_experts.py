"""Routing and the sum of experts in JAX's model, against those of PyTorch's on the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from fp8ref.spec.llama import LlamaConfig
from fp8ref.train.jax.llama import experts
from fp8ref.train.torch.llama import experts as of_torch


def test_it_routes_as_torch_does_ties_included(rng):  # M-8
    x = rng.integers(-2, 3, (64, 16)).astype(np.float32)
    weight = rng.integers(-1, 2, (8, 16)).astype(np.float32)
    weight[5] = weight[2]  # equal logits for every token
    router = of_torch.Router(
        LlamaConfig(
            hidden_size=16,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_experts=8,
            num_experts_per_tok=3,
        )
    )
    with torch.no_grad():
        router.weight.copy_(torch.from_numpy(weight))
        expected = [v.numpy() for v in router(torch.from_numpy(x))]
    found = experts.route(jnp.asarray(x), jnp.asarray(weight), 3, normalizes=True)
    np.testing.assert_array_equal(found[0], expected[0])
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        # Logits are exact integers; exponentials of both libraries err by a few ulp.
        np.testing.assert_allclose(mine, theirs, rtol=16 * 2**-24)


def test_a_tokens_experts_are_summed_by_weight_and_its_gradient_in_float32(rng):  # M-8
    tokens, k, count = 12, 2, 4
    x = jnp.asarray(rng.standard_normal((tokens, 8)), jnp.bfloat16)
    chosen = jnp.asarray([rng.permutation(count)[:k] for _ in range(tokens)])
    weights = jnp.asarray(rng.random((tokens, k)), jnp.float32)
    factor = jnp.asarray([1.0, 2.0, 4.0, 8.0])

    def of_groups(rows, sizes):
        return rows * jnp.repeat(factor, sizes, total_repeat_length=len(rows))[:, None].astype(
            rows.dtype
        )

    def run(x):
        return experts.mixture(x, chosen, weights, count, of_groups)[0]

    y, sizes = experts.mixture(x, chosen, weights, count, of_groups)
    np.testing.assert_array_equal(sizes, np.bincount(np.asarray(chosen).ravel(), minlength=count))
    expected = (np.asarray(weights) * np.asarray(factor)[np.asarray(chosen)]).sum(
        1, keepdims=True
    ) * np.asarray(x, np.float32)
    np.testing.assert_allclose(y, expected, rtol=4 * 2**-24, atol=1e-7)
    grad = jax.grad(lambda x: run(x).sum())(x)
    # Each expert's gradient is rounded to bfloat16, and then their sum: three roundings by 2^-9.
    exact = (np.asarray(weights) * np.asarray(factor)[np.asarray(chosen)]).sum(1, keepdims=True)
    np.testing.assert_allclose(
        np.asarray(grad, np.float32), np.broadcast_to(exact, x.shape), rtol=3 * 2**-9
    )


def test_the_balancing_loss_is_torchs(rng):  # M-8
    rows, p = rng.integers(1, 9, (3, 4)).astype(np.float32), rng.random((3, 4)).astype(np.float32)
    expected = of_torch.balancing_loss(
        [of_torch.Balance(*map(torch.from_numpy, pair)) for pair in zip(rows, p, strict=True)], 2
    )
    apart = experts.balancing_loss(
        [experts.Balance(*map(jnp.asarray, pair)) for pair in zip(rows, p, strict=True)], 2
    )
    # of layers under a scan
    stacked = experts.balancing_loss([experts.Balance(jnp.asarray(rows), jnp.asarray(p))], 2)
    np.testing.assert_allclose([apart, stacked], expected.item(), rtol=16 * 2**-24)
