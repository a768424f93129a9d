"""Cut tokens into training windows at random access (spec D-2, D-4)."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

MOST = 2**32 - 1  # the most windows that can be shuffled: grain shuffles 32-bit indices


class Tokens(Protocol):
    """A sequence of tokens, of a file or in memory."""

    def __len__(self) -> int: ...
    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens from index start to stop - 1."""
        ...


class InMemory:
    """Tokens of an array."""

    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens from index start to stop - 1, as a view of the array."""
        return self._tokens[start:stop]


class Part(NamedTuple):
    """A range of windows of one token sequence: ``first`` to ``first + number``."""

    tokens: Tokens
    first: int
    number: int


class Windows:
    """All windows of the parts, int32 [length + 1], as a random-access source for grain."""

    def __init__(self, parts: Sequence[Part], length: int) -> None:
        self._parts = [part for part in parts if part.number]
        self._ends = np.cumsum([part.number for part in self._parts])
        self._length = length

    @property
    def parts(self) -> list[Part]:
        """The parts that hold windows."""
        return list(self._parts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._parts else 0

    def __getitem__(self, index: int) -> np.ndarray:
        of = int(np.searchsorted(self._ends, index, side="right"))
        tokens, first, number = self._parts[of]
        start = (first + index - int(self._ends[of]) + number) * self._length
        return tokens.read(start, start + self._length + 1).astype(np.int32)


def count(tokens: int, length: int) -> int:
    """Number of windows of length + 1 tokens at stride length: a last token begins the next."""
    return max(0, (tokens - 1) // length)


def whole(tokens: Tokens, length: int) -> Part:
    """All windows of a token sequence."""
    return Part(tokens, 0, count(len(tokens), length))
