"""A mixture of data sources by weights, at random access (spec D-8)."""

import hashlib
import heapq
import json
import math
from collections.abc import Sequence
from fractions import Fraction

import grain
import numpy as np

from fp8ref.train.data.windows import Windows


class Mixture:
    """Rows of several sources in one order, which the weights alone give.

    Row k of source i has the place (k + 1/2) / w_i; rows are in the order of places, then sources.
    A weight is the decimal number that it is written as, and all is exact.
    """

    def __init__(self, rows: Sequence[grain.MapDataset], weights: Sequence[float]) -> None:
        """rows: datasets of one row or more each; weights: one above 0 for each."""
        self._rows = rows
        exact = [Fraction(repr(float(weight))) for weight in weights]
        self._shares = [weight / sum(exact) for weight in exact]

    def __len__(self) -> int:
        """The number of rows before one is missing."""
        place, source = min((self._place(i, len(rows)), i) for i, rows in enumerate(self._rows))
        # before it: of an earlier source also the row of the same place, of a later one none
        before = (place * share + Fraction(1, 2) for share in self._shares)
        return sum(math.floor(n) if i < source else math.ceil(n) - 1 for i, n in enumerate(before))

    def __getitem__(self, index: int) -> np.ndarray:
        source, row = self.at(index)
        return self._rows[source][row]

    def at(self, index: int) -> tuple[int, int]:
        """(source, its row) of a row of the mixture; no earlier one is looked at."""
        # Up to place t a source has floor(t w + 1/2) rows. Of n sources these are together at most
        # t + n/2, and at least t - n/2: so many remain to be counted one by one.
        start = max(Fraction(0), index - Fraction(len(self._shares), 2))
        counts = [math.floor(start * share + Fraction(1, 2)) for share in self._shares]
        following = [(self._place(i, count), i, count) for i, count in enumerate(counts)]
        heapq.heapify(following)
        for _ in range(index - sum(counts)):
            _, source, row = following[0]
            heapq.heapreplace(following, (self._place(source, row + 1), source, row + 1))
        return following[0][1:]

    def _place(self, source: int, row: int) -> Fraction:
        return Fraction(2 * row + 1, 2) / self._shares[source]


def train(splits: Sequence[Windows], weights: Sequence[float], seed: int) -> Mixture:
    """Training rows without end.

    Each source is shuffled by seed plus its place, and anew each time that it begins again.
    """
    rows = [
        grain.MapDataset.source(split).seed(seed + i).shuffle().repeat()
        for i, split in enumerate(splits)
    ]
    return Mixture(rows, weights)


def validation(splits: Sequence[Windows], weights: Sequence[float]) -> Mixture:
    """Validation rows in the same shares, whatever the seed, until a source is used up."""
    return Mixture([grain.MapDataset.source(split).seed(0).shuffle() for split in splits], weights)


def described(mixture: Sequence[tuple[str, float]], sources: Sequence[dict]) -> dict:
    """What a manifest says: each source with its weight, and one sha256 of all."""
    each = [
        {"source": source, "weight": weight, **about}
        for (source, weight), about in zip(mixture, sources, strict=True)
    ]
    key = json.dumps([[about["sha256"], about["weight"]] for about in each])
    return {"mixture": each, "sha256": hashlib.sha256(key.encode()).hexdigest()}
