"""The clauses of docs/SEMANTICS.md that explain why two backends differ in a value though all before it is equal, by its kind; ``explain`` chooses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fp8ref.crosscheck.delayed_states import States
from fp8ref.hardware import Multiply
from fp8ref.llama import LlamaConfig
from fp8ref.recipe import Recipe


@dataclass(frozen=True)
class Reason:
    """clauses: those that explain a difference; none where no clause does."""

    clauses: tuple[str, ...]
    text: str


# By kind of value; what is found by computing (scales, codes, results of GEMMs and of attention) is in ``held``.
REASONS = {
    "tokens": Reason(("D-2", "D-3"), "a batch is a function of the text, data.seed and the step: one of them differs"),
    "initial weights": Reason(("M-6", "K-7"), "initial weights are a function of run.seed and the model, or are run.init_from's"),
    "state": Reason(("K-2",), "the states that both go on from are another"),
    "recipe": Reason(("R-1",), "the recipes quantise it otherwise"),
    "absent": Reason(("R-2",), "one of the recipes runs this GEMM in high precision"),
    "weight": Reason(("M-2",), "the masters are equal and what is multiplied is not their rounding in both"),
    "logits": Reason(
        ("G-9", "M-3"), "lm_head in high precision sums in float32 in any order, and so does model.norm before it. B-2 bounds logits"
    ),
    "loss": Reason(("M-5",), "logits are equal; logsumexp and mean are float32 sums, in the library's order. B-3 bounds the loss"),
    "gradient of high precision": Reason(
        ("G-9",), "a GEMM in high precision sums in float32 in any order, of operands that are not observed. B-5 bounds gradients"
    ),
    "gradient of the table": Reason(
        ("M-2",), "rows of the embedding's gradient are float32 sums over tokens, in the library's order. B-5 bounds them"
    ),
    "backward": Reason(
        (),
        "no clause explains it: M-3 states where the forward pass rounds, none where the backward pass does between GEMMs. B-5 bounds gradients",
    ),
    "parameter": Reason((), "no clause explains it: the GEMM that makes it has equal results, where it was observed. B-5 bounds gradients"),
    "norm": Reason(
        ("T-2",), "all gradients are equal; PyTorch sums their squares in float64, JAX in float32. B-4 bounds the curve of the norms"
    ),
    "learning rate": Reason(("T-3",), "a rate is a function of optimizer.learning_rate, min_learning_rate, warmup_steps and run.steps"),
    "moment": Reason(
        ("T-1", "T-2", "T-6"),
        "gradients and their norm are equal; clipping and moments are of optimizer.max_norm, beta1, beta2 and kind; T-1 states no order of roundings",
    ),
    "master weight": Reason(
        ("T-1",),
        "moments and learning rate are equal; what is left is optimizer.eps, weight_decay, the steps counted and the order of T-1's roundings",
    ),
    "delayed": Reason(
        ("H-3", "H-4"), "what the step observed is equal; a history and the scale made of it are a function of that and the state"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Subjects:
    """What two backends had beside the values: names, recipes by linear, A's states of delayed scaling before the step.

    model, outputs   of A: its sizes, and the results of the forward GEMMs that were observed, [B, T, N] by linear.
    unseen    linears in high precision between the values, which are not observed.
    multiply  the simulated hardware that each multiplies by (G-19); None: the framework's own GEMMs.
    """

    names: tuple[str, str]
    recipes: tuple[dict[str, Recipe], dict[str, Recipe]]
    states: States
    model: LlamaConfig
    outputs: Mapping[str, np.ndarray]
    unseen: Sequence[str] = ()
    multiply: tuple[Multiply | None, Multiply | None] = (None, None)
