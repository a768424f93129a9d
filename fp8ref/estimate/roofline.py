"""Roofline estimate of a training step: its linears' GEMMs in bfloat16 and in FP8, and the rest.

A kernel takes the longest of three times: its FLOPs at the rate of large GEMMs, its bytes at the
bandwidth of copies, and a launch. A GEMM's tiles run on the processors in waves, and the last wave
may be partly empty, which slows small shapes. The sum over K may be split into pieces (split-K),
whose float32 parts are added afterwards. Kernels run one after another.

Parts that are not linears limit FP8's gain (Amdahl). They are counted as fused kernels; eager
PyTorch moves more bytes. Not counted: collectives, which may overlap, the host, the loader,
validation and checkpoints.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple, get_args

from fp8ref.estimate import attention, filtering, grouped, kernels, linear_place, outside_linears
from fp8ref.estimate.filtering import Kind
from fp8ref.estimate.gpu_rates import Ceilings, gemm_seconds
from fp8ref.estimate.grouped import GroupedGemm
from fp8ref.estimate.kernels import ALONE, Fusion, Kernel, Place, multiplies_fp8
from fp8ref.estimate.ledger import Ledger, Step
from fp8ref.recipe import RECIPES, Gemm, GemmSpec, Recipe
from fp8ref.selection.linears import Decision
from fp8ref.spec import granularity
from fp8ref.spec.products import Products
from fp8ref.train.config.config import Config
from fp8ref.train.config.device_shapes import runs_output_again, tokens, used


class Size(NamedTuple):
    """A GEMM of a linear: [M, K] x [N, K] -> [M, N]."""

    which: Gemm
    m: int
    n: int
    k: int


def predict_step(
    config: Config, backend: str, ceilings: Ceilings, lost: set[Kind] | None = None
) -> Step:
    """Predict a device's optimizer step. lost: what is filtered; None: ``losing``."""
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

    cast_once = backend == "jax" or kernels.casts_by_triton(config, backend)
    return filtering.worthwhile(filtering.slower(ledgers, cast_once=cast_once), seconds)


def _unfiltered_step(config: Config, backend: str, ceilings: Ceilings) -> Step:
    """The step, in which nothing is filtered."""
    parts, again = config.data.microbatches, config.parallel.checkpointing == "full"
    bf16 = configured = 0.0
    once = _once(config, backend)
    for (decision, whole), (_, first) in zip(
        linears(config, backend, ceilings),
        linears(config, backend, ceilings, gemms=("output",)),
        strict=True,
    ):
        spent = [whole]
        layer = decision.path.startswith("model.layers.")
        twice = backend == "torch" or runs_output_again(decision.path, config, backend)
        chunked = config.parallel.loss == "chunked" and decision.path == "lm_head"
        if (again and layer and twice) or chunked:
            spent.append(first)
        bf16 += parts * sum(ledger.bf16 for ledger in spent)
        saved = (parts * len(spent) - 1) * _seconds(once.get(decision.path, ()), ceilings)
        configured += parts * sum(ledger.seconds for ledger in spent) - saved
    rest = outside_linears.seconds(config, backend, ceilings)
    variant = config.attention_variant
    in_bf16 = outside_linears.seconds(filtering.in_bf16(config), backend, ceilings)
    if variant is not None:
        rest["attention"] = config.model.num_hidden_layers * attention.seconds(
            config, variant, backend, ceilings
        )
    return Step(bf16, configured, configured, rest, in_bf16, rest)


def _once(config: Config, backend: str) -> dict[str, list[Kernel]]:
    """{linear: kernels that quantize its weight once a step}: Triton's in PyTorch."""
    fusion = kernels.fusion(config, backend)
    decisions = [d for d in config.decisions() if d.experts is None]
    recipes = {d.path: d.recipe for d in decisions}
    once = {}
    for d in decisions:
        if kernels.code_bytes(d.recipe, config, backend) < 2:
            continue
        sizes = gemm_sizes(d, config, backend)
        place = linear_place.of(d, config, backend, recipes)
        once[d.path] = kernels.linear_kernels(
            d.recipe, _elements(sizes), fusion, dataclasses.replace(place, roles=("weight",))
        )
    return once


