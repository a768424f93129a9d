"""Roofline estimate of a linear's three GEMMs in bfloat16 and in FP8, with quantization.

A kernel takes the longest of three times: its FLOPs at the rate of large GEMMs, its bytes at the
bandwidth of copies, and a launch. A GEMM's tiles run on the processors in waves, and the last wave
may be partly empty, which slows small shapes. The sum over K may be split into pieces (split-K),
whose float32 parts are added afterwards. Kernels run one after another.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fp8ref.estimate import kernels
from fp8ref.estimate.gpu_rates import Ceilings
from fp8ref.estimate.kernels import Fusion, multiplies_fp8
from fp8ref.linear_selection import Decision
from fp8ref.recipe import Gemm, GemmSpec, Recipe
from fp8ref.train.config import Config
from fp8ref.train.device_shapes import in_fp8, tokens, used

TILES = ((128, 256), (256, 128), (128, 128))
"""Height and width of the tiles of a result that one processor computes, as in cuBLAS on Hopper."""

PIECES = (1, 2, 4, 8)
"""The numbers of pieces that split-K may cut a sum over K into."""

Size = tuple[Gemm, int, int, int]
"""A GEMM's name, M, N and K: [M, K] x [N, K] -> [M, N]."""


@dataclass(frozen=True)
class GemmShape:
    """One GEMM of a linear on one device: [M, K] x [N, K] -> [M, N].

    runs_in: its dtypes and accumulation, in words.
    """

    linear: str
    which: Gemm
    m: int
    n: int
    k: int
    runs_in: str
    fp8: bool


@dataclass(frozen=True)
class Ledger:
    """Seconds of one linear for one microbatch.

    parts: FP8's by purpose; empty if no GEMM is in FP8.
    """

    bf16: float
    parts: dict[str, float]
    kernels: int
    floor: float  # seconds of the kernel launches alone: no bandwidth makes it faster

    @property
    def seconds(self) -> float:
        """Time as configured: FP8's parts, or bfloat16 without any."""
        return sum(self.parts.values()) if self.parts else self.bf16

    @property
    def ratio(self) -> float | None:
        """bfloat16's time by FP8's; below 1, FP8 is slower."""
        return self.bf16 / self.seconds if self.parts else None


def short_name(linear: str) -> str:
    """model.layers.7.mlp.up_proj -> up_proj."""
    return linear.split(".")[-1]


def gemm_shapes(decision: Decision, config: Config, backend: str) -> Iterator[GemmShape]:
    """The three GEMMs of a linear, for one microbatch (SEMANTICS L-2)."""
    m, (n, k) = tokens(config), used(decision.path, decision.shape, config)
    if short_name(decision.path) == "lm_head" and config.parallel.sequence and backend == "jax":
        m //= config.parallel.tensor  # its weight is not cut over tensor; its tokens are
    for which, dims in (("output", (m, n, k)), ("grad_input", (m, k, n)), ("grad_weight", (n, k, m))):
        spec = decision.recipe.gemms[which]  # type: ignore[index]
        yield GemmShape(decision.path, which, *dims, runs_in(spec, backend), multiplies_fp8(spec, backend))  # type: ignore[arg-type]


def runs_in(spec: GemmSpec, backend: str) -> str:
    """Formats, granularities and accumulation of a GEMM, as on an H100 or H200."""
    if spec.a is None or spec.b is None:
        return "bf16"
    operands = " x ".join(f"{cast.fmt.name} {cast.granularity}" + " delayed" * (cast.delayed is not None) for cast in (spec.a, spec.b))
    return f"{operands}, {spec.accumulate}" if multiplies_fp8(spec, backend) else f"{operands}, dequantized: no FP8 GEMM (G-16)"


