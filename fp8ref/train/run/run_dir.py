"""Claim a run directory: create, resume or replace a run, under a lock for one trainer."""

import errno
import fcntl
import os
import platform
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fp8ref.recipe import RECIPES
from fp8ref.shared import console, files
from fp8ref.shared.errors import ConfigError, require
from fp8ref.train.config import architecture, hardware, schedule
from fp8ref.train.config import config as configs
from fp8ref.train.config.config import Config
from fp8ref.train.run import checkpoint, failed_step, log, trackers
from fp8ref.train.run.checkpoint import Checkpoint

LOCK = ".lock"
"""The file in a run directory that a trainer locks."""

UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of file systems without locks, on which a run trains unlocked."""

MAY_CHANGE = (
    *("config.run.out", "config.data.source", "config.parallel."),
    *("config.checkpoint.", "config.statistics.", "config.log."),
)
"""Keys, or their beginnings, that may change when a run resumes.

data.source may, and the paths of data.mixture and data.evaluation: checkpoints record the data's
hashes, which are compared. statistics may not where they decide which recipe runs.
"""


class Lock:
    """An advisory lock on a run directory, from ``take`` to ``close`` or the process's end."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def take(self, out: Path) -> bool:
        """Lock an existing directory. Returns False if this object holds the lock already.

        Raises:   ConfigError: another process trains there, or the directory cannot be written.
        """
        if self._descriptor is not None:
            return False
        try:
            # not through a link, whose target the lock's text would replace
            descriptor = os.open(
                out / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666
            )
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise OSError(errno.EINVAL, f"{LOCK} is a pipe or a device")
        except OSError as error:
            raise ConfigError(
                f"{out} cannot be written ({error.strerror}). Make it writable, or name another "
                "directory with --run.out."
            ) from error
        try:
            _lock(descriptor)
        except BlockingIOError as error:
            owner = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise ConfigError(
                f"{out} is in use: {owner or 'another process'} trains there. Wait until it "
                "ends, or name another directory with --run.out."
            ) from error
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                os.close(descriptor)
                raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
        self._descriptor = descriptor
        return True

    def close(self) -> None:
        """Release the lock, if it is held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _lock(descriptor: int) -> None:
    """Lock a file, or raise as flock; wait a moment for a report that looks (``killed``)."""
    for wait in (0.01, 0.05, 0.2):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(wait)
    return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def killed(out: Path) -> bool:
    """Whether the process that trained here is gone, so that "running" is not its last word.

    False also if it ran on another machine, or without locks, which are not seen here.
    """
    try:
        with files.open_regular(out / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released when the file is closed
            owner = file.read(1000).decode(errors="replace").rstrip()
            return owner.endswith(f" on {platform.node()}")
    except (OSError, ValueError):  # held, or no lock file
        return False


def claim(
    out: Path, config: Config, backend: str, held: Lock, *, resume: bool, overwrite: bool
) -> bool:
    """Whether there is anything to train in this directory.

    Locks it if it exists; changes nothing else.

    resume     continue a run from its last checkpoint, on any mesh; False for a finished one.
    overwrite  replace a run.
    Raises:   ConfigError: the directory holds a run, or other files, and neither option is given;
              what overwrite removes is a link; another process trains there; the resumed run has
              another config, except for MAY_CHANGE; it cannot be made.
    """
    if resume and overwrite:
        raise ConfigError("--resume keeps a run and --overwrite removes it; give one of them.")
    if not out.exists():
        above = next(parent for parent in out.absolute().parents if parent.exists())
        text = f"--run.out {out} cannot be made: {above} is a file. Name another directory."
        require(above.is_dir(), text, ConfigError)
        return _starts(out, resume)
    saved = checkpoint.saved(out) if out.is_dir() else []
    if not (saved or (out.is_dir() and ((out / "manifest.json").is_file() or _empty(out)))):
        raise ConfigError(
            f"{out} exists and is not a run of fp8ref; it is left alone. Name another directory "
            "with --run.out."
        )
    if _empty(out):
        held.take(out)
        return _starts(out, resume)
    try:
        manifest = log.read_manifest(out)
    except ConfigError:
        if not (resume and saved):
            raise
        held.take(out)
        console.say(
            f"{out / 'manifest.json'} is lost or damaged. The run resumes from its last checkpoint."
        )
        return True
    if overwrite:
        _check_replaceable(out)
    elif not resume:
        raise ConfigError(
            f"{out} already holds a run. Continue it with --resume, replace it with "
            "--overwrite, or name another directory with --run.out."
        )
    elif not _goes_on(out, manifest, config, backend, saved):
        return False
    held.take(out)
    return True


def _starts(out: Path, resume: bool) -> bool:
    """True; says so where a run was to be resumed that is not there."""
    if resume:
        console.say(f"{out} holds no run to resume: this one starts at step 0.")
    return True


def _goes_on(
    out: Path, manifest: dict, config: Config, backend: str, saved: Sequence[Path]
) -> bool:
    """Whether a run that is resumed has steps left; ConfigError if it is of another config."""
    different = changed(_described(config, backend), manifest)
    trained = checkpoint.step_of(saved[0]) if saved else 0
    longer = "config.run.steps" in different and lengthens(config, manifest, trained)
    if longer:
        del different["config.run.steps"]
    if different:
        key, (here, there) = next(iter(different.items()))
        raise ConfigError(
            f"{out} holds a run with another {key}: {there!r}; got {here!r}. Resume with the "
            "same configuration, or use --overwrite."
        )
    return manifest["status"] != "finished" or longer


def _check_replaceable(out: Path) -> None:
    """ConfigError if --overwrite would remove a link or a file in place of a directory."""
    for folder in (checkpoint.FOLDER, failed_step.FOLDER, trackers.EVENTS):
        path = out / folder
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            kind = f"a link to {path.readlink()}" if path.is_symlink() else "a file"
            raise ConfigError(
                f"--overwrite removes {folder}/ of the run that it replaces, and {path} is {kind}. "
                "Nothing was changed. Remove it yourself, or name another directory with "
                "--run.out."
            )


def make(out: Path, held: Lock) -> None:
    """Make and lock the directory.

    Raises:   ConfigError: it cannot be made, or another process claimed it since.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--run.out {out} cannot be made ({error.strerror}). Name another directory."
        ) from error
    # claim saw no directory and could lock nothing: another process may have been faster since
    if held.take(out) and not _empty(out):
        raise ConfigError(
            f"another process has just started a run in {out}. Name another directory with "
            "--run.out."
        )


