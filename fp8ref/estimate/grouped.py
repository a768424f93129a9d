"""Grouped GEMMs in the roofline estimate: the products of all of a device's experts (spec X).

One projection's experts are as many equal GEMMs, as if each took as many rows. How they are
multiplied is the backend's (X-10): by one kernel, by a GEMM for each expert, or in JAX by a GEMM
for each block of rows, in a loop.
"""

import math
from collections.abc import Callable
from typing import Literal

from fp8ref.estimate.gpu_rates import Ceilings
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
    """Whether FP8 is multiplied: of operands in blocks nothing is, but by PyTorch's GEMM of each
    expert.
    """
    return spec.fp8 and multiplies_fp8(spec, backend)


def block_rows(rows: int, experts: int) -> int:
    """Rows of a block of JAX's loop: a power of two from 16 to 512, as an expert has on average or
    fewer (X-10).
    """
    return min(max(1 << (rows // experts).bit_length() >> 1, 16), 512)


def seconds(
    which: Gemm,
    size: tuple[int, int, int],
    experts: int,
    method: By,
    rate: float,
    bytes_: tuple[int, int],
    ceilings: Ceilings,
    alone: Callable[..., float],
    tiles: tuple[tuple[int, int], ...],
) -> float:
    """Time of ``experts`` GEMMs [M, K] x [N, K] -> [M, N] of this size.

    bytes_   of an element of an operand, and of the result.
    alone    the time of one GEMM, ``roofline.gemm_seconds``; tiles: as there.
    """
    m, n, k = size
    if method == "a GEMM for each block of rows":
        rows = (k if which == "grad_weight" else m) * experts
        block = block_rows(rows, experts)
        count = rows // block + experts
        m, k = (m, block) if which == "grad_weight" else (block, k)
    else:
        count = experts
    traffic = bytes_[0] * k * (m + n) + bytes_[1] * m * n
    if method == "one kernel":
        fastest = math.inf
        for height, width in tiles:
            waves = math.ceil(
                count * math.ceil(m / height) * math.ceil(n / width) / ceilings.sheet.processors
            )
            fastest = min(
                fastest, waves * ceilings.sheet.processors * 2 * height * width * k / rate
            )
        return max(fastest, count * traffic / ceilings.bandwidth, ceilings.launch)
    each = alone(m, n, k, rate, traffic, ceilings)
    if method == "a GEMM for each block of rows":
        # a weight's slice; a sum in float32
        moved = 2 * bytes_[0] * n * k if which != "grad_weight" else 3 * 4 * m * n
        each += AROUND * ceilings.launch + moved / ceilings.bandwidth
    return count * each


def launches(which: Gemm, size: tuple[int, int, int], experts: int, method: By) -> int:
    """The kernels of such a grouped GEMM."""
    if method == "one kernel":
        return 1
    if method == "a GEMM for each expert":
        return experts
    rows = (size[2] if which == "grad_weight" else size[0]) * experts
    return (rows // block_rows(rows, experts) + experts) * (1 + AROUND)


def around(
    which: Gemm, size: tuple[int, int, int], experts: int, method: By, fusion: Fusion, bytes_: int
) -> list[Kernel]:
    """The kernels that lay rows out for a grouped GEMM, and its result afterwards: in JAX blocks of
    rows, which are padded to twice the rows at most; results in float32, scaled."""
    if method != "a GEMM for each block of rows":
        return []
    m, n, k = size
    blocks = {"grad_weight": k * (m + n)}.get(which, m * k) * experts
    layouts = [Kernel("layout", 3 * bytes_ * blocks)]
    return [*layouts, Kernel("rescale", (4 + 2) * m * n * experts)] if fusion == "xla" else layouts
