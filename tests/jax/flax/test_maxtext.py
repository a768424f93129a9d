"""MaxText's own DenseGeneral, MlpBlock and RMSNorm, unmodified, from the checkout that FP8REF_MAXTEXT names, with fp8ref's hook.

MaxText asks its quantization for a linen ``dot_general_cls`` and bridges it to NNX. They import aqt, qwix, pathwaysutils and others, which no extra
of fp8ref installs. Its attention needs tokamax, which Python 3.11 does not compile: here it is three lines. Passed with MaxText e591f30.
"""

import os
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fp8ref.jax as fj
from fp8ref.jax import linear, proof

CHECKOUT = os.environ.get("FP8REF_MAXTEXT")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="FP8REF_MAXTEXT names no checkout of MaxText"),
    pytest.mark.filterwarnings("ignore"),  # MaxText's own
]

D, HEADS, SIZE, F = 64, 4, 16, 128
HOW = {"dtype": jnp.bfloat16, "weight_dtype": jnp.float32}


def missing() -> str:
    """The module that MaxText's linears import and that is not installed; or nothing."""
    sys.path.insert(0, os.path.join(CHECKOUT, "src"))
    try:
        import maxtext.layers.linears  # noqa: F401
    except ModuleNotFoundError as error:
        return str(error.name)
    return ""


def block(recipe):
    """A decoder layer's linears and norms, in the order of MaxText's models/llama2.py."""
    if lacking := missing():
        pytest.skip(f"MaxText imports {lacking}")
    from maxtext.common.common_types import DecoderBlockType, ShardMode
    from maxtext.layers import linears, normalizations, quantizations

    class Quant(quantizations.Fp8Quantization):
        def dot_general_cls(self, mesh_axes=()):
            return fj.flax.linen_dot_general(recipe)

    config = SimpleNamespace(
        fused_mlp=False,
        shard_mode=ShardMode.AUTO,
        matmul_precision="default",
        dense_fsdp_use_two_stage_all_gather=False,
        debug_sharding=False,
        activations_in_float32=False,
        decoder_block=DecoderBlockType.LLAMA2,
    )
    rngs, quant = nnx.Rngs(0), Quant()

    class Block(nnx.Module):
        def __init__(self):
            of = {"quant": quant, "rngs": rngs, **HOW}
            self.norms = nnx.List([normalizations.RMSNorm(D, **HOW, kernel_axes=("norm",), rngs=rngs) for _ in range(2)])
            self.query, self.key, self.value = (linears.DenseGeneral(D, (HEADS, SIZE), **of) for _ in range(3))
            self.out = linears.DenseGeneral((HEADS, SIZE), D, axis=(-2, -1), **of)
            mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
            self.mlp = linears.MlpBlock(config, mesh, D, F, ("silu", "linear"), intermediate_dropout_rate=0.0, **of)

        def __call__(self, x):
            normed = self.norms[0](x)
            q, k, v = self.query(normed), self.key(normed), self.value(normed)
            weights = nnx.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * SIZE**-0.5)
            x = x + self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, v))
            return x + self.mlp(self.norms[1](x), deterministic=True)

    return Block()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_maxtexts_block_trains(recipe, rng):  # L-1
    model = block(recipe)
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    x = jnp.asarray(rng.standard_normal((4, 16, D)), jnp.bfloat16)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: (model(x).astype(jnp.float32) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    fp8 = sum(gemm.fp8 for gemm in proof.gemms(proof.read(step.lower(model, optimizer, x))))
    assert fp8 == 7 * (2 if recipe == "rowwise_with_gw_hp" else 3)
    kernel = model.query.kernel[...].reshape(D, -1).astype(jnp.bfloat16)
    expected, _ = jax.jit(lambda x, w: linear.apply(x, w.T, recipe=recipe))(x, kernel)
    np.testing.assert_array_equal(nnx.jit(lambda model, x: model.query(x))(model, x).reshape(expected.shape), expected)
    losses = [float(step(model, optimizer, x)) for _ in range(3)]
    assert losses[-1] < losses[0]
