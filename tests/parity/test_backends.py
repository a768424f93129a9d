"""The two backends against each other where no simulator stands between them."""

import numpy as np
import pytest

from fp8ref.recipe import SHARED_RECIPES
from fp8ref.train.data import loader
from fp8ref.train.jax.trainer import Trainer as JaxTrainer
from fp8ref.train.torch.trainer import Trainer as TorchTrainer


def test_both_start_from_the_same_bits(small):  # M-6
    a, b = JaxTrainer(small).weights(), TorchTrainer(small).weights()
    assert a.keys() == b.keys()
    for name, value in a.items():
        np.testing.assert_array_equal(value.view(np.int32), b[name].view(np.int32))


@pytest.mark.parametrize("recipe", SHARED_RECIPES)
def test_both_convert_the_same_linears(recipe, small):
    config = small.replace(
        numerics={
            "recipe": recipe,
            "filter_fqns": ("lm_head", "o_proj") if recipe != "bf16" else (),
        }
    )
    a, b = JaxTrainer(config), TorchTrainer(config)
    assert a.decisions == b.decisions
    from torchao.float8.float8_linear import Float8Linear

    from fp8ref.torch.linear.linear import Linear

    kind = Linear if recipe == "rowwise_native" else Float8Linear  # torchao has no such epilogue
    converted = {name for name, m in b.model.named_modules() if isinstance(m, kind)}
    assert converted == {d.path for d in a.decisions if d.fp8}


def test_one_step_moves_the_weights_alike(small):  # T-1, T-2, T-3, M-2
    """In bf16 the gradients of both agree to about 2^-8, and Adam's first step is +-lr wherever a
    gradient is not tiny.
    """
    config = small.replace(numerics={"recipe": "bf16"})
    batch = loader.open_batches(config).step(0)
    a, b = JaxTrainer(config), TorchTrainer(config)
    before = a.weights()
    first, second = a.step(batch), b.step(batch)
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-3)
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-2)
    moved, too = a.weights(), b.weights()
    lr = config.optimizer.learning_rate_at(0, config.run.steps)
    agree = np.concatenate(
        [(np.abs(moved[name] - too[name]) < 0.05 * lr).ravel() for name in before]
    )
    assert agree.mean() > 0.97
