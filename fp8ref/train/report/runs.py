"""Read run directories, for comparisons and reports."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fp8ref.shared import console
from fp8ref.shared.errors import ConfigError, require
from fp8ref.spec import kernels
from fp8ref.train.config import config as configs
from fp8ref.train.report import run_files
from fp8ref.train.report.foreign_logs import Log
from fp8ref.train.run import run_dir

__all__ = ["Run", "common_steps", "read", "read_all"]

SAME = ("model", "optimizer", "data.batch_size", "data.sequence_length", "run.steps")
"""What a run and its bf16 reference runs have in common in their configs, beside the text (E-1)."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run; lines: of metrics.jsonl, by step; statistics: of statistics.jsonl, if any."""

    path: Path
    name: str
    manifest: dict
    lines: list[dict]
    statistics: list[dict]

    @cached_property
    def losses(self) -> dict[int, float]:
        """{step: training loss in nats}."""
        return self.curve("loss")

    def curve(self, key: str) -> dict[int, float]:
        """{step: value} of a metric, at the steps that have it."""
        return {line["step"]: float(line[key]) for line in self.lines if key in line}

    @cached_property
    def config(self) -> dict:
        """The manifest's config, with defaults of the keys that came later."""
        return configs.completed(self.manifest["config"])

    @property
    def architecture(self) -> dict:
        """The section ``architecture``, and what a model of the user's was made of."""
        model = self.manifest.get("model", {})
        made_of = {key: value for key, value in model.items() if key != "config"}
        return self.config.get("architecture", {}) | made_of

    def key(self, dotted: str) -> Any:
        """The value of a config key, such as ``run.seed``."""
        value: Any = self.config
        for part in dotted.split("."):
            value = value[part]
        return value

    @property
    def seeds(self) -> tuple[int, int]:
        """(run.seed, data.seed): of the initial weights and of the shuffle."""
        return self.key("run.seed"), self.key("data.seed")

    @property
    def tokens_per_step(self) -> int:
        """Tokens in the global batch."""
        return self.key("data.batch_size") * self.key("data.sequence_length")

    @property
    def bf16(self) -> bool:
        """Whether no linear runs in FP8, in any phase of a schedule."""
        parts = self.recipes.values()
        return not any(linear["fp8"] for part in parts for linear in part["linears"])

    @property
    def recipes(self) -> dict[str, dict]:
        """By recipe, the linears that were planned and the proof that was found."""
        schedule = self.manifest.get("schedule")
        if schedule:
            return schedule["recipes"]
        return {self.key("numerics.recipe"): self.manifest}

    @property
    def ran(self) -> list[tuple[int, str]]:
        """(first step, recipe) of each recipe that ran."""
        schedule = self.manifest.get("schedule")
        ran = schedule["ran"] if schedule else [(0, self.key("numerics.recipe"))]
        return [(start, recipe) for start, recipe in ran]

    @property
    def finished(self) -> bool:
        """Whether the run reached its last step."""
        return self.manifest["status"] == "finished"

    @property
    def diverged(self) -> str:
        """The error of a run that ended by a non-finite loss or gradient; else ''."""
        error = self.manifest.get("error", "")
        if self.manifest["status"] != "failed" or not error.startswith("NonFiniteError"):
            return ""
        return console.one_line(error)

    @property
    def text(self) -> Any:
        """What identifies the training text: its hash, or else the manifest's whole description."""
        data = self.manifest["data"]
        return data.get("sha256", data)

    @property
    def settings(self) -> dict:
        """The config without run.out, and backend and text."""
        run = {key: value for key, value in self.config["run"].items() if key != "out"}
        return {
            **self.config,
            "architecture": self.architecture,
            "run": run,
            "backend": self.manifest["backend"],
            "text": self.text,
        }

    @property
    def kernels(self) -> dict[str, str]:
        """{device: what cast there, and why}; {} of a run that did not record it."""
        recorded = self.manifest.get("kernels", {})
        return {device: kernels.read(ran).text for device, ran in recorded.items()}

    @property
    def versions(self) -> dict:
        """Versions of packages and of fp8ref, the device, and what cast there."""
        return {
            **self.manifest["versions"],
            "fp8ref": self.manifest["fp8ref"],
            "device": self.manifest["device"],
            **({"casts": "; ".join(self.kernels.values())} if self.kernels else {}),
        }

    @property
    def reference(self) -> dict:
        """What this run shares with its bf16 reference runs (E-1)."""
        shared = {key: self.key(key) for key in SAME}
        return shared | {"architecture": self.architecture, "text": self.text}


def read(path: Path) -> Run:
    """The run in a directory, finished or not.

    A run whose first step was not finite is accepted; a killed one is interrupted.

    Raises:   ConfigError: there is no run; a file is damaged; no step was taken yet.
    """
    # bytes that are not UTF-8 cannot be printed
    name = console.one_line(str(path).encode(errors="replace").decode())
    manifest = run_files.manifest(path)
    if manifest["status"] == "running" and run_dir.killed(path):
        manifest |= {"status": "interrupted"}
    run = Run(
        path=path,
        name=name,
        manifest=manifest,
        lines=run_files.metrics(path),
        statistics=run_files.statistics(path),
    )
    if not run.lines and not run.diverged:
        error = f": {run.manifest['error']}" if run.manifest.get("error") else ""
        raise ConfigError(
            f"{path} has no step yet (its status is {run.manifest['status']!r}{error}). Leave "
            "it out, or train it first."
        )
    return run


def read_all(paths: Sequence[Path]) -> list[Run]:
    """The runs in directories; a directory of runs gives all in it, at any depth, by name.

    Of such a directory a run that has no step yet is left out, and said.
    Raises as ``read``, and ConfigError if one is named twice, or none has a step.
    """
    named: dict[str, Path] = {}
    runs: list[Run] = []
    for path in paths:
        for folder in _runs_in(path):
            first = named.setdefault(os.path.realpath(folder), folder)
            text = f"every run is named once; got {folder} and {first}. Leave one out."
            require(first is folder, text, ConfigError)
            if folder is not path and not _has_steps(folder):
                console.say(f"{folder} has no step yet, and is left out")
                continue
            runs.append(read(folder))
    text = f"no run in {', '.join(map(str, paths))} has a step yet. Train them first."
    require(bool(runs), text, ConfigError)
    return runs


def _has_steps(path: Path) -> bool:
    error = run_files.manifest(path).get("error", "")
    return bool(run_files.metrics(path)) or str(error).startswith("NonFiniteError")


def _runs_in(path: Path) -> list[Path]:
    """The runs within a directory that is none itself; else the directory."""
    if not path.is_dir() or (path / "manifest.json").exists():
        return [path]
    inner = [
        run
        for child in sorted(path.iterdir())
        if child.is_dir() and not child.is_symlink() and not child.name.startswith(".")
        for run in _runs_in(child)
        if (run / "manifest.json").exists()
    ]
    return inner or [path]


def common_steps(runs: Sequence[Run | Log]) -> np.ndarray:
    """The steps that all runs have, ascending."""
    return np.array(sorted(set.intersection(*(set(run.losses) for run in runs))), np.int64)


def at(curve: dict[int, float], steps: np.ndarray) -> np.ndarray:
    """A curve's values at steps."""
    return np.array([curve[int(step)] for step in steps], np.float64)
