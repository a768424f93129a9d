"""What a linear's three GEMMs cost in bfloat16 and in FP8, part by part: an estimate from ceilings, by one model for every table.

A kernel takes the longest of: its FLOPs at the rate that large GEMMs reach; its bytes at the bandwidth that copies reach; a launch.
A GEMM's tiles go to processors in waves, of which the last may be part empty: large shapes hardly notice, small ones do; their sum may be cut
into a few pieces, whose float32 parts are added afterwards, where that is faster. Kernels run one after another.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fp8ref.estimate import kernels as passes
from fp8ref.estimate.gemms import gemms as shapes_of
from fp8ref.estimate.gpu_rates import Ceilings
from fp8ref.estimate.kernels import Fusion
from fp8ref.recipe import Decision, Gemm, Recipe
from fp8ref.train.config import Config
from fp8ref.train.device_shapes import in_fp8

TILES, PIECES = ((128, 256), (256, 128), (128, 128)), (1, 2, 4, 8)  # of a result on one processor, as cuBLAS's on Hopper; of a sum
Size = tuple[Gemm, int, int, int]  # [M, K] x [N, K] -> [M, N]


@dataclass(frozen=True)
class Ledger:
    """Seconds of one linear for one part of a batch. parts: FP8's, by what they are for; empty where nothing is in FP8."""

    bf16: float
    parts: dict[str, float]
    kernels: int
    floor: float  # of FP8's launches alone: no bandwidth makes it faster

    @property
    def seconds(self) -> float:
        """As configured: FP8's parts, or bfloat16's where there are none."""
        return sum(self.parts.values()) if self.parts else self.bf16

    @property
    def ratio(self) -> float | None:
        """bfloat16's time by FP8's; below 1, FP8 is slower."""
        return self.bf16 / self.seconds if self.parts else None


def gemm_seconds(m: int, n: int, k: int, rate: float, bytes_: float, ceilings: Ceilings) -> float:
    """[M, K] x [N, K] -> [M, N], at a rate in FLOP a second, moving bytes_."""
    processors = ceilings.sheet.processors
    traffic, found = bytes_ / ceilings.bandwidth, math.inf
    for height, width in TILES:
        tiles = math.ceil(m / height) * math.ceil(n / width)
        for pieces in PIECES:
            waves = math.ceil(tiles * pieces / processors)
            busy = waves * processors * 2 * height * width * k / pieces / rate
            summed = 8 * pieces * m * n / ceilings.bandwidth if pieces > 1 else 0.0  # float32, written and read
            found = min(found, max(busy, traffic) + summed)
    return max(found, ceilings.launch)


def of_sizes(recipe: Recipe, sizes: Sequence[Size], how: Fusion, ceilings: Ceilings, *, shard: int = 1, gathered: bool = False) -> Ledger:
    """Of the GEMMs named in sizes. shard: devices that each cast their part of a weight, whose codes are then gathered where gathered."""
    bf16 = sum(gemm_seconds(m, n, k, ceilings.bf16, 2 * (k * (m + n) + m * n), ceilings) for _, m, n, k in sizes)
    if not any(recipe.gemms[which].fp8 for which, *_ in sizes):
        return Ledger(bf16, {}, len(sizes), len(sizes) * ceilings.launch)
    backend = "jax" if how == "xla" else "torch"
    multiplied, kernels = 0.0, []
    for which, m, n, k in sizes:
        spec = recipe.gemms[which]
        fp8, after = passes.multiplies_fp8(spec, backend), passes.rescale(spec, m * n, how)
        kernels += after
        unscaled = bool(after) or not spec.rowwise
        rate = ceilings.bf16 if not fp8 else ceilings.fp8 if unscaled else ceilings.fp8_rowwise
        written = 4 if how == "xla" and after else 2
        multiplied += gemm_seconds(m, n, k, rate, (1 if fp8 else 2) * k * (m + n) + written * m * n, ceilings)
    elements = _elements(sizes)
    whole = elements["weight"]
    kernels += passes.of_linear(
        recipe,
        elements | {"weight": whole / shard},
        how,
        gemms=[which for which, *_ in sizes],
        gathered=whole if gathered else None,
    )
    parts = {"gemm": multiplied} | dict.fromkeys(("amax", "scale", "cast", "layout", "rescale"), 0.0)
    for kernel in kernels:
        parts[kernel.part] += max(kernel.bytes / ceilings.bandwidth, ceilings.launch)
    count = len(sizes) + len(kernels)
    return Ledger(bf16, parts, count, count * ceilings.launch)


def of_decision(decision: Decision, config: Config, backend: str, ceilings: Ceilings, *, gemms: Sequence[Gemm] = passes.GEMMS) -> Ledger:
    """Of a linear of a config, on one device, for one part of a batch."""
    sizes: list[Size] = [(s.which, s.m, s.n, s.k) for s in shapes_of(decision, config, backend) if s.which in gemms]
    fsdp = config.parallel.fsdp
    gathered = fsdp > 1 and in_fp8(decision.recipe, config, backend)
    return of_sizes(decision.recipe, sizes, passes.fusion(config, backend), ceilings, shard=fsdp if gathered else 1, gathered=gathered)


def sizes_of(m: int, n: int, k: int) -> list[Size]:
    """The three GEMMs of a weight [N, K] and M tokens."""
    return [("output", m, n, k), ("grad_input", m, k, n), ("grad_weight", n, k, m)]


def _elements(sizes: Sequence[Size]) -> dict:
    """Elements of every role, from any one of a linear's GEMMs."""
    which, m, n, k = sizes[0]
    tokens, rows, columns = {"output": (m, n, k), "grad_input": (m, k, n), "grad_weight": (k, m, n)}[which]
    return {"input": tokens * columns, "weight": rows * columns, "grad_output": tokens * rows}
