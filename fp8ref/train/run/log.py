"""The log files of a run.

config.toml       the configuration
metrics.jsonl     a JSON object for each step: loss, gradient norm, speed
statistics.jsonl  quantization statistics (Q-8) and health of states (Q-12), of the steps of
                  statistics.every
manifest.json     versions, device, data, linears, the proof, and the status
"""

import contextlib
import json
import math
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TextIO

import pydantic
import tomli_w

import fp8ref
from fp8ref.selection import rules as linear_rules
from fp8ref.selection.linears import Decision
from fp8ref.shared import console, extras, files, package_data
from fp8ref.shared.errors import ConfigError, LostRunError
from fp8ref.spec.kernels import Kernels
from fp8ref.train.config import architecture, hardware
from fp8ref.train.config import config as configs
from fp8ref.train.config.config import Config
from fp8ref.train.run import checkpoint, coverage, failed_step, file_checks

PACKAGES: tuple[str, ...] = package_data.tables(__file__, "packages")["recorded"]
"""The packages whose versions a manifest records, where they are installed."""

METRICS, STATISTICS = "metrics.jsonl", "statistics.jsonl"


class Tracker(Protocol):
    """What gets every step's metrics too."""

    def step(self, metrics: dict) -> None:
        """Log the metrics of a step."""
        ...

    def close(self, failed: bool) -> None:
        """End the log of a run that failed, or is finished."""
        ...


