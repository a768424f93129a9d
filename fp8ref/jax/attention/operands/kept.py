"""The matrices of a pass of attention, [B, H, Tq, Tk], kept tile by tile for whoever asked: scores,
codes of P, dS and its codes. Nothing else of attention is quadratic in the tokens."""

from collections.abc import Iterable

import jax.numpy as jnp
from jax import Array, lax

from fp8ref.jax.attention.operands.operands import Parts

Matrix = str
"""A matrix: scores, p_codes, ds or ds_codes.

Scores have all their factors, under the variant's base; dS is before its cast.
"""


class Kept:
    """What a loop over blocks and tiles carries of these matrices. A key that a query does not see
    has the score -infinity, and 0 else.

    start   what the loop begins with.
    """

    def __init__(self, parts: Parts, names: Iterable[Matrix]) -> None:
        self._parts = parts
        size = (*parts.q.shape[:4], parts.grid.length * parts.grid.tiles)
        self.start = {
            name: parts.zeros(*size, dtype=jnp.uint8 if name.endswith("codes") else jnp.float32)
            - (jnp.inf if name == "scores" else 0)
            for name in names
        }

    def put(self, carried: dict, name: Matrix, block: Array, tile: Array, part: Array) -> dict:
        """The matrices with one part of one replaced, if that is kept."""
        if name not in carried:
            return carried
        values = lax.bitcast_convert_type(part, jnp.uint8) if name.endswith("codes") else part
        parts, x = self._parts, carried[name]
        rows = parts.put_tile(parts.block(x, block), values, tile, axis=4)
        return carried | {name: parts.put_block(x, rows, block)}

    def whole(self, carried: dict) -> dict[str, Array]:
        """The matrices [B, H, Tq, Tk] of a loop's last carry."""
        keys = self._parts.shape_k[2]
        return {name: self._parts.ungrouped(x)[..., :keys] for name, x in carried.items()}
