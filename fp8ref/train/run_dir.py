"""Whether a directory is a run's to write: it is new, or may be replaced, or is the same run's. One training at a time has it."""

import errno
import fcntl
import os
import platform
from pathlib import Path

from fp8ref import console
from fp8ref.errors import ConfigError
from fp8ref.train import checkpoint, hardware, log
from fp8ref.train import config as configs
from fp8ref.train.config import Config

LOCK = ".lock"
UNKNOWN = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of file systems that have no locks
# in a run that resumes; where data lie, not which
MAY_CHANGE = (
    "config.run.out",
    "config.data.source",
    "config.parallel.",
    "config.checkpoint.",
    "config.statistics.",
    "config.log.",
)


class Lock:
    """An advisory lock on a run directory, from ``take`` until ``close``."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def take(self, out: Path) -> bool:
        """Lock a directory that is there. Whether this changed anything: not where the same object has it already.

        Raises:   ConfigError: another process trains there, or nobody can write.
        """
        if self._descriptor is not None:
            return False
        try:
            descriptor = os.open(out / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ConfigError(
                f"{out} cannot be written ({error.strerror}). Make it writable, or name another directory with --run.out."
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise ConfigError(
                f"{out} is being trained in by {owner or 'another process'}. Wait until that ends, or name another directory with --run.out."
            ) from error
        except OSError as error:
            if error.errno not in UNKNOWN:
                os.close(descriptor)
                raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
        self._descriptor = descriptor
        return True

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def claim(out: Path, config: Config, backend: str, held: Lock, *, resume: bool, overwrite: bool) -> bool:
    """Whether there is training to do in this directory, which is then locked if it is there. Changes nothing else.

    A run that already finished is left alone under ``resume``. One that did not goes on from its last checkpoint, on a mesh of any kind.
    Raises:   ConfigError: the directory holds a run, or other files, and nothing allows touching it; another process trains there; a resumed
              run of another config, but for the keys of MAY_CHANGE; it cannot be made.
    """
    if resume and overwrite:
        raise ConfigError("--resume keeps a run and --overwrite removes it; give one of them.")
    if not out.exists():
        above = next(parent for parent in out.absolute().parents if parent.exists())
        if not above.is_dir():
            raise ConfigError(f"--run.out {out} cannot be made: {above} is a file. Name another directory.")
        return True
    saved = out.is_dir() and bool(checkpoint.saved(out))
    if not (saved or (out.is_dir() and ((out / "manifest.json").is_file() or _empty(out)))):
        raise ConfigError(f"{out} exists and is not a run of fp8ref; it is left alone. Name another directory with --run.out.")
    if _empty(out):
        held.take(out)
        return True
    try:
        manifest = log.read_manifest(out)
    except ConfigError:
        if not (resume and saved):
            raise
        held.take(out)
        console.say(f"{out / 'manifest.json'} is lost or damaged. The run's checkpoints are there: it goes on from the last one.")
        return True
    if not resume and not overwrite:
        raise ConfigError(
            f"{out} already holds a run. Continue it with --resume, replace it with --overwrite, or name another directory with --run.out."
        )
    if overwrite:
        held.take(out)
        return True
    mine = {"backend": backend, "config": configs.to_dict(config), "hardware": hardware.told(config)}
    different = changed(mine, manifest)
    if different:
        key, (here, there) = next(iter(different.items()))
        raise ConfigError(
            f"{out} holds a run with another {key}: {there!r}, and now {here!r}. Resume with the same configuration, or use --overwrite."
        )
    if manifest["status"] == "finished":
        return False
    held.take(out)
    return True


def make(out: Path, held: Lock) -> None:
    """The directory, locked.

    Raises:   ConfigError: it cannot be made, or another process has begun there since it was claimed.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--run.out {out} cannot be made ({error.strerror}). Name another directory.") from error
    if held.take(out) and not _empty(out):
        raise ConfigError(f"{out} was not there, and now holds a run that another process began. Name another directory with --run.out.")


def changed(mine: dict, theirs: dict) -> dict:
    """``config.differences`` in backend, config and simulated hardware between a run and what it would go on from, but for keys of MAY_CHANGE."""
    a, b = ({key: one.get(key) for key in ("backend", "config", "hardware")} for one in (mine, theirs))
    return {key: both for key, both in configs.differences(a, b).items() if not key.startswith(MAY_CHANGE)}


def _empty(out: Path) -> bool:
    """Whether nothing is there but what a process leaves that is killed while it writes its first file."""
    return {path.name for path in out.iterdir()} <= {"manifest.json.tmp", LOCK}
