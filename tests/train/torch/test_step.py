import numpy as np
import pytest
import torch
from helpers.states import adamw
from helpers.training import microbatches, seeds

from fp8ref.recipe import OPERANDS, RECIPES, REDUCED_AXES
from fp8ref.selection.rules import Rule
from fp8ref.sim import linear as sim
from fp8ref.torch import delayed
from fp8ref.torch.kernels import weights
from fp8ref.torch.linear import rounding
from fp8ref.torch.observe.gemms import observe_gemms
from fp8ref.train.data import loader
from fp8ref.train.torch import optimizer
from fp8ref.train.torch.step import Step
from fp8ref.train.torch.trainer import Trainer


def test_optimizer_is_clipped_adamw_as_specified(small, monkeypatch):  # T-1, T-2, T-3
    slope = adamw.slopes(small)

    def loss(self, tokens):
        return sum((p * torch.from_numpy(slope[name])).sum() for name, p in self.params.items())

    monkeypatch.setattr(Step, "loss", loss)
    adamw.check(Trainer, small, slope)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_gradients_of_parts_are_summed_in_float32_as_by_hand(recipe, small):  # T-7
    config = microbatches.config_of(small, recipe)
    whole = Trainer(microbatches.without_parts(config))
    microbatches.check_bits(Trainer(config), whole, whole.gradients)


def test_a_batch_in_parts_is_the_batch_but_for_rounding(small):  # T-7
    microbatches.check_whole(Trainer, microbatches.config_of(small, "bf16"))


def test_delayed_scaling_merges_the_parts_and_rolls_once(small):  # T-7, H-4
    config = microbatches.config_of(small, "delayed")
    trainer, tokens = Trainer(config), microbatches.tokens_of(config)
    seen = []
    trainer.observe(tokens, lambda layer, which, a, b, out: seen.append((layer, which, a[0], b[0])))
    trainer.step(tokens)
    expected = microbatches.delayed_states(seen, config)
    assert len(expected) == 3 * sum(d.fp8 for d in trainer.decisions)
    for name, state in delayed.states(trainer.model):
        layer, _, role = name.rpartition(".")
        found = (state.scale.numpy(), state.amax_history.numpy(), state.step.numpy())
        for mine, theirs in zip(found, expected[layer.removesuffix(".states"), role], strict=True):
            np.testing.assert_array_equal(mine, theirs, err_msg=name)


@pytest.mark.parametrize("part", range(microbatches.PARTS))
def test_one_part_that_is_not_finite_stops_the_step(part, small, monkeypatch):  # T-4, T-7
    config = microbatches.config_of(small, "delayed")
    trainer, tokens = Trainer(config), microbatches.tokens_of(config)
    before, honest, calls = trainer.weights(), Step.loss, []

    def loss(self, tokens):
        calls.append(len(calls))
        return honest(self, tokens) * (np.inf if calls[-1] == part else 1)

    monkeypatch.setattr(Step, "loss", loss)
    assert not np.isfinite(trainer.step(tokens)["loss"])
    assert len(calls) == microbatches.PARTS
    assert all(np.array_equal(value, before[name]) for name, value in trainer.weights().items())
    assert all(
        state.step == 0 and not state.seen.any() for _, state in delayed.states(trainer.model)
    )


@pytest.mark.parametrize("kind", ["adamw", "adamw_fused"])
def test_a_step_that_is_not_finite_changes_nothing_whoever_decides(kind, small, monkeypatch):  # T-4
    """The host before an update; or the device, within one that is launched already.

    The next step is taken.
    """
    config = microbatches.config_of(small, "delayed").replace(optimizer={"kind": kind})
    trainer, other, tokens = Trainer(config), Trainer(config), microbatches.tokens_of(config)
    expected = [other.step(tokens), other.step(tokens)]
    found = [trainer.step(tokens)]
    honest = Step.loss
    monkeypatch.setattr(Step, "loss", lambda self, tokens: honest(self, tokens) * np.nan)
    before = {
        key: {name: x.clone() for name, x in value.items()}
        for key, value in trainer._step.tensors().items()
    }
    assert np.isnan(trainer.step(tokens)["grad_norm"])
    for key, value in trainer._step.tensors().items():
        assert all(torch.equal(x, before[key][name]) for name, x in value.items()), key
    monkeypatch.undo()
    found.append(trainer.step(tokens))
    assert found == expected
    for key, value in trainer._step.tensors().items():
        assert all(torch.equal(x, other._step.tensors()[key][name]) for name, x in value.items()), (
            key
        )


