"""The operands of attention in the fast form: batches of matrices for one GEMM a tile (spec A-18).

    q, do    [B x Hkv, Tq x G, D]    the query heads of a head of keys are neighboring rows
    k, v     [B x Hkv, Tk, D]

On a GPU they are codes, and FP8 GEMMs multiply them. A CPU has none: there they are dequantized
float32 numbers, with the softmax scale in q, and one batched GEMM takes all sequences and heads. MX
blocks are dequantized everywhere.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fp8ref.formats import Format
from fp8ref.spec.attention.variants import Variant
from fp8ref.torch.attention.observer import multiplying
from fp8ref.torch.attention.operands import heads
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.heads import Heads
from fp8ref.torch.attention.operands.operands import Tile
from fp8ref.torch.attention.operands.problem import Problem
from fp8ref.torch.gemm import batched as batched_gemm
from fp8ref.torch.gemm import hardware
from fp8ref.torch.quantize import float_values

CHUNK = 1 << 18
"""On a CPU, the scores computed at a time: of as many sequences and heads as a core's cache holds.
"""


def takes_codes(codes: Tensor, variant: Variant) -> bool:
    """Whether GEMMs take these operands: FP8 on GPUs or simulated, bfloat16 on GPUs."""
    if variant.granularity == "mx_1x32":
        return False
    if variant.fmt.bits == 8:
        return codes.device.type != "cpu" or hardware.active() is not None
    return codes.is_cuda


class Layout:
    """q, k and v of a pass as batches of matrices, and what their products are still multiplied by.

    codes     whether they are codes; else dequantized.
    scale     what scores of dequantized operands have in q: the softmax scale under the variant's
              base.
    """

    def __init__(self, tensors: dict[str, Heads], problem: Problem, step: int = 1) -> None:
        self.problem, self.variant, self.shape = problem, problem.variant, problem.shape
        self.step, device = step, tensors["q"].codes.device
        # a CPU's memory for scores is used again, and its cache holds some of them
        self.on_cpu = device.type == "cpu" and not torch.compiler.is_compiling()
        self.tensors, self.codes = tensors, takes_codes(tensors["q"].codes, self.variant)
        self.scale = problem.score_scale
        self.cap = None if problem.call.softcap is None else float(problem.call.cap)
        self.fast = self.variant.plan == "hopper_fast"
        q = self.query_rows(tensors["q"])
        self.q = q if self.codes else q.mul_(self.scale)
        self.k = operands.along_features(self.values(tensors["k"])).flatten(0, 1)
        self.v = operands.along_features(self.values(tensors["v"])).flatten(0, 1)
        self._scratch: dict[int, Tensor] = {}

    def values(self, x: Heads) -> Tensor:
        """The codes, or dequantized float32 numbers in new memory."""
        if self.codes:
            return x.codes
        numbers = float_values.decode(x.codes)
        if x.blocks is None:
            return numbers.clone() if numbers is x.codes else numbers
        return numbers.mul_(heads.spread(x.scale_inv, x))

    def query_rows(self, x: Heads) -> Tensor:
        """q or do, [B x Hkv, Tq x G, D]."""
        return self.rows(operands.grouped(self.values(x), self.shape, self.step))

    def rows(self, x: Tensor) -> Tensor:
        """[B, Hkv, T, G, ...] as [B x Hkv, T x G, ...]."""
        return x.flatten(2, 3).flatten(0, 1)

    def by_head(self, x: Tensor) -> Tensor:
        """[B x Hkv, T x G, D] as [B, H, Tq, D]."""
        shape = self.shape
        x = x.view(shape.batch, shape.key_heads, -1, shape.group, x.shape[-1])
        return operands.by_head(x, shape)

    def at(self, tile: Tile) -> slice:
        """The rows of a tile."""
        return slice(tile.first * self.shape.group, tile.last * self.shape.group)

    def place(self, part: slice, tile: Tile) -> tuple[slice, slice, slice]:
        """A part of a tile in a matrix [B x Hkv, Tq x G, Tk]."""
        return part, self.at(tile), tile.keys

    def parts(self, tile: Tile) -> Iterator[slice]:
        """The sequences and heads whose scores are computed at a time: all, but on a CPU."""
        n, each = len(self.q), (tile.last - tile.first) * self.shape.group * tile.width
        count = max(1, CHUNK // each) if self.on_cpu else n
        return (slice(begin, min(begin + count, n)) for begin in range(0, n, count))

    def scratch(self, which: int, part: slice, tile: Tile) -> Tensor | None:
        """Memory for a part's scores, reused by tiles; None if a product allocates."""
        if self.codes or not self.on_cpu:
            return None
        size = part.stop - part.start, (tile.last - tile.first) * self.shape.group, tile.width
        elements = size[0] * size[1] * size[2]
        if which not in self._scratch or self._scratch[which].numel() < elements:
            self._scratch[which] = torch.empty(elements, device=self.q.device, dtype=torch.float32)
        return self._scratch[which][:elements].view(size)

    def head_scale(self, scale: Tensor) -> Tensor:
        """A scale of a tensor or of heads, () or [B x Hkv]."""
        return scale.flatten() if scale.ndim else scale

    def scores(self, part: slice, tile: Tile, seen: list[tuple[slice, Tensor]]) -> Tensor:
        """A part's scores in the variant's base [n, rows, keys]; -infinity if masked."""
        s = self._products(part, tile)
        s = s if self.cap is None else s.tanh_().mul_(self.cap)
        return self._hide(s, part, seen)

    def scores_and_slope(
        self, part: slice, tile: Tile, seen: list[tuple[slice, Tensor]]
    ) -> tuple[Tensor, Tensor | None]:
        """``scores``, and what a softcap multiplies dS by; None without one."""
        if self.cap is None:
            return self.scores(part, tile, seen), None
        s = self._products(part, tile).tanh_()
        slope = 1.0 - s * s
        return self._hide(s.mul_(self.cap), part, seen), slope

    def _products(self, part: slice, tile: Tile) -> Tensor:
        a, b = self.q[part, self.at(tile)], self.k[part, tile.keys]
        with multiplying("scores"):
            s = batched_gemm.products(
                a, b, fast=self.fast, factor=self._factor(part), out=self.scratch(0, part, tile)
            )
        if self.codes and self.variant.granularity == "rows_128":
            q_scale_inv = operands.query_scale(self.tensors["q"].scale_inv, tile, self.problem)
            k_scale_inv = operands.key_scale(self.tensors["k"].scale_inv, tile, self.variant)
            s = s.mul_(self.rows(q_scale_inv * (k_scale_inv * self.scale))[part])
        elif self.codes and self.variant.granularity is None:
            s = s.mul_(self.scale)
        return s

    def _hide(self, s: Tensor, part: slice, seen: list[tuple[slice, Tensor]]) -> Tensor:
        for rows, hidden in seen:
            row_scores = s[:, rows].unflatten(1, (-1, self.shape.group))
            row_scores.masked_fill_(hidden if len(hidden) == 1 else hidden[part], -torch.inf)
        return s

    def _factor(self, part: slice) -> Tensor | None:
        """scale_inv of the GEMM of scores, by tensor or head."""
        if not self.codes or self.variant.granularity not in ("tensor", "head"):
            return None
        scale_inv = self.tensors["q"].scale_inv * self.tensors["k"].scale_inv
        factor = self.head_scale(scale_inv * self.scale)
        return factor[part] if factor.ndim else factor

    def hidden(self, tile: Tile) -> list[tuple[slice, Tensor]]:
        """Keys that rows do not see: a tile's rows, bool [1 or B x Hkv, queries, 1, keys]."""
        shape, group, device = self.shape, self.shape.group, self.q.device
        if self.problem.documents.q is not None:
            seen = operands.seen(tile, self.problem, device)
            assert seen is not None
            head_mask = (~seen).expand(shape.batch, shape.key_heads, *seen.shape[2:]).flatten(0, 1)
            return [(slice(0, (tile.last - tile.first) * group), head_mask)]
        masks = []
        for first, last in _partial(tile, self.problem):
            part = tile._replace(first=first, last=last, inside=False)
            seen = operands.seen(part, self.problem, device)
            assert seen is not None
            rows = slice((first - tile.first) * group, (last - tile.first) * group)
            masks.append((rows, ~seen[:, 0]))
        return masks

    def narrow(
        self, x: Tensor, fmt: Format, part: slice, tile: Tile, *, inside: bool = False
    ) -> Tensor:
        """x, which is written, rounded to a format for a GEMM, saturated; codes, or numbers.

        inside    no number of x is above the format's range.
        """
        if self.codes:
            return heads.codes(x, fmt)
        if fmt.bits != 8:
            return x.copy_(heads.rounded(x, fmt))
        return float_values.round_(x, fmt, self.scratch(2, part, tile), inside=inside)


def _partial(tile: Tile, problem: Problem) -> list[tuple[int, int]]:
    """The ranges of a tile's rows that do not see all its keys."""
    offset, (left, right) = problem.offset, problem.window
    if tile.width != tile.end - tile.begin:
        return [(tile.first, tile.last)]
    whole = tile.first if right is None else max(tile.first, tile.end - 1 - offset - right)
    behind = min(tile.last, problem.shape.queries)
    if left is not None:
        behind = min(behind, tile.begin - offset + left + 1)
    if whole >= behind:
        return [(tile.first, tile.last)]
    ranges = (tile.first, whole), (behind, tile.last)
    return [(first, last) for first, last in ranges if first < last]