def on_one_device(run: Path, who: str) -> tuple[Config, Checkpoint]:
    """The config and last checkpoint of a run on one device; who: begins the error for another.

    Raises:   ConfigError: several devices; no intact checkpoint.
    """
    config = configs.load(run / "config.toml")
    text = f"{who} on one device; {run} has {config.parallel.devices}. Train with parallel.* at 1."
    require(config.parallel.devices <= 1, text, ConfigError)
    last = checkpoint.latest(run, console.say, aside=False)
    if last is None:
        raise ConfigError(
            f"{run} has no checkpoint. Train it to its end, or with --checkpoint.every."
        )
    return config, last


def last_checkpoint(out: Path, config: Config, backend: str, data: Mapping) -> Checkpoint | None:
    """The checkpoint that a run resumes from; None if it has none yet.

    data: the description of what the resumed run would train and validate on (``loader.Batches``).
    Raises:   ConfigError: none intact; another run's; changed data; FP8 moments of another mesh.
    """
    last = checkpoint.latest(out, console.say)
    if last is None:
        if (out / log.METRICS).exists():
            console.say(f"{out} has no checkpoint yet: it starts again from step 0.")
        return None
    mine = _described(config, backend)
    for key, (here, there) in changed(mine, last.manifest).items():
        if key == "config.run.steps" and lengthens(config, last.manifest, last.step):
            continue
        raise ConfigError(
            f"{last.path} is from another run: its {key} is {there!r}; this run has {here!r}. "
            "Put the run's own checkpoints back."
        )
    if last.step > config.run.steps:
        raise ConfigError(
            f"{last.path} is from another run: it holds step {last.step}, but run.steps is "
            f"{config.run.steps}. Remove it."
        )
    before, now = last.manifest["data"]["sha256"], data["sha256"]
    if before != now:
        raise ConfigError(
            f"{last.path} was trained on different data: its sha256 was {before} and is "
            f"{now}. Put the data back, or start another run from these weights: fp8ref "
            "export, then run.init_from."
        )
    sets = configs.differences(evaluated(data), evaluated(last.manifest["data"]))
    for name, (after, held) in sets.items():
        raise ConfigError(
            f"{last.path} was validated on another set: the sha256 of data.evaluation {name!r} "
            f"was {held} and is {after}. Put the set back, or start another run."
        )
    saved_on = last.manifest["config"].get("parallel")
    here = configs.to_dict(config)["parallel"]
    mesh = configs.differences(saved_on, here)
    for key in ("data", "fsdp", "expert", "tensor"):
        if config.optimizer.kind == "adamw_fp8" and key in mesh:
            raise ConfigError(
                "each process quantizes its own piece of the FP8 moments in blocks (T-6): "
                f"{last.path} has parallel.{key} {mesh[key][0]}; got {mesh[key][1]}. Resume on "
                "the mesh that saved it."
            )
    _say_if_gradients_grow(last, config, backend)
    return last


