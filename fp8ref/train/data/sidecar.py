"""The sidecar shards.json of ``fp8ref data prepare``: dtype, tokens, hashes (spec D-7)."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pydantic

from fp8ref.shared import files
from fp8ref.shared.errors import ConfigError, require

NAME = "shards.json"  # the name of a sidecar

PIECES, PIECE = 8, 2**13  # a sample is 8 pieces of 8 KiB


@dataclass(frozen=True, kw_only=True)
class File:
    """One shard's entry. sample: the hash of ``sample``."""

    tokens: int
    sha256: str
    sample: str


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """The content of shards.json. max_id: the largest token in any of its shards."""

    format: Literal["fp8ref shards 2"]
    source: str
    tokenizer: str
    vocab_size: int
    end_of_document: int | None
    dtype: Literal["uint16", "uint32"]
    max_id: int
    files: dict[str, File]


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A sidecar's entry for one file. path: the sidecar's."""

    path: Path
    dtype: str
    file: File


for _record in (File, Sidecar):
    _record.__pydantic_config__ = pydantic.ConfigDict(extra="forbid", strict=True)  # type: ignore[union-attr]
_ADAPTER = pydantic.TypeAdapter(Sidecar)


def write(folder: Path, sidecar: Sidecar) -> Path:
    """Write shards.json into a folder."""
    path = folder / NAME
    path.write_bytes(_ADAPTER.dump_json(sidecar, indent=1) + b"\n")
    return path


def read(folder: Path) -> Sidecar | None:
    """The sidecar of a folder; None if it has none.

    Raises:   ConfigError: the file is damaged or of another kind; a shard that it lists is missing.
    """
    path = folder / NAME
    try:
        sidecar = _ADAPTER.validate_json(files.read_bytes(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a sidecar of this fp8ref's data prepare ({_first(error)}). Write "
            "the shards again, or move it away."
        ) from error
    for name in sidecar.files:
        text = f"{path} lists {name}, which is not there. Write the shards again."
        require((folder / name).is_file(), text, ConfigError)
    return sidecar


class Sidecars:
    """The sidecars of one source's folders, each read once."""

    def __init__(self) -> None:
        self._read: dict[Path, Sidecar | None] = {}

    def of(self, path: Path) -> Recorded | None:
        """The sidecar's entry for a file; None if no sidecar lists the file."""
        folder = path.parent
        if folder not in self._read:
            self._read[folder] = read(folder)
        sidecar = self._read[folder]
        if sidecar is None or path.name not in sidecar.files:
            return None
        return Recorded(path=folder / NAME, dtype=sidecar.dtype, file=sidecar.files[path.name])

    def read(self) -> list[tuple[Path, int]]:
        """(path, vocabulary size) of each sidecar read so far."""
        read = self._read.items()
        present = [(folder / NAME, sidecar) for folder, sidecar in read if sidecar]
        return [(path, max(own.vocab_size, own.max_id + 1)) for path, own in present]


def sample(path: Path) -> str:
    """SHA-256 of evenly spaced pieces of a file, first and last included; of all if it is small."""
    hashed = hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb") as file:
        for i in range(PIECES):
            file.seek(max(0, i * (size - PIECE) // (PIECES - 1)))
            hashed.update(file.read(PIECE))
    return hashed.hexdigest()


def _first(error: OSError | ValueError) -> str:
    if not isinstance(error, pydantic.ValidationError):
        return str(error)
    first = error.errors()[0]
    got = f"; got {first['input']!r}" if isinstance(first["input"], str | int) else ""
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}{got}".removeprefix(": ")
