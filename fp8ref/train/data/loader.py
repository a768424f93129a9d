"""Data loader: global batches as a pure function of (seed, step), for any source (spec D)."""

import contextlib
import hashlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import grain
import numpy as np

from fp8ref.shared.errors import ConfigError
from fp8ref.train.config.config import Config
from fp8ref.train.data import documents, mixture, shards, sources, tokenizers, windows
from fp8ref.train.data.mixture import Mixture
from fp8ref.train.data.sources import Source
from fp8ref.train.data.windows import InMemory, Windows

__all__ = ["Batches", "open_batches"]


@dataclass(frozen=True)
class Batches:
    """Global batches [batch_size, sequence_length + 1], int32, at random access.

    A resumed run reads no earlier step.

    train, validation  datasets of rows: row j of batch k is row k * batch_size + j.
    description        the source as JSON; its sha256 changes if the tokens do.
    evaluation         datasets of data.evaluation, by name.
    """

    train: grain.MapDataset | Mixture
    validation: grain.MapDataset | Mixture
    batch_size: int
    description: dict
    evaluation: Mapping[str, grain.MapDataset] = field(default_factory=dict)

    def step(self, step: int) -> np.ndarray:
        """The training batch of a step. No other batch is read."""
        return self._rows(self.train, step)

    def held_out(self, index: int) -> np.ndarray:
        """A validation batch; an index always gives the same one."""
        return self._rows(self.validation, index)

    def of_set(self, name: str, index: int) -> np.ndarray:
        """A batch of a set of data.evaluation; an index always gives the same one."""
        return self._rows(self.evaluation[name], index)

    def _rows(self, dataset: grain.MapDataset | Mixture, batch: int) -> np.ndarray:
        return np.stack([dataset[batch * self.batch_size + row] for row in range(self.batch_size)])


def open_batches(config: Config, *, first: bool = True) -> Batches:
    """Open config.data's tokens as batches.

    Text and documents are read whole; shards are mapped, and read on demand.

    first     whether this process shows progress, and checks tokens for all processes.
    Raises:   ConfigError: an unreadable source; a token outside the vocabulary; a short split.
    """
    data = config.data
    evaluation, evaluation_described = _evaluation(config, first)
    apart = [_alone(config, source) for source, _ in data.mixture or ((data.source, 1.0),)]
    with _naming("data.source" if data.mixture is None else "data.mixture"):
        opened = [_open(part, first) for part in apart]
    train: grain.MapDataset | Mixture
    validation: grain.MapDataset | Mixture
    if data.mixture is None:
        ((train_windows, validation_windows, description),) = opened
        train = _shuffled(train_windows, data.seed).repeat()
        validation = _shuffled(validation_windows, 0)
    else:
        weights = [weight for _, weight in data.mixture]
        train = mixture.train([split for split, _, _ in opened], weights, data.seed)
        validation = mixture.validation([split for _, split, _ in opened], weights)
        description = mixture.described(data.mixture, [about for _, _, about in opened])
        least = data.batch_size * config.run.eval_batches
        if len(validation) < least:
            raise _too_short(
                "data.mixture", "validation", len(validation), least, data.sequence_length
            )
    return Batches(
        train=train,
        # validation has a fixed seed: data.seed may differ between runs whose losses are compared
        validation=validation,
        batch_size=data.batch_size,
        description={"source": data.source, **description} | evaluation_described,
        evaluation=evaluation,
    )


def _alone(config: Config, source: str) -> Config:
    """The config with one source alone."""
    return config.replace(data={"source": source, "mixture": None, "evaluation": None})


