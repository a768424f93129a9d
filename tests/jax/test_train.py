import numpy as np
import pytest

from fp8ref import llama
from fp8ref.jax.train import Trainer
from fp8ref.recipe import RECIPES
from fp8ref.run import data


@pytest.fixture
def tokens(small):
    return data.open_batches(small).step(0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_loss_of_a_repeated_batch_falls(recipe, small, tokens):
    trainer = Trainer(small.replace(numerics={"recipe": recipe}))
    losses = [trainer.step(tokens)["loss"] for _ in range(6)]
    assert losses[-1] < losses[0] - 0.05
    assert trainer.evaluate(tokens) < losses[-1]  # T-5


def test_two_trainers_agree_bit_for_bit(small, tokens):
    a, b = Trainer(small), Trainer(small)
    for _ in range(2):
        assert a.step(tokens) == b.step(tokens)
    for name, value in a.weights().items():
        np.testing.assert_array_equal(value, b.weights()[name])


def test_step_is_clipped_adamw_with_decay_on_matrices(small, tokens):  # T-1, T-2, T-3
    config = small.replace(optimizer={"max_norm": 0.05, "weight_decay": 0.5, "warmup_steps": 2, "learning_rate": 0.01})
    trainer = Trainer(config)
    before = trainer.weights()
    norm = trainer.step(tokens)["grad_norm"]
    assert norm > 0.05
    after = trainer.weights()
    # the first Adam step is g / (|g| + eps'), which is +-1 where g is not tiny: p - lr * (+-1 + decay * p), decay on matrices alone
    for name in ("model.layers.0.mlp.up_proj.weight", "model.norm.weight"):
        decay = 0.5 if before[name].ndim == 2 else 0
        moved = (before[name] - after[name]) / 0.005 - decay * before[name]
        assert np.mean(np.abs(np.abs(moved) - 1) < 1e-2) > 0.9


def test_a_loss_that_is_not_finite_changes_nothing(small, tokens):  # T-4
    weights = llama.initial_weights(small.model, seed=0)
    weights["model.norm.weight"] = np.full_like(weights["model.norm.weight"], 3e38)  # finite, and overflows the logits
    trainer = Trainer(small.replace(numerics={"recipe": "bf16"}), weights)
    before = trainer.weights()
    metrics = trainer.step(tokens)
    assert not all(map(np.isfinite, metrics.values()))
    for name, value in trainer.weights().items():
        np.testing.assert_array_equal(value, before[name])


def test_weights_with_nan_are_refused_by_name(small):
    weights = llama.initial_weights(small.model, seed=0)
    weights["lm_head.weight"][3, 4] = np.nan
    with pytest.raises(ValueError, match=r"lm_head.weight holds nan at \[3, 4\]"):
        Trainer(small, weights)


def test_tokens_are_checked(small, tokens):
    trainer = Trainer(small)
    with pytest.raises(ValueError, match=r"\[0, 256\)"):
        trainer.step(tokens + 200)
    with pytest.raises(ValueError, match="integers"):
        trainer.step(np.where(tokens > 100, np.nan, tokens))


def test_observe_sees_the_planned_gemms_and_changes_nothing(small, tokens):
    trainer = Trainer(small.replace(numerics={"recipe": "rowwise"}))
    before, seen = trainer.weights(), set()
    trainer.observe(tokens, lambda name, gemm, a, b, out: seen.add((name, gemm)))
    assert seen == {(d.path, gemm) for d in trainer.decisions if d.fp8 for gemm in d.recipe.gemms}
    for name, value in trainer.weights().items():
        np.testing.assert_array_equal(value, before[name])
