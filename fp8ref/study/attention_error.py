"""Run recorded attention by each variant, and measure how far its output is from real arithmetic (spec A)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fp8ref.attention import VARIANTS, Mask, by_name
from fp8ref.result import Result
from fp8ref.sim import attention

if TYPE_CHECKING:
    from rich.console import Console


class Attended(NamedTuple):
    """One call of attention: q [1, H, T, D], k and v [1, Hkv, T, D], float32; whether it is causal, and its scale; None: 1 / sqrt(D)."""

    layer: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    causal: bool
    scale: float | None


@dataclass(frozen=True, kw_only=True)
class AttentionRow:
    """One layer's attention by one variant.

    error    ||o' - o|| / ||o|| of the output, o being that of real arithmetic on the same q, k and v.
    """

    layer: str
    variant: str
    error: float


@dataclass(frozen=True, kw_only=True)
class JudgedAttention(Result):
    """Every layer's attention by every variant. refused: why calls, or variants of a layer, were left out."""

    rows: tuple[AttentionRow, ...]
    refused: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether anything was judged."""
        return bool(self.rows)

    def worst(self, count: int = 10) -> list[AttentionRow]:
        """The largest errors, the largest first."""
        return sorted(self.rows, key=lambda row: -row.error)[:count]

    def to_dict(self) -> dict:
        """Rows and refusals."""
        return {"rows": [asdict(row) for row in self.rows], "refused": self.refused}

    def render(self, console: "Console") -> None:
        """A row for each variant: the median over layers and the worst."""
        from rich.table import Table

        table = Table("variant", "median error of the output", "largest", "at")
        for variant in dict.fromkeys(row.variant for row in self.rows):
            rows = [row for row in self.rows if row.variant == variant]
            worst = max(rows, key=lambda row: row.error)
            table.add_row(variant, f"{float(np.median([row.error for row in rows])):.3%}", f"{worst.error:.3%}", worst.layer)
        console.print(table)
        for name, why in self.refused.items():
            console.print(f"{name}: {why}", markup=False, soft_wrap=True)


def judge(calls: Sequence[Attended], variants: Sequence[str] | None, refused: dict[str, str]) -> JudgedAttention:
    """Each call by each variant. variants: names; None: all but exact. refused: calls that could not be recorded.

    Raises:   ValueError: an unknown variant.
    """
    rows, left_out = [], dict(refused)
    names = [by_name(name).name for name in variants] if variants is not None else [name for name in VARIANTS if name != "exact"]
    for call in calls:
        how: dict = {"mask": Mask(causal=call.causal), "scale": call.scale}
        exact = attention.forward(call.q, call.k, call.v, variant="exact", **how).o.astype(np.float64)
        size = float(np.linalg.norm(exact))
        for name in names:
            try:
                found = attention.forward(call.q, call.k, call.v, variant=name, **how).o
            except ValueError as error:
                left_out[f"{call.layer}, {name}"] = str(error)
                continue
            rows.append(AttentionRow(layer=call.layer, variant=name, error=float(np.linalg.norm(found - exact)) / size if size else 0.0))
    return JudgedAttention(rows=tuple(rows), refused=left_out)