def _seconds(beside: Iterable[Kernel], ceilings: Ceilings) -> float:
    return sum(max(kernel.bytes / ceilings.bandwidth, ceilings.launch) for kernel in beside)


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
        d = decision
        key = (short_name(d.path), d.shape, d.recipe, d.experts, str(place))
        if key not in cache:
            cache[key] = linear_ledger(d, config, backend, ceilings, gemms=gemms, place=place)
        ledgers.append((d, cache[key]))
    return ledgers


def short_name(linear: str) -> str:
    """model.layers.7.mlp.up_proj -> up_proj."""
    return linear.split(".")[-1]


def gemm_sizes(decision: Decision, config: Config, backend: str) -> list[Size]:
    """A linear's three GEMMs, for one microbatch (L-2); of experts those of one of average rows."""
    m, (n, k) = tokens(config), used(decision.path, decision.shape, config)
    if decision.experts is not None:
        # with experts apart, from all devices that hold different ones
        rows = m * config.parallel.expert * config.model.num_experts_per_tok
        m = rows // decision.experts
    if short_name(decision.path) == "lm_head" and config.parallel.sequence and backend == "jax":
        m //= config.parallel.tensor  # its weight is not cut over tensor; its tokens are
    return sizes_of(m, n, k)


def runs_in(spec: GemmSpec, backend: str, by: Products = "auto") -> str:
    """Formats, granularities and accumulation of a GEMM; by: what multiplies operands in blocks."""
    if spec.a is None or spec.b is None:
        return "bf16"
    operands = " x ".join(
        f"{cast.fmt.name} {cast.granularity}" + " delayed" * (cast.delayed is not None)
        for cast in (spec.a, spec.b)
    )
    if multiplies_fp8(spec, backend, by):
        blocks = granularity.by_name(spec.a.granularity).reduced is not None
        return f"{operands}, {by if blocks and by != 'auto' else spec.accumulate}"
    if spec.emulated:
        return f"{operands}, emulated: dequantized (R-9)"
    return f"{operands}, dequantized: no FP8 GEMM (G-16)"


def gemms_ledger(
    recipe: Recipe, sizes: Sequence[Size], fusion: Fusion, ceilings: Ceilings, place: Place = ALONE
) -> Ledger:
    """Cost of the GEMMs in ``sizes`` of one linear."""
    bf16 = sum(
        gemm_seconds(m, n, k, ceilings.bf16, 2 * (k * (m + n) + m * n), ceilings)
        for _, m, n, k in sizes
    )
    if not any(recipe.gemms[which].fp8 for which, *_ in sizes):
        return Ledger(bf16, {}, len(sizes), len(sizes) * ceilings.launch)
    backend = "jax" if fusion == "xla" else "torch"
    multiplied = 0.0
    for which, m, n, k in sizes:
        spec = recipe.gemms[which]
        fp8 = multiplies_fp8(spec, backend, place.products)
        unscaled = kernels.scaled_after(spec, fusion) or not spec.rowwise
        # a GEMM whose scales are applied afterwards runs at the plain FP8 rate
        in_fp8 = ceilings.fp8 if unscaled else ceilings.fp8_rowwise
        bits = spec.a.fmt.bits if fp8 and spec.a is not None else 16
        # of 4-bit products no ceiling is published: as far below their peak as FP8's
        rate = {16: ceilings.bf16, 4: in_fp8 * ceilings.sheet.fp4 / ceilings.sheet.fp8}.get(
            bits, in_fp8
        )
        traffic = bits / 8 * k * (m + n) + kernels.writes(spec, fusion) * m * n
        multiplied += gemm_seconds(m, n, k, rate, traffic, ceilings)
    beside = quantizing(recipe, sizes, fusion, place)
    return _ledger(bf16, multiplied, len(sizes), beside, ceilings)


def _ledger(
    bf16: float, multiplied: float, gemms: int, beside: Sequence[Kernel], ceilings: Ceilings
) -> Ledger:
    """The cost of FP8 GEMMs and of the kernels beside them."""
    parts = {"gemm": multiplied} | dict.fromkeys(get_args(kernels.Part), 0.0)
    for kernel in beside:
        parts[kernel.part] += max(kernel.bytes / ceilings.bandwidth, ceilings.launch)
    count = gemms + len(beside)
    return Ledger(bf16, parts, count, count * ceilings.launch)


