"""What the trainers of both backends promise alike."""

import numpy as np
import pytest

from fp8ref.recipe import SHARED_RECIPES
from fp8ref.spec import llama
from fp8ref.train import loop
from fp8ref.train.data import loader

pytestmark = pytest.mark.parametrize("backend", loop.BACKENDS)


@pytest.fixture
def tokens(small):
    return loader.open_batches(small).step(0)


@pytest.mark.grid(2)
@pytest.mark.parametrize("recipe", SHARED_RECIPES)
def test_the_loss_of_a_repeated_batch_falls(backend, recipe, small, tokens):
    trainer = loop.trainer(backend, small.replace(numerics={"recipe": recipe}))
    losses = [trainer.step(tokens)["loss"] for _ in range(6)]
    assert losses[-1] < losses[0] - 0.05
    assert trainer.evaluate(tokens) < losses[-1]  # T-5


def test_two_trainers_agree_bit_for_bit(backend, small, tokens):
    a, b = loop.trainer(backend, small), loop.trainer(backend, small)
    for _ in range(2):
        assert a.step(tokens) == b.step(tokens)
    for name, value in a.weights().items():
        np.testing.assert_array_equal(value, b.weights()[name])


def test_moments_are_adams_of_the_clipped_gradient(backend, small, tokens):  # T-1, T-2
    config = small.replace(numerics={"recipe": "bf16"}, optimizer={"beta1": 0.75, "beta2": 0.875})
    trainer = loop.trainer(backend, config)
    assert all(
        not value.any() for of_one in trainer.moments().values() for value in of_one.values()
    )
    gradients = trainer.gradients(tokens)
    norm = trainer.step(tokens)["grad_norm"]
    found = trainer.moments()
    assert list(found) == ["exp_avg", "exp_avg_sq"]
    for name, gradient in gradients.items():
        g = gradient.astype(np.float64) * min(1, config.optimizer.max_norm / norm)
        # norm, quotient, product, square and sum: fewer than eight roundings to float32; the
        # gradient is compiled apart in jax, by a bfloat16 here or there
        np.testing.assert_allclose(
            found["exp_avg"][name], 0.25 * g, rtol=8 * 2**-24 + 2**-7, atol=1e-12
        )
        np.testing.assert_allclose(
            found["exp_avg_sq"][name], 0.125 * g**2, rtol=8 * 2**-24 + 2**-6, atol=1e-12
        )


def test_a_loss_that_is_not_finite_changes_nothing(backend, small, tokens):  # T-4
    weights = llama.initial_weights(small.model, seed=0)
    # finite, and overflows the logits
    weights["model.norm.weight"] = np.full_like(weights["model.norm.weight"], 3e38)
    trainer = loop.trainer(backend, small.replace(numerics={"recipe": "bf16"}), weights)
    before = trainer.weights()
    assert not all(map(np.isfinite, trainer.step(tokens).values()))
    for name, value in trainer.weights().items():
        np.testing.assert_array_equal(value, before[name])


def test_weights_with_nan_are_refused_by_name(backend, small):
    weights = llama.initial_weights(small.model, seed=0)
    weights["lm_head.weight"][3, 4] = np.nan
    with pytest.raises(ValueError, match=r"lm_head.weight holds nan at \[3, 4\]"):
        loop.trainer(backend, small, weights)


def test_tokens_are_checked(backend, small, tokens):
    trainer = loop.trainer(backend, small)
    with pytest.raises(ValueError, match=r"\[0, 256\)"):
        trainer.step(tokens + 200)
    with pytest.raises(ValueError, match="integers"):
        trainer.step(np.where(tokens > 100, np.nan, tokens))


@pytest.mark.slow
def test_observing_sees_the_planned_gemms_and_changes_nothing(backend, small, tokens):
    trainer = loop.trainer(backend, small.replace(numerics={"recipe": "rowwise"}))
    before, seen = trainer.weights(), set()
    trainer.observe(tokens, lambda name, gemm, a, b, out: seen.add((name, gemm)))
    assert seen == {(d.path, gemm) for d in trainer.decisions if d.fp8 for gemm in d.recipe.gemms}
    again = set()
    trainer.observe(tokens, lambda name, gemm, a, b, out: again.add((name, gemm)))
    assert again == seen
    if backend == "jax":
        assert trainer._observed._cache_size() == 1  # one program reports to every observer
    for name, value in trainer.weights().items():
        np.testing.assert_array_equal(value, before[name])


def test_a_gpu_counts_its_memory_and_a_cpu_does_not(backend, small, tokens):
    trainer = loop.trainer(backend, small)
    trainer.step(tokens)
    masters = sum(value.nbytes for value in trainer.weights().values())
    peak = trainer.peak_memory()
    # and two moments
    assert peak is None if trainer.device.startswith("cpu") else peak > 3 * masters
