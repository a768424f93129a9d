"""Masters of parameters that tensor parallelism cuts by columns and rows, on ranks (O-11, O-14)."""

import numpy as np
import pytest
from helpers.processes.ranks import run
from helpers.states.state_layouts import differing

from fp8ref.sim.states import states as sim
from fp8ref.train.data import loader
from fp8ref.train.torch.trainer import Trainer

MODEL = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2}


def configured(small, recipe="tensorwise", **parallel):
    optimizer = {"kind": "adamw_states", "layout": "msamp_o2", "max_norm": float("inf")}
    return small.replace(
        numerics={"recipe": recipe}, model=MODEL, optimizer=optimizer, parallel=parallel
    )


def compared(config, tokens):
    """Of passes and a step: what differs from a run whose float32 masters have the same numbers,
    and from the simulator's step.
    """
    narrow = Trainer(config)
    before = narrow.weights()
    wide = Trainer(config.replace(optimizer={"layout": "msamp"}), before)
    missing = narrow.prove(tokens)["missing"]
    mine, theirs = narrow.gradients(tokens), wide.gradients(tokens)
    unlike = [
        name
        for name, g in theirs.items()
        if mine[name].dtype != np.float32 or differing(mine[name], g)
    ]
    unlike += ["evaluate"] * (narrow.evaluate(tokens) != wide.evaluate(tokens))
    narrow.step(tokens)
    keys, after = config.optimizer, narrow.weights()
    for name, g in mine.items():
        # a power of two and the same amax: the same codes
        master = sim.master(before[name], "msamp_o2")
        rate = float(np.float32(keys.learning_rate_at(0, config.run.steps)))
        optimizer = sim.AdamW(
            learning_rate=rate,
            b1=keys.beta1,
            b2=keys.beta2,
            eps=keys.eps,
            weight_decay=keys.weight_decay if g.ndim > 1 else 0.0,
            layout="msamp_o2",
        )
        new, _ = sim.step(master, g, sim.init(g.shape, "msamp_o2"), optimizer)
        unlike += [f"{name} after a step"] * bool(
            differing(after[name], sim.weight(new, "msamp_o2"))
        )
    return missing, unlike


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "parallel", "recipe"),
    [
        (2, {"tensor": 2}, "tensorwise"),
        (2, {"tensor": 2, "sequence": True}, "rowwise"),
        (4, {"tensor": 2, "fsdp": 2, "sequence": True}, "tensorwise"),
    ],
    ids=str,
)
def test_masters_that_are_cut_by_columns(ranks, parallel, recipe, small):  # O-11, O-14, O-15
    config = configured(small, recipe, **parallel)
    assert (
        run(ranks, compared, config, loader.open_batches(config).step(0), timeout=300)
        == [([], [])] * ranks
    )
