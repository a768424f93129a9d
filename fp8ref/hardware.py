"""What takes the place of a framework's FP8 GEMM: a function of arrays in host memory (SEMANTICS G-19).

The backends know no simulator: they are given one of these, ``sim.hardware.Hardware`` in a run, and call it where they would multiply.
"""

from typing import Literal, NamedTuple, Protocol

import numpy as np

from fp8ref.formats import Format


class Factor(NamedTuple):
    """An operand of a GEMM, its reduced axis last.

    codes      uint8 [M, K], in any memory order.
    scale_inv  float32: (), [M, 1], or one of each block.
    """

    codes: np.ndarray
    scale_inv: np.ndarray
    fmt: Format
    granularity: str


class Multiply(Protocol):
    """[M, K] x [N, K] -> float32 [M, N], values of out_dtype: the sum, the scales and the rounding. Hashable; of one name does one thing.

    accumulate   what the recipe asks of the hardware (G-7).
    epilogue     the name of one of ``epilogue.EPILOGUES`` without a bias.
    out_dtype    float32, bfloat16 or float16; a result that is not finite is one too.
    """

    @property
    def name(self) -> str:
        """What a compiled graph and a manifest know it by."""
        ...

    def __call__(self, a: Factor, b: Factor, *, accumulate: Literal["fast", "slow"], epilogue: str, out_dtype: Format) -> np.ndarray: ...
