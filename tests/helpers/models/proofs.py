"""Small models of linears, and the GEMMs that a proof of them must record."""

import dataclasses

import torch
from torch import nn

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.recipe import RECIPES, CastSpec, GemmSpec, Recipe
from fp8ref.torch.model import convert

NAMES = {"e4m3fn": "f8e4m3fn", "e5m2": "f8e5m2"}
E4, E5 = CastSpec(fmt=E4M3FN), CastSpec(fmt=E5M2)
# No two GEMMs alike, so that none is mistaken for another; the last under unit scales that are no
# rows'.
DISTINCT = Recipe(
    name="distinct",
    output=GemmSpec(a=E4, b=E5, accumulate="slow"),
    grad_input=GemmSpec(a=E5, b=E4, accumulate="fast"),
    grad_weight=GemmSpec(a=E5, b=E4, accumulate="slow", epilogue="unit_round_scale_round"),
)
WEIGHT_ONLY = dataclasses.replace(DISTINCT, name="weight_only", grad_input=GemmSpec())


def square(recipe):
    """Two linears of 128 x 128; with 128 tokens M = N = K."""
    torch.manual_seed(0)
    return convert.convert(
        nn.Sequential(nn.Linear(128, 128, bias=False), nn.ReLU(), nn.Linear(128, 128)).bfloat16(),
        recipe,
    )


def expected(recipe, layers=("0", "2"), without=()):
    """The FP8 GEMMs of a recipe, as the proof describes them."""
    recipe = RECIPES[recipe] if isinstance(recipe, str) else recipe
    return {
        (
            f"{name}/{which}",
            NAMES[spec.a.fmt.name],
            NAMES[spec.b.fmt.name],
            spec.accumulate,
            "rowwise" if spec.rowwise else "tensorwise",
        )
        for name in layers
        for which, spec in recipe.gemms.items()
        if spec.fp8 and f"{name}/{which}" not in without
    }


def name_of(recipe):
    return getattr(recipe, "name", recipe)


def fp8(trace):
    return {(g.name, g.a, g.b, g.accumulate, g.granularity) for g in trace.gemms if g.fp8}


def step(module, x=None):
    module(torch.randn(128, 128).bfloat16() if x is None else x).float().square().sum().backward()
