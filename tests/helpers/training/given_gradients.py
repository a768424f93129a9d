"""Trainers of both backends whose step takes gradients that a test gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8ref.train import loop

BACKENDS = pytest.mark.parametrize("backend", loop.BACKENDS)
SIZES = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}


def configured(small, layout: str, **sections):
    """bf16, so that neither backend's FP8 changes anything else; no clipping, which is T-2's."""
    optimizer = {"kind": "adamw_states", "layout": layout, "max_norm": float("inf")}
    return small.replace(model=SIZES, numerics={"recipe": "bf16"}, optimizer=optimizer, **sections)


def fed(trainer, gradients: dict[str, np.ndarray]) -> None:
    """Have the trainer's steps and measured steps take these gradients."""
    if trainer.backend == "torch":
        import torch

        def backward(tokens):
            for name, p in trainer._step.params.items():
                p.grad = torch.tensor(gradients[name])
            return torch.ones(1)

        trainer._step.backward = backward
        return
    step = trainer._step

    def train(*arguments):  # with the gradients: XLA would fold constants
        *rest, given = arguments
        step.gradients = lambda *_: (jnp.float32(1), given, {}, {})
        return type(step).train(step, *rest)

    tree = step.stacks.tree(
        step.model.params, {name: jnp.asarray(g) for name, g in gradients.items()}
    )
    compiled = jax.jit(train)
    trainer._train = lambda *arguments: compiled(*arguments, tree)
    trainer._gradients = lambda *_: (None, tree, None, None)
