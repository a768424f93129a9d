"""An ablation finds a planted harmful cast, resumes, and says what it measured (spec E-8)."""

import dataclasses
import json
import math
from typing import ClassVar

import numpy as np
import pytest
from helpers.training.ablations import ablated
from rich.console import Console

from fp8ref.selection.rules import Rule
from fp8ref.shared.errors import ConfigError
from fp8ref.train import loop
from fp8ref.train.config import config as configs
from fp8ref.train.experiments import ablation_start, variants

PLANTED = (
    Rule(layers=("lm_head",), recipe="tensorwise"),
    Rule(layers=("lm_head",), roles=("grad_output",), format="e4m3fn", policy="unscaled"),
)
"""The gradients of lm_head in e4m3 without a scale.

The largest are 1 / 2048, of 2048 tokens; e4m3 rounds those to 2^-10 to zero.
"""


@pytest.fixture
def two(small):
    """Two layers, whose trainers are fakes but for a first run."""
    return small.replace(model={"num_hidden_layers": 2}, run={"steps": 4, "eval_every": 4})


@pytest.mark.slow
@pytest.mark.parametrize("backend", loop.BACKENDS)
@pytest.mark.parametrize("base", ["bf16", "fp8"])
def test_a_planted_cast_is_rank_1_with_an_interval_above_0(small, tmp_path, backend, base):
    config = small.replace(
        data={"batch_size": 32, "sequence_length": 64},
        numerics={"recipe": "tensorwise", "rules": PLANTED},
        optimizer={"learning_rate": 3e-3, "min_learning_rate": 3e-3, "warmup_steps": 1},
        run={"steps": 2, "eval_every": 2},
    )
    loop.train(config, backend, tmp_path / "run")
    found = ablated(tmp_path / "run", base=base, roles=["grad_output"], steps=8, seeds=3, batches=3)
    first = found.rows[0]
    assert (first.operand.group, first.operand.role) == ("lm_head", "grad_output")
    assert first.low > 0
    assert first.underflow == 1.0
    assert (tmp_path / "run" / "ablation" / "ablation.png").read_bytes().startswith(b"\x89PNG")
    sound = [row for row in found.rows if row.operand.group == "layers.0"]
    assert len(sound) == 2
    assert all(row.cost < first.cost / 10 for row in sound)


@pytest.mark.slow
@pytest.mark.parametrize("backend", loop.BACKENDS)
def test_experts_are_studied_as_linears(small, tmp_path, backend):  # E-10
    """Of each projection input and weight, whose costs are those of trainers with this cast
    alone.
    """
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "qk_norm": True}
    config = small.replace(
        model=experts, numerics={"recipe": "rowwise"}, run={"steps": 1, "eval_every": 1}
    )
    loop.train(config, backend, tmp_path / "run")
    found = ablated(tmp_path / "run", by="kind", layers=["experts"], batches=2)
    names = {row.operand.name for row in found.rows}
    assert names == {
        f"{key}_proj/output/{role}"
        for key in ("gate", "up", "down")
        for role in ("input", "weight")
    }
    start = ablation_start.run_start(tmp_path / "run", None)
    high = loop.trainer(backend, config.replace(numerics={"recipe": "bf16"}))
    start.into(high, high.config)
    held_out = [start.batches.held_out(i) for i in range(2)]
    plain = [high.evaluate(tokens) for tokens in held_out]
    rules = (
        Rule(layers=("*",), gemms=("grad_input", "grad_weight"), recipe="bf16"),
        Rule(layers=("*",), gemms=("output",), roles=("weight",), recipe="bf16"),
        Rule(
            layers=("self_attn", "gate_proj", "up_proj"),
            gemms=("output",),
            roles=("input",),
            recipe="bf16",
        ),
    )
    cast = config.replace(numerics={"rules": rules})
    trainer = loop.trainer(backend, cast)
    start.into(trainer, cast)
    cost = np.mean(
        [trainer.evaluate(tokens) - of for tokens, of in zip(held_out, plain, strict=True)]
    )
    row = next(row for row in found.rows if row.operand.name == "down_proj/output/input")
    assert row.cost == pytest.approx(cost, abs=1e-12)
    assert row.cost != 0
    assert row.sqnr > 20


