"""Roofline estimate of a training step: its linears' GEMMs in bfloat16 and in FP8, and all the
rest.

A kernel takes the longest of three times: its FLOPs at the rate of large GEMMs, its bytes at the
bandwidth of copies, and a launch. A GEMM's tiles run on the processors in waves, and the last wave
may be partly empty, which slows small shapes. The sum over K may be split into pieces (split-K),
whose float32 parts are added afterwards. Kernels run one after another.

Parts that are not linears limit FP8's gain (Amdahl). They are counted as fused kernels; eager
PyTorch moves more bytes. Not counted: collectives, which may overlap, the host, the loader,
validation and checkpoints.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fp8ref.estimate import attention, filtering, grouped, kernels, linear_place, outside_linears
from fp8ref.estimate.filtering import Kind
from fp8ref.estimate.gpu_rates import Ceilings
from fp8ref.estimate.kernels import Fusion, Kernel, multiplies_fp8
from fp8ref.estimate.ledger import Ledger, Step
from fp8ref.recipe import RECIPES, ROLES, Gemm, GemmSpec, Recipe, Role
from fp8ref.selection.linears import Decision
from fp8ref.train.config.config import Config
from fp8ref.train.config.device_shapes import runs_output_again, scaled_first, tokens, used

TILES = ((128, 256), (256, 128), (128, 128))
"""Height and width of the tiles of a result that one processor computes, as in cuBLAS on Hopper."""

PIECES = (1, 2, 4, 8)
"""The numbers of pieces that split-K may cut a sum over K into."""

Size = tuple[Gemm, int, int, int]
"""A GEMM's name, M, N and K: [M, K] x [N, K] -> [M, N]."""


def predict_step(
    config: Config, backend: str, ceilings: Ceilings, lost: set[Kind] | None = None
) -> Step:
    """Predict one optimizer step of a device, all microbatches included. lost: what is filtered;
    None: ``losing``.
    """
    lost = losing(config, backend, ceilings) if lost is None else lost
    step = _unfiltered_step(config, backend, ceilings)
    if not lost:
        return step
    after = _unfiltered_step(
        filtering.without(config, lost, linears(config, backend, ceilings)), backend, ceilings
    )
    return dataclasses.replace(step, filtered=after.configured, after=after.rest)


def losing(config: Config, backend: str, ceilings: Ceilings) -> set[Kind]:
    """The kinds of linears without which in FP8 a step is faster."""
    ledgers = linears(config, backend, ceilings)

    def seconds(lost: set[Kind]) -> float:
        step = _unfiltered_step(filtering.without(config, lost, ledgers), backend, ceilings)
        return step.configured + sum(step.rest.values())

    return filtering.worthwhile(filtering.slower(ledgers, backend), seconds)


def _unfiltered_step(config: Config, backend: str, ceilings: Ceilings) -> Step:
    """The step, in which nothing is filtered."""
    parts, again = config.data.microbatches, config.parallel.checkpointing == "full"
    bf16 = configured = saved = 0.0
    forward = linears(config, backend, ceilings, gemms=("output",))
    scaled = scaled_first(config) if backend == "jax" else {}
    for (decision, whole), (_, first) in zip(
        linears(config, backend, ceilings), forward, strict=True
    ):
        spent = [whole]
        layer = decision.path.startswith("model.layers.")
        if (
            again
            and layer
            and (backend == "torch" or runs_output_again(decision.path, config, backend))
        ) or (config.parallel.loss == "chunked" and decision.path == "lm_head"):
            spent.append(first)
        bf16, configured = (
            bf16 + sum(ledger.bf16 for ledger in spent),
            configured + sum(ledger.seconds for ledger in spent),
        )
        if decision.path in scaled:  # a step takes the amax of its weight once
            saved += (parts * len(spent) - 1) * _weight_amax(decision, config, ceilings)
    rest, variant = outside_linears.seconds(config, backend, ceilings), config.attention_variant
    in_bf16 = outside_linears.seconds(filtering.in_bf16(config), backend, ceilings)
    if variant is not None:
        rest["attention"] = config.model.num_hidden_layers * attention.seconds(
            config, variant, backend, ceilings
        )
    return Step(parts * bf16, parts * configured - saved, parts * configured - saved, rest, in_bf16)


