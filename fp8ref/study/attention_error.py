"""Run recorded attention by each variant, and measure its output's error (spec A)."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from fp8ref.shared import console
from fp8ref.shared.result import Result
from fp8ref.sim.attention import attention
from fp8ref.sim.attention.gradients import gradients as attention_gradients
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import VARIANTS, Mask, by_name
from fp8ref.study import recording as recordings
from fp8ref.study.recording import Attended, Recording

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class AttentionRow:
    """One layer's attention by one variant.

    error      ||o' - o|| / ||o|| of the output; o: real arithmetic on the same q, k and v.
    gradients  the same of dq, dk and dv together; None without a recorded gradient of the output,
               or of a variant without a backward pass.
    """

    layer: str
    variant: str
    error: float
    gradients: float | None = None


@dataclass(frozen=True, kw_only=True)
class JudgedAttention(Result):
    """Every layer's attention by every variant. refused: why others were left out."""

    rows: tuple[AttentionRow, ...]
    refused: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether anything was judged."""
        return bool(self.rows)

    def worst(self, count: int = 10) -> list[AttentionRow]:
        """The largest errors, the largest first."""
        return sorted(self.rows, key=lambda row: -row.error)[:count]

    def by_variant(self) -> list[tuple[str, float, AttentionRow]]:
        """(variant, the median error of the output over layers, the row of the largest)."""
        summaries = []
        for variant in dict.fromkeys(row.variant for row in self.rows):
            rows = [row for row in self.rows if row.variant == variant]
            median = float(np.median([row.error for row in rows]))
            summaries.append((variant, median, max(rows, key=lambda row: row.error)))
        return summaries

    def gradients(self, variant: str) -> str:
        """The median error of a variant's gradients, in words."""
        errors = [
            row.gradients
            for row in self.rows
            if row.variant == variant and row.gradients is not None
        ]
        return f"{float(np.median(errors)):.3%}" if errors else "-"

    def errors(self) -> tuple[list[str], list[str], np.ndarray]:
        """(layers, variants, error of the output [layers, variants]); NaN where left out."""
        layers = list(dict.fromkeys(row.layer for row in self.rows))
        names = list(dict.fromkeys(row.variant for row in self.rows))
        error_map = np.full((len(layers), len(names)), np.nan)
        for row in self.rows:
            error_map[layers.index(row.layer), names.index(row.variant)] = row.error
        return layers, names, error_map

    def to_dict(self) -> dict:
        """Rows and refusals."""
        return {"rows": [asdict(row) for row in self.rows], "refused": self.refused}

    def render(self, console: "Console") -> None:
        """A row for each variant: the median over layers and the worst."""
        from rich.table import Table

        table = Table(
            "variant", "median error of the output", "largest", "at", "median error of gradients"
        )
        for variant, median, worst in self.by_variant():
            table.add_row(
                variant, f"{median:.3%}", f"{worst.error:.3%}", worst.layer, self.gradients(variant)
            )
        console.print(table)
        for name, why in self.refused.items():
            console.print(f"{name}: {why}", markup=False, soft_wrap=True)


def judge(recording: Recording, variants: Sequence[str] | None = None) -> JudgedAttention:
    """Each recorded attention by each variant. variants: names; None: all but exact.

    Raises:   ValueError: an unknown variant; a recording without attention.
    """
    recordings.check(recording)
    recordings.listed(variants, "variants")
    if not recording.attention and not recording.refused:
        raise ValueError(
            "the recording has attention; got none. In PyTorch a model calls "
            "scaled_dot_product_attention (in transformers attention 'sdpa'), in Flax "
            "jax.nn.dot_product_attention, as nnx.MultiHeadAttention does, and record keeps 1 "
            "or more heads."
        )
    rows, left_out = [], dict(recording.refused)
    names = [name for name in VARIANTS if name != "exact"]
    if variants is not None:
        names = [by_name(name).name for name in variants]
    with console.library_bar("judge attention", len(recording.attention)) as advance:
        for one in recording.attention.values():
            real = _passed(one, "exact")
            for name in names:
                try:
                    tensors = _passed(one, name)
                except ValueError as error:
                    left_out[f"{one.layer}, {name}"] = str(error)
                    continue
                gradients = None
                if tensors["gradients"] and real["gradients"]:
                    gradients = distance(tensors["gradients"], real["gradients"])
                output = distance(tensors["error"], real["error"])
                rows.append(AttentionRow(one.layer, name, output, gradients))
            advance(one.layer)
    return JudgedAttention(rows=tuple(rows), refused=left_out)


def distance(tensors: Sequence[np.ndarray], real: Sequence[np.ndarray]) -> float:
    """||x' - x|| / ||x|| of several tensors together; 0 where x is."""
    size = math.hypot(*(float(np.linalg.norm(x)) for x in real))
    errors = (float(np.linalg.norm(a - b)) for a, b in zip(tensors, real, strict=True))
    return math.hypot(*errors) / size if size else 0.0


def _passed(one: Attended, variant: str) -> dict[str, list[np.ndarray]]:
    """The output, and the gradients where they can be had, float64."""
    call = Call(variant=by_name(variant), mask=Mask(causal=one.causal), scale=one.scale)
    result = attention.forward(one.q, one.k, one.v, variant=call)
    error = [result.o.astype(np.float64)]
    tensors: dict[str, list[np.ndarray]] = {"error": error, "gradients": []}
    if one.do is not None and call.variant.backward is not None:
        grads = attention_gradients.backward(one.do, one.q, one.k, one.v, result, variant=call)
        tensors["gradients"] = [x.astype(np.float64) for x in (grads.dq, grads.dk, grads.dv)]
    return tensors
