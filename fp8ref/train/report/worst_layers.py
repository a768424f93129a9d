"""The layers of a run whose FP8 operands lost most, of its recorded statistics (spec Q)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

COUNT = 10
"""Rows of the table of a report."""


@dataclass(frozen=True, kw_only=True)
class Worst:
    """A layer at its worst recorded step.

    operand  <gemm>/<role> with the lowest SQNR of all steps; step: where it was.
    sqnr     in dB; None if it was not finite. last: of the same operand at the last record.
    lost     the largest share of any operand of the layer that became zero, of all steps; clipped: that was saturated.
    """

    layer: str
    operand: str
    step: int
    sqnr: float | None
    last: float | None
    lost: float
    clipped: float


def worst(statistics: Sequence[dict], count: int = COUNT) -> list[Worst]:
    """The ``count`` layers with the lowest SQNR, the lowest first; an SQNR that is not finite is below all.

    statistics: lines of statistics.jsonl, by step.
    """
    found: dict[str, Worst] = {}
    for line in statistics:
        for key, values in line["statistics"].items():
            layer, gemm, role = key.rsplit("/", 2)
            sqnr, before = values.get("sqnr"), found.get(layer)
            lost, clipped = values.get("underflow_rate") or 0.0, values.get("saturation_rate") or 0.0
            here = Worst(layer=layer, operand=f"{gemm}/{role}", step=line["step"], sqnr=sqnr, last=None, lost=lost, clipped=clipped)
            if before is not None:
                worse = before if _order(before.sqnr) <= _order(sqnr) else here
                here = replace(worse, lost=max(lost, before.lost), clipped=max(clipped, before.clipped))
            found[layer] = here
    last = statistics[-1]["statistics"] if statistics else {}
    chosen = sorted(found.values(), key=lambda one: _order(one.sqnr))[:count]
    return [replace(one, last=last.get(f"{one.layer}/{one.operand}", {}).get("sqnr")) for one in chosen]


def _order(sqnr: float | None) -> float:
    return float("-inf") if sqnr is None else sqnr
