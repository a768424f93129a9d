"""A planted defect in real training is called worse, and what is sound is not."""

import dataclasses

import pytest

from fp8ref import recipe as recipes
from fp8ref.formats import E4M3FN
from fp8ref.policy import POLICIES
from fp8ref.recipe import CastSpec, GemmSpec, Recipe
from fp8ref.train import loop
from fp8ref.train.report import runs
from fp8ref.train.report.verdict import Arm, judged, verdict

STEPS = 30


@pytest.fixture
def e4m3_gradients(monkeypatch):
    """Puts a recipe into RECIPES whose gradients are e4m3, scaled by a factor too much: what
    exceeds the format is clipped.
    """
    from fp8ref.torch.quantize import scales

    def plant(name: str, factor: float) -> str:
        # torchao has no such powers of two, so fp8ref's own layer runs it
        policy = dataclasses.replace(POLICIES["torchao_mask"], name=name)
        forward, backward = CastSpec(fmt=E4M3FN), CastSpec(fmt=E4M3FN, policy=policy)
        slow = {"accumulate": "slow"}
        planted = Recipe(
            name=name,
            output=GemmSpec(a=forward, b=forward, accumulate="fast"),
            grad_input=GemmSpec(a=backward, b=forward, **slow),
            grad_weight=GemmSpec(a=backward, b=forward, **slow),
        )
        monkeypatch.setitem(recipes.RECIPES, name, planted)
        sound = scales.scales_from_amax

        def off(amax, fmt, of="torchao"):
            found = sound(amax, fmt, of)
            return (
                found
                if of is not policy
                else scales.Scales(found.scale * factor, found.scale_inv / factor)
            )

        monkeypatch.setattr(scales, "scales_from_amax", off)
        return name

    return plant


@pytest.mark.slow
def test_gradients_whose_scale_is_off_by_16_are_worse_and_seeds_are_not(
    tmp_path, small, e4m3_gradients
):
    """lm_head is in FP8 too, so that all gradients of linears are: there predictions are confident
    and amaxes large.
    """
    config = small.replace(
        run={"steps": STEPS, "eval_every": STEPS}, optimizer={"learning_rate": 3e-3}
    )

    def train(recipe: str, seed: int) -> runs.Run:
        out = tmp_path / f"{recipe}-{seed}"
        head = () if recipe == "bf16" else ("lm_head",)
        loop.train(
            config.replace(
                numerics={"recipe": recipe, "fp8_fqns": head},
                run={"seed": seed},
                data={"seed": seed},
            ),
            "torch",
            out,
        )
        return runs.read(out)

    group = [train("bf16", seed) for seed in range(3)]
    for name, factor in (("sound", 1.0), ("planted", 16.0)):
        recipe = e4m3_gradients(name, factor)
        group += [train(recipe, seed) for seed in range(3)]

    def found(arm: Arm):
        return verdict(arm, group)

    sound, planted = judged(group)
    assert found(sound).kind != "worse"
    assert found(planted).kind == "worse"
