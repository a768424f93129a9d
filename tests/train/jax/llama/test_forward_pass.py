import re

import jax.numpy as jnp
import numpy as np
import pytest

from fp8ref.train.config import config as configs
from fp8ref.train.jax.llama import forward_pass
from fp8ref.train.jax.llama.forward_pass import Pass
from fp8ref.train.jax.trainer import Trainer


def test_chunks_of_queries_attend_as_all_do(rng, monkeypatch):  # B-11
    """Of 7 queries in chunks of 3, so that the last is padded: each query's sums are of the same
    terms, in float32.
    """
    monkeypatch.setattr(forward_pass, "QUERIES", 3)
    q, k, v = (jnp.asarray(rng.normal(0, 1, (2, 7, heads, 4)), jnp.float32) for heads in (4, 2, 2))
    whole, chunked = (Pass(attention=how).attended(q, k, v, "layer") for how in ("xla", "chunked"))
    # scores of 4 products, 7 exponentials, their sum and 7 products more, of weights whose sum is
    # 1: gamma(30) of the largest value
    np.testing.assert_allclose(
        chunked, whole, rtol=0, atol=30 * 2.0**-24 * float(jnp.abs(v).max()) * 2
    )


def test_what_a_layer_has_is_found_by_its_name():
    """A layer's name ends at a dot: layer 1 is no part of layer 11."""
    names = ["model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj"]
    run = Pass(mu=dict.fromkeys(names, jnp.ones(())), taps=dict.fromkeys(names, jnp.zeros(())))
    assert [list(found) for found in run.of("model.layers.1")] == [
        [],
        [],
        names[:1],
        [],
        names[:1],
        [],
    ]


def test_experts_that_fsdp_cuts_are_gathered_again_in_the_backward_pass():
    """Eight experts of 128 x 128, three projections, gathered in bfloat16 in each pass; nothing is
    multiplied again: a loop for each product.
    """
    config = configs.load("tiny-moe").replace(
        model={"num_hidden_layers": 1}, parallel={"fsdp": 2}, numerics={"recipe": "rowwise"}
    )
    config = config.replace(data={"batch_size": 4, "sequence_length": 32, "microbatches": 1})
    text = Trainer(config).lowered(np.zeros((4, 33), np.int32)).as_text()
    gathered = re.findall(r"stablehlo\.all_gather.*?-> tensor<([\dx]+)xbf16>", text, re.DOTALL)
    assert gathered.count("8x128x128") == 2 * 3
    assert text.count("stablehlo.while") == 3 * 3


@pytest.mark.slow
def test_chunked_attention_is_xlas(small, monkeypatch):  # B-11
    """Chunks of 5 queries of 16, so that the last is padded; a query's own sums are in one
    order.
    """
    monkeypatch.setattr(forward_pass, "QUERIES", 5)
    (one, losses, _), (other, found, _) = (
        trained(small),
        trained(small.replace(parallel={"attention": "chunked"})),
    )
    # gradients of keys are summed over chunks in float32, and rounded to bfloat16 once more
    np.testing.assert_allclose(found, losses, rtol=2.0**-8)
    for name, value in one.weights().items():
        assert np.linalg.norm(other.weights()[name] - value) <= 2.0**-6 * np.linalg.norm(value), (
            name
        )


def trained(config, steps=2):
    trainer = Trainer(config)
    tokens = np.random.default_rng(0).integers(0, 256, (steps, 4, 17))
    return trainer, [trainer.step(batch)["loss"] for batch in tokens], tokens
