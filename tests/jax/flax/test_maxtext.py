"""MaxText's own decoder layer of Llama, unmodified, its attention too, from the checkout that
FP8REF_MAXTEXT names, with fp8ref's hook.

MaxText asks its quantization for a linen ``dot_general_cls`` and bridges it to NNX; its
configuration is its own base.yml. Beside this environment it imports what no extra of fp8ref
installs: ``pip install --no-deps aqtp qwix pathwaysutils tokamax typeguard==2.13.3 jaxtyping
einshape immutabledict omegaconf fastapi starlette uvicorn opentelemetry-api``. A newer typeguard
reads tokamax's shapes as code, and fails. Passed with MaxText e591f30 and tokamax 0.0.12.
"""

import contextlib
import os
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

import fp8ref.jax as fj
from fp8ref.jax import proof
from fp8ref.jax.linear import linear

CHECKOUT = os.environ.get("FP8REF_MAXTEXT")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="FP8REF_MAXTEXT names no checkout of MaxText"),
    pytest.mark.filterwarnings("ignore"),  # MaxText's own
]

D, HEADS, KV, SIZE, F, SEQUENCES, LENGTH = 64, 4, 2, 16, 128, 8, 32
SIZES = {
    "base_emb_dim": D,
    "base_mlp_dim": F,
    "base_num_query_heads": HEADS,
    "base_num_kv_heads": KV,
    "head_dim": SIZE,
    "base_num_decoder_layers": 1,
    "vocab_size": 256,
    "max_target_length": LENGTH,
    "override_model_config": True,
}
OURS = {
    "run_name": "fp8ref",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "enable_checkpointing": False,
    "dataset_type": "synthetic",
}
HOW = {
    "attention": "dot_product",
    "scan_layers": False,
    "dtype": "bfloat16",
    "weight_dtype": "float32",
}
LINEARS = {
    "self_attention.query": (D, HEADS * SIZE),
    "self_attention.key": (D, KV * SIZE),
    "self_attention.value": (D, KV * SIZE),
    "self_attention.out": (HEADS * SIZE, D),
    "mlp.wi_0": (D, F),
    "mlp.wi_1": (D, F),
    "mlp.wo": (F, D),
}
"""Name -> [in, out]."""


def missing() -> str:
    """The module that MaxText imports and that is not installed; or nothing."""
    sys.path.insert(0, os.path.join(CHECKOUT, "src"))
    try:
        import maxtext.models.llama2  # noqa: F401
    except ModuleNotFoundError as error:
        return str(error.name)
    return ""


@contextlib.contextmanager
def decoder_layer(recipe: str | None, devices: int = 1, kind: AxisType = AxisType.Auto):
    """(LlamaDecoderLayer, its forward pass of x) on a mesh of that many devices along MaxText's
    axis fsdp; recipe: None for MaxText's own products.
    """
    if lacking := missing():
        pytest.skip(f"MaxText imports {lacking}")
    from maxtext.common.common_types import MODEL_MODE_TRAIN
    from maxtext.configs import pyconfig
    from maxtext.layers import quantizations
    from maxtext.models.llama2 import LlamaDecoderLayer

    class Quant(quantizations.Fp8Quantization):
        def dot_general_cls(self, mesh_axes=()):
            return fj.flax.linen_dot_general(recipe)

    base = os.path.join(CHECKOUT, "src", "maxtext", "configs", "base.yml")
    mode = {
        "shard_mode": "explicit" if kind == AxisType.Explicit else "auto",
        "per_device_batch_size": SEQUENCES // devices,
    }
    config = pyconfig.initialize(["", base], **SIZES, **OURS, **HOW, **mode)
    sizes = [devices if axis == "fsdp" else 1 for axis in config.mesh_axes]
    mesh = Mesh(
        np.array(jax.devices()[:devices]).reshape(sizes),
        config.mesh_axes,
        axis_types=(kind,) * len(sizes),
    )
    positions, segments = (
        jnp.broadcast_to(jnp.arange(LENGTH), (SEQUENCES, LENGTH)),
        jnp.ones((SEQUENCES, LENGTH), jnp.int32),
    )
    with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
        layer = LlamaDecoderLayer(
            config, MODEL_MODE_TRAIN, mesh, nnx.Rngs(0), None if recipe is None else Quant()
        )
        yield layer, lambda layer, x: layer(x, segments, positions, True, MODEL_MODE_TRAIN)[0]


