"""Claims about training, measured by small models of matched seeds."""

import contextlib
import hashlib
import io
import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fp8ref import recipe as recipes
from fp8ref.estimate import gpu_rates, report
from fp8ref.findings.casts import error
from fp8ref.findings.claim import Sample, Trial, kept, replaced
from fp8ref.selection.rules import Rule
from fp8ref.shared import files
from fp8ref.shared.errors import NonFiniteError, StoppedError, require
from fp8ref.train import loop
from fp8ref.train.config import config as configs
from fp8ref.train.config.config import Config
from fp8ref.train.config.schedule import lowest_sqnr
from fp8ref.train.data import loader
from fp8ref.train.report import gap as gaps
from fp8ref.train.report import runs

STEPS = 120
"""Of every run."""

BLOCKS = ("layers",)
"""What rules change: the linears of all blocks."""

RECIPES = ("tensorwise", "rowwise", "mxfp8")
"""Recipes of three granularities."""

RATES = (0.5e-3, 2e-3, 8e-3)
"""Peak learning rates; the second is that of all other runs."""


def tiny(trial: Trial, recipe: str, *rules: Rule) -> Config:
    """Runs of 0.13 million parameters in two blocks, on the standard library's text."""
    return configs.load("tiny").replace(
        model={"hidden_size": 64, "intermediate_size": 192},
        data={"sequence_length": 64, "batch_size": 8, "seed": trial.seed},
        run={"steps": STEPS, "seed": trial.seed, "eval_every": 0, "eval_batches": 1},
        numerics={"recipe": recipe, "rules": rules or None},
        checkpoint={"every": 0},
    )


def run_of(trial: Trial, arm: Mapping[str, Any]) -> Config:
    """The run that an arm of a claim describes: recipe; rules of the linears of all blocks, or of
    those that they name; other numerics, such as a schedule; blocks; equal_time: of as many more
    steps as tensorwise is faster than rowwise.
    """
    rules = [Rule(**{"layers": BLOCKS, **rule}) for rule in arm.get("rules", ())]
    keys = {key: arm.get(key) for key in ("accumulate", "schedule")}
    steps = round(STEPS * speed()) if arm.get("equal_time") else STEPS
    return tiny(trial, arm["recipe"], *rules).replace(
        numerics=keys, model={"num_hidden_layers": arm.get("blocks", 2)}, run={"steps": steps}
    )


def loss_of_arms(trial: Trial) -> Sample:
    """The loss of the claim's last arm, minus that of the one before; lines: less bf16's."""
    configs_of = [run_of(trial, arm) for arm in trial.arms.values()]
    plain = {"recipe": "bf16", "rules": None, "accumulate": None, "schedule": None}
    bf16 = loss(trial, configs_of[0].replace(numerics=plain))
    gaps_to_bf16 = [loss(trial, config) - bf16 for config in configs_of]
    return Sample(gaps_to_bf16[-1] - gaps_to_bf16[-2], {"gap to bf16": gaps_to_bf16})


def loss(trial: Trial, config: Config) -> float:
    """The training loss of the last steps of a run, a twelfth, in nats under its own casts; of one
    whose loss was not finite that of a model that knows nothing.
    """
    path = trial.folder / "losses" / f"{_name(config)}.json"
    if not path.exists():
        run = _trained(config)
        with replaced(path) as part:
            part.write_text(json.dumps([] if run.diverged else list(run.losses.values())))
    losses = kept(path, list)
    width = gaps.window(config.run.steps)
    return float(np.mean(losses[-width:])) if losses else math.log(config.model.vocab_size)


