import re

import jax.numpy as jnp
import ml_dtypes
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
    leading, tensorwise = (
        {name: w.shape[:-2] for name, w in weights.items()},
        dict.fromkeys(weights, recipe.by_name("tensorwise")),
    )
    amaxes = weight_scales.amaxes(weights)
    found = weight_scales.of(amaxes, leading, tensorwise)
    for name, w in weights.items():
        own = [
            scaling.quantize(one, recipe.weight_copy("tensorwise").fmt)
            for one in (w if w.ndim == 3 else [w])
        ]
        for field in scales.Scales._fields:
            wanted = np.array([getattr(one, field) for one in own]).reshape(w.shape[:-2])
            assert np.array_equal(np.asarray(getattr(found[name], field)), wanted, equal_nan=True)
    assert weight_scales.of(amaxes, leading, {}) == {}
    some = weight_scales.of(amaxes, leading, {"c": tensorwise["c"]})
    assert some.keys() == {"c"}
    assert np.array_equal(some["c"].scale, found["c"].scale, equal_nan=True)


BATCHES = np.random.default_rng(0).integers(0, 256, (3, 8, 33))


def config_of(recipe="tensorwise", parts=1, layers=1, **parallel):
    """Of one layer, unless a stack of them is asked for: XLA compiles each anew."""
    config = sizes.config(recipe, parts, **parallel)
    return config.replace(model={"num_hidden_layers": layers})


def trained(**keys):
    trainer = Trainer(config_of(**keys))
    losses = [trainer.step(tokens)["loss"] for tokens in BATCHES[:2]]
    return losses, trainer.weights(), trainer


def largest(trainer):
    """The amaxes of the weights that a trainer has, rounded to bfloat16, in the order of its
    program."""
    weights = trainer.weights()
    layers = range(trainer.config.model.num_hidden_layers)
    return [
        np.abs(weights[f"{each}.weight"].astype(ml_dtypes.bfloat16)).max().astype(np.float32)
        for name in trainer._step.weighed
        for each in ([name.replace("*", str(i)) for i in layers] if "*" in name else [name])
    ]


@pytest.mark.parametrize("parallel", [pytest.param(mesh, id=name) for name, mesh in MESHES.items()])
def test_scales_made_before_a_pass_change_no_bit(parallel):
    """P-9"""
    layers = 2 if "scan" in parallel else 1
    losses, weights, trainer = trained(layers=layers, **parallel)
    others, apart, plain = trained(layers=layers, **parallel, precompute_scales=False)
    assert losses == others
    assert np.asarray(trainer._state.amaxes).tolist() == largest(trainer)
    assert trainer._train._cache_size() == 1
    assert plain._state.amaxes is None
    assert all(np.array_equal(w, apart[name]) for name, w in weights.items())


def test_microbatches_share_them():
    losses, weights, _ = trained(parts=2, fsdp=2)
    others, apart, _ = trained(parts=2, fsdp=2, precompute_scales=False)
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


def test_a_step_hands_on_the_amaxes_of_its_new_weights():
    """The step after a planted amax differs; a pass that updates nothing takes its own."""
    _, _, trainer = trained()
    state, tokens = trainer._state, BATCHES[2]
    right = Trainer(trainer.config, trainer.weights()).evaluate(tokens)
    trainer._state = state._replace(amaxes=state.amaxes.at[0].mul(1.5))
    assert trainer.evaluate(tokens) == right
    assert trainer.step(tokens)["loss"] != right
    assert np.asarray(trainer._state.amaxes).tolist() == largest(trainer)


def test_restored_weights_bring_amaxes_of_their_own(tmp_path):  # K-2
    """In a trainer that has stepped since, and on another mesh; a checkpoint has none."""
    _, _, trainer = trained()
    trainer.save(tmp_path / "state")()
    before, loss = np.asarray(trainer._state.amaxes), trainer.step(BATCHES[2])["loss"]
    assert not np.array_equal(trainer._state.amaxes, before)
    other = Trainer(config_of(fsdp=2, scan=True))
    for each in (trainer, other):
        each.load(tmp_path / "state", 2)
        assert each._state.amaxes is None
        assert each.step(BATCHES[2])["loss"] == pytest.approx(
            loss, rel=0 if each is trainer else 1e-3
        )
        assert np.asarray(each._state.amaxes).tolist() == largest(each)


def test_a_step_that_is_not_finite_keeps_them():  # T-4
    _, _, trainer = trained()
    weights, before = trainer.weights(), np.asarray(trainer._state.amaxes)
    trainer._state.params["lm_head"]["weight"] = jnp.full_like(
        trainer._state.params["lm_head"]["weight"], np.inf
    )
    assert not np.isfinite(trainer.step(BATCHES[2])["loss"])
    kept = [name != "lm_head" for name in trainer._step.weighed]
    assert np.array_equal(np.asarray(trainer._state.amaxes)[kept], before[kept])
    assert np.array_equal(trainer.weights()["model.norm.weight"], weights["model.norm.weight"])


def test_a_phase_begins_with_amaxes_of_the_weights_that_another_recipe_left():  # T-9
    schedule = ((0, "bf16"), (1, "tensorwise"))
    trainer = Trainer(config_of("bf16").replace(numerics={"schedule": schedule}))
    trainer.step(BATCHES[0])
    assert np.asarray(trainer._state.amaxes).tolist() == largest(trainer)
    trainer.switch("tensorwise")
    fresh = Trainer(config_of(), trainer.weights())
    assert trainer.step(BATCHES[1])["loss"] == fresh.step(BATCHES[1])["loss"]


@pytest.mark.parametrize("name", ["rowwise", "delayed", "bf16"])
def test_other_recipes_have_none(name):
    state, *_ = Trainer(sizes.config(name))._arguments(BATCHES[0])
    assert state.amaxes is None
