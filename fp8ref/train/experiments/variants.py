"""Configs with operands in high precision, their losses, and a file that keeps them (spec E-8)."""

import glob
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fp8ref.recipe import OPERANDS
from fp8ref.selection import attention_casts
from fp8ref.selection import rules as linear_rules
from fp8ref.selection.rules import GEMMS, Rule
from fp8ref.shared import files
from fp8ref.shared.errors import ConfigError
from fp8ref.spec.states import layouts
from fp8ref.spec.states import parts as layout_parts
from fp8ref.train import loop
from fp8ref.train.config import config as configs
from fp8ref.train.config.config import Config
from fp8ref.train.experiments import ablation_start
from fp8ref.train.experiments.ablation_start import Start

LOSSES = "losses.jsonl"
"""The file with the losses of an ablation's variants, from which it is resumed."""


Cast = tuple[str, str, str]
"""A cast: (linear, GEMM, role), (attention, "attention", role) or ("", "states", part)."""


def studying(config: Config, *, attention: str | None, states: str | None) -> Config:
    """The config with every operand of attention, and narrow part of a layout, as a cast.

    attention, states: a variant and a layout; None: neither is studied.
    Raises:   ConfigError: a variant or layout that has no such casts.
    """
    if attention is not None:
        config = ablation_start.with_plain_attention(config)
    try:
        if attention is not None:
            config = config.replace(
                numerics={
                    "attention": attention,
                    "attention_scaling": "current",
                    "attention_arithmetic": "fast",
                    "attention_operands": attention_casts.ROLES,
                },
                parallel={"attention": "xla", "compile": "none"},
            )
        if states is not None:
            parts = layout_parts.narrow(layout_parts.by_name(states))
            layout = layout_parts.named(layouts.by_name(states.partition("/")[0]), parts)
            config = config.replace(optimizer={"kind": "adamw_states", "layout": layout})
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return config


def in_high_precision(config: Config, *, attention: bool, states: bool) -> Config:
    """The config with FP8 attention, and states, in high precision, in the same order."""
    variant, layout = config.attention_variant, config.optimizer.moment_layout
    if attention and variant is not None and variant.fmt.bits == 8:
        config = ablation_start.with_plain_attention(config)
    if states and layout is not None:
        config = config.replace(optimizer={"layout": _with_parts(layout, ())})
    return config


def _with_parts(layout: layouts.Layout, parts: tuple[str, ...]) -> str:
    """The name of a layout with these parts alone narrow."""
    return layout_parts.named(layouts.by_name(layout.name.partition("/")[0]), parts)


def cast_operands(config: Config) -> list[Cast]:
    """Everything that a config casts, of linears, attention and states."""
    operands: list[Cast] = [
        (d.path, *key)
        for d in config.decisions()
        for key, cast in linear_rules.casts_of(d.recipe).items()
        if cast is not None
    ]
    if config.numerics.attention_operands is not None:
        for layer in config.attention_layers:
            casts = config.attention_operands(layer)
            operands += [
                (layer, "attention", role)
                for role in attention_casts.ROLES
                if casts is not None and role in casts.roles
            ]
    layout = config.optimizer.moment_layout
    if layout is not None and "/" in layout.name:
        operands += [("", "states", part) for part in layout_parts.narrow(layout)]
    return operands