def gemm_seconds(m: int, n: int, k: int, rate: float, bytes_: float, ceilings: Ceilings) -> float:
    """Time of [M, K] x [N, K] -> [M, N] at ``rate`` FLOP a second, with bytes_ of memory traffic."""
    processors = ceilings.sheet.processors
    traffic, found = bytes_ / ceilings.bandwidth, math.inf
    for height, width in TILES:
        tiles = math.ceil(m / height) * math.ceil(n / width)
        for pieces in PIECES:
            # every wave takes a tile's time on all processors, even if only one of them has a tile
            waves = math.ceil(tiles * pieces / processors)
            busy = waves * processors * 2 * height * width * k / pieces / rate
            summed = 8 * pieces * m * n / ceilings.bandwidth if pieces > 1 else 0.0  # float32, written and read
            found = min(found, max(busy, traffic) + summed)
    return max(found, ceilings.launch)


def of_sizes(recipe: Recipe, sizes: Sequence[Size], how: Fusion, ceilings: Ceilings, *, shard: int = 1, gathered: bool = False) -> Ledger:
    """Cost of the GEMMs in ``sizes``.

    shard     devices that each quantize their shard of the weight.
    gathered  whether the shards' codes are then all-gathered.
    """
    bf16 = sum(gemm_seconds(m, n, k, ceilings.bf16, 2 * (k * (m + n) + m * n), ceilings) for _, m, n, k in sizes)
    if not any(recipe.gemms[which].fp8 for which, *_ in sizes):
        return Ledger(bf16, {}, len(sizes), len(sizes) * ceilings.launch)
    backend = "jax" if how == "xla" else "torch"
    multiplied, made = 0.0, []
    for which, m, n, k in sizes:
        spec = recipe.gemms[which]
        fp8, after = multiplies_fp8(spec, backend), kernels.rescale(spec, m * n, how)
        made += after
        unscaled = bool(after) or not spec.rowwise
        # a GEMM whose scales are applied afterwards runs at the plain FP8 rate
        rate = ceilings.bf16 if not fp8 else ceilings.fp8 if unscaled else ceilings.fp8_rowwise
        multiplied += gemm_seconds(m, n, k, rate, (1 if fp8 else 2) * k * (m + n) + kernels.writes(spec, how) * m * n, ceilings)
    elements = _elements(sizes)
    whole = elements["weight"]
    made += kernels.of_linear(
        recipe,
        elements | {"weight": whole / shard},
        how,
        gemms=[which for which, *_ in sizes],
        gathered=whole if gathered else None,
    )
    parts = {"gemm": multiplied} | dict.fromkeys(("amax", "scale", "cast", "layout", "rescale"), 0.0)
    for kernel in made:
        parts[kernel.part] += max(kernel.bytes / ceilings.bandwidth, ceilings.launch)
    count = len(sizes) + len(made)
    return Ledger(bf16, parts, count, count * ceilings.launch)


def of_decision(decision: Decision, config: Config, backend: str, ceilings: Ceilings, *, gemms: Sequence[Gemm] = kernels.GEMMS) -> Ledger:
    """Cost of a config's linear on one device, for one microbatch."""
    sizes: list[Size] = [(s.which, s.m, s.n, s.k) for s in gemm_shapes(decision, config, backend) if s.which in gemms]
    fsdp = config.parallel.fsdp
    gathered = fsdp > 1 and in_fp8(decision.recipe, config, backend)
    return of_sizes(decision.recipe, sizes, kernels.fusion(config, backend), ceilings, shard=fsdp if gathered else 1, gathered=gathered)


def sizes_of(m: int, n: int, k: int) -> list[Size]:
    """The three GEMMs of a weight [N, K] and M tokens."""
    return [("output", m, n, k), ("grad_input", m, k, n), ("grad_weight", n, k, m)]


def _elements(sizes: Sequence[Size]) -> dict:
    """Elements of each role's tensor, from any one of a linear's GEMMs."""
    which, m, n, k = sizes[0]
    tokens, rows, columns = {"output": (m, n, k), "grad_input": (m, k, n), "grad_weight": (k, m, n)}[which]
    return {"input": tokens * columns, "weight": rows * columns, "grad_output": tokens * rows}
