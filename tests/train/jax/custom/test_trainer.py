import json

import numpy as np
import pytest
from helpers.models import own_configurations

from fp8ref.selection.rules import Rule
from fp8ref.shared.errors import ConfigError
from fp8ref.train import loop
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import DataConfig, RunConfig
from fp8ref.train.jax.trainer import Trainer
from fp8ref.train.run import state_conversion
from fp8ref.train.run.state_conversion import Source

TOKENS = np.random.default_rng(0).integers(0, 256, (4, 4, 17))


@pytest.fixture
def of(text):
    def make(name: str = "Plain", **sections) -> Config:
        return Config(
            architecture=own_configurations.nnx(name),
            data=DataConfig(source=str(text), sequence_length=16, batch_size=4),
            run=RunConfig(steps=4, eval_every=2, eval_batches=1),
        ).replace(**sections)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_a_resumed_trainer_goes_on_with_the_same_bits(of, recipe, tmp_path):  # K-3
    config = of(numerics={"recipe": recipe})
    first, second = Trainer(config), Trainer(config)
    for batch in TOKENS[:2]:
        first.step(batch)
    first.save(tmp_path / "state")()
    second.load(tmp_path / "state", 2)
    for batch in TOKENS[2:]:
        assert first.step(batch) == second.step(batch)
    for name, value in first.weights().items():
        np.testing.assert_array_equal(value, second.weights()[name])
    for name, state in first.fp8_states().items():
        for mine, theirs in zip(state, second.fp8_states()[name], strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.slow
def test_a_run_is_recorded_whole(of, tmp_path):
    config = of(
        statistics={"every": 2},
        numerics={"recipe": "delayed"},
        optimizer={"kind": "adamw_states", "layout": "te"},
    )
    lines = loop.train(config, "jax", tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert len(manifest["model"].pop("sha256")) == 64
    assert manifest["model"] == {
        "class": "helpers.models.own_nnx_models.Plain",
        "parameters": 256 * 32 * 2 + 2 * 32 * 64 + 64,
    }
    assert {gemm["gemm"] for gemm in manifest["proof"]["gemms"] if gemm["fp8"]} == {
        f"{layer}/{gemm}"
        for layer in ("up", "down")
        for gemm in ("output", "grad_input", "grad_weight")
    }
    first, second = (
        json.loads(line)
        for line in (tmp_path / "run" / "statistics.jsonl").read_text().splitlines()
    )
    assert len(first["statistics"]) == 12
    assert second["states"][""]["count"] == manifest["model"]["parameters"]
    weight = second["statistics"]["up/output/weight"]
    # float32 weights of variance 1 / 32, rounded to bfloat16; scales of delayed scaling are powers
    # of two below 448 / amax.
    assert 0.3 < weight["amax"] < 1
    assert weight["scale_min"] == weight["scale_max"]
    assert weight["amax"] * weight["scale_max"] <= 448
    # e4m3 has 4 bits of precision: 6.02 * 4 + 7.3 dB of a uniform error, less where subnormal
    assert 24 < weight["sqnr"] < 36


def test_a_step_that_is_not_finite_changes_nothing(of):  # T-4
    trainer = Trainer(of(numerics={"recipe": "delayed"}))
    trainer.step(TOKENS[0])
    broken = {name: np.full_like(value, np.nan) for name, value in trainer.weights().items()}
    state, fp8 = trainer._state, trainer.fp8_states()
    trainer._state = state._replace(params=broken)
    assert np.isnan(trainer.step(TOKENS[1])["loss"])
    for name, one in trainer.fp8_states().items():
        for mine, before in zip(one, fp8[name], strict=True):
            np.testing.assert_array_equal(mine, before)


def test_a_linear_that_is_not_called_is_missing_from_the_proof(of):
    with pytest.raises(ConfigError, match="spare/output"):
        Trainer(of("Uncalling")).prove(TOKENS[0])


def test_other_logits_are_refused(of):
    with pytest.raises(ConfigError, match="returns logits"):
        Trainer(of("Misshapen")).step(TOKENS[0])


def test_a_schedule_switches_and_its_states_outlive_a_phase(of, tmp_path):  # T-9
    config = of(numerics={"recipe": "delayed", "schedule": ((0, "delayed"), (2, "bf16"))})
    trainer, other = Trainer(config), Trainer(config)
    trainer.step(TOKENS[0])
    before = trainer.fp8_states()
    assert all(int(step) == 1 for *_, step in before.values())
    trainer.switch("bf16")
    assert not any(d.fp8 for d in trainer.decisions)
    in_bf16 = trainer.step(TOKENS[1])
    trainer.save(tmp_path / "state")()
    other.load(tmp_path / "state", 2)
    for name, state in other.fp8_states().items():
        for mine, theirs in zip(state, before[name], strict=True):
            np.testing.assert_array_equal(mine, theirs)
    for one in (trainer, other):
        one.switch("delayed")
    assert trainer.step(TOKENS[2]) == other.step(TOKENS[2])
    assert all(int(step) == 2 for *_, step in other.fp8_states().values())
    alone = Trainer(of(numerics={"recipe": "delayed"}))
    alone.step(TOKENS[0])
    assert alone.step(TOKENS[1]) != in_bf16
    with pytest.raises(ValueError, match="a recipe of its config, delayed, bf16; got 'rowwise'"):
        trainer.switch("rowwise")


def test_rules_change_single_casts(of):
    rules = (
        Rule(layers=("up",), roles=("grad_output",), recipe="bf16"),
        Rule(layers=("down",), gemms=("output",), format="e5m2"),
    )
    trainer = Trainer(of(numerics={"recipe": "tensorwise", "rules": rules}))
    proof = trainer.prove(TOKENS[0])
    assert proof["missing"] == []
    made = {gemm["gemm"]: (gemm["a"], gemm["b"]) for gemm in proof["gemms"] if gemm["fp8"]}
    assert made["down/output"] == ("f8e5m2", "f8e5m2")
    assert made["up/output"] == ("f8e4m3fn", "f8e4m3fn")
    assert not {"up/grad_input", "up/grad_weight"} & made.keys()
    measured = trainer.statistics(TOKENS[0])
    assert {"down/output/input", "up/output/weight"} <= measured.keys()
    assert "up/grad_weight/grad_output" not in measured


def test_a_state_is_adopted_under_another_layout(of):  # E-8
    first, second = (
        Trainer(of(numerics={"recipe": "delayed"})),
        Trainer(
            of(numerics={"recipe": "delayed"}, optimizer={"kind": "adamw_states", "layout": "te"})
        ),
    )
    first.step(TOKENS[0])
    source = Source(
        weights=first.weights(), moments=first.moments(), delayed=first.fp8_states(), step=1
    )
    second.adopt(state_conversion.converted(source, second.config, "jax"), 1)
    for name, value in first.weights().items():
        np.testing.assert_array_equal(value, second.weights()[name])
    for name, state in first.fp8_states().items():
        for mine, theirs in zip(state, second.fp8_states()[name], strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert first.evaluate(TOKENS[1]) == second.evaluate(TOKENS[1])
    assert np.isfinite(second.step(TOKENS[1])["loss"])
