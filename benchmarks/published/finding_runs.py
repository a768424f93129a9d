"""Claims about training, measured by training tiny models with matched seeds (``findings``)."""

import functools
import tempfile
from pathlib import Path

import numpy as np

from claim import Claim
from fp8ref.selection.rules import Rule
from fp8ref.train import loop
from fp8ref.train.config import config as configs
from fp8ref.train.config.config import Config
from fp8ref.train.report import gap as gaps

STEPS = 60
"""Of every run."""

LOSS = 3.0
"""About the loss at their end, in nats, of which the margin is a part."""


def tiny(seed: int, **numerics) -> Config:
    """60 steps of 0.12 million parameters, on the standard library's text."""
    sizes = {"hidden_size": 64, "intermediate_size": 192}
    keys = {"sequence_length": 64, "batch_size": 8, "seed": seed}
    run = {"steps": STEPS, "seed": seed, "eval_every": 0, "eval_batches": 1}
    return configs.load("tiny").replace(
        model=sizes, data=keys, run=run, numerics=numerics, checkpoint={"every": 0}
    )


@functools.cache
def _trained(seed: int, recipe: str, policy: str | None, accumulate: str | None) -> float:
    """The training loss of the last tenth of a run."""
    rules = None if policy is None else (Rule(layers=("model.layers.*",), policy=policy),)
    with tempfile.TemporaryDirectory() as folder:
        lines = loop.train(
            tiny(seed, recipe=recipe, rules=rules, accumulate=accumulate),
            "torch",
            Path(folder, "run"),
        )
    assert lines is not None
    return float(np.mean([line["loss"] for line in lines[-gaps.window(STEPS) :]]))


def mx_floor_in_training(seed: int) -> float:
    """Loss of mxfp8 with scales rounded down, minus with scales rounded up."""
    return _trained(seed, "mxfp8", "mx_floor", None) - _trained(seed, "mxfp8", None, None)


def accumulation_in_training(seed: int) -> float:
    """Loss with Hopper's fast accumulation in all GEMMs, minus with sums promoted to float32."""
    return _trained(seed, "tensorwise", None, "hopper_fast") - _trained(
        seed, "tensorwise", None, "hopper_slow"
    )


def swiglu_alignment(seed: int) -> float:
    """How much the largest cosine of a pair of rows of gate and up grows in a run."""
    trainer = loop.trainer("torch", config := tiny(seed, recipe="bf16"))
    from fp8ref.train.data import loader

    batches = loader.open_batches(config)
    before = _largest_cosine(trainer.weights())
    for step in range(STEPS):
        trainer.step(batches.step(step))
    return _largest_cosine(trainer.weights()) - before


def _largest_cosine(weights: dict[str, np.ndarray]) -> float:
    found = []
    for name, gate in weights.items():
        if name.endswith("gate_proj.weight"):
            up = weights[name.replace("gate_proj", "up_proj")]
            found.append(
                np.abs(
                    (gate * up).sum(1) / np.linalg.norm(gate, axis=1) / np.linalg.norm(up, axis=1)
                ).max()
            )
    return float(max(found))


MARGIN = gaps.MARGIN * LOSS
"""Of equivalence, in nats (spec E-4)."""

CLAIMS = [
    Claim(
        name="mx_floor_in_training",
        claim="MXFP8 with the floor of OCP's rule trains worse than with scales rounded up.",
        source="Mishra et al., Recipes for Pre-training LLMs with MXFP8, arXiv:2506.08027, with "
        "models of up to 8 billion parameters and 15 trillion tokens",
        figure="loss in nats, floor minus round-up",
        how=f"{STEPS} steps of a model of 0.12 million parameters, of matched seeds.",
        measure=mx_floor_in_training,
        form="{:+.4f}",
        margin=MARGIN,
        seeds=5,
    ),
    Claim(
        name="accumulation_in_training",
        claim="Training needs promotion: Hopper's fast accumulation in all GEMMs costs loss.",
        source="DeepSeek-V3, arXiv:2412.19437, section 3.3; torchtitan and torchao use fast "
        "accumulation in the forward pass alone",
        figure="loss in nats, hopper_fast minus hopper_slow",
        how=f"{STEPS} steps of the same model under simulated hardware, K from 64 to 512, of "
        "matched seeds.",
        measure=accumulation_in_training,
        form="{:+.4f}",
        margin=MARGIN,
        seeds=5,
    ),
    Claim(
        name="swiglu_alignment",
        claim="Rows of SwiGLU's gate and up align in training, until their products are outliers "
        "that FP8 cannot hold.",
        source="Fishman et al., Scaling FP8 training to trillion-token LLMs, arXiv:2409.12517: 7 "
        "billion parameters, up to two trillion tokens",
        figure="growth of the largest cosine of a pair of rows",
        how=f"{STEPS} steps in bf16. Aligned rows have a cosine of 1.",
        measure=swiglu_alignment,
        above=0.5,
        seeds=3,
    ),
]
