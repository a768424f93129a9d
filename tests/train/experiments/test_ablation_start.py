"""An ablation begins from a run, or from weights of Hugging Face's format (spec E-8)."""

import json
import shutil

import numpy as np
import pytest
import torch
from helpers.training.ablations import ablated

from fp8ref.selection.rules import Rule
from fp8ref.shared.errors import ConfigError
from fp8ref.train import loop
from fp8ref.train.config.sections import DataConfig
from fp8ref.train.experiments import ablation_start, variants
from fp8ref.train.models import export
from fp8ref.train.run import train_state


@pytest.fixture
def two(small):
    return small.replace(run={"steps": 4, "eval_every": 4})


def test_weights_of_hugging_faces_format_are_taken_in_place_of_a_run(two, text, tmp_path):
    one = two.replace(
        model={"num_hidden_layers": 1},
        numerics={"recipe": "bf16"},
        run={"steps": 1, "eval_every": 1},
    )
    loop.train(one, "torch", tmp_path / "run")
    export.export(tmp_path / "run", tmp_path / "hf")
    data = DataConfig(source=str(text), sequence_length=16, batch_size=4)
    start = ablation_start.weights_start(tmp_path / "hf", "torch", "delayed", data)
    assert start.config.model == one.model
    found = ablated(start, out=tmp_path / "out", by="model", roles=["weight"], batches=2)
    same = ablated(tmp_path / "run", recipe="delayed", by="model", roles=["weight"], batches=2)
    assert found.step == 0
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "hf", other)
    assert ablation_start.weights_start(other, "torch", "delayed", data).identity == start.identity
    weights = next(other.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    assert (
        ablation_start.Start(
            name="", backend="torch", step=0, own=one, config=one, weights=other
        ).identity
        != start.identity
    )
    # One set of weights and batches, and weights alone are cast, whose amaxes no batch changes: not
    # a bit differs.
    assert found.baseline == same.baseline
    assert [(row.operand.name, row.cost) for row in found.rows] == [
        ("model/output/weight", same.rows[0].cost)
    ]
    with pytest.raises(ConfigError, match="no run, and has no config"):
        ablation_start.weights_start(tmp_path / "run", "torch", None, data)


def test_another_model_of_transformers_is_taken_in_pytorch_alone(two, text, tmp_path):
    described = {
        "model_type": "gpt_neox",
        "vocab_size": 256,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(described))
    data = DataConfig(source=str(text), sequence_length=16, batch_size=4)
    with pytest.raises(ConfigError, match="JAX trains the trainer"):
        ablation_start.weights_start(tmp_path, "jax", None, data)
    start = ablation_start.weights_start(tmp_path, "torch", None, data)
    assert start.config.architecture.kind == "transformers"
    with pytest.raises(ConfigError, match="--attention takes the trainer's own Llama"):
        ablated(start, attention="cudnn", batches=2, out=tmp_path / "out")


# te has v in e4m3, sqrt_e5m2 its root in e5m2
def test_codes_of_a_checkpoint_are_not_read_as_another_layout_s(small, tmp_path):
    own = small.replace(
        optimizer={"kind": "adamw_states", "layout": "te"}, run={"steps": 1, "eval_every": 1}
    )
    loop.train(own, "torch", tmp_path / "run")
    start = ablation_start.run_start(tmp_path / "run", None)
    config = variants.studying(start.config, attention=None, states="sqrt_e5m2")
    trainer = loop.trainer("torch", config)
    start.into(trainer, config)
    kept, made = (found["exp_avg_sq"] for found in (start.source.moments, trainer.moments()))
    for name, v in kept.items():
        # e5m2 rounds a root by at most 2^-3 of it, and so v by (1 + 2^-3)^2 - 1 < 0.27. What e4m3
        # has not rounded to 0 is at least 2^-18 of the largest, and its root 2^-9: no subnormal of
        # e5m2.
        np.testing.assert_allclose(made[name], v, rtol=0.27, atol=0)


def test_delayed_scales_begin_beside_attention_s_own(small, tmp_path):
    own = {"recipe": "tensorwise", "attention": "cudnn", "attention_scaling": "delayed"}
    loop.train(
        small.replace(numerics=own, run={"steps": 1, "eval_every": 1}), "torch", tmp_path / "run"
    )
    start = ablation_start.run_start(tmp_path / "run", "delayed")
    trainer = loop.trainer("torch", start.config)
    # the linears' states are of a batch, and attention's are the checkpoint's
    start.into(trainer, start.config)
    states, kept = trainer.fp8_states(), start.source.delayed
    assert len(kept) == 10
    assert set(kept) < set(states)
    for name, state in kept.items():
        np.testing.assert_array_equal(states[name][1], state[1])
    amaxes = start.source.amaxes()
    assert all(
        set(states[name][1].tolist()) == {amaxes[name]} for name in states.keys() - kept.keys()
    )


def test_torchao_s_moments_go_on_in_float32(small, tmp_path):
    with torch.compiler.set_stance("force_eager"):
        loop.train(
            small.replace(optimizer={"kind": "adamw_fp8"}, run={"steps": 1, "eval_every": 1}),
            "torch",
            tmp_path / "run",
        )
    start = ablation_start.run_start(tmp_path / "run", None)
    assert start.config.optimizer.kind == "adamw"
    trainer = loop.trainer("torch", start.config)
    start.into(trainer, start.config)
    kept, made = start.source.moments, trainer.moments()
    for which in train_state.MOMENTS:
        assert any(v.any() for v in kept[which].values())
        for name, v in kept[which].items():
            np.testing.assert_array_equal(made[which][name], v)


def test_damaged_weights_of_a_llama_are_refused_in_each_backend(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 256}))
    (tmp_path / "model.safetensors").write_bytes(b"?")
    for backend in loop.BACKENDS:
        with pytest.raises(ConfigError, match="safetensors") as raised:
            ablation_start.weights_start(
                tmp_path, backend, None, DataConfig(sequence_length=16, batch_size=4)
            )
        assert not str(raised.value).startswith("run.init_from")


def test_a_state_is_another_s_if_its_numbers_mean_the_same(small):
    own = small.replace(optimizer={"kind": "adamw_states", "layout": "te"})
    assert train_state.interchangeable(own, own.replace(numerics={"recipe": "rowwise"}), "jax")
    assert train_state.interchangeable(own, own.replace(optimizer={"layout": "te/m+v"}), "jax")
    assert not train_state.interchangeable(
        own, own.replace(optimizer={"layout": "sqrt_e5m2"}), "jax"
    )
    delayed = small.replace(numerics={"recipe": "delayed"})
    other = delayed.replace(
        numerics={"rules": (Rule(layers=("up_proj",), roles=("weight",), format="e5m2"),)}
    )
    assert train_state.schema(delayed, "torch") == train_state.schema(other, "torch")
    assert not train_state.interchangeable(delayed, other, "torch")
