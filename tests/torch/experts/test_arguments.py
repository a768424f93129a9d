"""What a grouped linear refuses (spec X)."""

import dataclasses

import pytest
import torch
from helpers.gemm.grouped_cases import OFFS, integers

from fp8ref.formats import E2M1FN, E4M3FN
from fp8ref.policy import FP4_POLICIES
from fp8ref.recipe import RECIPES, CastSpec, GemmSpec, Recipe
from fp8ref.selection import grouped as recipes
from fp8ref.spec.rotation import NVFP4_ROTATION
from fp8ref.torch.experts import arguments as grouped_arguments
from fp8ref.torch.experts import grouped

ENDS = torch.tensor(OFFS, dtype=torch.int32)

SQUARES = Recipe(
    name="squares",
    output=GemmSpec(
        a=CastSpec(fmt=E4M3FN, granularity="blockwise_128x128"),
        b=CastSpec(fmt=E4M3FN, granularity="blockwise_1x128"),
        accumulate="fast",
    ),
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 75, 256)}, r"experts takes x \[M, K\], w \[E, N, K\]"),
        ({"x": torch.zeros(150, 256)}, "of one dtype"),
        ({"offs": ENDS[:3]}, r"experts takes offs int32 \[4\]"),
        ({"offs": OFFS}, "experts takes offs as a tensor; got .*. Use torch.tensor"),
        ({"offs": ENDS.float()}, r"experts takes offs int32 \[4\]"),
        ({"offs": ENDS.flip(0)}, "experts: offs ascend from 0 to at most M=150; got"),
        ({"offs": ENDS + 14}, "experts: offs ascend from 0 to at most M=150; got"),
        ({"offs": ENDS.to("meta")}, "on one device"),
        (
            {"w": torch.zeros(4, 24, 256).bfloat16()},
            "experts: FP8 needs N and K in multiples of 16",
        ),
        (
            {"recipe": "delayed"},
            "experts: recipe 'delayed' takes states of input, weight, grad_output; got none",
        ),
        ({"recipe": SQUARES}, "no block of a grouped input has several rows"),
    ],
)
def test_what_is_refused(change, message, rng):
    x, w, _ = (torch.from_numpy(v).bfloat16() for v in integers(rng))
    with pytest.raises(ValueError, match=message):
        grouped.apply(
            **({"x": x, "w": w, "offs": ENDS, "recipe": "rowwise", "name": "experts"} | change)
        )


def test_a_name_begins_the_error():
    assert grouped_arguments.check_recipe("rowwise", "up") == recipes.by_name("rowwise")
    with pytest.raises(ValueError, match=r"^no block of a grouped input has several rows"):
        grouped_arguments.check_recipe(SQUARES)
    with pytest.raises(ValueError, match=r"^up: no block of a grouped input has several rows"):
        grouped_arguments.check_recipe(SQUARES, "up")


@pytest.mark.parametrize(
    "change",
    [
        {"rounding": "stochastic"},
        {"rotation": NVFP4_ROTATION},
        {"policy": FP4_POLICIES["te_nvfp4"], "granularity": "nvfp4_1x16", "fmt": E2M1FN},
    ],
)
def test_operands_of_nvfp4_are_refused_by_name(change, monkeypatch):  # S-24, X-8
    cast = dataclasses.replace(RECIPES["mxfp8"].output.a, **change)
    spec = GemmSpec(a=cast, b=cast, accumulate="slow")
    with pytest.raises(ValueError, match=r"gate: experts neither rotate.*got recipe 'tried'"):
        grouped_arguments.check_recipe(Recipe(name="tried", output=spec), "gate")