def _weight_amax(decision: Decision, config: Config, ceilings: Ceilings) -> float:
    """Seconds that XLA's kernels take for the amax of a linear's weight."""
    sizes = [
        (s.which, s.m, s.n, s.k)
        for s in gemm_shapes(decision, config, "jax")
        if s.which == "output"
    ]
    extra_kernels = quantizing(
        decision.recipe,
        sizes,
        "xla",
        **{**linear_place.of(decision, config, "jax"), "roles": ["weight"]},
    )
    return sum(
        max(kernel.bytes / ceilings.bandwidth, ceilings.launch)
        for kernel in extra_kernels
        if kernel.part == "amax"
    )


def with_tied(config: Config) -> list[Decision]:
    """The linears, with a tied lm_head too: it is a GEMM in high precision."""
    decisions = config.decisions()
    if not config.model.tie_word_embeddings:
        return decisions
    shape = (config.model.vocab_size, config.model.hidden_size)
    return [
        *decisions,
        Decision(path="lm_head", shape=shape, recipe=RECIPES["bf16"], reason="tied"),
    ]


def linears(
    config: Config, backend: str, ceilings: Ceilings, *, gemms: Sequence[Gemm] = kernels.GEMMS
) -> list[tuple[Decision, Ledger]]:
    """(linear, cost) for one microbatch.

    The cost of equal linears in equal places is computed once.
    """
    cache: dict[tuple, Ledger] = {}
    ledgers = []
    decisions = with_tied(config)
    recipes = {decision.path: decision.recipe for decision in decisions}
    for decision in decisions:
        place = linear_place.of(decision, config, backend, recipes)
        # the recipe itself: rules make several of one name
        key = (
            short_name(decision.path),
            decision.shape,
            decision.recipe,
            decision.experts,
            str(place),
        )
        if key not in cache:
            cache[key] = linear_ledger(
                decision, config, backend, ceilings, gemms=gemms, place=place
            )
        ledgers.append((decision, cache[key]))
    return ledgers


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


def short_name(linear: str) -> str:
    """model.layers.7.mlp.up_proj -> up_proj."""
    return linear.split(".")[-1]


def gemm_shapes(decision: Decision, config: Config, backend: str) -> Iterator[GemmShape]:
    """The three GEMMs of a linear, for one microbatch (spec L-2); of experts those of one with as
    many rows as the others."""
    m, (n, k) = tokens(config), used(decision.path, decision.shape, config)
    if decision.experts is not None:
        # with experts apart, from all devices that hold different ones
        m = m * config.parallel.expert * config.model.num_experts_per_tok // decision.experts
    if short_name(decision.path) == "lm_head" and config.parallel.sequence and backend == "jax":
        m //= config.parallel.tensor  # its weight is not cut over tensor; its tokens are
    for which, dims in (
        ("output", (m, n, k)),
        ("grad_input", (m, k, n)),
        ("grad_weight", (n, k, m)),
    ):
        spec = decision.recipe.gemms[which]  # type: ignore[index]
        yield GemmShape(
            decision.path,
            which,  # type: ignore[arg-type]
            *dims,
            runs_in(spec, backend),
            multiplies_fp8(spec, backend),
        )


def runs_in(spec: GemmSpec, backend: str) -> str:
    """Formats, granularities and accumulation of a GEMM, as on an H100 or H200."""
    if spec.a is None or spec.b is None:
        return "bf16"
    operands = " x ".join(
        f"{cast.fmt.name} {cast.granularity}" + " delayed" * (cast.delayed is not None)
        for cast in (spec.a, spec.b)
    )
    return (
        f"{operands}, {spec.accumulate}"
        if multiplies_fp8(spec, backend)
        else f"{operands}, dequantized: no FP8 GEMM (G-16)"
    )


