"""What tells shards from others: their bytes, or a sample of those where there are too many to read at every start (SEMANTICS D-4)."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from fp8ref.errors import ConfigError
from fp8ref.train.data.shards import Shard
from fp8ref.train.data.sources import unreadable

WHOLE = 2**30  # bytes of a source that are all read, in a few seconds; of a larger one samples are
PIECES, PIECE = 8, 2**13  # of a sample: how many, of how many bytes


def of(shards: Sequence[Shard]) -> str:
    """SHA-256 of every shard's name, size and contents: the hash a sidecar records, or that of the file or, of a large source, of a sample.

    Raises:   ConfigError: a file is not the one that its sidecar was written for.
    """
    hashed = hashlib.sha256()
    whole = sum(shard.bytes for shard in shards) <= WHOLE
    for shard in shards:
        try:
            contents = _sha256(shard.path) if whole else sample(shard.path)
        except OSError as error:
            raise unreadable(shard.path, error) from error
        if recorded := shard.recorded:
            if contents != (recorded.sha256 if whole else recorded.sample):
                raise ConfigError(
                    f"{shard.path} was changed after it was written: its SHA-256{'' if whole else ' of samples'} is {contents}, not that in "
                    f"{recorded.path}. Put the file back, or write the shards again."
                )
            contents = recorded.sha256
        hashed.update(f"{shard.name}\0{shard.bytes}\0{contents}\n".encode())
    return hashed.hexdigest()


def sample(path: Path) -> str:
    """SHA-256 of pieces of a file at even distances, the first and the last among them: together all of a small one."""
    hashed = hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb") as file:
        for i in range(PIECES):
            file.seek(max(0, i * (size - PIECE) // (PIECES - 1)))
            hashed.update(file.read(PIECE))
    return hashed.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