def without(config: Config, operands: Iterable[Cast]) -> Config:
    """The config with these operands in high precision, and no others.

    Raises:   ConfigError: a rule for them would change others.
    """
    operands = list(operands)
    rules = list(config.numerics.rules or ())
    for gemm in GEMMS:
        for role in OPERANDS[gemm]:
            paths = tuple(path for path, *key in operands if key == [gemm, role])
            if paths:
                alone = tuple(map(_alone, paths))
                rules.append(Rule(layers=alone, gemms=(gemm,), roles=(role,), recipe="bf16"))
    numerics: dict[str, Any] = {"rules": tuple(rules) or None}
    optimizer = {}
    left = [cast for cast in cast_operands(config) if cast not in operands]
    if config.numerics.attention_operands is not None:
        numerics["attention_operands"] = tuple(
            f"{layer}/{role}" for layer, gemm, role in left if gemm == "attention"
        )
    layout = config.optimizer.moment_layout
    if layout is not None and "/" in layout.name:
        parts = tuple(part for _, gemm, part in left if gemm == "states")
        optimizer["layout"] = _with_parts(layout, parts)
    changed_config = config.replace(numerics=numerics, optimizer=optimizer)
    if differ := set(cast_operands(changed_config)) ^ set(left):
        raise ConfigError(
            "an ablation leaves out what it names alone; a rule would change "
            f"{'/'.join(min(differ))} too. Rename that module."
        )
    return changed_config


def _alone(path: str) -> str:
    """The pattern (R-3) of this path alone: without a bracket "proj" would name attn.proj too.

    >>> _alone("layers.0.proj")
    '[l]ayers.0.proj'
    """
    return f"[{path[0]}]{glob.escape(path[1:])}"


def losses(config: Config, start: Start, *, steps: int, seeds: int) -> list[float | None]:
    """Validation losses of each batch, or trained, of each order of data; None: not finite."""
    trainer = loop.trainer(start.backend, config)
    held_out = [start.batches.held_out(i) for i in range(config.run.eval_batches)]
    values: list[float] = []
    for seed in range(seeds if steps else 1):
        start.into(trainer, config)
        finite = True
        for step in range(steps):  # steps that the run has not seen, other ones for each seed
            tokens = start.batches.step(start.step + seed * steps + step)
            finite &= all(map(math.isfinite, trainer.step(tokens).values()))
        losses = [trainer.evaluate(tokens) for tokens in held_out]
        values += [float(np.mean(losses)) if finite else math.nan] if steps else losses
    return [loss if math.isfinite(loss) else None for loss in values]


def statistics(config: Config, start: Start) -> dict[str, dict]:
    """Every operand's quantization statistics, under the recipe, after the checkpoint (Q-8).

    Of attention those of the variant itself, of q, k, v and do (Q-13).
    """
    config = config.replace(numerics={"attention_operands": None})
    trainer = loop.trainer(start.backend, config)
    start.into(trainer, config)
    return trainer.statistics(start.batches.step(start.step))


def keeping(out: Path, about: dict) -> Callable:
    """A function (name, measure) -> the value in ``out``, or the measured one, which it writes.

    Raises:   ConfigError: another ablation is there; it cannot be written, or is a link.
    """
    path = out / LOSSES
    if link := next((x for x in (out, path) if x.is_symlink()), None):
        raise ConfigError(
            f"an ablation writes through no link; {link} is one. Name another directory with "
            "--out, or remove it."
        )
    lines, about = list(_lines(path)), json.loads(json.dumps(about))
    if lines and lines[0] != about:
        differ = next(iter(configs.differences(lines[0], about)))
        raise ConfigError(
            f"{path} is of another ablation: it differs in {differ}. Name another directory "
            "with --out, or remove it."
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not lines:
            path.write_text(json.dumps(about) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--out {out} cannot be written ({error.strerror}). Name another directory."
        ) from error
    saved = {name: value for line in lines[1:] for name, value in line.items()}

    def value(name: str, measure: Callable):
        if name not in saved:
            saved[name] = measure()
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({name: saved[name]}) + "\n")
        return saved[name]

    return value


def _lines(path: Path) -> Iterator[dict]:
    """The objects of the file; a torn last line, of an ablation that was killed, is cut off."""
    if not path.exists():
        return
    try:
        text = files.read_bytes(path).decode()
        whole = text[: text.rfind("\n") + 1]
        lines = [files.parse_json(line) for line in whole.splitlines()]
        if not all(isinstance(line, dict) for line in lines):
            raise ValueError("a line is no JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}). Remove it, or name another directory with --out."
        ) from error
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    yield from lines
