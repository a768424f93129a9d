import numpy as np
import pytest
from ranks import run

from fp8ref.recipe import RECIPES
from fp8ref.torch import delayed
from fp8ref.train.data import loader
from fp8ref.train.torch.trainer import Trainer


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains(recipe, small):
    """Dims of 128, of which every block is one."""
    config = small.replace(
        numerics={"recipe": recipe},
        model={"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 2},
        data={"sequence_length": 32},
    )
    trainer, batches = Trainer(config), loader.open_batches(config)
    losses = [trainer.step(batches.step(0))["loss"] for _ in range(6)]  # one batch, again and again
    assert losses[-1] < losses[0]


def test_delayed_states_roll_once_a_step_and_not_without_one(small):  # H-5, T-4
    config = small.replace(numerics={"recipe": "delayed"})
    trainer, batches = Trainer(config), loader.open_batches(config)
    states = dict(delayed.states(trainer.model))
    assert len(states) == 3 * sum(d.fp8 for d in trainer.decisions)
    trainer.evaluate(batches.held_out(0))
    trainer.gradients(batches.held_out(0))
    trainer.observe(batches.held_out(0), lambda *reported: None)
    assert not any(state.seen.any() for state in states.values())
    trainer.step(batches.step(0))
    assert all(state.step == 1 for state in states.values())
    trainer._params["model.norm.weight"].data.fill_(np.nan)
    trainer.step(batches.step(1))
    assert all(state.step == 1 and not state.seen.any() for state in states.values())


def proved(config, tokens):
    """A rank's proof, and its losses of one batch, again and again."""
    trainer = Trainer(config)
    proof = trainer.prove(tokens)
    return (
        proof["missing"],
        sorted(gemm["gemm"] for gemm in proof["gemms"] if gemm["fp8"]),
        [trainer.step(tokens)["loss"] for _ in range(3)],
    )


def test_ranks_that_share_linears_prove_every_gemm(small):  # B-8, P-14
    config = small.replace(numerics={"recipe": "delayed"}, model={"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2})
    found = run(2, proved, config.replace(parallel={"tensor": 2, "sequence": True}), loader.open_batches(config).step(0))
    assert found[0] == found[1]
    missing, gemms, losses = found[0]
    assert missing == []
    assert len(set(gemms)) == len(gemms) == 3 * sum(d.fp8 for d in config.decisions())
    assert losses[-1] < losses[0]
