import re

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import sizes

from fp8ref import recipe
from fp8ref.jax.quantize import scales, scaling
from fp8ref.train.jax.llama import weight_scales
from fp8ref.train.jax.trainer import Trainer

MESHES = {
    "one device": {},
    "shards": {"fsdp": 4, "data": 2},
    "tensor, scanned": {
        "fsdp": 2,
        "tensor": 2,
        "sequence": True,
        "scan": True,
        "checkpointing": "full",
    },
    "plain jit": {"fsdp": 8, "through": "jit"},
}


def test_scales_are_those_of_each_weights_own_amax():
    """Of a stack a layer's; a NaN stays with its weight."""
    draw = np.random.default_rng(0).normal
    weights = {
        "a": draw(size=(3, 5)),
        "b": draw(size=(2, 4, 3)),
        "c": draw(size=(2, 2)),
        "d": np.zeros((2, 2)),
    }
    weights["b"][1] *= 100
    weights["c"][0, 1] = np.nan
    weights = {name: jnp.asarray(w, jnp.bfloat16) for name, w in weights.items()}
    found = weight_scales.of(weights, dict.fromkeys(weights, recipe.by_name("tensorwise")))
    for name, w in weights.items():
        own = [
            scaling.quantize(one, recipe.weight_copy("tensorwise").fmt)
            for one in (w if w.ndim == 3 else [w])
        ]
        for field in scales.Scales._fields:
            wanted = np.array([getattr(one, field) for one in own]).reshape(w.shape[:-2])
            assert np.array_equal(np.asarray(getattr(found[name], field)), wanted, equal_nan=True)
    assert weight_scales.of(weights, {}) == {}


def trained(parts=1, **parallel):
    trainer, draw = (
        Trainer(sizes.config("tensorwise", parts, **parallel)),
        np.random.default_rng(0).integers,
    )
    losses = [trainer.step(tokens)["loss"] for tokens in draw(0, 256, (2, 8, 33))]
    return losses, trainer.weights(), trainer


@pytest.mark.parametrize("parallel", [pytest.param(mesh, id=name) for name, mesh in MESHES.items()])
def test_scales_made_before_a_pass_change_no_bit(parallel):
    """P-9"""
    losses, weights, _ = trained(**parallel)
    others, apart, _ = trained(**parallel, precompute_scales=False)
    assert losses == others
    assert all(np.array_equal(w, apart[name]) for name, w in weights.items())


def test_microbatches_share_them():
    losses, weights, _ = trained(2, fsdp=2)
    others, apart, _ = trained(2, fsdp=2, precompute_scales=False)
    assert losses == others
    assert all(np.array_equal(w, apart[name]) for name, w in weights.items())


def amaxes(config):
    """The lengths of all maxima between devices, int32, in a step as it is lowered: before XLA
    combines any.
    """
    text = Trainer(config).lowered(np.zeros((8, 33), np.int32)).as_text()
    found = re.findall(
        r'"stablehlo.all_reduce".*?stablehlo\.(\w+) .*?: \(tensor<(?:(\d+)x)?(\w+)>\)',
        text,
        re.DOTALL,
    )
    return [
        int(length or 1)
        for operation, length, dtype in found
        if (operation, dtype) == ("maximum", "i32")
    ]


def test_one_maximum_between_devices_is_of_all_weights():
    config = sizes.config("tensorwise", fsdp=8)
    together = amaxes(config)
    apart = amaxes(config.replace(parallel={"precompute_scales": False}))
    linears = sum(d.fp8 for d in config.decisions())
    assert together.count(linears) == 1
    assert linears not in apart
    assert sorted(apart) == sorted([one for one in together if one != linears] + [1] * linears)