class Fake:
    """A trainer whose loss is 2 and, for each operand of layer 1 that is cast, 0.1 more; and 0.001
    times the batch.
    """

    made = 0
    configs: ClassVar[list] = []

    def __init__(self, config):
        Fake.made += 1
        casts = variants.cast_operands(config)
        Fake.configs.append(config)
        self.loss = 2 + 0.1 * sum("layers.1" in path for path, *_ in casts) / 7 + 0.001 * len(casts)
        self.steps = 0

    def load(self, state, step):
        self.steps = 0

    def adopt(self, arrays, step):
        self.steps = 0

    def weights(self):
        return {}

    moments = fp8_states = weights

    def step(self, tokens):
        self.steps += 1
        return {"loss": math.nan if "nan" in str(tokens) else 2.0, "grad_norm": 1.0}

    def evaluate(self, tokens):
        return self.loss + 0.01 * float(np.mean(tokens)) / 256 + 0.01 * self.steps

    def statistics(self, tokens):
        return {
            "model.layers.1.mlp.up_proj/output/input": {
                "sqnr": 20.0,
                "underflow_rate": 0.25,
                "saturation_rate": 0.5,
            },
            "model.layers.1.self_attn/values/p": {
                "count": 4,
                "underflow_rate": 0.0,
                "overflow_rate": 0.75,
            },
        }


@pytest.fixture
def run(two, tmp_path, monkeypatch):
    """A run of torch, whose trainers are then fakes."""
    loop.train(two, "torch", tmp_path / "run")
    monkeypatch.setattr(loop, "trainer", lambda backend, config, weights=None: Fake(config))
    Fake.made = 0
    Fake.configs.clear()
    return tmp_path / "run"


def test_operands_are_ranked_with_their_statistics_and_resumed(run, tmp_path):
    found = ablated(run, batches=3)
    assert [row.operand.name for row in found.rows[:2]] == [
        "layers.1/output/input",
        "layers.1/output/weight",
    ]
    assert found.rows[0].cost == pytest.approx(0.1 + 0.007)
    assert (found.rows[0].sqnr, found.rows[0].underflow, found.rows[0].saturation) == (
        20.0,
        0.25,
        0.5,
    )
    assert (found.steps, found.samples, len(found.rows)) == (0, 3, 4)
    assert Fake.made == 2 + 4
    lines = (run / "ablation" / variants.LOSSES).read_text().splitlines(keepends=True)
    # killed while it wrote the last
    (run / "ablation" / variants.LOSSES).write_text("".join(lines[:-1]) + lines[-1][:5])
    assert ablated(run, batches=3).to_dict() == found.to_dict()
    assert Fake.made == 2 + 4 + 1
    with pytest.raises(
        ConfigError, match=r"is of another ablation: it differs in base\. Name another directory"
    ):
        ablated(run, batches=3, base="fp8")
    written = json.loads((run / "ablation" / "ablation.json").read_text())
    assert written["rows"][0]["rank"] == 1
    assert written["rows"][0]["linears"][0] == "model.layers.1.self_attn.q_proj"


def test_losses_are_of_their_casts_and_weights(run, tmp_path, two):
    of_attention = ablated(run, layers=["self_attn"], roles=["weight"], batches=2)
    # groups of the same names, in the same directory
    of_mlps = ablated(run, layers=["mlp"], roles=["weight"], batches=2)
    assert [row.operand.name for row in of_attention.rows] == [
        row.operand.name for row in of_mlps.rows
    ]
    assert of_mlps.rows[0].cost == pytest.approx(0.1 * 3 / 7 + 0.003)
    assert of_attention.rows[0].cost == pytest.approx(0.1 * 4 / 7 + 0.004)
    start = ablation_start.run_start(run, None)
    start.checkpoint.manifest["files"]["another"] = {"bytes": 1, "sha256": "0"}
    with pytest.raises(ConfigError, match="it differs in weights"):
        ablated(start, layers=["mlp"], roles=["weight"], batches=2, out=run / "ablation")


