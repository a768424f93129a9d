"""What a run leaves behind: config.toml, metrics.jsonl (one JSON object a step), statistics.jsonl where asked for, and manifest.json (what ran, and how)."""

import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import ClassVar

import tomli_w

import fp8ref
from fp8ref.recipe import Decision
from fp8ref.run import checkpoint, failure
from fp8ref.run import config as configs
from fp8ref.run.config import Config, ConfigError

PACKAGES = (
    "numpy",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "torch",
    "torchao",
    "grain",
    "safetensors",
    "tokenizers",
    "tiktoken",
)
METRICS, STATISTICS = "metrics.jsonl", "statistics.jsonl"
# in a run that resumes; where data lie, not which
MAY_CHANGE = (
    "config.run.out",
    "config.run.init_from",
    "config.data.source",
    "config.parallel.",
    "config.checkpoint.",
    "config.statistics.",
    "config.log.",
)


class RunLog:
    """A run directory being written. Each metrics line is flushed as it is written; the manifest is replaced whole."""

    def __init__(self, out: Path, manifest: dict, *, start: int = 0) -> None:
        """start: the first step that it will write; lines of that and later ones, and a torn last line, are removed; of statistics alike."""
        self.out = out
        self._manifest = manifest
        self.kept = _keep(out / METRICS, start)
        _keep(out / STATISTICS, start)
        self.status("running")
        self._metrics = (out / METRICS).open("a", encoding="utf-8")

    def step(self, metrics: dict) -> None:
        self._metrics.write(_line(metrics))
        self._metrics.flush()

    def statistics(self, line: dict) -> None:
        with (self.out / STATISTICS).open("a", encoding="utf-8") as file:
            file.write(_line(line))

    def sync(self) -> None:
        """Bring the metrics to the disk, as a checkpoint of their last step is."""
        os.fsync(self._metrics.fileno())

    def status(self, status: str, **more) -> None:
        """running, finished, stopped, interrupted or failed."""
        self._manifest = {**self._manifest, "status": status, **more}
        _replace(self.out / "manifest.json", _json(self._manifest))

    def close(self) -> None:
        self._metrics.close()


class Unwritten:
    """The same run in a process that is not the one that writes."""

    kept: ClassVar[list[dict]] = []

    def sync(self) -> None: ...
    def step(self, metrics: dict) -> None: ...
    def statistics(self, line: dict) -> None: ...
    def status(self, status: str, **more) -> None: ...
    def close(self) -> None: ...


