"""Why runs under delayed attention scales differ from bfloat16's: python
benchmarks/losses/attention_first_steps.py [--json FILE]

States begin with scale 1, under which the gradients of attention are cast to zero (A-19). In
batches of 512 tokens v_proj learns from the second step on, then from a part of its gradient,
q_proj and k_proj from the third. Four arms of equal weights and batches, in PyTorch, say what
follows from that:

    framework's             the framework's own attention in bfloat16
    framework's, held       the same, without the gradients that delayed scales lose whole: of v in
                            one step, of q and k in two
    cudnn, delayed          states begin with scale 1
    cudnn, delayed, warm    states begin with what three passes of the first batch observed, without
                            an update of the weights
"""

import argparse
import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch.nn import functional

import attention_losses
import layout_losses
from fp8ref.spec import llama
from fp8ref.train import loop
from fp8ref.train.config import config as configs
from fp8ref.train.config.config import Config
from fp8ref.train.data import loader
from fp8ref.train.torch.llama.llama import Attention

HELD = {"v": 1, "q": 2, "k": 2}
"""The first steps in which an operand has no gradient under delayed scales, in batches of 512
tokens; of 1024 tokens it is one step more.
"""

WARM = 3
"""Passes after which all states have a scale: gradients of dO, then dS, then dQ and dK."""

SHOWN = max(HELD.values()) + 1
"""The first steps whose gradients are recorded: up to one in which all operands have some."""

ARMS = (attention_losses.OWN, "framework's, held", attention_losses.DELAYED, "cudnn, delayed, warm")
RESULTS = Path(__file__).parents[1] / "results" / "attention_first_steps.json"


def run(config: Config, arm: str, seed: int) -> dict:
    """The validation loss after the last step of a run, and of each of its first steps the norm of
    the gradients of q_proj, k_proj and v_proj.

    These are sums of products with dQ, dK and dV, and zero where those are.
    """
    name = attention_losses.DELAYED if arm.startswith("cudnn") else attention_losses.OWN
    chosen = config.replace(
        numerics=attention_losses.keys_of(name),
        run={"seed": config.run.seed + seed},
        data={"seed": config.data.seed + seed},
    )
    batches, weights = (
        loader.open_batches(chosen),
        llama.initial_weights(chosen.model, seed=chosen.run.seed),
    )
    trainer = loop.trainer("torch", chosen, weights)
    if arm.endswith("warm"):
        _warm(trainer, chosen, weights, batches.step(0))
    norms: dict[str, list[float]] = {name: [] for name in HELD}
    for step in range(chosen.run.steps):
        with _holding(step) if arm.endswith("held") else contextlib.nullcontext():
            if step < SHOWN:
                # in a pass of its own, which changes no state
                gradients = trainer.gradients(batches.step(step))
                for name, of in norms.items():
                    of.append(
                        _norm(
                            x
                            for path, x in gradients.items()
                            if path.endswith(f"{name}_proj.weight")
                        )
                    )
            trainer.step(batches.step(step))
    loss = float(
        np.mean([trainer.evaluate(batches.held_out(i)) for i in range(chosen.run.eval_batches)])
    )
    return {
        "backend": "torch",
        "attention": arm,
        "seed": seed,
        "val_loss": loss,
        "gradients": norms,
    }


def _norm(arrays: Iterable[np.ndarray]) -> float:
    """The norm of all numbers of these arrays; 0 if each of them is zero."""
    return float(np.sqrt(sum(np.square(x.astype(np.float64)).sum() for x in arrays)))


def _warm(trainer, config: Config, weights, tokens: np.ndarray) -> None:
    """Give a trainer the states that passes over one batch observe, under a learning rate of 0."""
    still = config.replace(optimizer={"learning_rate": 1e-30, "min_learning_rate": 0.0})
    other = loop.trainer("torch", still, weights)
    for _ in range(WARM):
        other.step(tokens)
    pairs = zip(trainer.model.modules(), other.model.modules(), strict=True)
    for mine, theirs in (
        (a, b) for a, b in pairs if isinstance(a, Attention) and isinstance(b, Attention)
    ):
        mine.states.load_state_dict(theirs.states.state_dict())
    scales = [float(state[0]) for state in trainer.fp8_states().values()]
    assert all(scale != 1 for scale in scales), (
        "a state has scale 1: it has seen no tensor; raise WARM"
    )


@contextlib.contextmanager
def _holding(step: int) -> Iterator[None]:
    """The framework's own attention without the gradients that are held in this step."""
    own = functional.scaled_dot_product_attention

    def held(q, k, v, **how):
        for name, x in (("q", q), ("k", k), ("v", v)):
            if step < HELD[name] and x.requires_grad:
                x.register_hook(torch.zeros_like)
        return own(q, k, v, **how)

    functional.scaled_dot_product_attention = held
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--config", default="tiny", help="a packaged config or a file (default tiny)"
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    data = {"batch_size": given.batch_size, "sequence_length": given.sequence_length}
    config = configs.load(given.config).replace(
        numerics={"recipe": "bf16"},
        run={"steps": given.steps, "eval_every": given.steps},
        data=data,
    )
    found = layout_losses.about(given.config, config)
    for seed in range(given.seeds):
        for arm in given.arms:
            found["runs"].append(run(config, arm, seed))
            given.json.write_text(json.dumps(found, indent=1) + "\n")
    Console(width=150).print(attention_losses.table(found["runs"]))


if __name__ == "__main__":
    main()
