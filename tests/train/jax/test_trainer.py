import pytest

from fp8ref.recipe import SHARED_RECIPES
from fp8ref.train.data import loader
from fp8ref.train.jax.trainer import Trainer


@pytest.mark.parametrize("recipe", SHARED_RECIPES)
def test_the_training_step_holds_one_float8_dot_for_each_planned_gemm(recipe, small):
    trainer = Trainer(small.replace(numerics={"recipe": recipe}))
    tokens = loader.open_batches(small).step(0)
    hlo = trainer.lowered(tokens).as_text()
    dots = [line for line in hlo.splitlines() if "dot_general" in line and line.count("xf8E") == 2]
    assert len(dots) == sum(spec.fp8 for d in trainer.decisions for spec in d.recipe.gemms.values())
