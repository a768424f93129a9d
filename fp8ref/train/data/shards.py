"""Token shards: memory-mapped .bin and .npy files of uint16 or uint32 (spec D-4, D-5)."""

import functools
import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fp8ref.shared import console, files
from fp8ref.shared.errors import ConfigError
from fp8ref.train.data import sidecar, sources, windows
from fp8ref.train.data.sources import Source
from fp8ref.train.data.windows import Part

OPEN = 64  # the most files mapped at once: each takes a file descriptor

START = 2**16  # bytes that show whether tokens are 16 or 32 bits wide

SCANNED = 2**24  # tokens checked between two steps of the progress bar

LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""{(magic, version): dtype} of llm.c's header: 256 int32, with the number of tokens third."""

LLM_C_BYTES = 1024  # bytes of llm.c's header
NPY_HEADER = 2**16  # bytes that hold the header of a .npy of one dimension

WHOLE = 2**30
"""The most bytes of a source that is hashed whole; of a larger one, samples are hashed."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The tokens of one file, from byte ``offset`` on; recorded: the sidecar's entry, if any."""

    name: str
    path: Path
    dtype: np.dtype
    offset: int
    tokens: int
    bytes: int
    vocab_size: int
    mapped: Callable[["Shard"], np.ndarray]
    recorded: sidecar.Recorded | None = None

    def __len__(self) -> int:
        return self.tokens

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start to stop, all of them inside the model's vocabulary.

        Raises:   ConfigError: a token outside it, which the check at opening may miss.
        """
        tokens = self.mapped(self)[start:stop]
        if len(tokens) and int(tokens.max()) >= self.vocab_size:
            at = start + int(np.argmax(tokens >= self.vocab_size))
            raise ConfigError(
                f"{self.path}: token {at} (byte {self.offset + at * self.dtype.itemsize}) is "
                f"{self.mapped(self)[at]}, and model.vocab_size is {self.vocab_size}. Set "
                "model.vocab_size to that of the tokenizer, or data.token_dtype if "
                f"{self.dtype} is not what the file holds."
            )
        return tokens


def open_shards(
    source: Source, token_dtype: str | None, vocab_size: int, length: int, *, scan: bool = True
) -> list[Shard]:
    """Open and check the shards of a source.

    scan      look at every token of files without a sidecar, if their dtype admits others.
    Raises:   ConfigError: a file is unreadable, of another dtype or shape, too short for a window,
              or holds a token of vocab_size or more.
    """
    mapped = functools.lru_cache(OPEN)(_map)
    records = sidecar.Sidecars()
    opened = []
    for name, path in source.files:
        try:
            opened.append(_open(name, path, records.of(path), token_dtype, vocab_size, mapped))
        except OSError as error:
            raise sources.unreadable(path, error) from error
        # recorded shards may be short: the last one of a split holds the rest
        if len(opened[-1]) <= length and not opened[-1].recorded:
            raise ConfigError(
                f"{path} holds {len(opened[-1])} tokens, and a window is data.sequence_length + "
                f"1 = {length + 1}; windows do not cross files (D-4). Leave the file out, join "
                "it with another, or lower data.sequence_length."
            )
    for path, recorded in records.read():
        check_vocabulary(recorded, vocab_size, str(path))
    if scan:
        unknown = [shard for shard in opened if not shard.recorded]
        _scan([shard for shard in unknown if vocab_size <= np.iinfo(shard.dtype).max])
    return opened


def check_vocabulary(tokenizer: int, model: int, what: str) -> None:
    """ConfigError if a tokenizer's vocabulary is larger than the model's. what: names its owner."""
    if tokenizer > model:
        raise ConfigError(
            f"model.vocab_size is {model}, and the vocabulary of {what} {tokenizer}. Set "
            f"model.vocab_size to {tokenizer} or more."
        )


def split(shards: Sequence[Shard], fraction: float, length: int) -> tuple[list[Part], list[Part]]:
    """Windows for training and validation: whole files by name, or the last of each file (D-5)."""
    train, validation = [], []
    named = any(sources.is_validation(shard.name) for shard in shards)
    for shard in shards:
        whole = windows.whole(shard, length)
        held_out = int(whole.number * fraction)
        if named:
            held_out = whole.number if sources.is_validation(shard.name) else 0
        train.append(Part(shard, 0, whole.number - held_out))
        validation.append(Part(shard, whole.number - held_out, held_out))
    return train, validation


def fingerprint(shards: Sequence[Shard]) -> str:
    """SHA-256 over every shard's name, size and contents.

    For a large source, a sample of the contents is hashed.

    A shard with a sidecar counts by the hash recorded there, once the file was found unchanged.
    Raises:   ConfigError: a file changed after its sidecar was written.
    """
    hashed = hashlib.sha256()
    whole = sum(shard.bytes for shard in shards) <= WHOLE
    for shard in shards:
        try:
            contents = sha256(shard.path) if whole else sidecar.sample(shard.path)
        except OSError as error:
            raise sources.unreadable(shard.path, error) from error
        if recorded := shard.recorded:
            if contents != (recorded.file.sha256 if whole else recorded.file.sample):
                kind = "SHA-256" if whole else "SHA-256 of samples"
                raise ConfigError(
                    f"{shard.path} was changed after it was written: its {kind} is {contents}, "
                    f"not that in {recorded.path}. Put the file back, or write the shards again."
                )
            contents = recorded.file.sha256
        hashed.update(f"{shard.name}\0{shard.bytes}\0{contents}\n".encode())
    return hashed.hexdigest()


def sha256(path: Path) -> str:
    """Of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _map(shard: Shard) -> np.ndarray:
    try:
        return np.memmap(shard.path, shard.dtype, "r", shard.offset, (shard.tokens,))
    except OSError as error:
        raise sources.unreadable(shard.path, error) from error
    except ValueError as error:
        raise ConfigError(
            f"{shard.path} was truncated after it was opened ({error}). Put the file back."
        ) from error


