"""Seeds of stochastic operands, as the simulator's random numbers make them (spec S-24)."""

import zlib

import numpy as np

from fp8ref.sim import philox


def derived(seed: int, counter: int, stream: int) -> int:
    low, high = map(int, philox.words(np.array([counter]), stream, seed)[0, :2])
    return high << 32 | low


def of_linear(seed: int, step: int, microbatch: int, name: str) -> int:
    """A linear's in a pass of a run."""
    return derived(derived(seed, step, 4 + microbatch), zlib.crc32(name.encode()), 3)