def _say_if_gradients_grow(last: Checkpoint, config: Config, backend: str) -> None:
    """Say so where grad_outputs change by more than delayed scaling has seen (K-2)."""
    source = str(last.path / "manifest.json")
    before = configs.from_dict(last.manifest["config"], source=source).parallel.sharing
    now = config.parallel.sharing
    delayed = config.numerics.attention_scaling == "delayed" or any(
        RECIPES[recipe].delayed for recipe in config.recipes
    )
    if backend == "torch" and delayed and before != now:
        effect = "loses small ones until old amaxes leave its histories"
        if now > before:
            effect = "clips the largest in its first step"
        console.say(
            f"{last.path.name} is of {before} rank{'s' * (before > 1)} that shared the batch, "
            f"and {now} read it: grad_outputs are {now / before:g} times as large as its "
            f"amaxes, so delayed scaling {effect} (K-2)."
        )


def lengthens(config: Config, manifest: dict, trained: int) -> bool:
    """Whether a config has more steps, and those taken have the same rates and recipes."""
    source = getattr(manifest, "source", "manifest.json")
    before = configs.from_dict(manifest["config"], source=source)
    now, steps = config.run.steps, before.run.steps
    if now <= steps:
        return False
    rate = config.optimizer.learning_rate_at
    rate_before = before.optimizer.learning_rate_at
    same_rates = all(rate(step, now) == rate_before(step, steps) for step in range(trained))
    entries = config.numerics.schedule or ()
    return same_rates and all(isinstance(begin, int) for begin, _ in entries)


def evaluated(data: Mapping) -> dict[str, str]:
    """{name: sha256} of the sets of data.evaluation, of a description of the data."""
    sets = data.get("evaluation")
    described = sets.items() if isinstance(sets, Mapping) else ()
    return {
        name: str(about.get("sha256")) for name, about in described if isinstance(about, Mapping)
    }


def changed(mine: dict, theirs: dict) -> dict:
    """{key: (mine, theirs)} where two manifests differ in what a resumed run may not change."""
    a, b = (
        {key: one.get(key) for key in ("backend", "hardware")}
        | {"config": _without_paths(one.get("config"))}
        for one in (mine, theirs)
    )
    for one, manifest in ((a, mine), (b, theirs)):
        # a run before there was a sum of the model cannot be compared
        if "sha256" in mine.get("model", {}) and "sha256" in theirs.get("model", {}):
            one["sha256 of architecture.source"] = manifest["model"]["sha256"]
    decide = schedule.is_measured(mine["config"]["numerics"].get("schedule"))
    free = tuple(key for key in MAY_CHANGE if not (decide and key == "config.statistics."))
    differ = configs.differences(a, b)
    return {key: both for key, both in differ.items() if not key.startswith(free)}


def _described(config: Config, backend: str) -> dict:
    """What a manifest of this run would say, as far as ``changed`` compares it."""
    return {
        "backend": backend,
        "config": configs.to_dict(config),
        "hardware": hardware.to_manifest(config),
        "model": architecture.described(config),
    }


def _without_paths(config: dict | None) -> dict | None:
    """A manifest's config, completed, without paths of data.mixture and data.evaluation."""
    if not isinstance(config, dict):
        return config
    whole = configs.completed(config)
    if whole is config:  # no config of this version
        return config
    kept = {"mixture": 1, "evaluation": 0}
    data = {
        key: [pair[kept[key]] for pair in value] if key in kept else value
        for key, value in whole.get("data", {}).items()
    }
    return whole | {"data": data}


def _empty(out: Path) -> bool:
    """Whether the directory is empty, or a run was killed there before its first manifest."""
    return {path.name for path in out.iterdir()} <= {"manifest.json.tmp", LOCK}
