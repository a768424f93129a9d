"""Run directories read back, by whoever compares or reports them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fp8ref.run import log
from fp8ref.run.config import ConfigError

# What a run and the bf16 runs it is judged by have in common (E-1), beside the text: sections of the config, and keys.
SAME = ("model", "optimizer", "data.batch_size", "data.sequence_length", "run.steps")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run directory. statistics: the lines of statistics.jsonl, none where there is no such file."""

    path: Path
    name: str
    manifest: dict
    lines: list[dict]
    statistics: list[dict]

    @cached_property
    def losses(self) -> dict[int, float]:
        return self.curve("loss")

    def curve(self, key: str) -> dict[int, float]:
        """{step: value} of a metric, where it was written; in the order of the steps."""
        return dict(sorted((line["step"], float(line[key])) for line in self.lines if key in line))

    def key(self, dotted: str) -> Any:
        """A key of the config, such as ``run.seed``.

        Raises:   ConfigError: a manifest that lacks it.
        """
        value: Any = self.manifest.get("config")
        for part in dotted.split("."):
            if not isinstance(value, dict) or part not in value:
                raise ConfigError(f"{self.path / 'manifest.json'} has no config.{dotted}; {self.name} is no intact run. Leave it out.")
            value = value[part]
        return value

    @property
    def seeds(self) -> tuple[int, int]:
        return self.key("run.seed"), self.key("data.seed")

    @property
    def tokens_per_step(self) -> int:
        return self.key("data.batch_size") * self.key("data.sequence_length")

    @property
    def bf16(self) -> bool:
        """Whether no linear runs in FP8."""
        return not any(linear["fp8"] for linear in self.manifest.get("linears", []))

    @property
    def finished(self) -> bool:
        return self.manifest["status"] == "finished"

    @property
    def diverged(self) -> str:
        """What the run ended by, if that was a loss or gradient that is not finite; else ''."""
        error = str(self.manifest.get("error", "")) if self.manifest["status"] == "failed" else ""
        return error if error.startswith("NonFiniteError") else ""

    @property
    def text(self) -> Any:
        """What the training text is known by: its hash, or else all that the manifest says of it."""
        data = self.manifest.get("data", {})
        return data.get("sha256", data)

    @property
    def settings(self) -> dict:
        """What was chosen: the config but for the directory, backend and text."""
        config = {name: {k: v for k, v in keys.items() if (name, k) != ("run", "out")} for name, keys in self.manifest["config"].items()}
        return {**config, "backend": self.manifest.get("backend"), "text": self.text}

    @property
    def versions(self) -> dict:
        """What it ran with."""
        return {**self.manifest.get("versions", {}), "fp8ref": self.manifest["fp8ref"], "device": self.manifest.get("device")}

    @property
    def reference(self) -> dict:
        """What this run has in common with the runs it is judged by."""
        return {**{key: self.key(key) for key in SAME}, "text": self.text}


def read(path: Path) -> Run:
    """The run in a directory, finished or not.

    Raises:   ConfigError: no run there, a file of it that cannot be read, or no step yet.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory. Name a run, as fp8ref train --run.out wrote it.")
    manifest = log.read_manifest(path)
    run = Run(
        path=path, name=str(path), manifest=manifest, lines=_lines(path / "metrics.jsonl"), statistics=_lines(path / "statistics.jsonl")
    )
    for key in (*SAME, "run.seed", "data.seed", "numerics.recipe"):
        run.key(key)
    if bad := next((line for line in run.lines if not {"step", "loss"} <= line.keys()), None):
        raise ConfigError(f"{path / 'metrics.jsonl'}: every line has a step and a loss; got {json.dumps(bad)[:80]}. Leave {path} out.")
    if any("step" not in line or not isinstance(line.get("statistics"), dict) for line in run.statistics):
        raise ConfigError(f"{path / 'statistics.jsonl'}: every line has a step and statistics. Remove the file, or leave {path} out.")
    if not run.lines:
        raise ConfigError(f"{path} has no step yet (its status is {manifest['status']!r}). Leave it out, or train it first.")
    return run


def read_all(paths: Sequence[Path]) -> list[Run]:
    """The runs in directories, each named once."""
    seen: dict[Path, Path] = {}
    for path in paths:
        if path.resolve() in seen:
            raise ConfigError(f"every run is named once; got {path} and {seen[path.resolve()]}. Leave one out.")
        seen[path.resolve()] = path
    return [read(path) for path in paths]


def common_steps(runs: Sequence[Run]) -> np.ndarray:
    """The steps that all runs have, ascending."""
    return np.array(sorted(set.intersection(*(set(run.losses) for run in runs))), np.int64)


def at(curve: dict[int, float], steps: np.ndarray) -> np.ndarray:
    """A curve's values at steps."""
    return np.array([curve[int(step)] for step in steps], np.float64)


def _lines(path: Path) -> list[dict]:
    """JSON lines, a torn last one left out; none of a file that is not there."""
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ConfigError(f"{path}, line {number}, is not a JSON object. Mend it, or leave {path.parent} out.")
        found.append(value)
    return found
