"""shards.json: what ``fp8ref data prepare`` says of the shards beside it (SEMANTICS D-7)."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pydantic

from fp8ref.errors import ConfigError

NAME = "shards.json"
PIECES, PIECE = 8, 2**13  # of a sample: how many, of how many bytes


@dataclass(frozen=True, kw_only=True)
class File:
    """One shard. sample: of its pieces (see ``sample``)."""

    tokens: int
    sha256: str
    sample: str


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """All shards of a directory; max_id is the largest token in any of them."""

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
    """What a sidecar says of one file."""

    path: Path
    dtype: str
    tokens: int
    sha256: str
    sample: str


for _record in (File, Sidecar):
    _record.__pydantic_config__ = pydantic.ConfigDict(extra="forbid", strict=True)  # type: ignore[union-attr]
_ADAPTER = pydantic.TypeAdapter(Sidecar)


def write(folder: Path, sidecar: Sidecar) -> Path:
    """Write shards.json into a folder."""
    path = folder / NAME
    path.write_bytes(_ADAPTER.dump_json(sidecar, indent=1) + b"\n")
    return path


def read(folder: Path) -> Sidecar | None:
    """The sidecar of a folder; None where there is none.

    Raises:   ConfigError: it is damaged or something else, or a shard that it lists is missing.
    """
    path = folder / NAME
    try:
        made = _ADAPTER.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, pydantic.ValidationError) as error:
        raise ConfigError(
            f"{path} is no sidecar of this fp8ref's data prepare ({_first(error)}). Write the shards again, or move it away."
        ) from error
    for name in made.files:
        if not (folder / name).is_file():
            raise ConfigError(f"{path} lists {name}, which is not there. Write the shards again.")
    return made


class Sidecars:
    """The sidecars beside the files of one source, each read once."""

    def __init__(self) -> None:
        self._read: dict[Path, Sidecar | None] = {}

    def of(self, path: Path) -> Recorded | None:
        """What the sidecar beside a file says of it, if there is one and it lists the file."""
        folder = path.parent
        if folder not in self._read:
            self._read[folder] = read(folder)
        made = self._read[folder]
        if made is None or path.name not in made.files:
            return None
        file = made.files[path.name]
        return Recorded(path=folder / NAME, dtype=made.dtype, tokens=file.tokens, sha256=file.sha256, sample=file.sample)

    def read(self) -> list[tuple[Path, int]]:
        """(path, vocabulary) of each that there is."""
        return [(folder / NAME, max(made.vocab_size, made.max_id + 1)) for folder, made in self._read.items() if made]


def sample(path: Path) -> str:
    """SHA-256 of pieces of a file at even distances, the first and the last among them: together all of a small one."""
    hashed = hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb") as file:
        for i in range(PIECES):
            file.seek(max(0, i * (size - PIECE) // (PIECES - 1)))
            hashed.update(file.read(PIECE))
    return hashed.hexdigest()


def _first(error: OSError | pydantic.ValidationError) -> str:
    if isinstance(error, OSError):
        return str(error)
    first = error.errors()[0]
    got = f"; got {first['input']!r}" if isinstance(first["input"], str | int) else ""
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}{got}".removeprefix(": ")