@contextlib.contextmanager
def _naming(key: str) -> Iterator[None]:
    """In this context a ConfigError names the key that the source is of."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace("data.source", key)) from error


def _shuffled(split: Windows, seed: int) -> grain.MapDataset:
    return grain.MapDataset.source(split).seed(seed).shuffle()


def _evaluation(config: Config, first: bool) -> tuple[dict[str, grain.MapDataset], dict]:
    """All windows of each set of data.evaluation, in a fixed order; and what manifests say."""
    sets, described, length = {}, {}, config.data.sequence_length
    least = config.data.batch_size * config.run.eval_batches
    for name, source in config.data.evaluation or ():
        with _naming("data.evaluation"):
            train, held_out, about = _splits(_alone(config, source), first)
        both = Windows([*train.parts, *held_out.parts], length)
        if not least <= len(both) <= windows.MOST:
            raise _too_short(f"data.evaluation {name!r}", "whole", len(both), least, length)
        sets[name], described[name] = _shuffled(both, 0), {"source": source, **about}
    return sets, {"evaluation": described} if described else {}


def _open(config: Config, first: bool) -> tuple[Windows, Windows, dict]:
    """(training windows, validation windows, description) of data.source.

    Raises:   ConfigError: a split has too few windows, or more than can be shuffled.
    """
    data = config.data
    train, validation, description = _splits(config, first, trains=True)
    needed = {
        "train": (train, data.batch_size),
        "validation": (validation, data.batch_size * config.run.eval_batches),
    }
    for name, (split, least) in needed.items():
        if not least <= len(split) <= windows.MOST:
            subject = f"data.source {data.source!r}"
            raise _too_short(subject, name, len(split), least, data.sequence_length)
    return train, validation, description


def _too_short(subject: str, split: str, count: int, least: int, length: int) -> ConfigError:
    problem = (
        f"{windows.MOST} is the most that can be shuffled. Raise data.sequence_length, or "
        "name fewer files."
    )
    if count < least:
        problem = (
            f"{least} are needed. Give more text, in more files (a file belongs to one split), "
            "lower data.batch_size, data.sequence_length or run.eval_batches, or change "
            "data.validation_fraction."
        )
    holds = f"the {split} split holds {count} sequences of {length} tokens"
    return ConfigError(f"{subject}: {holds}, and {problem}")


def _splits(config: Config, first: bool, *, trains: bool = False) -> tuple[Windows, Windows, dict]:
    """As ``_open``. trains: refuse a source that is all for validation by its names."""
    data = config.data
    source = sources.find(data)
    if source.kind == "hub":
        raise ConfigError(
            f"data.source {data.source!r} is a dataset of the hub, which can only be read from "
            "its beginning. Training reads at any place. Write shards of it first: fp8ref "
            f"data prepare --source {shlex.quote(data.source)} --out tokens; then set "
            "data.source to 'tokens'."
        )
    by_name = source.kind in ("shards", "documents")
    alone = by_name and all(sources.is_validation(name) for name, _ in source.files)
    if trains and alone:
        raise ConfigError(
            f"data.source {data.source!r}: every file is for validation by its name, such as "
            f"{source.files[0][0]!r} (D-5). Add files for training, or rename some."
        )
    if source.kind == "shards":
        return _shards(config, source, first)
    if source.kind == "text" and data.tokenizer is None and data.end_of_document is None:
        return _bytes(config, source)
    return _documents(config, source, first)


def _bytes(config: Config, source: Source) -> tuple[Windows, Windows, dict]:
    """Text files as bytes, one concatenated sequence for each split (D-1)."""
    documents.check_size(config.data, source)
    splits: dict[bool, list[bytes]] = {False: [], True: []}
    for name, path in source.files:
        held_out = documents.file_is_validation(name, config.data.validation_fraction)
        splits[held_out].append(documents.read_bytes(path))
    train, validation = (
        np.frombuffer(b"".join(splits[held_out]), np.uint8) for held_out in (False, True)
    )
    hashed = hashlib.sha256()
    for part in (train.data, b"\0", validation.data):
        hashed.update(part)
    description = {
        "files": len(source.files),
        "sha256": hashed.hexdigest(),
        "train_bytes": len(train),
        "validation_bytes": len(validation),
        "validation_unigram_entropy": unigram_entropy(validation),
    }
    return *_whole([train, validation], config), description


def _documents(config: Config, source: Source, first: bool) -> tuple[Windows, Windows, dict]:
    """Documents, tokenized now and kept in memory (D-6)."""
    tokenizer = tokenizers.load(config.data, source.kind)
    owner = f"tokenizer {tokenizer.name}"
    shards.check_vocabulary(tokenizer.vocab_size, config.model.vocab_size, owner)
    documents.check_size(config.data, source)
    splits: dict[bool, list[np.ndarray]] = {False: [], True: []}
    for held_out, tokens in documents.tokenized(config.data, source, tokenizer, shown=first):
        splits[held_out].append(tokens)
    empty = [np.empty(0, tokenizer.dtype)]
    train, validation = (np.concatenate(splits[held_out] or empty) for held_out in (False, True))
    hashed = hashlib.sha256()
    for part in (train, validation):
        hashed.update(len(part).to_bytes(8, "little") + part.astype("<u4").tobytes())
    description = {
        "files": len(source.files),
        "tokenizer": tokenizer.name,
        "sha256": hashed.hexdigest(),
        "train_tokens": len(train),
        "validation_tokens": len(validation),
        "validation_unigram_entropy": unigram_entropy(validation),
    }
    return *_whole([train, validation], config), description


def _shards(config: Config, source: Source, first: bool) -> tuple[Windows, Windows, dict]:
    """Token shards, memory-mapped when a window of theirs is read (D-4, D-5)."""
    data, length = config.data, config.data.sequence_length
    vocab_size = config.model.vocab_size
    opened = shards.open_shards(source, data.token_dtype, vocab_size, length, scan=first)
    train, validation = shards.split(opened, data.validation_fraction, length)
    description = {
        "sha256": shards.fingerprint(opened),
        "tokens": sum(map(len, opened)),
        "files": [{"name": s.name, "bytes": s.bytes, "tokens": len(s)} for s in opened],
    }
    return Windows(train, length), Windows(validation, length), description


def _whole(splits: Sequence[np.ndarray], config: Config) -> tuple[Windows, Windows]:
    length = config.data.sequence_length
    train, validation = (
        Windows([windows.whole(InMemory(split), length)], length) for split in splits
    )
    return train, validation


def unigram_entropy(tokens: np.ndarray) -> float:
    """Entropy of the tokens in nats: the least loss without context; 0 without tokens."""
    counts = np.bincount(tokens)
    frequency = counts[counts > 0] / max(1, len(tokens))
    return float(-(frequency * np.log(frequency)).sum())
