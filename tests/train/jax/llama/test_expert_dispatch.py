"""The trainer's experts on two devices, whose rows move in FP8 or in bfloat16."""

import re

import jax
import numpy as np
import pytest

from fp8ref.train.data import loader
from fp8ref.train.jax.trainer import Trainer

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
}


def trained(small, recipe, how, **keys):
    """(metrics of two steps, states, weights, the dtypes of rows in the all-to-alls of the lowered
    step).
    """
    config = small.replace(
        model=EXPERTS,
        numerics={"recipe": recipe},
        parallel={"expert": 2, "expert_dispatch": how, **keys},
    )
    batches = loader.open_batches(config)
    trainer = Trainer(config)
    lines = [
        line
        for line in trainer.lowered(batches.step(0)).as_text().splitlines()
        if '"stablehlo.all_to_all"' in line
    ]
    moves = re.findall(r"tensor<2x\d+x32x(\w+)>$", "\n".join(lines), re.MULTILINE)
    return (
        [trainer.step(batches.step(i)) for i in range(2)],
        trainer.fp8_states(),
        trainer.weights(),
        moves,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        ("tensorwise", {"data": 2}),
        ("delayed", {"scan": True, "checkpointing": "full"}),
        ("rowwise", {}),
    ],
    ids=str,
)
def test_training_has_the_same_bits_in_codes(recipe, keys, small):
    """Weights after two steps have the bits of all gradients."""
    (steps, states, weights, in_codes), rows = (
        trained(small, recipe, how, **keys) for how in ("fp8", "compute")
    )
    assert steps == rows[0]
    for mine, theirs in zip((states, weights), rows[1:3], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            jax.tree.map(np.testing.assert_array_equal, mine[name], value)
    assert set(rows[3]) == {"bf16"}
    assert len(in_codes) == len(rows[3]) >= 4
    assert in_codes.count("ui8") == (0 if recipe == "rowwise" else len(in_codes) // 2)
