"""Flax's own gemma, from the checkout of google/flax that FP8REF_GEMMA names, on a mesh of Explicit
axes, by its own shardings. Passed with 18f8f311.
"""

import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from fp8ref import jax as fj

CHECKOUT = os.environ.get("FP8REF_GEMMA")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="FP8REF_GEMMA names no checkout of google/flax"),
    pytest.mark.filterwarnings("ignore"),  # gemma's own
]

SIZES = {
    "num_layers": 2,
    "num_embed": 256,
    "embed_dim": 64,
    "hidden_dim": 128,
    "num_heads": 4,
    "head_dim": 16,
    "num_kv_heads": 2,
}
TOKENS = np.random.default_rng(0).integers(0, 256, (4, 64))


def gemma(sharding):
    """Two layers, one of them with a sliding window."""
    sys.path.insert(0, str(Path(str(CHECKOUT)) / "examples" / "gemma"))
    try:
        import transformer
        import transformer_cfg as cfg
    except ModuleNotFoundError as error:
        pytest.skip(f"gemma imports {error.name}, which is not installed")
    attention = (cfg.AttentionType.GLOBAL, cfg.AttentionType.LOCAL_SLIDING)
    how = {
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
        "use_qk_norm": True,
        "sliding_window_size": 32,
        "final_logit_softcap": None,
    }
    shardings = (
        cfg.ShardingConfig.fsdp_tp_sharding() if sharding else cfg.ShardingConfig.no_sharding()
    )
    config = cfg.TransformerConfig(
        **SIZES, **how, attention_types=attention, dtype=jnp.bfloat16, shd_config=shardings
    )
    return transformer.Transformer(config, rngs=nnx.Rngs(0))


def trained(recipe, sharding):
    """Losses of three steps that learn to repeat a token, and what lowers another one."""
    model = fj.flax.convert(gemma(sharding), recipe)
    positions, mask = (
        np.tile(np.arange(64), (4, 1)),
        np.tile(np.tril(np.ones((64, 64), bool)), (4, 1, 1)),
    )
    batch = [
        jax.device_put(x, P("fsdp")) if sharding else jnp.asarray(x)
        for x in (TOKENS, positions, mask)
    ]
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)

    def loss_fn(model, tokens, positions, mask):
        logits, _ = model(tokens, positions, None, mask, rngs=nnx.Rngs(0))
        words = jax.nn.one_hot(tokens, SIZES["num_embed"])
        if sharding:
            words = jax.sharding.reshard(words, jax.typeof(logits).sharding.spec)
        return -(words * jax.nn.log_softmax(logits.astype(jnp.float32))).sum(-1).mean()

    @nnx.jit
    def step(model, optimizer, *batch):
        loss, grads = fj.flax.value_and_grad(loss_fn, update=True)(model, *batch)
        optimizer.update(model, grads)
        return loss

    return [float(step(model, optimizer, *batch)) for _ in range(3)], step.lower(
        model, optimizer, *batch
    )


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "rowwise", "delayed"])
def test_it_converts_and_trains_on_explicit_axes(recipe):  # P-20
    """All of its einsums and linears are in FP8, forward and backward. Sums in another order move a
    number of bfloat16 by a step, 2^-8 of it, at most; averaged over 256 tokens, and three steps of
    Adam."""
    expected, _ = trained(recipe, sharding=False)
    with jax.set_mesh(jax.make_mesh((2, 2), ("fsdp", "tp"))):
        found, lowered = trained(recipe, sharding=True)
        assert sum(gemm.fp8 for gemm in fj.proof.gemms(fj.proof.read(lowered))) == (
            0 if recipe == "bf16" else 2 * 6 * 3
        )
    assert found[2] < found[1] < found[0]
    np.testing.assert_allclose(found, expected, rtol=2.0**-7)