class RunLog:
    """Writes a run's files, and hands every step's metrics to ``trackers``.

    A metrics line is flushed when it is written; the manifest is replaced atomically.
    """

    def __init__(self, out: Path, manifest: dict, *, start: int = 0) -> None:
        """start: the first step to be written; later lines, and a torn last one, are removed."""
        self.out = out
        self.trackers: list[Tracker] = []
        self._manifest = manifest
        self.kept = _keep(out / METRICS, start, ("loss", "seconds"))
        _keep(out / STATISTICS, start, ("statistics",))
        self._metrics: TextIO | None = None
        self.status("running")
        self._metrics = (out / METRICS).open("a", encoding="utf-8")

    def check(self) -> None:
        """LostRunError if the directory, or metrics.jsonl in it, is not the one that was opened."""
        assert self._metrics is not None
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(os.fstat(self._metrics.fileno()), (self.out / METRICS).stat()):
                return
        raise LostRunError(
            f"{self.out} was removed, moved or replaced while the run trained: its {METRICS} is "
            "not the one that this run writes. Nothing more was saved. Resume from a copy of "
            "its last checkpoint, or train again in another directory, by --run.out."
        )

    def step(self, metrics: dict) -> None:
        """Append the metrics of a step."""
        assert self._metrics is not None
        with _naming(self.out / METRICS):
            self._metrics.write(_line(metrics))
            self._metrics.flush()
        for tracker in self.trackers:
            tracker.step(metrics)

    def statistics(self, line: dict) -> None:
        """Append quantization statistics, and the health of states, of a step (Q-8, Q-12)."""
        path = self.out / STATISTICS
        with _naming(path), path.open("a", encoding="utf-8") as file:
            file.write(_line(line))

    def sync(self) -> None:
        """fsync metrics and statistics.

        A checkpoint must not be newer on the disk than they are.
        Raises:   LostRunError: as ``check``.
        """
        self.check()
        assert self._metrics is not None
        os.fsync(self._metrics.fileno())
        if (self.out / STATISTICS).exists():
            checkpoint.sync(self.out / STATISTICS)

    def status(self, status: str, **more) -> None:
        """Set the manifest's status: running, finished, stopped, interrupted or failed. To trackers
        a run failed unless it is finished.

        Raises:   LostRunError: as ``check``.
        """
        self._failed = status != "finished"
        if self._metrics is not None:
            self.check()
        self._manifest = {**self._manifest, "status": status, **more}
        _replace(self.out / "manifest.json", _json(self._manifest))

    def ran(self, ran: list[list]) -> None:
        """Record which recipes of a schedule ran, each from its first step on (T-9)."""
        self.status(self._manifest["status"], schedule=self._manifest["schedule"] | {"ran": ran})

    def close(self) -> None:
        """Close the files, then every tracker.

        Raises:   OSError: a line could not be written.
        """
        assert self._metrics is not None
        with _naming(self.out / METRICS):
            self._metrics.close()
        for tracker in self.trackers:
            tracker.close(self._failed)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """In this context an OSError names this path, which one of a write does not know."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path} could not be written: {error.strerror or error}. Free space, or make the "
            "directory writable."
        ) from error


class Unwritten:
    """The log of a process other than the first: nothing is written."""

    kept: ClassVar[list[dict]] = []

    def _nothing(self, *_: Any, **__: Any) -> None:
        """The first process writes, and notices that the directory is gone."""

    check = sync = step = statistics = status = ran = close = _nothing


def manifest(
    config: Config,
    backend: str,
    *,
    data: dict,
    decisions: list[Decision],
    device: str,
    kernels: Mapping[str, Kernels] | None = None,
    proofs: Mapping[str, dict] | None = None,
    ran: list[list] | None = None,
) -> dict:
    """What the manifest of a run says before its first step; ``create`` adds where it starts.

    kernels     what casts on each device, by its name.
    proofs      of each recipe's step, where the trainer has them.
    ran         recipes of a schedule that ran, each with its first step.
    """
    manifest = {
        "fp8ref": fp8ref.__version__,
        "backend": backend,
        "device": device,
        "kernels": {name: ran.manifest for name, ran in (kernels or {}).items()},
        "versions": {"python": platform.python_version(), **extras.versions(*PACKAGES)},
        "config": configs.to_dict(config),
        "data": data,
        **_described(config, decisions, (proofs or {}).get(config.numerics.recipe)),
        "starts": [],
    }
    if config.architecture.kind != "llama":
        size = sum(map(math.prod, config.shapes.parameters.values()))
        made_of = {"class": config.shapes.kind, "parameters": size}
        manifest["model"] = made_of | architecture.described(config)
    if simulated := hardware.to_manifest(config):
        manifest["hardware"] = simulated
    if config.numerics.schedule is not None:
        each = {}
        for recipe in config.recipes:
            alone = config.under(recipe)
            each[recipe] = _described(alone, alone.decisions(), (proofs or {}).get(recipe))
        manifest["schedule"] = {"ran": ran or [], "recipes": each}
    return manifest


def create(
    out: Path, config: Config, manifest: dict, *, overwrite: bool = False, start: int = 0
) -> RunLog:
    """Begin to log a run in a directory that ``run_dir`` claimed and locked.

    overwrite   remove the checkpoints and failed steps of the run that is replaced.
    start       the first step; above 0 if the run resumes.
    """
    manifest = manifest | {"starts": _starts(out, start)}
    # first: it marks the directory as a run
    _replace(out / "manifest.json", _json(manifest | {"status": "running"}))
    if overwrite:
        for folder in (checkpoint.FOLDER, failed_step.FOLDER):
            checkpoint.remove(out / folder)
    _replace(out / "config.toml", tomli_w.dumps(configs.to_dict(config)))
    return RunLog(out, manifest, start=start)


def _described(config: Config, decisions: list[Decision], proof: dict | None) -> dict:
    """What a manifest says of a recipe: the plan of each linear, and what the proof shows."""
    linears = []
    for d in decisions:
        linear = {
            "path": d.path,
            "shape": list(d.shape),
            "recipe": d.recipe.name,
            "fp8": d.fp8,
            "reason": d.reason,
        }
        if config.numerics.rules:
            linear["operands"] = linear_rules.to_manifest(d)
        linears.append(linear)
    about = {"linears": linears, "fp8": coverage.of(config, decisions)}
    return about | ({"proof": proof} if proof else {})


def finish(out: Path) -> None:
    """Set a run's status to finished, when its last checkpoint holds all steps."""
    manifest = read_manifest(out)
    manifest.pop("error", None)
    lines = read_metrics(out)
    done = {"status": "finished", "final": lines[-1] if lines else {}}
    _replace(out / "manifest.json", _json(manifest | done))


@file_checks.record
class _Manifest:
    """The types of what is read of a manifest everywhere."""

    fp8ref: str
    status: str
    error: str = ""
    backend: str = ""
    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)


_MANIFEST = pydantic.TypeAdapter(_Manifest)


