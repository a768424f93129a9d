"""Faults of GEMMs whose M, N or K is no multiple of a tile."""

import numpy as np
from museum import ask
from museum.arithmetic import F
from museum.exhibit import Exhibit
from museum.gemms import product, right

SLICE = 64  # of K, in HipKittens
WARPS = 12


def dropped_tail(a, b, scale_a, scale_b):
    """K in whole MMAs of 32; the rest is dropped."""
    k = a.shape[1] // 32 * 32
    return right(a[:, :k], b[:, :k], scale_a, scale_b)


def unwritten_columns(a, b, scale_a, scale_b):
    """Each of 12 warps has the same multiple of 8 columns; no warp has the last ones."""
    y = right(a, b, scale_a, scale_b)
    y[:, WARPS * max(len(b) // WARPS // 8 * 8, 8) :] = 0
    return y


def stale_tail(a, b, scale_a, scale_b):
    """The last tile of 128 along K is read up to a multiple of 32: behind the numbers that were
    loaded are those of the tile before."""
    k = a.shape[1]
    last = k // 128 * 128
    y = product(a, b)
    if last:
        end = last + -(-(k - last) // 32) * 32
        stale = np.arange(k, end) - 128
        y = y + product(a[:, stale], b[:, stale])
    return y * scale_a * scale_b.T


def behind_the_rows(x):
    """The slice of K behind the end of each row: the next row begins there."""
    memory = np.append(x.astype(F).reshape(-1), np.zeros(SLICE, F))
    k = x.shape[1]
    return memory[np.arange(len(x))[:, None] * k + k + np.arange(SLICE)]


def slice_too_many(a, b, scale_a, scale_b):
    """Slices of K are taken in pairs: with an odd number the last pair reads one too many."""
    y = product(a, b)
    if a.shape[1] % (2 * SLICE) == SLICE:
        y = y + product(behind_the_rows(a), behind_the_rows(b))
    return y * scale_a * scale_b.T


EXHIBITS = (
    Exhibit(
        name="tilelang-2381",
        link="https://github.com/tile-ai/tilelang/issues/2381",
        library="TileLang",
        year=2026,
        title="The tail of K behind the last whole MMA is dropped",
        fault=dropped_tail,
        twin=right,
        ask=ask.gemm("rowwise"),
        named="at K = 112: the last 16 of K dropped",
    ),
    Exhibit(
        name="tilelang-2537",
        link="https://github.com/tile-ai/tilelang/issues/2537",
        library="TileLang",
        year=2026,
        title="Columns that belong to no warp are not written",
        fault=unwritten_columns,
        twin=right,
        ask=ask.gemm("rowwise", shapes=[(16, 104, 64)]),
        named="columns 96 to 103: zeros",
    ),
    Exhibit(
        name="tilelang-ascend-1341",
        link="https://github.com/tile-ai/tilelang-ascend/issues/1341",
        library="TileLang (Ascend)",
        year=2026,
        title="An unaligned tail of K multiplies what the tile before left",
        fault=stale_tail,
        twin=right,
        ask=ask.gemm("rowwise", shapes=[(32, 32, 200)]),
        named="24 of K, 72 to 95, added twice",
    ),
    Exhibit(
        name="hipkittens-65",
        link="https://github.com/HazyResearch/HipKittens/pull/65",
        library="HipKittens",
        year=2026,
        title="With an odd number of slices of K one slice too many is read",
        fault=slice_too_many,
        twin=right,
        ask=ask.gemm("rowwise", shapes=[(32, 32, 192)]),
        unnamed="K = 192, e4m3fn x e4m3fn, rowwise x rowwise: got -0.125, expected -0.375 (G-2)",
    ),
)
