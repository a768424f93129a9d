"""The layers of a run whose FP8 operands lost most, of its recorded statistics (spec Q)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fp8ref.selection import statistics as stats

COUNT = 10  # rows of the table of a report


@dataclass(frozen=True, kw_only=True)
class Worst:
    """A layer at its worst recorded step.

    operand  <gemm>/<role> with the lowest SQNR of all steps; step: where it was.
    sqnr     in dB; -inf where numbers were not finite, inf where nothing was lost, as of zeros.
             last: of the same operand at the last record; None where it has none.
    lost     the layer's largest share that became zero at any step; clipped: saturated (Q-13).
    """

    layer: str
    operand: str
    step: int
    sqnr: float
    last: float | None
    lost: float
    clipped: float


def worst(statistics: Sequence[dict], count: int = COUNT) -> list[Worst]:
    """The ``count`` layers with the lowest SQNR, the lowest first. Operands with elements that are
    not finite come before all, those that lost nothing after all.

    statistics: lines of statistics.jsonl, by step.
    """
    worst_layers: dict[str, Worst] = {}
    for line in statistics:
        for key, values in line["statistics"].items():
            layer, gemm, role = key.rsplit("/", 2)
            sqnr, before = _sqnr(values), worst_layers.get(layer)
            lost = values.get("underflow_rate") or 0.0
            clipped = stats.clipped(values) or 0.0
            here = Worst(
                layer=layer,
                operand=f"{gemm}/{role}",
                step=line["step"],
                sqnr=sqnr,
                last=None,
                lost=lost,
                clipped=clipped,
            )
            if before is not None:
                worse = before if before.sqnr <= sqnr else here
                here = replace(
                    worse, lost=max(lost, before.lost), clipped=max(clipped, before.clipped)
                )
            worst_layers[layer] = here
    last = statistics[-1]["statistics"] if statistics else {}
    chosen = sorted(worst_layers.values(), key=lambda record: record.sqnr)[:count]
    own = [last.get(f"{record.layer}/{record.operand}") for record in chosen]
    return [
        replace(record, last=None if values is None else _sqnr(values))
        for record, values in zip(chosen, own, strict=True)
    ]


def _sqnr(values: dict) -> float:
    """The SQNR of a record, whose null has two reasons (Q-8)."""
    if (sqnr := values.get("sqnr")) is not None:
        return sqnr
    broken = values.get("non_finite") or any(
        values.get(key, 0.0) is None for key in ("amax", "scale_min", "scale_max")
    )
    return float("-inf") if broken else float("inf")