def test_from_fp8_a_cost_has_the_same_sign(run):
    found = ablated(run, base="fp8", batches=3)
    assert found.rows[0].operand.group == "layers.1"
    assert found.rows[0].cost == pytest.approx(0.1 + 0.007)


def test_training_is_matched_and_begins_again_for_each_order(run):
    found = ablated(
        run,
        steps=2,
        seeds=3,
        batches=2,
        by="kind",
        layers=["up_proj", "down_proj"],
        gemms=["grad_weight"],
    )
    assert [row.operand.group for row in found.rows] == [
        "up_proj",
        "up_proj",
        "down_proj",
        "down_proj",
    ]
    assert found.samples == 3
    assert found.baseline == pytest.approx(2 + 0.02, abs=0.01)


def test_operands_of_attention_and_states_are_switched_one_by_one(run):  # E-9, O-1
    found = ablated(
        run,
        attention="cudnn",
        states="te",
        steps=1,
        seeds=2,
        batches=2,
        layers=(),
        gemms=["attention", "states"],
    )
    names = [
        f"layers.{i}/attention/{role}" for i in (0, 1) for role in ("q", "k", "v", "p", "do", "ds")
    ] + ["model/states/m", "model/states/v"]
    assert sorted(row.operand.name for row in found.rows) == sorted(names)
    #
    assert {row.operand.name: row.saturation for row in found.rows if row.saturation} == {
        "layers.1/attention/p": 0.75
    }
    seen = [
        (config.numerics.attention_operands, config.optimizer.layout) for config in Fake.configs
    ]
    assert ((), "te/none") in seen  # the baseline
    assert (("model.layers.1.self_attn/ds",), "te/none") in seen
    assert ((), "te/v") in seen
    whole = ablated(
        run,
        states="te",
        base="fp8",
        steps=1,
        seeds=2,
        batches=2,
        gemms=["states"],
        out=run / "whole",
        by="model",
    )
    assert [row.operand.role for row in whole.rows] == ["m", "v"]
    assert {config.optimizer.layout for config in Fake.configs[-3:]} >= {"te/m", "te/v"}


def beginning(run, **sections):
    """A Start from the run as if its config had these keys."""
    start = ablation_start.run_start(run, None)
    return dataclasses.replace(
        start, own=start.own.replace(**sections), config=start.config.replace(**sections)
    )


@pytest.mark.parametrize(
    "attention",
    [
        {"attention": "cudnn"},
        {"attention": "mxfp8"},
        {"attention": "cudnn", "attention_backward": "bf16"},
    ],
)
def test_all_else_is_in_high_precision_or_as_the_run_has_it(run, attention):  # E-8
    start = beginning(
        run,
        numerics=attention,
        optimizer={"kind": "adamw_states", "layout": "te"},
        model={"hidden_size": 64},
    )
    how = {"by": "model", "gemms": ["output"], "batches": 2}
    ablated(start, out=run / "bf16", **how)
    # that reads the checkpoint
    seen = [
        (one.attention_variant, one.optimizer.layout)
        for one in Fake.configs
        if one is not start.own
    ]
    assert seen == [(None, "te/none")] * (1 + 1 + 2)  # the baseline, statistics and two operands
    Fake.configs.clear()
    ablated(start, out=run / "fp8", base="fp8", **how)
    assert {
        (one.numerics.attention, one.numerics.attention_backward, one.optimizer.layout)
        for one in Fake.configs
    } == {(attention["attention"], attention.get("attention_backward", "own"), "te")}


