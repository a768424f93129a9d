"""Byte-level tokens of real text, and batches that are a pure function of (seed, step) (SEMANTICS D)."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import grain
import numpy as np

from fp8ref.run.config import Config, ConfigError

SUFFIXES = {".py", ".md", ".txt"}
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Batches:
    """Global batches [batch_size, sequence_length + 1], int32, by index: any step is as near as the first."""

    train: grain.MapDataset
    validation: grain.MapDataset
    description: dict

    def step(self, step: int) -> np.ndarray:
        """The training batch of a step."""
        return self.train[step]

    def held_out(self, index: int) -> np.ndarray:
        """A validation batch; the same index is always the same batch."""
        return self.validation[index]


def open_batches(config: Config) -> Batches:
    """Read the text that config.data names and cut it into batches.

    Raises:   ConfigError: no such directory, no text in it, or a split shorter than the batches asked of it.
    """
    data = config.data
    files = _files(data.source)
    train, validation = b"", b""
    for path, content in files:
        # by the path alone, so that a file's split depends on no other file (D-1)
        if hashlib.sha256(path.encode()).digest()[0] < 256 * data.validation_fraction:
            validation += content
        else:
            train += content
    splits = {
        "train": (_Windows(train, data.sequence_length), data.batch_size),
        "validation": (_Windows(validation, data.sequence_length), data.batch_size * config.run.eval_batches),
    }
    for name, (windows, needed) in splits.items():
        if len(windows) < needed:
            raise ConfigError(
                f"data.source {data.source!r}: the {name} split holds {len(windows)} sequences of {data.sequence_length} tokens, and {needed} are needed. "
                "Give more text, or lower data.batch_size, data.sequence_length or run.eval_batches."
            )
    return Batches(
        train=grain.MapDataset.source(splits["train"][0]).seed(data.seed).shuffle().repeat().batch(data.batch_size),
        validation=grain.MapDataset.source(splits["validation"][0]).seed(0).shuffle().batch(data.batch_size),
        description={
            "source": data.source,
            "files": len(files),
            "sha256": hashlib.sha256(train + b"\0" + validation).hexdigest(),
            "train_bytes": len(train),
            "validation_bytes": len(validation),
            "validation_unigram_entropy": unigram_entropy(validation),
        },
    )


def unigram_entropy(text: bytes) -> float:
    """Entropy of the byte frequencies, in nats: the loss of the best model that ignores context."""
    frequency = np.bincount(np.frombuffer(text, np.uint8), minlength=256) / len(text)
    frequency = frequency[frequency > 0]
    return float(-(frequency * np.log(frequency)).sum())


class _Windows:
    """Windows of length + 1 bytes at stride length, as a random-access source for grain (SEMANTICS D-2)."""

    def __init__(self, text: bytes, length: int) -> None:
        self._bytes = np.frombuffer(text, np.uint8)
        self._length = length

    def __len__(self) -> int:
        return max(0, (len(self._bytes) - 1) // self._length)

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self._length
        return self._bytes[start : start + self._length + 1].astype(np.int32)


def _files(source: str) -> list[tuple[str, bytes]]:
    """(relative POSIX path, bytes) of every file of the source, ordered by path."""
    root = Path(sysconfig.get_path("stdlib")) if source == "stdlib" else Path(source)
    if not root.is_dir():
        raise ConfigError(f"data.source is 'stdlib' or a directory; got {source!r}, which is no directory.")
    suffixes, left_out = ({".py"}, LEFT_OUT) if source == "stdlib" else (SUFFIXES, set())
    files = []
    for path in root.rglob("*"):
        relative = path.relative_to(root)
        if path.suffix in suffixes and not left_out.intersection(relative.parts) and path.is_file():
            files.append((relative.as_posix(), path.read_bytes()))
    if not any(content for _, content in files):
        raise ConfigError(f"data.source {source!r} holds no {', '.join(sorted(suffixes))} files with text in them.")
    return sorted(files)
