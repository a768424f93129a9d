"""bonsai's own Qwen3, unmodified, from the checkout that FP8REF_BONSAI names: converted and
trained. Passed with bonsai 36284254.
"""

import contextlib
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

import fp8ref.jax as fj
from fp8ref.jax import proof

CHECKOUT = os.environ.get("FP8REF_BONSAI")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="FP8REF_BONSAI names no checkout of bonsai"),
]

TOKENS = np.random.default_rng(0).integers(1, 64, (4, 17))
SIZES = {
    "num_layers": 2,
    "vocab_size": 64,
    "emb_dim": 64,
    "mlp_dim": 128,
    "num_heads": 4,
    "head_dim": 16,
    "num_kv_heads": 2,
}
OTHERS = {
    "rope_theta": 10_000,
    "rope_scaling_factor": 8.0,
    "local_rope_theta": 1e4,
    "norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def trained(recipe, mesh=None, steps=2):
    """Losses of the steps, and the FP8 GEMMs of the program that makes one."""
    sys.path.insert(0, CHECKOUT)
    from bonsai.models.qwen3 import modeling

    cut = mesh is not None
    config = modeling.ModelConfig._from_param(**SIZES, **OTHERS, use_fsdp=cut, use_tp=cut)
    with jax.set_mesh(mesh) if cut else contextlib.nullcontext():
        model = fj.flax.convert(
            modeling.Qwen3(config, rngs=nnx.Rngs(0)), recipe, filter_fqns=["lm_head"]
        )
        optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
        tokens = (
            jax.device_put(TOKENS, jax.sharding.NamedSharding(mesh, P("fsdp")))
            if cut
            else jnp.asarray(TOKENS)
        )

        def loss_fn(model, tokens):
            given, target = tokens[:, :-1], tokens[:, 1:]
            cache = modeling.init_cache(config, *given.shape, 0, dtype=jnp.float32)
            logits = model(given, cache=cache, segment_ids=jnp.ones_like(given))
            logits = reshard(logits, P("fsdp")) if cut else logits
            return optax.softmax_cross_entropy_with_integer_labels(
                logits.astype(jnp.float32), target
            ).mean()

        @nnx.jit
        def step(model, optimizer, tokens):
            loss, grads, seen = fj.flax.value_and_grad(loss_fn)(model, tokens)
            optimizer.update(model, grads)
            fj.flax.update(model, seen)
            return loss

        losses = [float(step(model, optimizer, tokens)) for _ in range(steps)]
        return losses, sum(
            gemm.fp8 for gemm in proof.gemms(proof.read(step.lower(model, optimizer, tokens)))
        )


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
def test_qwen3_trains_on_one_device_and_on_explicit_axes(recipe):  # P-20
    """Sums in another order move a number of bfloat16 by a step, 2^-8 of it, at most; a loss of 4
    takes over no more of that.
    """
    alone, fp8 = trained(recipe)
    assert alone[-1] < alone[0]
    assert fp8 == 2 * 7 * 3
    cut, of_cut = trained(recipe, jax.make_mesh((2, 2), ("fsdp", "tp"), devices=jax.devices()[:4]))
    np.testing.assert_allclose(cut, alone, rtol=2.0**-8)
    assert of_cut == fp8
