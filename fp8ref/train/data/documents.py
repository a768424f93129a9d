"""Read, split and tokenize text files, .jsonl, .parquet and datasets of the hub (spec D-6)."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fp8ref.shared import console, files
from fp8ref.shared.errors import ConfigError
from fp8ref.train.config.sections import DataConfig
from fp8ref.train.data import sources
from fp8ref.train.data.sources import Source
from fp8ref.train.data.tokenizers import Tokenizer, library

IN_MEMORY = 4 * 2**30  # most bytes of text that a run tokenizes at its start

MEBIBYTE = 2**20  # bytes of a mebibyte, the unit of the progress bar


class Document(NamedTuple):
    """One document, UTF-8 or any bytes; read: bytes of the source read so far, for progress."""

    text: bytes
    validation: bool
    read: int


def file_is_validation(name: str, fraction: float) -> bool:
    """Whether a text file is for validation: its path alone decides, and no other file (D-1)."""
    return hashlib.sha256(name.encode()).digest()[0] < 256 * fraction


def text_is_validation(text: bytes, fraction: float) -> bool:
    """Whether a document is for validation, by its text: equal ones are on one side (D-6)."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8]) < 2**64 * fraction


def check_size(data: DataConfig, source: Source) -> None:
    """ConfigError if the source is too large to be tokenized when a run starts."""
    size = sum(_size(path) for _, path in source.files)
    if size > IN_MEMORY:
        raise ConfigError(
            f"data.source {data.source!r} has {size / 2**30:.1f} GiB of text; up to "
            f"{IN_MEMORY / 2**30:.0f} GiB are read when a run starts. Write shards of it first "
            "with fp8ref data prepare, and train from those."
        )


def tokenized(
    data: DataConfig, source: Source, tokenizer: Tokenizer, *, shown: bool = True
) -> Iterator[tuple[bool, np.ndarray]]:
    """(for validation?, tokens) of each document that is not empty, with a progress bar."""
    title, total = "tokenizing", None
    if source.kind != "hub":
        title = "tokenizing, MiB"
        total = sum(_size(path) for _, path in source.files) // MEBIBYTE
    batch: list[Document] = []
    size = count = advanced = 0
    with console.bar(title, total, shown=shown) as advance:

        def flush() -> Iterator[tuple[bool, np.ndarray]]:
            nonlocal advanced, count
            encoded = tokenizer.encode([document.text for document in batch])
            for document, tokens in zip(batch, encoded, strict=True):
                yield document.validation, tokens
            count += sum(map(len, encoded))
            done = batch[-1].read // MEBIBYTE
            advance(f"{count:,} tokens", done - advanced)
            advanced = done

        for document in read(data, source, utf8=data.tokenizer is not None):
            batch.append(document)
            size += len(document.text)
            if size >= MEBIBYTE or len(batch) == 1024:
                yield from flush()
                batch, size = [], 0
        if batch:
            yield from flush()


def read(data: DataConfig, source: Source, *, utf8: bool = True) -> Iterator[Document]:
    """Every document that is not empty, in the order of the files and within them."""
    named = any(sources.is_validation(name) for name, _ in source.files)
    done, fraction = 0, data.validation_fraction
    if source.kind == "hub":
        for text in _hub(data, source.split):
            done += len(text)
            yield Document(text, text_is_validation(text, fraction), done)
    for name, path in source.files:
        size = _size(path)
        if source.kind == "text":
            text = read_bytes(path)
            if utf8:
                _check_utf8(text, path)
            if text:
                yield Document(text, file_is_validation(name, fraction), done + size)
        else:
            rows = _jsonl if path.suffix == ".jsonl" else _parquet
            by_name = sources.is_validation(name)
            for text, share in rows(path, data.text_column):
                held_out = by_name if named else text_is_validation(text, fraction)
                yield Document(text, held_out, done + int(size * share))
        done += size


def read_bytes(path: Path) -> bytes:
    """The bytes of a file, or ConfigError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise sources.unreadable(path, error) from error


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise sources.unreadable(path, error) from error


def _jsonl(path: Path, column: str) -> Iterator[tuple[bytes, float]]:
    """(text, share of the file read) of each line."""
    done = 0
    try:
        size = _size(path) or 1  # a pipe has none
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                done += len(line)
                if not line.strip():
                    continue
                where = f"{path}: line {number}"
                remedy = "A .jsonl file holds one object a line."
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ConfigError(f"{where} is not JSON ({error}). {remedy}") from error
                if not isinstance(row, dict):
                    raise ConfigError(f"{where} is not a JSON object. {remedy}")
                if text := _text(row, column, where):
                    yield text, done / size
    except OSError as error:
        raise sources.unreadable(path, error) from error


def _parquet(path: Path, column: str) -> Iterator[tuple[bytes, float]]:
    """(text, share of the file read) of each row, of which no other column is read."""
    parquet = library("pyarrow.parquet", f"reading {path.name}")
    arrow = library("pyarrow", f"reading {path.name}")
    try:
        # a pipe cannot be read from its end
        with files.open_regular(path) as opened, parquet.ParquetFile(opened) as file:
            if column not in file.schema_arrow.names:
                _text(dict.fromkeys(file.schema_arrow.names), column, str(path))
            number = 0
            for rows in file.iter_batches(batch_size=1024, columns=[column]):
                for value in rows.column(0).to_pylist():
                    number += 1
                    if text := _text({column: value}, column, f"{path}: row {number}"):
                        yield text, number / file.metadata.num_rows
    except ConfigError:
        raise
    except (OSError, ValueError, arrow.ArrowException) as error:
        raise sources.unreadable(path, error) from error


def _hub(data: DataConfig, split: str) -> Iterator[bytes]:
    """Stream the texts of a dataset of the hub; nothing is stored on disk."""
    datasets = library("datasets", f"data.source {data.source!r}")
    name, _, config = data.source.removeprefix(sources.HUB).partition(":")
    try:
        rows = iter(datasets.load_dataset(name, config or None, split=split, streaming=True))
    except Exception as error:  # the errors of hub, client and network have no common base
        raise _unstreamable(data, split, error) from error
    number = 0
    while True:
        try:
            row = next(rows, None)
        except Exception as error:
            raise _unstreamable(data, split, error, f" after {number} rows") from error
        if row is None:
            return
        number += 1
        if text := _text(row, data.text_column, f"data.source {data.source!r}: row {number}"):
            yield text


def _text(row: dict[str, Any], column: str, where: str) -> bytes:
    if column not in row:
        raise ConfigError(
            f"{where} has no column {column!r}; it has {', '.join(map(repr, row)) or 'none'}. "
            "Set data.text_column to one of them."
        )
    if not isinstance(row[column], str):
        raise ConfigError(
            f"{where}: {column!r} is not text but {type(row[column]).__name__}. Set "
            "data.text_column, or repair the file."
        )
    try:
        return row[column].encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise ConfigError(
            f"{where}: {column!r} is not Unicode text ({error}). Repair the file."
        ) from error


def _check_utf8(text: bytes, path: Path) -> None:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 ({error}). Convert it, or leave data.tokenizer out: bytes "
            "take any file."
        ) from error


def _unstreamable(data: DataConfig, split: str, error: Exception, when: str = "") -> ConfigError:
    return ConfigError(
        f"data.source {data.source!r}, split {split!r}: datasets cannot stream it{when} "
        f"({type(error).__name__}: {error}). Check the name, hf:org/name or hf:org/name:config, "
        "the split and the network."
    )
