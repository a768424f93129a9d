import adamw
import jax
import pytest

from fp8ref.jax import train
from fp8ref.jax.train import Trainer
from fp8ref.recipe import SHARED_RECIPES
from fp8ref.run import data


def test_optimizer_is_clipped_adamw_as_specified(small, monkeypatch):  # T-1, T-2, T-3
    slope = adamw.slopes(small)

    def loss(self, params, seen, state, tokens):
        return sum((value * slope[train._name(path)]).sum() for path, value in jax.tree_util.tree_leaves_with_path(params)), seen

    monkeypatch.setattr(Trainer, "_loss_of", loss)
    adamw.check(Trainer, small, slope)


@pytest.mark.parametrize("recipe", SHARED_RECIPES)
def test_the_training_step_holds_one_float8_dot_for_each_planned_gemm(recipe, small):
    trainer = Trainer(small.replace(numerics={"recipe": recipe}))
    tokens = data.open_batches(small).step(0)
    hlo = trainer.lowered(tokens).as_text()
    dots = [line for line in hlo.splitlines() if "dot_general" in line and line.count("xf8E") == 2]
    assert len(dots) == sum(spec.fp8 for d in trainer.decisions for spec in d.recipe.gemms.values())