def create(
    out: Path,
    config: Config,
    backend: str,
    *,
    data: dict,
    decisions: list[Decision],
    device: str,
    proof: dict | None = None,
    overwrite: bool = False,
    start: int = 0,
) -> RunLog:
    """Start writing a run into a directory that ``claim`` allowed.

    overwrite   drops the checkpoints of the run before.
    start       the first step, of a run that resumes from a checkpoint.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--run.out {out} cannot be made ({error.strerror}). Name another directory.") from error
    manifest = {
        "fp8ref": fp8ref.__version__,
        "backend": backend,
        "device": device,
        "versions": {"python": platform.python_version(), **_versions()},
        "config": configs.to_dict(config),
        "data": data,
        "linears": [{"path": d.path, "shape": list(d.shape), "recipe": d.recipe.name, "fp8": d.fp8, "reason": d.reason} for d in decisions],
        "starts": _starts(out, start),
    } | ({"proof": proof} if proof else {})
    _replace(out / "manifest.json", _json(manifest | {"status": "running"}))  # first: by it a directory is known for a run
    if overwrite:
        for folder in (checkpoint.FOLDER, failure.FOLDER):
            checkpoint.remove(out / folder)
    _replace(out / "config.toml", tomli_w.dumps(configs.to_dict(config)))
    return RunLog(out, manifest, start=start)


def finish(out: Path) -> None:
    """Say of a run, all of whose steps are in its last checkpoint, that it is finished."""
    manifest = read_manifest(out)
    manifest.pop("error", None)
    lines = read_metrics(out)
    _replace(out / "manifest.json", _json(manifest | {"status": "finished", "final": lines[-1] if lines else {}}))


def claim(out: Path, config: Config, backend: str, *, resume: bool, overwrite: bool) -> bool:
    """Whether there is training to do in this directory. Changes nothing; ``create`` replaces the files of an old run.

    A run that already finished is left alone under ``resume``. One that did not goes on from its last checkpoint, on a mesh of any kind.
    Raises:   ConfigError: the directory holds a run, or other files, and nothing allows touching it; a resumed run of another config, but
              for the keys of MAY_CHANGE.
    """
    if resume and overwrite:
        raise ConfigError("--resume keeps a run and --overwrite removes it; give one of them.")
    # what a process leaves that is killed while it writes its first file
    if not out.exists() or (out.is_dir() and {path.name for path in out.iterdir()} <= {"manifest.json.tmp"}):
        return True
    if not out.is_dir() or not (out / "manifest.json").is_file():
        raise ConfigError(f"{out} exists and is not a run of fp8ref; it is left alone. Name another directory with --run.out.")
    manifest = read_manifest(out)
    if overwrite:
        return True
    if not resume:
        raise ConfigError(
            f"{out} already holds a run. Continue it with --resume, replace it with --overwrite, or name another directory with --run.out."
        )
    mine = {"backend": backend, "config": configs.to_dict(config)}
    theirs = {"backend": manifest.get("backend"), "config": manifest.get("config")}
    different = changed(mine, theirs)
    if different:
        key, (here, there) = next(iter(different.items()))
        raise ConfigError(
            f"{out} holds a run with another {key}: {there!r}, and now {here!r}. Resume with the same configuration, or use --overwrite."
        )
    return manifest["status"] != "finished"


def read_manifest(out: Path) -> dict:
    """manifest.json of a run; ConfigError when it is missing, damaged or another program's."""
    try:
        manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{out / 'manifest.json'} cannot be read ({error}); {out} is no intact run. Name another directory.") from error
    if not isinstance(manifest, dict) or not {"fp8ref", "status"} <= manifest.keys():
        raise ConfigError(
            f"{out / 'manifest.json'} is not a manifest of fp8ref; {out} is left alone. Name another directory with --run.out."
        )
    return manifest


def read_metrics(out: Path) -> list[dict]:
    """The lines of metrics.jsonl, a torn last one left out."""
    return read_lines(out / "metrics.jsonl")


def read_lines(path: Path) -> list[dict]:
    """Of a file with a JSON object a line, a torn last one left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def changed(mine: dict, theirs: dict) -> dict:
    """``differences`` in backend and config between a run and what it would go on from, but for keys of MAY_CHANGE."""
    a, b = ({key: one.get(key) for key in ("backend", "config")} for one in (mine, theirs))
    return {key: both for key, both in differences(a, b).items() if not key.startswith(MAY_CHANGE)}


def differences(a, b, path: str = "") -> dict:
    """{dotted key: (a's value, b's)} where two nested dicts differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        found: dict = {}
        for key in {**a, **b}:
            found |= differences(a.get(key), b.get(key), f"{path}.{key}" if path else key)
        return found
    return {} if a == b else {path: (a, b)}


def _starts(out: Path, start: int) -> list[int]:
    """The step at which each process, or all of them together, began: 0, and those of resuming."""
    before = read_manifest(out).get("starts", []) if start else []
    return [*before, start]


def _keep(path: Path, start: int) -> list[dict]:
    """The lines of steps before ``start``, all that is left of a file."""
    kept = [line for line in read_lines(path) if line["step"] < start] if start and path.exists() else []
    path.unlink(missing_ok=True) if not kept else _replace(path, "".join(_line(line) for line in kept))
    return kept


def _json(manifest: dict) -> str:
    return json.dumps(manifest, indent=1, allow_nan=False) + "\n"


def _line(metrics: dict) -> str:
    return json.dumps(metrics, allow_nan=False) + "\n"


def _versions() -> dict[str, str]:
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
    return {name: installed[name] for name in PACKAGES if name in installed}


def _replace(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, sees the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
