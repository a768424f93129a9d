"""What is recorded of P and dS while tiles pass by: amaxes and counts, and for whoever asked the
matrices themselves. Nothing else of attention is quadratic in the tokens.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from fp8ref.formats import Format
from fp8ref.torch.attention.operands import heads
from fp8ref.torch.attention.operands.problem import Report, Shape

Matrix = str
"""A matrix: scores, p_codes, ds or ds_codes.

Scores have all their factors, under the variant's base; dS is before its cast.
"""


class Kept:
    """What is kept of a pass. A key that a query does not see has the score -infinity, and 0 else.

    names   the matrices to keep; the others cost nothing.
    size    of the pass's own layout: [B, Hkv, rows, G, keys], or [B x Hkv, rows x G, keys].
    """

    def __init__(
        self, names: Iterable[Matrix], size: tuple[int, ...], device: torch.device
    ) -> None:
        self._found = {}
        for name in names:
            dtype = torch.uint8 if name.endswith("codes") else torch.float32
            empty = -torch.inf if name == "scores" else 0
            self._found[name] = torch.full(size, empty, dtype=dtype, device=device)

    def __contains__(self, name: Matrix) -> bool:
        return name in self._found

    def put(self, name: Matrix, at: tuple, x: Tensor) -> None:
        """Keep one part of a matrix, if the matrix is kept."""
        if name in self._found:
            self._found[name][at] = x.view(torch.uint8) if name.endswith("codes") else x

    def whole(self, shape: Shape) -> dict[str, Tensor]:
        """All that is kept, by name: [B, H, Tq, Tk]."""
        matrices = {}
        for name, x in self._found.items():
            x = x.reshape(shape.batch, shape.key_heads, -1, shape.group, x.shape[-1])
            x = x.transpose(2, 3)[:, :, :, : shape.queries, : shape.keys]
            matrices[name] = x.reshape(shape.batch, shape.heads, *x.shape[3:])
        return matrices


class Tally:
    """The amax of P or dS over the tiles of a pass, and what its cast to a format does (A-12).

    largest     float32 (): the largest magnitude.
    saturated   int64 (): elements that the cast clips.
    lost        int64 (): elements of at least 2^-126 that the cast makes 0.
    """

    def __init__(self, fmt: Format, report: Report, device: torch.device) -> None:
        self._fmt, self.report = fmt, report
        self.largest = torch.zeros((), device=device, dtype=torch.float32)
        self.saturated = torch.zeros((), dtype=torch.int64, device=device)
        self.lost = torch.zeros_like(self.saturated)

    def enlarge(self, amax: Tensor) -> None:
        """Take the amax of a tile."""
        self.largest = torch.maximum(self.largest, amax)

    def count(self, x: Tensor, scale: Tensor | float) -> None:
        """Count what the cast of x times a scale clips and loses, for the report ``all``."""
        if self.report != "all" or self._fmt.bits != 8:
            return
        scaled = x * scale
        self.saturated = self.saturated + heads.above_range(scaled.abs(), self._fmt).sum()
        self.count_lost(x, heads.codes(scaled, self._fmt).view(torch.uint8) & 0x7F)

    def count_lost(self, x: Tensor, magnitudes: Tensor) -> None:
        """Count elements of x that a cast made 0, for the report ``all``, in numbers or codes."""
        if self.report == "all":
            zero = (magnitudes == 0) & (x.abs() >= torch.finfo(torch.float32).tiny)
            self.lost = self.lost + zero.sum()
