import jax
import numpy as np
import pytest

from fp8ref import llama
from fp8ref.jax import train
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


def test_optimizer_is_clipped_adamw_as_specified(small, monkeypatch):  # T-1, T-2, T-3
    """Against a float64 AdamW on gradients that are known: the loss is sum(p * c), so its gradient is c."""
    config = small.replace(
        optimizer={"learning_rate": 0.01, "min_learning_rate": 0.002, "warmup_steps": 2, "max_norm": 0.7, "weight_decay": 0.5, "eps": 1e-3}
    )
    rng = np.random.default_rng(5)
    start = llama.initial_weights(config.model, seed=0)
    slope = {name: rng.standard_normal(value.shape).astype(np.float32) / 50 for name, value in start.items()}

    def loss(self, params, tokens):
        leaves = jax.tree_util.tree_leaves_with_path(params)
        return sum((value * slope[train._name(path)]).sum() for path, value in leaves)

    monkeypatch.setattr(Trainer, "_loss_of", loss)

    trainer = Trainer(config, start)
    expected = {name: value.astype(np.float64) for name, value in start.items()}
    m, v = ({name: np.zeros(value.shape) for name, value in start.items()} for _ in range(2))
    norm = np.sqrt(sum((c.astype(np.float64) ** 2).sum() for c in slope.values()))
    assert norm > 0.7
    for step in range(6):
        assert trainer.step(np.zeros((1, 2), np.int32))["grad_norm"] == pytest.approx(norm, rel=1e-5)
        lr = 0.01 * (step + 1) / 2 if step < 2 else 0.002 + 0.008 * (1 + np.cos(np.pi * (step - 2) / 4)) / 2
        for name, p in expected.items():
            g = slope[name] * min(1, 0.7 / norm)
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.95 * v[name] + 0.05 * g**2
            update = m[name] / (1 - 0.9 ** (step + 1)) / (np.sqrt(v[name] / (1 - 0.95 ** (step + 1))) + 1e-3)
            expected[name] = p - lr * (update + (0.5 * p if p.ndim == 2 else 0))
    for name, value in trainer.weights().items():
        # float32 against float64, six steps of about ten roundings each of values up to 1: 60 * 2^-24
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=4e-6, err_msg=name)


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


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_training_step_holds_one_float8_dot_for_each_planned_gemm(recipe, small, tokens):
    trainer = Trainer(small.replace(numerics={"recipe": recipe}))
    hlo = trainer._step.lower(trainer._params, trainer._opt_state, tokens, np.float32(0)).as_text()
    dots = [line for line in hlo.splitlines() if "dot_general" in line and line.count("xf8E") == 2]
    assert len(dots) == sum(spec.fp8 for d in trainer.decisions for spec in d.recipe.gemms.values())


def test_observe_sees_the_planned_gemms_and_changes_nothing(small, tokens):
    trainer = Trainer(small.replace(numerics={"recipe": "rowwise"}))
    before, seen = trainer.weights(), set()
    trainer.observe(tokens, lambda name, gemm, a, b, out: seen.add((name, gemm)))
    assert seen == {(d.path, gemm) for d in trainer.decisions if d.fp8 for gemm in d.recipe.gemms}
    for name, value in trainer.weights().items():
        np.testing.assert_array_equal(value, before[name])
