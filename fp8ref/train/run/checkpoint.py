"""Checkpoints: written in the background, atomic, verified by checksum (spec K).

    RUN/checkpoints/step-00000100/state/           tensors (train_state), in the backend's file
                                                   format
                                  manifest.json    everything else, and each file's size and sha256

All processes write into step-00000100.unfinished. When every one is done, the first process writes
the manifest and renames the directory.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pydantic

from fp8ref.shared import files
from fp8ref.shared.errors import ConfigError, require
from fp8ref.train.run import file_checks
from fp8ref.train.run.processes import Processes, together
from fp8ref.train.run.trainer import Trainer

FORMAT = 1  # the version of the format of the directory and its manifest

FOLDER, PREFIX = "checkpoints", "step-"
REMEDY = "Those before it are intact; make room, and continue with --resume."
"""The end of each error about a checkpoint that could not be written."""

# behind a name: none of those is ever read
UNFINISHED, REMOVED, DAMAGED = (".unfinished", ".removed", ".damaged")


class OtherFormatError(ConfigError):
    """Another version of fp8ref wrote the checkpoint: it is intact, so no older one replaces it."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose checksums match: the state after ``step`` steps."""

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps taken before it was saved."""
        return self.manifest["step"]

    @property
    def state(self) -> Path:
        """The directory of the tensors."""
        return self.path / "state"


class Checkpoints:
    """Writes a run's checkpoints; all processes call ``save`` and ``finish`` at the same steps."""

    def __init__(
        self,
        out: Path,
        about: Mapping[str, Any],
        *,
        keep_last: int,
        processes: Processes,
        size: int = 0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """about: JSON for the manifests, next to step and files.

        size: bytes of a state; 0 if unknown.
        check: raises LostRunError where ``out`` is not the run's directory any more.
        """
        self._check, self._size, self._keep_last = check, size, keep_last
        self._folder = out / FOLDER
        self._about = dict(about)
        self._processes = processes
        # one thread: checkpoints are completed in their order
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._pending: Future | None = None
        if processes.first:  # leftovers of a process that was killed
            for ending in (UNFINISHED, REMOVED):
                for rest in [*self._folder.glob(f"{PREFIX}*{ending}")]:
                    if rest.is_dir():
                        remove(rest)

    def save(self, model: Trainer, step: int, **more: Any) -> None:
        """Wait for the previous checkpoint, then begin to write the state after ``step`` steps.

        more: JSON for this checkpoint's manifest, where it is not empty.
        Returns once the state is copied; the writing overlaps with training.
        Raises:   OSError, everywhere: the previous checkpoint failed, or no directory for this one.
        """
        together(self._processes, self.finish)
        unfinished = self._folder / f"{PREFIX}{step:08d}{UNFINISHED}"
        first = self._processes.first
        together(self._processes, lambda: self._prepare(unfinished) if first else None)
        written = model.save(unfinished / "state")
        about = {"step": step} | {key: value for key, value in more.items() if value}
        self._pending = self._thread.submit(self._complete, written, unfinished, about)

    def finish(self) -> None:
        """Wait until the last checkpoint is written.

        Raises:   OSError: it could not be written; earlier checkpoints are untouched. LostRunError:
                  the run's directory is gone.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def error(self) -> Exception | None:
        """The last checkpoint's error here, if its writing has ended by now; does not wait."""
        ended = self._pending is not None and self._pending.done()
        return self._pending.exception() if ended else None  # type: ignore[return-value, union-attr]

    def _complete(
        self, written: Callable[[], None], unfinished: Path, about: dict[str, Any]
    ) -> None:
        final = unfinished.with_name(unfinished.name.removesuffix(UNFINISHED))
        try:
            written()
            if not self._processes.first:
                return
            self._check()
            # This order survives a kill at any moment: files reach the disk before the manifest, it
            # before the rename, and older checkpoints go only after the new one stands.
            write_manifest(unfinished, self._about | about)
            # a run that was resumed from an earlier checkpoint may reach this step again
            remove(final)
            os.replace(unfinished, final)
            sync(self._folder)
            for old in saved(self._folder.parent)[self._keep_last :]:
                remove(old)
        except Exception as error:
            if self._processes.first:
                # a directory that is gone is the cause, and what is in its place is not this run's
                self._check()
                # makes room for the manifest and the logs
                shutil.rmtree(unfinished, ignore_errors=True)
            raise OSError(f"checkpoint {final} could not be written: {error}. {REMEDY}") from error

    def _prepare(self, unfinished: Path) -> None:
        self._check()
        make_empty(unfinished)
        free = shutil.disk_usage(unfinished).free
        if free < self._size:
            unfinished.rmdir()
            name = unfinished.name.removesuffix(UNFINISHED)
            raise OSError(
                f"checkpoint {name} takes {self._size / 1e6:,.0f} MB, and {self._folder} has "
                f"{free / 1e6:,.0f} MB left. {REMEDY}"
            )


def of_step(out: Path, step: int, folder: str = FOLDER) -> Path:
    """The directory of the checkpoint after so many steps."""
    return out / folder / f"{PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    """How many steps were taken before a checkpoint, by its name."""
    return int(path.name.removeprefix(PREFIX))


def directories(folder: Path) -> list[Path]:
    """What is named as a step in a folder, ascending."""
    paths = folder.glob(f"{PREFIX}*")
    return sorted(path for path in paths if path.name.removeprefix(PREFIX).isdecimal())


def saved(out: Path) -> list[Path]:
    """The complete checkpoints of a run, newest first, by name: contents are not verified."""
    return [path for path in directories(out / FOLDER)[::-1] if path.is_dir()]


def latest(out: Path, say: Callable[[str], None], *, aside: bool = True) -> Checkpoint | None:
    """The newest intact checkpoint; None if there are none at all.

    ``say`` reports each damaged one that is skipped. aside: rename it, so that it is kept; only for
    the process that may write.
    Raises:   ConfigError: there are checkpoints, and none is intact.
    """
    paths = saved(out)
    problems = []
    for path in paths:
        try:
            return Checkpoint(path, verify(path))
        except OtherFormatError:
            raise
        except (ConfigError, FileNotFoundError) as error:
            # the run still trains, and has removed it after writing newer ones
            if not path.exists():
                return latest(out, say, aside=aside)
            if not isinstance(error, ConfigError):
                raise
            problems.append(str(error))
            if path != paths[-1]:
                damaged = path.with_name(path.name + DAMAGED)
                kept = f"; this one is kept as {damaged.name}" if aside else ""
                say(f"{error} Trying the one before it{kept}.")
                if aside:
                    remove(damaged)
                    os.replace(path, damaged)
    if problems:
        raise ConfigError(
            f"no checkpoint of {out} is intact: {problems[-1]} Put its files back, or train "
            "again with --overwrite."
        )
    return None


@file_checks.record
class _File:
    bytes: int
    sha256: str


@file_checks.record
class _Manifest:
    """The types of what is read of a manifest."""

    files: dict[str, _File]
    step: Annotated[int, pydantic.Field(ge=0, le=2**53)]
    backend: str = ""
    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    measured: list[tuple[int, int]] = field(default_factory=list)
    recipe: str = ""
    metrics: dict[str, str] = field(default_factory=dict)


_MANIFEST = pydantic.TypeAdapter(_Manifest)


def verify(path: Path) -> files.Record:
    """The manifest of a checkpoint, once every file matches its recorded size and sha256.

    Raises:   ConfigError: the manifest is missing, changed or of another version; a file is
              missing, changed or extra. OSError: a file exists and cannot be read, so that nothing
              is known of its bytes.
    """
    try:
        manifest = files.read_object(path / "manifest.json")
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"checkpoint {path}: manifest.json cannot be read ({error}).") from error
    own = manifest.pop("sha256", None)
    if manifest.get("format") != FORMAT:
        raise OtherFormatError(
            f"checkpoint {path}: has format {manifest.get('format')!r}; this fp8ref reads "
            f"format {FORMAT}. Use the version that wrote it."
        )
    text = f"checkpoint {path}: manifest.json was changed after it was written."
    require(own == _digest(manifest), text, ConfigError)
    file_checks.check(
        _MANIFEST, manifest, f"checkpoint {path}: manifest.json", "It was not written by fp8ref."
    )
    sizes, listed = _files(path), manifest["files"]
    for name in sorted(sizes.keys() ^ listed.keys()):
        problem = "is missing" if name in listed else "is not one of its files"
        raise ConfigError(f"checkpoint {path}: {name} {problem}.")
    for name, size in sizes.items():
        if size != listed[name]["bytes"]:
            raise ConfigError(
                f"checkpoint {path}: {name} has {size:,} bytes; {listed[name]['bytes']:,} were "
                "written."
            )
    for name, digest in _digests(path, sizes).items():
        text = f"checkpoint {path}: {name} is damaged: its sha256 is not the one that was written."
        require(digest == listed[name]["sha256"], text, ConfigError)
    return manifest


def write_manifest(path: Path, about: Mapping[str, Any]) -> None:
    """Write manifest.json after fsync of all other files: it implies a complete checkpoint."""
    sizes = _files(path)
    digests = _digests(path, sizes, sync=True)
    content = {
        "format": FORMAT,
        **about,
        "files": {name: {"bytes": sizes[name], "sha256": digests[name]} for name in sizes},
    }
    signed = content | {"sha256": _digest(content)}
    with (path / "manifest.json").open("w", encoding="utf-8") as file:
        file.write(json.dumps(signed, indent=1, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    for folder in [path, *(p for p in path.rglob("*") if p.is_dir())]:
        sync(folder)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _files(path: Path) -> dict[str, int]:
    """{name: bytes} of all files except the manifest."""
    paths = (p for p in sorted(path.rglob("*")) if not p.is_dir())
    # -1: a pipe
    sizes = {p.relative_to(path).as_posix(): p.stat().st_size if p.is_file() else -1 for p in paths}
    sizes.pop("manifest.json", None)
    return sizes


def _digests(path: Path, names: Mapping[str, int], *, sync: bool = False) -> dict[str, str]:
    """{name: sha256}, several files at a time. sync: fsync them too."""

    def read(name: str) -> str:
        with (path / name).open("rb") as file:
            if sync:
                os.fsync(file.fileno())
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor() as threads:
        return dict(zip(names, threads.map(read, names), strict=True))


def remove(path: Path) -> None:
    """Remove a directory, if it exists; of a symbolic link the link alone.

    It is renamed first: a kill halfway leaves no checkpoint that looks damaged.
    """
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        going = path if path.name.endswith(REMOVED) else path.with_name(path.name + REMOVED)
        if going != path:
            remove(going)
            os.replace(path, going)
        shutil.rmtree(going)


def make_empty(path: Path) -> None:
    """Make an empty directory in place of anything at that path; the directory two above exists."""
    remove(path)
    path.parent.mkdir(exist_ok=True)
    path.mkdir()


def sync(path: Path) -> None:
    """fsync a file, or a directory, whose names then survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
