"""The configuration of a report's baseline, and what other runs have in place of it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fp8ref.train.config import config as configs
from fp8ref.train.report.runs import Run
from fp8ref.train.run import train_state


@dataclass(frozen=True)
class Differences:
    """others: runs compared with the baseline; rows: (dotted key, its value, theirs)."""

    baseline: Run
    others: tuple[Run, ...]
    rows: tuple[tuple[str, str, tuple[str, ...]], ...]


def differences(runs: Sequence[Run]) -> Differences:
    """Keys of the config, versions, backend, device and text in which any run is not like the
    baseline: the first bf16 run, or the first."""
    baseline = next((run for run in runs if run.bf16), runs[0])
    others = tuple(run for run in runs if run is not baseline)
    mine, *theirs = ({**run.settings, "versions": run.versions} for run in (baseline, *others))
    keys = dict.fromkeys(key for other in theirs for key in configs.differences(mine, other))
    rows = ((key, _at(mine, key), tuple(_at(other, key) for other in theirs)) for key in keys)
    return Differences(baseline, others, tuple(rows))


def flat(settings: dict) -> list[tuple[str, str]]:
    """(dotted key, value) of a nested config, in its order."""
    return [(dotted, _said(value)) for dotted, value in train_state.flat(settings).items()]


def _at(settings: Any, dotted: str) -> str:
    for part in dotted.split("."):
        settings = settings.get(part) if isinstance(settings, dict) else None
    return _said(settings)


def _said(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