def train_step(forward):
    @nnx.jit
    def step(layer, optimizer, x):
        loss, grads = nnx.value_and_grad(
            lambda layer: (forward(layer, x).astype(jnp.float32) ** 2).mean()
        )(layer)
        optimizer.update(layer, grads)
        return loss

    return step


@pytest.mark.parametrize(
    ("recipe", "devices", "kind"),
    [
        ("tensorwise", 1, AxisType.Auto),
        ("rowwise", 1, AxisType.Auto),
        ("rowwise_with_gw_hp", 1, AxisType.Auto),
        ("tensorwise", 4, AxisType.Auto),
        ("rowwise", 4, AxisType.Explicit),
    ],
)
def test_maxtexts_decoder_layer_trains(recipe, devices, kind, rng):  # L-1, P-20
    with decoder_layer(recipe, devices, kind) as (layer, forward):
        optimizer, step = (
            nnx.Optimizer(layer, optax.adamw(3e-3), wrt=nnx.Param),
            train_step(forward),
        )
        x = jnp.asarray(rng.standard_normal((SEQUENCES, LENGTH, D)), jnp.bfloat16)
        fp8 = sum(gemm.fp8 for gemm in proof.gemms(proof.read(step.lower(layer, optimizer, x))))
        assert fp8 == len(LINEARS) * (2 if recipe == "rowwise_with_gw_hp" else 3)
        losses = [float(step(layer, optimizer, x)) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_its_linears_are_the_specified_ones(recipe, rng):  # L-1
    """Each gives the bits of ``linear.apply`` of its kernel in bfloat16."""
    with decoder_layer(recipe) as (layer, _):
        modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(layer)}
        for name, (inputs, outputs) in LINEARS.items():
            module = modules[name]
            x = jnp.asarray(rng.standard_normal((SEQUENCES, LENGTH, inputs)), jnp.bfloat16)
            kernel = jnp.asarray(module.kernel[...].reshape(inputs, outputs), jnp.bfloat16)
            expected, _ = jax.jit(lambda x, w: linear.apply(x, w.T, recipe=recipe))(x, kernel)
            given = x.reshape(SEQUENCES, LENGTH, HEADS, SIZE) if name == "self_attention.out" else x
            y = nnx.jit(lambda module, x: module(x))(module, given)
            np.testing.assert_array_equal(y.reshape(expected.shape), expected, err_msg=name)


def test_the_report_names_its_linears():
    with decoder_layer("tensorwise") as (layer, _):
        rows = {row.path: row for row in fj.flax.report(layer).rows if row.recipe}
    assert set(rows) == set(LINEARS)
    assert {row.recipe for row in rows.values()} == {"tensorwise"}


def test_a_layer_without_a_recipe_has_no_fp8(rng):
    """The count above is not of products that MaxText itself makes in FP8."""
    with decoder_layer(None) as (layer, forward):
        step = train_step(forward)
        x = jnp.asarray(rng.standard_normal((SEQUENCES, LENGTH, D)), jnp.bfloat16)
        optimizer = nnx.Optimizer(layer, optax.adamw(3e-3), wrt=nnx.Param)
        gemms = proof.gemms(proof.read(step.lower(layer, optimizer, x)))
    assert len(gemms) >= 3 * len(LINEARS)
    assert not any(gemm.fp8 for gemm in gemms)
