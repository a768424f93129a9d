"""Sections architecture and data: the model, and what it learns from."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fp8ref.shared.errors import require, require_least


@dataclass(frozen=True, kw_only=True)
class ArchitectureConfig:
    """What is trained: the trainer's own Llama of section model, or a model of yours (spec
    T-10).
    """

    kind: Literal["llama", "transformers", "torch", "nnx"] = "llama"
    """llama: the trainer's own. transformers: a causal model of transformers (PyTorch). torch, nnx:
    what an import path makes, for PyTorch or JAX.
    """
    source: str | None = None
    """transformers: a directory with config.json, or the file. torch, nnx: module:function; called
    with vocab_size= (nnx: and rngs=), it makes a model that takes tokens [B, T] and returns logits
    [B, T, V]."""

    def __post_init__(self) -> None:
        require(
            (self.source is not None) == (self.kind != "llama"),
            "architecture.source is of a model of yours, which architecture.kind names; got "
            f"kind {self.kind!r} and source {self.source!r}.",
        )
        require(
            self.kind not in ("torch", "nnx") or ":" in (self.source or ""),
            f"architecture.source is module:function of kind {self.kind!r}; got {self.source!r}.",
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The training text, and how it is cut into batches (spec D)."""

    source: str = "stdlib"
    """Training text: stdlib, a path or a pattern. ``stdlib`` is the sources of Python's
    standard library; others are text (``*.py``, ``*.md``, ``*.txt``), token shards (.bin, .npy) or
    documents (.parquet, .jsonl). ``fp8ref data prepare`` also takes hf:org/name[:config]."""
    mixture: tuple[tuple[str, float], ...] | None = None
    """Sources and their weights, in place of source: [["books", 3.0], ["code", 1.0]] takes three
    sequences of books for each of code.
    """
    evaluation: tuple[tuple[str, str], ...] | None = None
    """Further sets to validate on, each a name and a source, of which all tokens are taken:
    [["code", "held-out/code"]] is val_loss_code.
    """
    tokenizer: str | None = None
    """Tokenizer: a tokenizer.json or tiktoken:NAME. Default: each byte is a token."""
    end_of_document: str | None = None
    """Token after each document; '' for none. Default: the tokenizer's own, or a zero byte."""
    text_column: str = "text"
    """Column of the documents that holds the text."""
    token_dtype: Literal["uint16", "uint32"] | None = None
    """Integer type of .bin shards without a shards.json. Default: uint16."""
    sequence_length: int = 128
    """Tokens in a sequence."""
    batch_size: int = 16
    """Sequences in the global batch."""
    microbatches: int = 1
    """Train the global batch in this many equal parts, one after the other.

    Gradients are summed in parallel.accumulate_dtype.
    """
    validation_fraction: float = 0.1
    """Share of the files, documents or shard tokens kept for validation.

    Unused if files are named val.
    """
    seed: int = 0
    """Seed of the data order."""

    def __post_init__(self) -> None:
        require(
            self.source != "", "data.source is 'stdlib', a file, a directory or a pattern; got ''."
        )
        if self.mixture is not None:
            require(
                self.source == "stdlib",
                f"data.mixture names the sources in place of data.source; got {self.source!r} "
                "too. Leave one of them out.",
            )
            require(
                len(self.mixture) >= 1,
                "data.mixture has at least one source; got none. Leave it out.",
            )
            for name, weight in self.mixture:
                require(
                    name != "" and 0 < weight < math.inf,
                    f"data.mixture has sources with weights above 0; got {[name, weight]}.",
                )
        names = [name for name, _ in self.evaluation or ()]
        require(
            len(set(names)) == len(names) and all(name.isidentifier() for name in names),
            "data.evaluation names each set once, by letters, digits and underscores; got "
            f"{names}.",
        )
        for key in ("tokenizer", "text_column"):
            require(
                getattr(self, key) != "", f"data.{key} is not empty; leave it out for its default."
            )
        require_least("data", 1, self, "sequence_length", "batch_size", "microbatches")
        require(
            self.batch_size % self.microbatches == 0,
            f"data.batch_size is divisible by data.microbatches; got {self.batch_size} and "
            f"{self.microbatches}. Change one of them.",
        )
        require(
            0 < self.validation_fraction < 1,
            f"data.validation_fraction must be between 0 and 1; got {self.validation_fraction}.",
        )
        require_least("data", 0, self, "seed")

    def indivisible(self, shared: str, who: str) -> str:
        """The message for a batch that devices cannot share; shared: ``batch_keys`` of the mesh."""
        parts = f" times data.microbatches = {self.microbatches}" * (self.microbatches > 1)
        return (
            f"data.batch_size is divisible by {shared} {who}{parts}; got {self.batch_size}. "
            "Change it, data.microbatches or the mesh."
        )

    def parts(self, batch: np.ndarray) -> np.ndarray:
        """A batch [B, ...] as microbatches [microbatches, B / microbatches, ...] of contiguous rows
        (spec T-7)."""
        require(
            len(batch) % self.microbatches == 0,
            f"a batch is trained in data.microbatches = {self.microbatches} equal parts; got "
            f"{len(batch)} sequences.",
        )
        return batch.reshape(self.microbatches, -1, *batch.shape[1:])