def read_manifest(out: Path) -> files.Record:
    """manifest.json of a run. ConfigError: it is missing, damaged or not of fp8ref."""
    try:
        manifest = files.read_object(out / "manifest.json")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{out / 'manifest.json'} cannot be read ({error}); {out} is not an intact run. "
            "Name another directory."
        ) from error
    if not {"fp8ref", "status"} <= manifest.keys():
        raise ConfigError(
            f"{out / 'manifest.json'} is not a manifest of fp8ref; {out} is left alone. Name "
            "another directory with --run.out."
        )
    remedy = f"{out} is not an intact run. Leave it out."
    file_checks.check(_MANIFEST, manifest, f"{out / 'manifest.json'}", remedy)
    return manifest


def read_metrics(out: Path) -> list[dict]:
    """The lines of metrics.jsonl, without a torn last one."""
    return read_lines(out / METRICS)


def read_lines(path: Path) -> list[dict]:
    """The objects of a JSON Lines file, without a torn last line; none if there is no file.

    Raises:   ConfigError: a line that is not a JSON object.
    """
    lines = _parsed(path)
    if None in lines:
        raise ConfigError(
            f"{path}, line {lines.index(None) + 1}, is not a JSON object. Repair it, or remove "
            "the file."
        )
    return [line for line in lines if line is not None]


def _parsed(path: Path) -> list[dict | None]:
    """The object of each complete line; None for a line that is not a JSON object."""
    if not path.exists():
        return []

    def parse(line: bytes) -> dict | None:
        try:
            value = files.parse_json(line.decode(errors="replace"))
        except ValueError:
            return None
        return value if isinstance(value, dict) else None

    try:
        return [parse(line) for line in files.read_lines(path) if line.endswith(b"\n")]
    except ValueError as error:
        raise ConfigError(
            f"{path} cannot be read ({error}). Repair it, or move it away."
        ) from error


def _starts(out: Path, start: int) -> list[int]:
    """The step at which the run began, and then each step from which it was resumed."""
    try:
        before = read_manifest(out).get("starts") if start else []
    except ConfigError:  # claim has said so
        before = []
    return [*(before if isinstance(before, list) else []), start]


def _keep(path: Path, start: int, keys: tuple[str, ...]) -> list[dict]:
    """Cut a file to the lines of steps before ``start``; a copy of a damaged one is kept."""
    lines = _parsed(path) if start else []
    good: list[dict] = []
    for line in lines:
        before = good[-1]["step"] if good else -1
        if line is not None and _intact(line, keys) and line["step"] > before:
            good.append(line)
    if len(good) < len(lines):
        aside = path.with_name(path.name + checkpoint.DAMAGED)
        aside.unlink(missing_ok=True)  # a link would be followed
        shutil.copyfile(path, aside)
        console.say(
            f"{path}: {len(lines) - len(good)} of {len(lines)} lines are damaged; they are left "
            f"out, and the file is kept as {aside.name}."
        )
    kept = [line for line in good if line["step"] < start]
    if kept:
        _replace(path, "".join(map(_line, kept)))
    else:
        path.unlink(missing_ok=True)
    return kept


def _intact(line: dict, keys: tuple[str, ...]) -> bool:
    """Whether a line has a step, these keys, and finite numbers or, under three keys, objects."""

    def fits(key: str, value: object) -> bool:
        if key in ("statistics", "states", "gradients"):
            return isinstance(value, dict)
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]

    step = line.get("step")
    whole = type(step) is int and step >= 0 and line.keys() >= set(keys)
    return whole and all(fits(*item) for item in line.items())


def _json(manifest: dict) -> str:
    return json.dumps(manifest, indent=1, allow_nan=False) + "\n"


def _line(metrics: dict) -> str:
    return json.dumps(metrics, allow_nan=False) + "\n"


def _replace(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, sees the old one or the new one."""
    # fsync before the rename: otherwise a crash may leave the new name with no contents
    temporary = path.with_name(path.name + ".tmp")
    with _naming(path):
        try:
            temporary.unlink(missing_ok=True)  # a link would be followed
            temporary.write_text(text, encoding="utf-8")
            checkpoint.sync(temporary)
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
