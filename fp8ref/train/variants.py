"""Configs with operands in high precision, their losses from a checkpoint, and a file that keeps them (spec E-8)."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from fp8ref import console as consoles
from fp8ref import linear_rules
from fp8ref.errors import ConfigError
from fp8ref.linear_rules import GEMMS, Rule
from fp8ref.recipe import OPERANDS, RECIPES, Gemm, Role, trained_recipes
from fp8ref.train import checkpoint, log, loop
from fp8ref.train import config as configs
from fp8ref.train.checkpoint import Checkpoint
from fp8ref.train.config import Config
from fp8ref.train.data import loader

LOSSES = "losses.jsonl"
"""The file of an ablation's directory with the losses of each variant, so that it can be resumed."""


def begin(run: Path, recipe: str | None) -> tuple[Checkpoint, Config]:
    """The last checkpoint of a run, and its config in the recipe that is studied.

    Raises:   ConfigError: no run or checkpoint; several devices; a recipe without FP8, or with delayed scaling.
    """
    log.read_manifest(run)
    config = configs.load(run / "config.toml")
    if config.parallel.devices > 1:
        raise ConfigError(f"an ablation takes a run on one device; {run} has {config.parallel.devices}. Train with parallel.* at 1.")
    last = checkpoint.latest(run, consoles.say, aside=False)
    if last is None:
        raise ConfigError(f"{run} has no checkpoint. Train it to its end, or with --checkpoint.every.")
    trained = config.recipes
    recipe = recipe or (config.numerics.recipe if RECIPES[config.numerics.recipe].fp8 else "tensorwise")
    if recipe not in trained_recipes() or not RECIPES[recipe].fp8:
        raise ConfigError(
            f"--recipe is one with FP8 that trains: {', '.join(name for name, one in trained_recipes().items() if one.fp8)}; got {recipe!r}."
        )
    for name in (*trained, recipe):
        if RECIPES[name].delayed:
            raise ConfigError(
                f"an ablation takes recipes that scale by a tensor's own amax; {name!r} has states. Use tensorwise or rowwise."
            )
    rules = config.numerics.rules if recipe in trained else None
    return last, config.replace(
        numerics={"recipe": recipe, "rules": rules, "schedule": None, "accumulate": None},
        parallel={"scan": False},
        statistics={"every": 0},
    )


def cast_operands(config: Config) -> list[tuple[str, Gemm, Role]]:
    """Every operand that a config casts: (linear, GEMM, role)."""
    return [(d.path, *key) for d in config.decisions() for key, cast in linear_rules.casts_of(d.recipe).items() if cast is not None]


def without(config: Config, operands: Sequence[tuple[str, Gemm, Role]]) -> Config:
    """The config with these operands in high precision."""
    rules = list(config.numerics.rules or ())
    for gemm in GEMMS:
        for role in OPERANDS[gemm]:
            paths = tuple(path for path, *key in operands if key == [gemm, role])
            rules += [Rule(layers=paths, gemms=(gemm,), roles=(role,), recipe="bf16")] if paths else []
    return config.replace(numerics={"rules": tuple(rules) or None})


def losses(config: Config, backend: str, last: Checkpoint, batches: loader.Batches, *, steps: int, seeds: int) -> list[float | None]:
    """Validation losses: of each batch, or, after training, their mean for each order of data; None if one was not finite."""
    trainer = loop.trainer(backend, config)
    held_out = [batches.held_out(i) for i in range(config.run.eval_batches)]
    found: list[float] = []
    for seed in range(seeds if steps else 1):
        trainer.load(last.state, last.step)
        finite = True
        for step in range(steps):  # steps that the run has not seen, other ones for each seed
            finite &= all(map(math.isfinite, trainer.step(batches.step(last.step + seed * steps + step)).values()))
        losses = [trainer.evaluate(tokens) for tokens in held_out]
        found += [float(np.mean(losses)) if finite else math.nan] if steps else losses
    return [loss if math.isfinite(loss) else None for loss in found]


def statistics(config: Config, backend: str, last: Checkpoint, batches: loader.Batches) -> dict[str, dict]:
    """The quantization statistics of every operand, under the recipe, of the batch after the checkpoint (Q-8)."""
    trainer = loop.trainer(backend, config)
    trainer.load(last.state, last.step)
    return trainer.statistics(batches.step(last.step))


def keeping(out: Path, about: dict) -> Callable:
    """A function (name, measure) -> the value in ``out``, or else the measured one, which it writes there.

    Raises:   ConfigError: another ablation is there; it cannot be written.
    """
    path = out / LOSSES
    lines = list(_lines(path))
    if lines and lines[0] != json.loads(json.dumps(about)):
        differ = next(iter(configs.differences(lines[0], json.loads(json.dumps(about)))))
        raise ConfigError(f"{path} is of another ablation: it differs in {differ}. Name another directory with --out, or remove it.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not lines:
            path.write_text(json.dumps(about) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written ({error.strerror}). Name another directory.") from error
    known = {name: value for line in lines[1:] for name, value in line.items()}

    def value(name: str, measure: Callable):
        if name not in known:
            known[name] = measure()
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({name: known[name]}) + "\n")
        return known[name]

    return value


def _lines(path: Path) -> Iterator[dict]:
    """The objects of the file; a torn last line, of an ablation that was killed, is cut off."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    for line in whole.splitlines():
        yield json.loads(line)
