"""A mixture of data sources by weights, at random access (spec D-8)."""

import hashlib
import json
from collections.abc import Sequence

import grain

from fp8ref.train.data.windows import Windows


def train(splits: Sequence[Windows], weights: Sequence[float], seed: int) -> grain.MapDataset:
    """Training rows without end: any weight of the rows are a source's, spread evenly, by grain.

    Each source has a shuffle of its own, by seed plus its place, and another one each time that it begins anew.
    """
    return _mixed([grain.MapDataset.source(split).seed(seed + i).shuffle().repeat() for i, split in enumerate(splits)], weights)


def validation(splits: Sequence[Windows], weights: Sequence[float]) -> grain.MapDataset:
    """Validation rows in the same shares, whatever the seed, as many as there are before a source is used up."""
    return _mixed([grain.MapDataset.source(split).seed(0).shuffle() for split in splits], weights)


def described(mixture: Sequence[tuple[str, float]], sources: Sequence[dict]) -> dict:
    """What a manifest says: each source with its weight, and one sha256 of all."""
    each = [{"source": source, "weight": weight, **about} for (source, weight), about in zip(mixture, sources, strict=True)]
    key = json.dumps([[about["sha256"], weight] for about, (_, weight) in zip(sources, mixture, strict=True)])
    return {"mixture": each, "sha256": hashlib.sha256(key.encode()).hexdigest()}


def _mixed(rows: Sequence[grain.MapDataset], weights: Sequence[float]) -> grain.MapDataset:
    total = sum(weights)
    return grain.MapDataset.mix(rows, weights=[weight / total for weight in weights])