def gemm_seconds(m: int, n: int, k: int, rate: float, bytes_: float, ceilings: Ceilings) -> float:
    """Time of [M, K] x [N, K] -> [M, N] at ``rate`` FLOP a second, with bytes_ of memory
    traffic.
    """
    processors = ceilings.sheet.processors
    traffic, fastest = bytes_ / ceilings.bandwidth, math.inf
    for height, width in TILES:
        tiles = math.ceil(m / height) * math.ceil(n / width)
        for pieces in PIECES:
            # every wave takes a tile's time on all processors, even if only one of them has a tile
            waves = math.ceil(tiles * pieces / processors)
            busy = waves * processors * 2 * height * width * k / pieces / rate
            # float32, written and read
            summed = 8 * pieces * m * n / ceilings.bandwidth if pieces > 1 else 0.0
            fastest = min(fastest, max(busy, traffic) + summed)
    return max(fastest, ceilings.launch)


def gemms_ledger(
    recipe: Recipe, sizes: Sequence[Size], fusion: Fusion, ceilings: Ceilings, **quantized
) -> Ledger:
    """Cost of the GEMMs in ``sizes``; quantized: keywords of ``quantizing``."""
    bf16 = sum(
        gemm_seconds(m, n, k, ceilings.bf16, 2 * (k * (m + n) + m * n), ceilings)
        for _, m, n, k in sizes
    )
    if not any(recipe.gemms[which].fp8 for which, *_ in sizes):
        return Ledger(bf16, {}, len(sizes), len(sizes) * ceilings.launch)
    backend = "jax" if fusion == "xla" else "torch"
    multiplied, extra_kernels = 0.0, quantizing(recipe, sizes, fusion, **quantized)
    for which, m, n, k in sizes:
        spec = recipe.gemms[which]
        fp8, unscaled = (
            multiplies_fp8(spec, backend),
            kernels.scaled_after(spec, fusion) or not spec.rowwise,
        )
        # a GEMM whose scales are applied afterwards runs at the plain FP8 rate
        rate = ceilings.bf16 if not fp8 else ceilings.fp8 if unscaled else ceilings.fp8_rowwise
        multiplied += gemm_seconds(
            m,
            n,
            k,
            rate,
            (1 if fp8 else 2) * k * (m + n) + kernels.writes(spec, fusion) * m * n,
            ceilings,
        )
    parts = {"gemm": multiplied} | dict.fromkeys(
        ("amax", "scale", "cast", "layout", "rescale"), 0.0
    )
    for kernel in extra_kernels:
        parts[kernel.part] += max(kernel.bytes / ceilings.bandwidth, ceilings.launch)
    count = len(sizes) + len(extra_kernels)
    return Ledger(bf16, parts, count, count * ceilings.launch)


def quantizing(
    recipe: Recipe,
    sizes: Sequence[Size],
    fusion: Fusion,
    *,
    linear: str = "",
    roles: Collection[Role] = ROLES,
    parts: Mapping[Role, int] = MappingProxyType({}),
    sent: Collection[Gemm] = (),
    norm_bytes: float = 4,
    pieces: bool = False,
) -> list[Kernel]:
    """The kernels beside the GEMMs in ``sizes``.

    linear, roles  as in ``kernels.linear_kernels``.
    parts          devices by role that quantize a part each, whose codes are then all-gathered.
    sent           GEMMs whose results are sums' parts in bfloat16, sent to other devices.
    norm_bytes, pieces
                   as in ``kernels.linear_kernels``.
    """
    elements = _elements(sizes)
    rescales = [
        kernel
        for which, m, n, _ in sizes
        for kernel in kernels.rescale(recipe, which, m * n, fusion, linear, sent=which in sent)
    ]
    return rescales + kernels.linear_kernels(
        recipe,
        {role: size / parts.get(role, 1) for role, size in elements.items()},
        fusion,
        gemms=[which for which, *_ in sizes],
        roles=roles,
        linear=linear,
        gathered={role: elements[role] for role in parts},
        norm_bytes=norm_bytes,
        pieces=pieces,
    )