def quantizing(
    recipe: Recipe, sizes: Sequence[Size], fusion: Fusion, place: Place = ALONE
) -> list[Kernel]:
    """The kernels beside the GEMMs in ``sizes`` of one linear."""
    rescales = [
        kernel
        for which, m, n, _ in sizes
        for kernel in kernels.rescale(recipe, which, m * n, fusion, place)
    ]
    gemms = [which for which, *_ in sizes]
    return rescales + kernels.linear_kernels(recipe, _elements(sizes), fusion, place, gemms)


def linear_ledger(
    decision: Decision,
    config: Config,
    backend: str,
    ceilings: Ceilings,
    *,
    gemms: Sequence[Gemm] = kernels.GEMMS,
    place: Place | None = None,
) -> Ledger:
    """Cost of a config's linear on one device, for one microbatch; of experts that of all of the
    device's. place: its ``linear_place``.
    """
    sizes = [size for size in gemm_sizes(decision, config, backend) if size.which in gemms]
    fusion = kernels.fusion(config, backend)
    if decision.experts is not None:
        return grouped_ledger(
            decision.recipe, sizes, decision.experts // config.parallel.expert, fusion, ceilings
        )
    if place is None:
        place = linear_place.of(decision, config, backend)
    return gemms_ledger(decision.recipe, sizes, fusion, ceilings, place)


def grouped_ledger(
    recipe: Recipe, sizes: Sequence[Size], experts: int, fusion: Fusion, ceilings: Ceilings
) -> Ledger:
    """Cost of grouped GEMMs, each of ``experts`` GEMMs of a size."""
    backend = "jax" if fusion == "xla" else "torch"
    wide = 4 if backend == "jax" else 2  # JAX's loop writes accumulators
    bf16, multiplied, count, plain_count = 0.0, 0.0, 0, 0
    in_fp8 = any(recipe.gemms[which].fp8 for which, *_ in sizes)
    beside = [
        Kernel(kernel.part, kernel.bytes * experts)
        for kernel in (quantizing(recipe, sizes, fusion) if in_fp8 else [])
        if kernel.part != "rescale"
    ]
    for which, m, n, k in sizes:
        spec = recipe.gemms[which]
        plain, gemm = (
            GroupedGemm(which, m, n, k, experts, grouped.by(s, backend))
            for s in (RECIPES["bf16"].gemms[which], spec)
        )
        laid = sum(kernel.bytes for kernel in plain.around(fusion, 2))
        bf16 += plain.seconds(ceilings.bf16, 2, wide, ceilings) + laid / ceilings.bandwidth
        plain_count += plain.launches
        fp8 = grouped.in_fp8(spec, backend)
        rate = ceilings.bf16
        if fp8:
            by_rows = spec.rowwise and backend == "torch"
            rate = ceilings.fp8_rowwise if by_rows else ceilings.fp8
        multiplied += gemm.seconds(rate, 1 if fp8 else 2, wide, ceilings)
        count += gemm.launches
        beside += gemm.around(fusion, 1 if fp8 else 2)
    if not in_fp8:
        return Ledger(bf16, {}, plain_count, plain_count * ceilings.launch)
    return _ledger(bf16, multiplied, count, beside, ceilings)


def sizes_of(m: int, n: int, k: int) -> list[Size]:
    """The three GEMMs of a weight [N, K] and M tokens."""
    return [Size("output", m, n, k), Size("grad_input", m, k, n), Size("grad_weight", n, k, m)]


def _elements(sizes: Sequence[Size]) -> dict:
    """Elements of each role's tensor, from any one of a linear's GEMMs."""
    which, m, n, k = sizes[0]
    tokens, rows, columns = {
        "output": (m, n, k),
        "grad_input": (m, k, n),
        "grad_weight": (k, m, n),
    }[which]
    return {"input": tokens * columns, "weight": rows * columns, "grad_output": tokens * rows}
