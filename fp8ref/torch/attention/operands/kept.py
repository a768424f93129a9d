"""The matrices of a pass of attention, [B, H, Tq, Tk], kept tile by tile for whoever asked: scores,
codes of P, dS and its codes. Nothing else of attention is quadratic in the tokens."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fp8ref.torch.attention.operands.inputs import Shape

Matrix = str
"""A matrix: scores, p_codes, ds or ds_codes.

Scores have all their factors, under the variant's base; dS is before its cast.
"""

_DTYPES = {
    "scores": torch.float32,
    "p_codes": torch.uint8,
    "ds": torch.float32,
    "ds_codes": torch.uint8,
}


class Kept:
    """What is kept of a pass. A key that a query does not see has the score -infinity, and 0 else.

    names   the matrices to keep; the others cost nothing.
    size    of the pass's own layout: [B, Hkv, rows, G, keys], or [B x Hkv, rows x G, keys].
    """

    def __init__(
        self, names: Iterable[Matrix], size: tuple[int, ...], device: torch.device
    ) -> None:
        self._found = {
            name: torch.full(
                size, -torch.inf if name == "scores" else 0, dtype=_DTYPES[name], device=device
            )
            for name in names
        }

    def __contains__(self, name: Matrix) -> bool:
        return name in self._found

    def put(self, name: Matrix, at: tuple, x: Tensor) -> None:
        """Keep one part of a matrix, if the matrix is kept."""
        if name in self._found:
            self._found[name][at] = x.view(torch.uint8) if _DTYPES[name] == torch.uint8 else x

    def whole(self, name: Matrix, shape: Shape) -> Tensor | None:
        """The matrix [B, H, Tq, Tk]; None if it is not kept."""
        if name not in self._found:
            return None
        x = self._found[name]
        x = x.reshape(shape.batch, shape.key_heads, -1, shape.group, x.shape[-1]).transpose(2, 3)
        return x[:, :, :, : shape.queries, : shape.keys].reshape(
            shape.batch, shape.heads, shape.queries, shape.keys
        )

    def all(self, shape: Shape) -> dict[str, Tensor]:
        """All that is kept, by name."""
        return {name: x for name in self._found if (x := self.whole(name, shape)) is not None}
