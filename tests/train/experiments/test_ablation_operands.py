"""What an ablation switches, by group (spec E-8)."""

import dataclasses

import pytest

from fp8ref.recipe import RECIPES
from fp8ref.selection import rules as linear_rules
from fp8ref.selection.linears import Decision
from fp8ref.shared.errors import ConfigError
from fp8ref.train.config.config import Config
from fp8ref.train.experiments import ablation_operands, variants
from fp8ref.train.experiments.ablation_operands import Studied


@pytest.fixture
def studied(small):
    config = small.replace(
        model={"num_hidden_layers": 2}, numerics={"recipe": "rowwise_with_gw_hp"}
    )
    return variants.studying(config, attention="cudnn", states="msamp_o2")


def names(config, **keys):
    return [operand.name for operand in ablation_operands.chosen(config, Studied(**keys))]


def test_operands_are_what_the_config_casts(studied):
    # grad_weight is in high precision
    of_layer = ["output/input", "output/weight", "grad_input/grad_output", "grad_input/weight"]
    linears = [f"layers.{i}/{operand}" for i in (0, 1) for operand in of_layer]
    attention = [
        f"layers.{i}/attention/{role}" for i in (0, 1) for role in ("q", "k", "v", "p", "do", "ds")
    ]
    assert sorted(names(studied)) == sorted(
        [*linears, *attention, "model/states/m", "model/states/v", "model/states/master"]
    )
    assert names(studied, layers=["layers.0.self_attn"], gemms=["attention"], roles=["p"]) == [
        "layers.0/attention/p"
    ]
    assert names(studied, by="kind", gemms=["output"], roles=["weight"], layers=["mlp"]) == [
        f"{kind}/output/weight" for kind in ("gate_proj", "up_proj", "down_proj")
    ]
    with pytest.raises(ConfigError, match="names no linear in FP8, nor attention"):
        names(studied, layers=["layers.2"])


def test_casts_are_left_out_one_by_one(studied):
    every = variants.cast_operands(studied)
    for operand in ablation_operands.chosen(studied, Studied(by="model")):
        assert (
            set(variants.cast_operands(variants.without(studied, operand.casts)))
            == set(every) - operand.casts
        )
        others = [one for one in every if one not in operand.casts]
        assert set(variants.cast_operands(variants.without(studied, others))) == operand.casts


# "proj" and "0" would name attn.proj and 1.0 too
def test_a_path_is_left_out_alone(studied, monkeypatch):
    of = Decision(path="", shape=(64, 64), recipe=RECIPES["tensorwise"], reason="")
    linears = [
        dataclasses.replace(of, path=path) for path in ("proj", "attn.proj", "0", "1.0", "[ab]")
    ]
    config = studied.replace(
        numerics={"attention": None, "attention_operands": None},
        optimizer={"kind": "adamw", "layout": None},
    )
    monkeypatch.setattr(
        Config, "decisions", lambda config: linear_rules.apply(config.numerics.rules or (), linears)
    )
    every = variants.cast_operands(config)
    for linear in linears:
        off = [one for one in every if one[0] == linear.path]
        assert set(variants.cast_operands(variants.without(config, off))) == set(every) - set(off)


def test_attention_of_a_run_in_the_stated_form_is_studied_in_the_fast_one(small):  # E-9
    stated = small.replace(numerics={"attention": "cudnn", "attention_arithmetic": "stated"})
    assert (
        variants.studying(stated, attention="cudnn", states=None).numerics.attention_arithmetic
        == "fast"
    )
