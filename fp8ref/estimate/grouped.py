"""Grouped GEMMs in the roofline estimate: the products of all of a device's experts (spec X).

One projection's experts are as many equal GEMMs, as if each took as many rows. How they are
multiplied is the backend's (X-10): by one kernel, by a GEMM for each expert, or in JAX by a GEMM
for each block of rows, in a loop.
"""

from dataclasses import dataclass
from typing import Literal

from fp8ref.estimate.gpu_rates import Ceilings, gemm_seconds
from fp8ref.estimate.kernels import Fusion, Kernel, multiplies_fp8
from fp8ref.recipe import Gemm, GemmSpec
from fp8ref.spec import granularity

By = Literal["one kernel", "a GEMM for each expert", "a GEMM for each block of rows"]
"""What multiplies a grouped GEMM."""

AROUND = 2
"""Kernels beside the GEMM in a round of JAX's loop: one that takes the block's weight or adds to
its gradient, one that writes the result.
"""


def by(spec: GemmSpec, backend: str) -> By:
    """How a backend multiplies a grouped GEMM on an H100 or H200 (X-10)."""
    if backend == "jax":
        return "a GEMM for each block of rows"
    if spec.a is None or spec.b is None:
        return "one kernel"
    whole = all(
        cast.fmt.name == "e4m3fn" and granularity.by_name(cast.granularity).reduced is None
        for cast in (spec.a, spec.b)
    )
    exact = all(
        granularity.by_name(cast.granularity).reduced is not None and cast.policy.e8m0 is not None
        for cast in (spec.a, spec.b)
    )
    return "one kernel" if whole or exact else "a GEMM for each expert"


def in_fp8(spec: GemmSpec, backend: str) -> bool:
    """Whether the grouped GEMM runs in FP8: of blocks only in PyTorch's GEMM of each expert."""
    return spec.fp8 and multiplies_fp8(spec, backend)


def block_rows(rows: int, experts: int) -> int:
    """Rows of a block of JAX's loop: a power of two, 16 to 512, at most the average (X-10)."""
    return min(max(1 << (rows // experts).bit_length() >> 1, 16), 512)


@dataclass(frozen=True)
class GroupedGemm:
    """``experts`` GEMMs [M, K] x [N, K] -> [M, N] of one size, and what multiplies them."""

    which: Gemm
    m: int
    n: int
    k: int
    experts: int
    by: By

    @property
    def rows(self) -> int:
        """The rows of all experts."""
        return (self.k if self.which == "grad_weight" else self.m) * self.experts

    @property
    def blocks(self) -> int:
        """The rounds of JAX's loop."""
        return self.rows // block_rows(self.rows, self.experts) + self.experts

    @property
    def launches(self) -> int:
        """The kernels that multiply."""
        if self.by == "one kernel":
            return 1
        by_expert = self.by == "a GEMM for each expert"
        return self.experts if by_expert else self.blocks * (1 + AROUND)

    def seconds(
        self, rate: float, operand_bytes: int, result_bytes: int, ceilings: Ceilings
    ) -> float:
        """Time at ``rate`` FLOP a second; bytes of an element of an operand, and of the result."""
        m, n, k = self.m, self.n, self.k
        in_blocks = self.by == "a GEMM for each block of rows"
        if in_blocks:
            block = block_rows(self.rows, self.experts)
            m, k = (m, block) if self.which == "grad_weight" else (block, k)
        traffic = operand_bytes * k * (m + n) + result_bytes * m * n
        if self.by == "one kernel":
            return gemm_seconds(m, n, k, rate, traffic, ceilings, experts=self.experts)
        each = gemm_seconds(m, n, k, rate, traffic, ceilings)
        if not in_blocks:
            return self.experts * each
        # a weight's slice; a sum in float32
        moved = 2 * operand_bytes * n * k if self.which != "grad_weight" else 3 * 4 * m * n
        return self.blocks * (each + AROUND * ceilings.launch + moved / ceilings.bandwidth)

    def around(self, fusion: Fusion, operand_bytes: int) -> list[Kernel]:
        """The kernels that lay rows out, and its result afterwards: in JAX blocks of rows, which
        are padded to twice the rows at most; results in float32, scaled."""
        if self.by != "a GEMM for each block of rows":
            return []
        m, n, k = self.m, self.n, self.k
        elements = (k * (m + n) if self.which == "grad_weight" else m * k) * self.experts
        layout = Kernel("layout", 3 * operand_bytes * elements)
        rescale = Kernel("rescale", (4 + 2) * m * n * self.experts)
        return [layout, rescale] if fusion == "xla" else [layout]