def linear_ledger(
    decision: Decision,
    config: Config,
    backend: str,
    ceilings: Ceilings,
    *,
    gemms: Sequence[Gemm] = kernels.GEMMS,
    place: Mapping[str, Any] | None = None,
) -> Ledger:
    """Cost of a config's linear on one device, for one microbatch; of experts that of all of the
    device's. place: its ``linear_place``.
    """
    sizes: list[Size] = [
        (s.which, s.m, s.n, s.k) for s in gemm_shapes(decision, config, backend) if s.which in gemms
    ]
    fusion = kernels.fusion(config, backend)
    if decision.experts is not None:
        return grouped_ledger(
            decision.recipe, sizes, decision.experts // config.parallel.expert, fusion, ceilings
        )
    return gemms_ledger(
        decision.recipe,
        sizes,
        fusion,
        ceilings,
        **(linear_place.of(decision, config, backend) if place is None else place),
    )


def grouped_ledger(
    recipe: Recipe, sizes: Sequence[Size], experts: int, fusion: Fusion, ceilings: Ceilings
) -> Ledger:
    """Cost of grouped GEMMs, each of ``experts`` GEMMs of a size."""
    backend = "jax" if fusion == "xla" else "torch"
    wide = 4 if backend == "jax" else 2  # JAX's loop writes accumulators
    bf16, multiplied, count, plain = 0.0, 0.0, 0, 0
    extra_kernels = (
        quantizing(recipe, [(which, m, n, k) for which, m, n, k in sizes], fusion)
        if any(recipe.gemms[which].fp8 for which, *_ in sizes)
        else []
    )
    extra_kernels = [
        Kernel(kernel.part, kernel.bytes * experts)
        for kernel in extra_kernels
        if kernel.part != "rescale"
    ]
    for which, m, n, k in sizes:
        spec, size = recipe.gemms[which], (m, n, k)
        plain_by = grouped.by(RECIPES["bf16"].gemms[which], backend)
        laid = sum(
            kernel.bytes for kernel in grouped.around(which, size, experts, plain_by, fusion, 2)
        )
        bf16 += (
            grouped.seconds(
                which,
                size,
                experts,
                plain_by,
                ceilings.bf16,
                (2, wide),
                ceilings,
                gemm_seconds,
                TILES,
            )
            + laid / ceilings.bandwidth
        )
        plain += grouped.launches(which, size, experts, plain_by)
        by, fp8 = grouped.by(spec, backend), grouped.in_fp8(spec, backend)
        rate = (
            ceilings.bf16
            if not fp8
            else ceilings.fp8_rowwise
            if spec.rowwise and backend == "torch"
            else ceilings.fp8
        )
        multiplied += grouped.seconds(
            which, size, experts, by, rate, (1 if fp8 else 2, wide), ceilings, gemm_seconds, TILES
        )
        count += grouped.launches(which, size, experts, by)
        extra_kernels += grouped.around(which, size, experts, by, fusion, 1 if fp8 else 2)
    if not any(recipe.gemms[which].fp8 for which, *_ in sizes):
        return Ledger(bf16, {}, plain, plain * ceilings.launch)
    parts = {"gemm": multiplied} | dict.fromkeys(
        ("amax", "scale", "cast", "layout", "rescale"), 0.0
    )
    for kernel in extra_kernels:
        parts[kernel.part] += max(kernel.bytes / ceilings.bandwidth, ceilings.launch)
    count += len(extra_kernels)
    return Ledger(bf16, parts, count, count * ceilings.launch)


def sizes_of(m: int, n: int, k: int) -> list[Size]:
    """The three GEMMs of a weight [N, K] and M tokens."""
    return [("output", m, n, k), ("grad_input", m, k, n), ("grad_weight", n, k, m)]


def _elements(sizes: Sequence[Size]) -> dict:
    """Elements of each role's tensor, from any one of a linear's GEMMs."""
    which, m, n, k = sizes[0]
    tokens, rows, columns = {
        "output": (m, n, k),
        "grad_input": (m, k, n),
        "grad_weight": (k, m, n),
    }[which]
    return {"input": tokens * columns, "weight": rows * columns, "grad_output": tokens * rows}