def test_a_run_s_own_attention_is_studied_where_it_has_single_casts(run):
    own = {"attention": "cudnn", "attention_scaling": "delayed", "attention_arithmetic": "stated"}
    found = ablated(
        beginning(run, numerics=own),
        by="model",
        gemms=["attention"],
        roles=["p", "q"],
        batches=2,
        out=run / "a",
    )
    assert [row.operand.role for row in found.rows] == ["q", "p"]
    own = {"attention": "cudnn", "attention_operands": ("p",)}
    found = ablated(
        beginning(run, numerics=own), by="model", gemms=["attention"], batches=2, out=run / "b"
    )
    assert [row.operand.role for row in found.rows] == ["p"]
    own = {"attention": "cudnn", "attention_backward": "bf16"}
    found = ablated(
        beginning(run, numerics=own), by="model", roles=["p", "input"], batches=2, out=run / "c"
    )
    assert [row.operand.role for row in found.rows] == ["input"]
    found = ablated(
        beginning(run, numerics=own),
        attention="cudnn",
        by="model",
        roles=["p"],
        batches=2,
        out=run / "d",
    )
    assert [row.operand.role for row in found.rows] == ["p"]


def test_the_parts_of_a_layout_that_a_run_has_are_studied(run):
    start = beginning(run, optimizer={"kind": "adamw_states", "layout": "te/v"})
    found = ablated(start, gemms=["states"], steps=1, seeds=2, batches=2, out=run / "parts")
    assert [row.operand.role for row in found.rows] == ["v"]


def test_a_baseline_that_is_not_finite_is_not_kept(run, monkeypatch):
    evaluate = Fake.evaluate
    monkeypatch.setattr(Fake, "evaluate", lambda self, tokens: math.nan)
    with pytest.raises(
        ConfigError, match=r"with no operand changed is not\. Take an earlier checkpoint"
    ):
        ablated(run, batches=2)
    with pytest.raises(
        ConfigError, match=r"trained at a learning rate of 0\.001 is not\. Lower --learning-rate"
    ):
        ablated(run, batches=2, steps=1, seeds=2, out=run / "steps")
    monkeypatch.setattr(Fake, "evaluate", evaluate)
    assert ablated(run, batches=2).baseline == pytest.approx(2, abs=0.01)


def test_no_batch_of_validation_is_counted_twice(run):  # E-8
    """An index beyond the last gives the first ones again, of which an interval would be too
    narrow.
    """
    batches = ablation_start.run_start(run, None).batches
    most = len(batches.validation) // batches.batch_size
    with pytest.raises(
        ConfigError, match=rf"--batches is at most the batches .* {most}; got {most + 1}\. Lower it"
    ):
        ablated(run, batches=most + 1)


def test_a_forward_pass_has_no_operand_of_gradients(run):
    found = ablated(run, attention="cudnn", batches=2, by="model")
    assert {row.operand.role for row in found.rows} == {"input", "weight", "q", "k", "v", "p"}


def test_a_loss_that_is_not_finite_ranks_first(run, monkeypatch):
    monkeypatch.setattr(
        Fake, "evaluate", lambda self, tokens: math.nan if 2.006 < self.loss < 2.01 else self.loss
    )
    found = ablated(run, batches=2)
    assert [row.cost is None for row in found.rows] == [True, True, False, False]
    console = Console(width=200, record=True, file=(run / "shown").open("w"))
    with console.file:
        found.render(console)
    shown = (run / "shown").read_text()
    assert "not finite" in shown
    assert "The intervals of 4 of 4 leave out 0" in shown


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"recipe": "bf16"}, r"--recipe is one with FP8"),
        ({"attention": "mxfp8"}, r"one FP8 scale per tensor, and gradients; got 'mxfp8'"),
        (
            {"states": "te"},
            r"states are written by steps of training; got --states 'te' without --steps",
        ),
        ({"states": "nn", "steps": 1}, r"got 'nn'"),
        ({"layers": ["absent"]}, r"--layers 'absent' names no linear in FP8"),
        ({"gemms": ["grad_weight"]}, r"no operand in FP8 is left"),
        ({"batches": 1}, r"2 or more batches; got 3 and 1"),
        (
            {"attention": "nonsense", "gemms": ["output"]},
            r"--attention nonsense studies operands of attention; got --gemms output\. Add "
            r"attention",
        ),
        (
            {"states": "te", "steps": 1, "gemms": ["output"]},
            r"--states te studies operands of states; got --gemms output",
        ),
        (
            {"states": "te", "steps": 1, "layers": ["mlp"]},
            r"--states te studies operands of states, of which --gemms, --roles and --layers "
            r"leave none",
        ),
        (
            {"states": "float32", "steps": 1},
            r"--states float32 studies operands of states, of which",
        ),
        (
            {"attention": "cudnn", "roles": ["weight"]},
            r"--attention cudnn studies operands of attention, of which",
        ),
        ({"gemms": ["states"], "steps": 1}, r"those of states --steps with --states te"),
    ],
)
def test_what_cannot_be_studied_is_refused(run, keys, message):
    with pytest.raises(ConfigError, match=message):
        ablated(run, **keys)
    assert Fake.made == 0