@pytest.mark.parametrize("recipe", [pytest.param("tensorwise", marks=pytest.mark.slow), "delayed"])
def test_the_kernel_of_adamw_trains_with_the_bits_of_plain_operations(recipe, small, monkeypatch):
    """Steps of two microbatches, of which one is not finite; weights are rounded and cast by the
    optimizer's step after the first."""
    pytest.importorskip("triton")
    honest, written, results = Step.loss, [], {}
    wrote = optimizer._Written.apply
    monkeypatch.setattr(
        optimizer._Written, "apply", lambda p, copy: written.append(copy) or wrote(p, copy)
    )
    for kernels in ("plain", "triton"):
        config = small.replace(
            numerics={"recipe": recipe, "kernels": kernels},
            model={"num_hidden_layers": 1, "vocab_size": 256},
            data={"batch_size": 2, "microbatches": 2, "sequence_length": 8},
            optimizer={"kind": "adamw_states", "layout": "float32", "max_norm": 0.1},
        )
        trainer, batches, found = Trainer(config), loader.open_batches(config), []
        for i, factor in enumerate((1, np.inf, 1)):
            monkeypatch.setattr(Step, "loss", lambda *args, by=factor: honest(*args) * by)
            found.append(trainer.step(batches.step(i)))
        assert bool(written) == (kernels == "triton")
        traces = [weights.trace(p) for p in trainer._params.values() if p.ndim == 2]
        cast = [trace.left is not None and bool(trace.left.codes) for trace in traces]
        assert any(cast) == (recipe == "delayed" and kernels == "triton")
        states = [getattr(s, f) for _, s in delayed.states(trainer.model) for f in s._buffers]
        results[kernels] = found, trainer.weights(), [x.clone() for x in states]
    (metrics, trained, states), (plain, expected, plain_states) = results.values()
    np.testing.assert_equal(metrics, plain)
    for name, weight in trained.items():
        np.testing.assert_array_equal(weight, expected[name])
    assert all(torch.equal(x, y) for x, y in zip(states, plain_states, strict=True))


@pytest.mark.parametrize("parts", [1, 2])
def test_every_microbatch_of_every_step_draws_by_a_seed_of_its_own(parts, small, monkeypatch):
    """The second step's codes, by the run's seed, the step, the microbatch and the linear (S-24)."""

    config = microbatches.config_of(small, "nvfp4", parts).replace(run={"seed": 2**33 + 5})
    trainer, tokens = Trainer(config), microbatches.tokens_of(config)
    trainer.step(tokens)
    seen = {}

    def observe(name, which, *operands):
        seen.setdefault((name, which), []).append(operands[:2])

    trainer.observe(tokens, observe)
    assert len(seen) == 3 * sum(d.fp8 for d in trainer.decisions)
    for (name, which), calls in seen.items():
        assert len(calls) == parts
        for microbatch, operands in enumerate(calls):
            seed = seeds.of_linear(config.run.seed, 1, microbatch, name)
            hp = {role: q[0] for role, q in zip(OPERANDS[which], operands, strict=True)}
            expected = sim.quantize_operands(which, hp, RECIPES["nvfp4"], seed=seed)
            for q, right, axis in zip(operands, expected, REDUCED_AXES[which], strict=True):
                codes = right.codes if axis else right.codes.T
                np.testing.assert_array_equal(q[1], codes, err_msg=f"{name} {which}")


def test_passes_outside_a_step_draw_as_the_first_of_the_coming_one(small):  # S-24
    """In fresh trainers too, whichever microbatch was the last."""
    rule = Rule(layers=("q_proj",), gemms=("output",), rounding="stochastic")
    config = microbatches.config_of(small, "nvfp4", 2).replace(numerics={"rules": (rule,)})
    trainer, tokens = Trainer(config), microbatches.tokens_of(config)
    name = "model.layers.0.self_attn.q_proj"
    recipe = rounding.stochastic_linears(trainer.model)[name].recipe
    for step in range(2):
        seen = []

        def observe(linear, which, a, b, out, seen=seen):
            seen.extend([(a[0].float().numpy(), a[1].numpy(), b[0])] if linear == name else [])

        with observe_gemms(trainer.model, observe):
            trainer.evaluate(tokens)
            trainer.logits(tokens[:, :-1])
        seed = seeds.of_linear(config.run.seed, step, 0, name)
        for x, codes, w in seen:
            hp = {"input": x, "weight": w.float().numpy()}
            expected, _ = sim.quantize_operands("output", hp, recipe, seed=seed)
            np.testing.assert_array_equal(codes, expected.codes)
        assert len(seen) == 3
        trainer.step(tokens)


def test_a_resumed_run_draws_as_one_that_went_on(small, monkeypatch, tmp_path):  # S-24, K-5

    config = microbatches.config_of(small, "nvfp4", 2)
    whole, tokens = Trainer(config), microbatches.tokens_of(config)
    for _ in range(2):
        whole.step(tokens)
    whole.save(tmp_path)()
    resumed = Trainer(config)
    resumed.load(tmp_path, 2)
    losses = [[t.step(tokens)["loss"] for _ in range(2)] for t in (whole, resumed)]
    assert losses[0] == losses[1]
    assert np.isfinite(whole.evaluate(tokens))
    mine = resumed.weights()
    for name, value in whole.weights().items():
        np.testing.assert_array_equal(mine[name], value, err_msg=name)