def _trained(config: Config) -> runs.Run:
    """A run, trained and read. One that is stopped is lost: its folder is for this process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        try:
            with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(NonFiniteError):
                loop.train(config, "torch", out)
        except (KeyboardInterrupt, StoppedError) as error:
            text = "stopped; trials that have ended are kept, and the same command goes on."
            raise type(error)(text) from error
        return runs.read(out)


def _name(config: Config) -> str:
    """The name of the file that keeps what was measured of a run."""
    key = json.dumps(configs.to_dict(config), sort_keys=True).encode()
    return hashlib.sha256(key).hexdigest()[:24]


def sqnr_as_criterion(trial: Trial) -> Sample:
    """dB by which the lowest SQNR of NVFP4's operands falls from the first third of a run to the
    last.
    """
    run = _trained(tiny(trial, "nvfp4").replace(statistics={"every": 10}))
    lowest = [found[0] for row in run.statistics if (found := lowest_sqnr(row["statistics"]))]
    require(len(lowest) == STEPS // 10, f"a record of seed {trial.seed} has no finite SQNR.")
    third = len(lowest) // 3
    fall = np.mean(lowest[:third]) - np.mean(lowest[-third:])
    return Sample(float(fall), {"lowest SQNR": lowest})


def gradients_in(trial: Trial, recipe: str, fmt: str) -> Config:
    """A recipe whose gradients are cast to a format."""
    casts = recipes.by_name(recipe).operand_casts
    own = {cast.cast.fmt.name for cast in casts if cast.role == "grad_output"}
    rule = Rule(layers=BLOCKS, roles=("grad_output",), format=fmt)
    return tiny(trial, recipe, *[rule] * (own != {fmt}))  # a rule that changes nothing is refused


def speed() -> float:
    """How many times as fast as rowwise a step of tensorwise is predicted to be: 8 billion
    parameters on an H200.
    """
    config, ceilings = configs.load("llama-8b"), gpu_rates.of("h200", None)
    seconds = []
    for recipe in ("rowwise", "tensorwise"):
        step = report.of(config.replace(numerics={"recipe": recipe}), "torch", ceilings).step
        seconds.append(step.configured + sum(step.rest.values()))
    return seconds[0] / seconds[1]


def weights(trial: Trial, config: Config) -> dict[str, np.ndarray]:
    """The weights after a run."""
    path = trial.folder / "weights" / f"{_name(config)}.npz"
    if not path.exists():
        trainer, batches = loop.trainer("torch", config), loader.open_batches(config)
        for step in range(config.run.steps):
            trainer.step(batches.step(step))
        with replaced(path) as part:
            files.write_arrays(part, trainer.weights())
    return files.read_arrays(path)


def batch(config: Config, step: int = STEPS) -> np.ndarray:
    """Tokens that a run of STEPS steps has not seen."""
    return loader.open_batches(config).step(step)


def gradient_error(
    config: Config, start: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray]
) -> float:
    """Percent by which the gradients of all weights differ from others, at some weights."""
    gradients = loop.trainer("torch", config, start).gradients(batch(config))
    mine, others = (
        np.concatenate([g[name].ravel() for name in sorted(exact)]) for g in (gradients, exact)
    )
    return 100 * error(mine, others.astype(np.float64))


def swiglu_alignment(trial: Trial) -> Sample:
    """The share of the way to 1 that the largest absolute cosine of rows of gate and up goes."""
    config = tiny(trial, "bf16")
    before = _largest_cosine(loop.trainer("torch", config).weights())
    after = _largest_cosine(weights(trial, config))
    share = (after - before) / (1 - before)
    return Sample(share, {"largest cosine": [before, after]})


def _largest_cosine(tensors: Mapping[str, np.ndarray]) -> float:
    cosines = []
    for name, gate in tensors.items():
        if name.endswith("gate_proj.weight"):
            up = tensors[name.replace("gate_proj", "up_proj")]
            norms = np.linalg.norm(gate, axis=1) * np.linalg.norm(up, axis=1)
            cosines.append(np.abs((gate * up).sum(1) / norms).max())
    return float(max(cosines))


def gradients_in_e5m2(trial: Trial) -> Sample:
    """Percent of error that casting grad_output adds to weights' gradients in mxfp8: in e5m2, minus
    in e4m3.
    """
    start = weights(trial, tiny(trial, "bf16"))
    lines: dict[str, list[float]] = {"e4m3fn": [], "e5m2": []}
    for recipe in RECIPES:
        uncast = tiny(trial, recipe, Rule(layers=BLOCKS, roles=("grad_output",), recipe="bf16"))
        exact = loop.trainer("torch", uncast, start).gradients(batch(uncast))
        for fmt, line in lines.items():
            line.append(gradient_error(gradients_in(trial, recipe, fmt), start, exact))
    return Sample(lines["e5m2"][2] - lines["e4m3fn"][2], lines)


def gap_by_learning_rate(trial: Trial) -> Sample:
    """The gap of nvfp4 to bf16 at four times the learning rate, minus that at the rate itself."""
    gap = []
    for rate in RATES:
        keys = {"learning_rate": rate, "min_learning_rate": rate / 10}
        low, high = (tiny(trial, name).replace(optimizer=keys) for name in ("nvfp4", "bf16"))
        gap.append(loss(trial, low) - loss(trial, high))
    return Sample(gap[2] - gap[1], {"gap of nvfp4 to bf16": gap})


def batch_invariance(trial: Trial) -> Sample:
    """The largest change of a sequence's logits, in their standard deviation, between a batch of
    one and a batch of eight, under scales of whole tensors.
    """
    config = tiny(trial, "bf16")
    start, tokens = weights(trial, config), batch(config)[:, :-1]
    lines: dict[str, list[float]] = {}
    for recipe in RECIPES:
        trainer = loop.trainer(
            "torch", run_of(trial, {"recipe": recipe, "accumulate": "hopper_slow"}), start
        )
        alone = trainer.logits(tokens[:1])[0]
        changes = [np.abs(trainer.logits(tokens[:n])[0] - alone).max() for n in (1, 2, 4, 8)]
        lines[recipe] = [float(change / alone.std()) for change in changes]
    return Sample(lines["tensorwise"][-1], lines)


def _rollout(trial: Trial) -> dict[str, float]:
    """{a difference of rules between trainer and rollout: the divergence of their next-byte
    policies on held-out text, in nats}.
    """
    keys = {"num_key_value_heads": 4, "hidden_size": 128, "intermediate_size": 384}
    plain = tiny(trial, "bf16").replace(model=keys)  # whose projections blocks of 128 divide
    start, tokens = weights(trial, plain), batch(plain)[:, :-1]

    def policy(recipe: str, *rules: Rule) -> np.ndarray:
        config = tiny(trial, recipe, *rules).replace(model=keys)
        logits = loop.trainer("torch", config, start).logits(tokens).astype(np.float64)
        return logits - np.logaddexp.reduce(logits, -1, keepdims=True)

    ours = policy("blockwise")
    rollouts = {
        "the same rules": ours,
        "UE8M0 scales": policy("blockwise", Rule(layers=BLOCKS, policy="deepgemm_ue8m0")),
        "scales of rows": policy("rowwise"),
        "gate_proj in bf16": policy("blockwise", Rule(layers=("gate_proj",), recipe="bf16")),
        "all in bf16": policy("bf16"),
    }
    return {name: float((np.exp(p) * (p - ours)).sum(-1).mean()) for name, p in rollouts.items()}


def rollout_by_ue8m0(trial: Trial) -> Sample:
    """The divergence of a rollout with UE8M0 scales from a trainer with float32 scales, over that
    of a rollout in bfloat16.
    """
    nats = _rollout(trial)
    lines = {"divergence": list(nats.values())}
    return Sample(nats["UE8M0 scales"] / nats["all in bf16"], lines)
