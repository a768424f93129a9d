"""What a run leaves behind: config.toml, metrics.jsonl (one JSON object a step) and manifest.json (what ran, and how)."""

import importlib.metadata
import itertools
import json
import os
import platform
from pathlib import Path

import tomli_w

import fp8ref
from fp8ref.recipe import Decision
from fp8ref.run import config as configs
from fp8ref.run.config import Config, ConfigError

PACKAGES = ("numpy", "jax", "jaxlib", "flax", "optax", "torch", "torchao", "grain")


class RunLog:
    """A run directory being written. Each metrics line is flushed as it is written; the manifest is replaced whole."""

    def __init__(self, out: Path, manifest: dict) -> None:
        """Metrics that are already there, of a run that starts again, are kept as metrics.0.jsonl, metrics.1.jsonl and so on."""
        self.out = out
        if (out / "metrics.jsonl").exists():
            free = next(i for i in itertools.count() if not (out / f"metrics.{i}.jsonl").exists())
            os.replace(out / "metrics.jsonl", out / f"metrics.{free}.jsonl")
        self._manifest = manifest
        self._metrics = (out / "metrics.jsonl").open("w", encoding="utf-8")
        self.status("running")

    def step(self, metrics: dict) -> None:
        self._metrics.write(json.dumps(metrics, allow_nan=False) + "\n")
        self._metrics.flush()

    def status(self, status: str, **more) -> None:
        """running, finished, interrupted or failed."""
        self._manifest = {**self._manifest, "status": status, **more}
        _replace(self.out / "manifest.json", json.dumps(self._manifest, indent=1, allow_nan=False) + "\n")

    def close(self) -> None:
        self._metrics.close()


class Unwritten:
    """The same run in a process that is not the one that writes."""

    def step(self, metrics: dict) -> None: ...
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
) -> RunLog:
    """Start writing a run into a directory that ``claim`` allowed; ``overwrite`` drops the metrics of the run before."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--run.out {out} cannot be made ({error.strerror}). Name another directory.") from error
    if overwrite:
        for old in out.glob("metrics*.jsonl"):
            old.unlink()
    _replace(out / "config.toml", tomli_w.dumps(configs.to_dict(config)))
    manifest = {
        "fp8ref": fp8ref.__version__,
        "backend": backend,
        "device": device,
        "versions": {"python": platform.python_version(), **_versions()},
        "config": configs.to_dict(config),
        "data": data,
        "linears": [{"path": d.path, "shape": list(d.shape), "recipe": d.recipe.name, "fp8": d.fp8, "reason": d.reason} for d in decisions],
    } | ({"proof": proof} if proof else {})
    return RunLog(out, manifest)


def claim(out: Path, config: Config, backend: str, *, resume: bool, overwrite: bool) -> bool:
    """Whether there is training to do in this directory. Changes nothing; ``create`` replaces the files of an old run.

    A run that already finished is left alone under ``resume``. One that did not is trained again from its first step: without
    checkpoints, that is where it resumes.
    Raises:   ConfigError: the directory holds a run, or other files, and nothing allows touching it; a resumed run of another config.
    """
    if resume and overwrite:
        raise ConfigError("--resume keeps a run and --overwrite removes it; give one of them.")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
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
    changed = differences(mine, theirs)
    changed.pop("config.run.out", None)
    if changed:
        key, (here, there) = next(iter(changed.items()))
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
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def differences(a, b, path: str = "") -> dict:
    """{dotted key: (a's value, b's)} where two nested dicts differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        found: dict = {}
        for key in {**a, **b}:
            found |= differences(a.get(key), b.get(key), f"{path}.{key}" if path else key)
        return found
    return {} if a == b else {path: (a, b)}


def _versions() -> dict[str, str]:
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
    return {name: installed[name] for name in PACKAGES if name in installed}


def _replace(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, sees the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
