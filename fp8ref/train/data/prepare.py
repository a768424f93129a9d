"""``fp8ref data prepare``: tokenize text or documents into token shards (spec D-7)."""

import contextlib
import dataclasses
import fcntl
import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fp8ref.shared.errors import ConfigError
from fp8ref.train.config.sections import DataConfig
from fp8ref.train.data import documents, sidecar, sources, tokenizers
from fp8ref.train.data.sidecar import Sidecar
from fp8ref.train.run import checkpoint

__all__ = ["prepare"]

SHARD_TOKENS = 10**8  # the default for the most tokens of a shard

LOCK = "lock"
"""The file that a writing process keeps locked: it shows which hidden directories are leftovers."""


class _Writer:
    """Writes the shards of one split, one at a time. most: tokens in a shard."""

    def __init__(self, folder: Path, split: str, most: int) -> None:
        self._folder, self._split, self._most = folder, split, most
        self._file: BinaryIO | None = None
        self._left = 0
        self._hash = hashlib.sha256()
        self.files: dict[str, sidecar.File] = {}
        self.max_id = -1

    def write(self, tokens: np.ndarray) -> None:
        if len(tokens):
            self.max_id = max(self.max_id, int(tokens.max()))
        while len(tokens):
            if self._file is None:
                self._file = (self._folder / self._name()).open("xb")
                self._left, self._hash = self._most, hashlib.sha256()
            piece, tokens = tokens[: self._left], tokens[self._left :]
            self._file.write(piece.tobytes())
            self._hash.update(piece.tobytes())
            self._left -= len(piece)
            if not self._left:
                self.finish()

    def finish(self) -> None:
        """Complete the open shard: fsync, close, and record its hashes."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            sample = sidecar.sample(self._folder / self._name())
            self.files[self._name()] = sidecar.File(
                tokens=self._most - self._left, sha256=self._hash.hexdigest(), sample=sample
            )
            self._file = None

    def abandon(self) -> None:
        """Close the open file after an error, even if the disk is full."""
        if self._file is not None:
            # buffered tokens are lost; the folder is removed anyway
            with contextlib.suppress(OSError):
                self._file.close()

    def _name(self) -> str:
        return f"{self._split}-{len(self.files):05d}.bin"


def prepare(
    data: DataConfig, out: Path, *, shard_tokens: int = SHARD_TOKENS, hf_split: str | None = None
) -> Sidecar:
    """Tokenize a source into train-00000.bin, val-00000.bin and so on, and shards.json, in ``out``.

    The directory appears when it is complete, or not at all.
    Raises:   ConfigError: out is not empty or cannot be written; an unusable source or tokenizer.
    """
    if shard_tokens < 2:
        raise ConfigError(
            "--shard-tokens is at least 2, for a window of one token and the next; got "
            f"{shard_tokens}."
        )
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(
            f"--out {out} exists and is not empty; it is left alone. Name another directory."
        )
    source = sources.find(data)
    if source.kind == "shards":
        raise ConfigError(
            f"--source {data.source!r} is token shards already. Train from it: data.source "
            "takes it as it is."
        )
    if hf_split is not None:
        if source.kind != "hub" or not hf_split:
            raise ConfigError(
                f"--hf-split names a split of a --source hf:org/name; got {hf_split!r} and "
                f"--source {data.source!r}."
            )
        source = dataclasses.replace(source, split=hf_split)
    tokenizer = tokenizers.load(data, source.kind)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with hidden_folder(out) as hidden:
            folder = hidden / "shards"
            folder.mkdir()
            # fails now, not after hours, if out is a link or mount point that cannot be replaced
            if out.exists():
                os.rename(folder, out)
                folder.mkdir()
            description = _write(data, source, tokenizer, folder, shard_tokens)
            os.rename(folder, out)
            checkpoint.sync(out.parent)
    except OSError as error:
        raise ConfigError(
            f"--out {out} cannot be written ({error.strerror}); no file of it is kept. Free "
            "space, or name another."
        ) from error
    return description


@contextlib.contextmanager
def hidden_folder(out: Path) -> Iterator[Path]:
    """A new hidden directory next to out, which ``sources`` ignores.

    It is removed in the end, except after a kill.

    Leftovers of killed processes for this out are removed first, that of a live one is kept.
    """
    for old in out.parent.glob(f".{glob.escape(out.name)}.{'?' * 8}"):
        with contextlib.suppress(OSError), (old / LOCK).open("rb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old)
    with (
        tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder,
        Path(folder, LOCK).open("xb") as lock,
    ):
        # on a file system without locks, leftovers are never removed
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(folder)


def _write(
    data: DataConfig,
    source: sources.Source,
    tokenizer: tokenizers.Tokenizer,
    folder: Path,
    shard_tokens: int,
) -> Sidecar:
    # Both splits are written in one pass over the documents, each with one open file.
    train = _Writer(folder, "train", shard_tokens)
    validation = _Writer(folder, "val", shard_tokens)
    with contextlib.ExitStack() as stack:
        stack.callback(train.abandon)
        stack.callback(validation.abandon)
        for held_out, tokens in documents.tokenized(data, source, tokenizer):
            (validation if held_out else train).write(tokens)
        train.finish()
        validation.finish()
    if not train.files:
        raise ConfigError(
            f"--source {data.source!r} holds no text for training. Give more, or lower "
            "--validation-fraction."
        )
    description = Sidecar(
        format="fp8ref shards 2",
        source=data.source,
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end,
        dtype="uint16" if tokenizer.dtype.itemsize == 2 else "uint32",
        max_id=max(train.max_id, validation.max_id),
        files={**train.files, **validation.files},
    )
    checkpoint.sync(sidecar.write(folder, description))
    checkpoint.sync(folder)
    return description
