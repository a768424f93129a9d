"""Tensors that tell quantizers to e2m1fn apart."""

import numpy as np

from fp8ref.conformance.inputs import dtypes
from fp8ref.formats import E2M1FN
from fp8ref.sim.quantize import cast

SHAPE = (128, 256)  # of all of them [M, K]: whole blocks along both axes

_BLOCK = 16


def tensors(source: str) -> dict[str, np.ndarray]:
    """By kind, float32 [M, K] holding values of the dtype: the simplest first.

    ties     under scales that are powers of two: every midpoint of e2m1fn with its neighbors.
    edges    each block's largest at a power of two, 1.5 and 1.75 times it, and next to these.
    spread   normal numbers, blocks of many sizes.
    range    one element 2^40 times as large as most, blocks of zeros, and too small blocks.
    small    numbers of 2^-100; zeros: nothing else.
    fours    blocks that have equal errors whether they are scaled to 4 or to 6, to roundings.
    """
    rng = np.random.default_rng(16)
    grid = cast.decode(np.arange(8, dtype=np.uint8), E2M1FN)
    ties = (grid[1:] + grid[:-1]) / 2
    around = [np.nextafter(ties, np.float32(side)) for side in (8, 0)]
    near = np.concatenate([ties, *around, grid])
    tie = rng.choice(near, SHAPE) * rng.choice([-1, 1], SHAPE)
    tie[:, ::_BLOCK], tie[::_BLOCK, :] = 6, 6  # an amax in each block of either axis
    powers = np.float32(2.0) ** np.arange(-3, 4)
    edge = np.concatenate([f * powers for f in (1, 1.25, 1.5, 1.75)]).astype(np.float32)
    beside = [np.nextafter(edge, np.float32(side)) for side in (99, 0)]
    edge = np.concatenate([edge, *beside])
    blocks = (SHAPE[0] // _BLOCK, SHAPE[1] // _BLOCK)
    edges = rng.uniform(-1, 1, SHAPE) * _square_blocks(rng.choice(edge, blocks))
    edges[::_BLOCK, ::_BLOCK] = rng.choice(edge, blocks)
    spread = rng.standard_normal(SHAPE) * np.exp2(rng.uniform(-4, 4, (SHAPE[0], 1)))
    spread *= np.exp2(rng.uniform(-4, 4, (1, SHAPE[1])))
    wide = rng.standard_normal(SHAPE)
    wide *= _square_blocks(np.exp2(rng.integers(-24, 8, blocks).astype(float)))
    wide[5, 7] = 2.0**16
    wide[32:48, 32:64] = 0
    small = spread * 2.0**-100
    # multiples of a block's scale, on both grids or halfway between them: under an amax of 5
    # products by S are larger than exact, so that they are nearer to the grid of 4
    four = rng.choice([0, 0.625, 1.5, 2.125, 3, 4.25, 6], SHAPE) * rng.choice([-1, 1], SHAPE)
    four[:, ::_BLOCK], four[::_BLOCK, :] = 6, 6
    four *= _square_blocks(np.exp2(rng.integers(-6, 4, blocks).astype(float))) * 5 / 128
    four[:, 0], four[0, :] = 5, 5
    tensors_by_kind = {
        "ties": tie,
        "edges": edges,
        "spread": spread,
        "range": wide,
        "small": small,
        "zeros": np.zeros(SHAPE),
        "fours": four,
    }
    narrow = {kind: x.astype(np.float32) for kind, x in tensors_by_kind.items()}
    return {kind: dtypes.rounded(x, source) for kind, x in narrow.items()}


def _square_blocks(values: np.ndarray) -> np.ndarray:
    """Each value over a square of _BLOCK."""
    return np.repeat(np.repeat(values, _BLOCK, axis=0), _BLOCK, axis=1)
