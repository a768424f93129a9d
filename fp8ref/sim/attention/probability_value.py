"""The second GEMM of attention, probabilities times values, over tiles of keys (spec A-9).

A ``Product`` goes from tile to tile: rescale, then add a tile. Its sums are one tensor-core chain,
float32 sums in order, or exact sums of one tile.
"""

import numpy as np

from fp8ref.formats import Format
from fp8ref.sim.gemm import accumulate as sums
from fp8ref.sim.gemm import tensor_core
from fp8ref.sim.gemm.accumulate import Accumulation
from fp8ref.sim.kernels import attention as kernels
from fp8ref.sim.kernels.chains import chains_from
from fp8ref.sim.quantize import scaling
from fp8ref.spec.attention.variant import MX
from fp8ref.spec.attention.variants import Variant


class Product:
    """O of some rows: ``total``, and the ``chain`` of tiles since, float32 [rows, D]."""

    def __init__(self, rows: int, features: int, variant: Variant, p_scale_inv: np.float32) -> None:
        self.variant, self.p_scale_inv = variant, p_scale_inv
        self.total = np.zeros((rows, features), np.float32)
        self.chain = np.zeros_like(self.total)
        self.place = 0

    def rescale(self, c: np.ndarray, place: int) -> None:
        """Multiply what came before the tile at that place of the order, each row by its factor.

        Places are counted over all tiles, so that a chain ends where it does in every row,
        whichever tiles are left out.
        """
        every = self.variant.promotion
        if every is not None and every > 1 and place // every > self.place // every:
            self._promote()
        self.place = place
        if (c != 1).any():
            if every is not None:
                self.total *= c[:, None]
            self.chain *= c[:, None]

    def add(
        self, p: np.ndarray, v: np.ndarray, scale_inv: np.ndarray, codes: np.ndarray | None = None
    ) -> None:
        """Add a tile: p [rows, keys] and v [keys, D], values of the variant's format; scale_inv is
        of v, inside the tile: () or, for MX, [keys / 32, D]; ``codes`` as of ``accumulate``."""
        variant = self.variant
        plan = sums.by_name(variant.plan)
        if plan == "exact":
            self.total += self._scaled_sum(p, v, scale_inv)
            return
        self.chain = accumulate(self.chain, p, v, variant.fmt, plan, codes)
        if variant.promotion == 1:
            self._promote(scale_inv)

    def end(self) -> np.ndarray:
        """The sum over all tiles."""
        if self.variant.promotion is None:
            return self.chain
        if self.variant.promotion > 1:
            self._promote()
        return self.total

    def _promote(self, scale_inv=None) -> None:
        chain_sums = self.chain
        if self.variant.out_scales == "tile":
            chain_sums = self._with_p_scale(chain_sums * scale_inv)
        self.total = self.total + chain_sums
        self.chain = np.zeros_like(self.chain)

    def _scaled_sum(self, p: np.ndarray, v: np.ndarray, scale_inv: np.ndarray) -> np.ndarray:
        """The exact sums of a tile or its MX blocks, with the scales that apply in a tile."""
        if self.variant.granularity != "mx_1x32":
            tile_sums = sums.exact_sum(p, v.T)
            if self.variant.out_scales != "tile":
                return tile_sums
            return self._with_p_scale(tile_sums * scale_inv)
        tile_sums = np.zeros((len(p), v.shape[1]), np.float32)
        for block, scale in enumerate(scale_inv):  # [D]
            part = slice(block * MX, (block + 1) * MX)
            block_sums = sums.exact_sum(p[:, part], v[part].T) * scale
            tile_sums = tile_sums + self._with_p_scale(block_sums)
        return tile_sums

    def _with_p_scale(self, tile_sums: np.ndarray) -> np.ndarray:
        """Sums times the scale_inv of P, for variants where P has its own scale."""
        return tile_sums if self.p_scale_inv == 1 else tile_sums * self.p_scale_inv


def accumulate(
    acc: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    fmt: Format,
    plan: str | Accumulation,
    codes: np.ndarray | None = None,
) -> np.ndarray:
    """acc [M, N] and the products of a [M, K] and b [K, N] of fmt: one chain (G-10), or in order
    (G-3). ``codes`` [N, K] are those of b.T, if they are at hand."""
    if not isinstance(plan, Accumulation):
        out = acc.copy()
        kernels.in_order(np.ascontiguousarray(a), np.ascontiguousarray(b), out)
        return out
    unit = plan.unit
    out = np.ascontiguousarray(acc)
    if not unit.compiled:
        return tensor_core.chain_plain(a, b.T, out, fmt, fmt, unit)
    out = out.copy() if out is acc else out
    if codes is None:
        codes = scaling.saturate(np.ascontiguousarray(b.T), fmt)
    rows = chains_from.pack(a, fmt, unit.fused_width, unit.fraction_bits, unit.output_bits)
    chains_from.go_on(out, rows, np.ascontiguousarray(codes), fmt)
    return out