def _open(
    name: str,
    path: Path,
    recorded: sidecar.Recorded | None,
    token_dtype: str | None,
    vocab_size: int,
    mapped,
) -> Shard:
    size = path.stat().st_size
    if not size:
        raise ConfigError(f"{path} is empty. Leave it out of data.source, or write it again.")
    if path.suffix == ".npy":
        dtype, offset = _npy(path)
    else:
        stated = recorded.dtype if recorded else _llm_c(path, size)
        offset = LLM_C_BYTES if stated and not recorded else 0
        dtype = np.dtype(stated or f"<u{4 if token_dtype == 'uint32' else 2}")
        if (size - offset) % dtype.itemsize:
            raise ConfigError(
                f"{path} is {size} bytes, which is not a whole number of {dtype.name} tokens. "
                "Set data.token_dtype, or write the file again."
            )
        if not stated and token_dtype is None:
            _check_width(path)
    if token_dtype not in (None, dtype.name):
        raise ConfigError(
            f"data.token_dtype is {token_dtype}, and {path} holds {dtype.name}. Leave "
            "data.token_dtype out."
        )
    tokens = (size - offset) // dtype.itemsize
    if recorded and (tokens, dtype) != (recorded.file.tokens, np.dtype(recorded.dtype)):
        raise ConfigError(
            f"{path} holds {tokens} tokens, and {recorded.path} says {recorded.file.tokens}. Write "
            "the shards again."
        )
    return Shard(
        name=name,
        path=path,
        dtype=dtype,
        offset=offset,
        tokens=tokens,
        bytes=size,
        vocab_size=vocab_size,
        mapped=mapped,
        recorded=recorded,
    )


def _npy(path: Path) -> tuple[np.dtype, int]:
    """(dtype, offset in bytes) of the tokens in a .npy file."""
    with path.open("rb") as file:
        start = io.BytesIO(file.read(NPY_HEADER))
    if start.getvalue().startswith(b"PK"):
        raise ConfigError(
            f"{path} is a .npz archive under another name. Write its array by numpy.save."
        )
    try:
        shape, _, dtype = files.read_array_header(start)
    except ValueError as error:
        raise ConfigError(
            f"{path} is not a complete .npy file ({error}). Write it again with numpy.save."
        ) from error
    if len(shape) != 1 or dtype.kind != "u" or dtype.itemsize not in (2, 4):
        raise ConfigError(
            f"{path} holds {dtype} of shape {shape}; a shard is uint16 or uint32 of one "
            "dimension. Convert it."
        )
    held, stated = path.stat().st_size, start.tell() + shape[0] * dtype.itemsize
    if type(shape[0]) is not int or held < stated or shape[0] < 0:
        raise ConfigError(
            f"{path} is not a complete .npy file: its header states the shape {shape}, and it has "
            f"{held} bytes. Write it again with numpy.save."
        )
    if held > stated:
        raise ConfigError(
            f"{path} has more bytes than its {shape[0]} tokens, which its header states. Write "
            "it again with numpy.save."
        )
    return dtype, start.tell()


def _llm_c(path: Path, size: int) -> str | None:
    """The dtype that a header of llm.c states; None without such a header.

    Raises:   ConfigError: the file's size does not match the header's number of tokens.
    """
    with path.open("rb") as file:
        magic, version, tokens = np.frombuffer(file.read(12).ljust(12, b"\0"), "<i4").tolist()
    dtype = LLM_C.get((magic, version))
    if dtype and size != (required := LLM_C_BYTES + tokens * np.dtype(dtype).itemsize):
        raise ConfigError(
            f"{path} is {size} bytes; its llm.c header, with {tokens} tokens, requires {required}. "
            "Write it again, or copy all of it."
        )
    return dtype


def _check_width(path: Path) -> None:
    """ConfigError if every second uint16 is 0: probably uint32, which no vocabulary check sees."""
    with path.open("rb") as file:
        start = file.read(START)
    low, high = np.frombuffer(start[: len(start) // 4 * 4], "<u2").reshape(-1, 2).T
    if len(low) >= 32 and low.any() and not high.any():
        raise ConfigError(
            f"{path}: read as uint16, every second token is 0; they look like uint32. Set "
            "data.token_dtype to 'uint32', or to 'uint16' if not."
        )


def _scan(shards: Sequence[Shard]) -> None:
    """Read every token once: ``Shard.read`` checks it."""
    pieces = [(shard, start) for shard in shards for start in range(0, len(shard), SCANNED)]
    if pieces:
        with console.bar("checking tokens", len(pieces)) as advance:
            for shard, start in pieces:
                shard.read(start, start + SCANNED)
                advance(shard.name)
