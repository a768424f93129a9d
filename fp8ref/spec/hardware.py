"""The interface of simulated hardware: a host function replaces a framework's FP8 GEMM (G-19).

The backends import no simulator. They receive a ``Multiply``, in a run a ``sim.hardware.Hardware``,
and call it where they would multiply.
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
    """[M, K] x [N, K] -> float32 [M, N] in out_dtype: sum, scale, round. Hashable, equal by name.

    accumulate   ``fast`` or ``slow``, as the recipe asks (G-7).
    epilogue     a name in ``epilogue.EPILOGUES``, without a bias.
    out_dtype    float32, bfloat16 or float16; results may be infinite or NaN.
    """

    @property
    def name(self) -> str:
        """The name in compiled graphs and manifests."""
        ...

    def __call__(
        self,
        a: Factor,
        b: Factor,
        *,
        accumulate: Literal["fast", "slow"],
        epilogue: str,
        out_dtype: Format,
    ) -> np.ndarray: ...
