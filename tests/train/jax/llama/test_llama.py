import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp8ref.selection import linears as linear_selection
from fp8ref.sim import llama as sim
from fp8ref.spec import llama
from fp8ref.train.jax.llama.forward_pass import Pass
from fp8ref.train.jax.llama.llama import Llama

CONFIG = llama.LlamaConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def build(config, seed=0):
    weights = {
        k: v * (4 if v.ndim == 2 else 1)
        for k, v in llama.initial_weights(config, seed=seed).items()
    }
    recipes = {
        d.path: d.recipe for d in linear_selection.select(llama.linear_shapes(config), "bf16")
    }
    return Llama(config, weights, recipes), weights, recipes


@pytest.mark.parametrize("tied", [False, True])
# M-1, M-3
def test_in_float32_the_model_is_the_simulators_without_rounding(tied, rng, monkeypatch):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    model, weights, recipes = build(config)
    tokens = rng.integers(0, 256, (2, 9))
    found = np.asarray(jax.jit(lambda t: model(t))(jnp.asarray(tokens)))
    assert found.dtype == np.float32
    monkeypatch.setattr(sim.Rounding, "__call__", lambda self, x: x.astype(np.float64))
    expected = sim.forward(tokens, weights, config, sim.Numerics(recipes=recipes))
    # float32 throughout: 2 layers of sums over at most 48 terms, gamma(48) = 3e-6, amplified by
    # residuals and norms
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_parameters_are_named_as_in_hugging_face():  # M-1
    model, _, _ = build(CONFIG)
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    assert {
        ".".join(str(p.key) for p in path): leaf.shape for path, leaf in leaves
    } == llama.parameter_shapes(CONFIG)


# M-2: 300 gradients of 2^-9 in bfloat16 would stick at 1
def test_embedding_gradients_sum_in_float32():
    model, _, _ = build(CONFIG)
    graph, params = nnx.split(model.model.embed_tokens)

    def loss(params):
        return (
            nnx.merge(graph, params)(jnp.full((1, 300), 7), jnp.bfloat16, Pass()).astype(
                jnp.float32
            )
            * 2.0**-9
        ).sum()

    grads = jax.tree.leaves(jax.grad(loss)(params))[0]
    np.testing.assert_array_equal(np.asarray(grads)[7], np.float32(300 * 2.0**-9))