def test_a_run_without_a_checkpoint_is_refused(run):
    import shutil

    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ConfigError, match="has no checkpoint"):
        ablated(run)


@pytest.mark.parametrize("backend", loop.BACKENDS)
def test_rules_are_read_trained_and_recorded(small, tmp_path, backend):
    text = {
        "numerics": {
            "recipe": "tensorwise",
            "rules": [{"layers": ["down_proj"], "roles": ["grad_output"], "format": "e4m3fn"}],
        }
    }
    rules = configs.from_dict(text).numerics.rules
    config = small.replace(
        numerics={"recipe": "tensorwise", "rules": rules}, run={"steps": 1, "eval_every": 1}
    )
    loop.train(config, backend, tmp_path / "run")
    assert configs.load(tmp_path / "run" / "config.toml").numerics.rules == rules
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    linear = next(one for one in manifest["linears"] if one["path"].endswith("down_proj"))
    assert linear["operands"]["grad_weight/grad_output"] == "e4m3fn tensorwise torchao"
    assert manifest["proof"]["missing"] == []
    gemm = next(
        one for one in manifest["proof"]["gemms"] if one["gemm"].endswith("down_proj/grad_weight")
    )
    assert gemm["a"] == "f8e4m3fn"


IN_A_LAYER = (
    Rule(layers=("layers.0",), roles=("grad_output",), format="e4m3fn", policy="unscaled"),
)
"""The gradients of layer 0 in e4m3 without a scale, which rounds nearly all of them to zero."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", loop.BACKENDS)
def test_a_planted_cast_of_a_transformer_layer_is_rank_1_at_the_run_s_peak_rate(
    two, tmp_path, backend
):
    config = two.replace(
        data={"batch_size": 16, "sequence_length": 64},
        numerics={"recipe": "tensorwise", "rules": IN_A_LAYER},
        # at the checkpoint the rate is 0: nothing would show
        optimizer={"learning_rate": 1e-2, "min_learning_rate": 0.0, "warmup_steps": 1},
        run={"steps": 10, "eval_every": 10},
    )
    loop.train(config, backend, tmp_path / "run")
    found = ablated(
        tmp_path / "run", gemms=["grad_weight"], roles=["grad_output"], steps=25, seeds=4, batches=2
    )
    assert [row.operand.group for row in found.rows] == ["layers.0", "layers.1"]
    assert found.rows[0].low > 0
    assert found.rows[0].underflow > 0.9
    assert abs(found.rows[1].cost) < found.rows[0].cost / 10


@pytest.mark.parametrize("linked", ["file", "directory"])
def test_an_ablation_writes_through_no_link(tmp_path, linked):
    out, other = tmp_path / "ablation", tmp_path / "other"
    other.mkdir()
    if linked == "directory":
        out.symlink_to(other)
    else:
        out.mkdir()
        (out / variants.LOSSES).symlink_to(other / "text")
        (other / "text").write_text("kept")
    with pytest.raises(ConfigError, match="writes through no link"):
        variants.keeping(out, {"a": 1})
    assert [path.read_text() for path in other.iterdir()] == ["kept"] * (linked == "file")
