import dataclasses

import numpy as np
import pytest
import torch
from helpers.models.tensor_models import loaded

from fp8ref.selection import linears as linear_selection
from fp8ref.sim import llama as sim
from fp8ref.spec import llama
from fp8ref.train.torch.llama.llama import Embedding, Llama

CONFIG = llama.LlamaConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.mark.parametrize("tied", [False, True])
# M-1, M-3
def test_in_float32_the_model_is_the_simulators_without_rounding(tied, rng, monkeypatch):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    weights = {
        k: v * (4 if v.ndim == 2 else 1) for k, v in llama.initial_weights(config, seed=0).items()
    }
    tokens = rng.integers(0, 256, (2, 9))
    with torch.no_grad():
        found = loaded(config, weights)(torch.from_numpy(tokens)).numpy()
    assert found.dtype == np.float32
    monkeypatch.setattr(sim.Rounding, "__call__", lambda self, x: x.astype(np.float64))
    linears = linear_selection.select(llama.linear_shapes(config), "bf16")
    numerics = sim.Numerics(recipes={d.path: d.recipe for d in linears})
    expected = sim.forward(tokens, weights, config, numerics)
    # float32 throughout: 2 layers of sums over at most 48 terms, gamma(48) = 3e-6, amplified by
    # residuals and norms
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_parameters_are_named_as_in_hugging_face():  # M-1
    model = Llama(CONFIG)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == llama.parameter_shapes(
        CONFIG
    )


# M-2: 300 gradients of 2^-9 in bfloat16 would stick at 1
def test_embedding_gradients_sum_in_float32():
    embedding = Embedding(CONFIG)
    (embedding(torch.full((1, 300), 7), torch.bfloat16).float() * 2.0**-9).sum().backward()
    assert (embedding.weight.grad[7] == 300 * 2.0**-9).all()


def test_dynamo_traces_the_model_under_a_default_device():
    model, tokens = (
        loaded(CONFIG, llama.initial_weights(CONFIG, seed=0)),
        torch.zeros(1, 8, dtype=torch.int64),
    )
    with torch.device("cpu"), torch.no_grad():
        expected = model(tokens)
        assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(tokens), expected)
