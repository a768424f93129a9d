"""``fp8ref train --dry-run``: tables of sizes, memory, GEMMs, communication and break-even."""

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fp8ref.estimate import filtering, kernels, memory, roofline
from fp8ref.estimate.collectives import collectives
from fp8ref.estimate.gpu_rates import GPUS, PUBLISHED
from fp8ref.shared import console as consoles
from fp8ref.spec import products
from fp8ref.train.config import architecture, device_shapes, hardware
from fp8ref.train.config.config import Config
from fp8ref.train.run import coverage, train_state

__all__ = ["show"]


def show(config: Config, backend: str, console: Console) -> None:
    """Print all tables; of a schedule those that depend on the recipe for each.

    Raises:   ConfigError: the backend would refuse the config on any devices.
    """
    architecture.check_backend(config, backend)
    if config.architecture.kind != "llama":
        _show_custom(config, backend, console)
        return
    device_shapes.check(config, backend)
    for make_table in (_sizes, _memory):
        _print(make_table(config, backend), console)
    for recipe in config.recipes:
        if config.numerics.schedule:
            console.print(
                Text(f"Recipe {recipe!r}, one of the schedule", style="bold"), "", sep="\n"
            )
        for make_table in (_linears, _gemms, _traffic, _break_even):
            _print(make_table(config.under(recipe), backend), console)


def _show_custom(config: Config, backend: str, console: Console) -> None:
    """What is known of a user's model: parameters, linears, and the bytes of a checkpoint."""
    shapes, data = config.shapes, config.data
    table = consoles.table("what", ">size", "how", title=f"The run, with {backend}")
    count = sum(map(math.prod, shapes.parameters.values()))
    table.add_row("parameters", f"{count:,}", shapes.kind)
    tokens = data.batch_size * data.sequence_length
    table.add_row(
        "tokens a step", f"{tokens:,}", f"{data.batch_size:,} sequences of {data.sequence_length:,}"
    )
    table.add_row("tokens a run", f"{tokens * config.run.steps:,}", f"{config.run.steps:,} steps")
    table.add_row(
        "a checkpoint", f"{_gib(train_state.disk_bytes(config, backend))} GiB", "on the disk"
    )
    table.caption = (
        "Memory, traffic and speed are not estimated: the layers of a user's model are not known."
    )
    _print(table, console)
    for recipe in config.recipes:
        own = config.under(recipe)
        _print(_linears(own, backend), console)
        summary = coverage.of(own, own.decisions())["summary"]
        console.print(Text(summary), "", sep="\n")


def _print(table: Table, console: Console) -> None:
    # printed apart: rich folds titles and captions to the width of the table
    title, caption, table.title, table.caption = table.title, table.caption, None, None
    below = [Text(str(caption))] if caption else []
    console.print(Text(str(title), style="bold"), table, *below, "", sep="\n")


def _sizes(config: Config, backend: str) -> Table:
    keys, data = config.parallel, config.data
    table = consoles.table("what", ">size", "how", title=f"The run, with {backend}")
    for kind, count in device_shapes.kinds(config).items():
        share = f"{count / 1e9:.2f} billion" if count >= 1e8 else ""
        table.add_row(f"parameters: {kind}", f"{count:,}", share)
    if config.model.num_experts:
        active = device_shapes.active(config)
        table.add_row(
            "parameters: active",
            f"{active:,}",
            f"{active / 1e9:.2f} billion: those that take a token, of its "
            f"{config.model.num_experts_per_tok} experts",
        )
    mesh = (
        " x ".join(f"{axis} {getattr(keys, axis)}" for axis in keys.axes)
        + ", sequences cut over tensor" * keys.sequence
    )
    table.add_row("devices", f"{keys.devices:,}", mesh)
    tokens = data.batch_size * data.sequence_length
    parts = f", in {data.microbatches} parts" * (data.microbatches > 1)
    table.add_row(
        "tokens a step",
        f"{tokens:,}",
        f"{data.batch_size:,} sequences of {data.sequence_length:,}{parts}",
    )
    table.add_row(
        "tokens a device and part",
        f"{device_shapes.tokens(config):,}",
        "M of its GEMMs" + ", shared along tensor" * (keys.tensor > 1),
    )
    if simulated := hardware.of(config, backend):
        table.add_row(
            "FP8 GEMMs",
            simulated.name,
            "simulated on the host's CPU; the other tables are for a GPU's own GEMMs",
        )
    if config.numerics.schedule:
        for (begins, recipe), start in zip(config.numerics.schedule, config.starts, strict=True):
            reached = start is not None and start < config.run.steps
            if "sqnr" in str(begins):
                when = "when it is measured"
            elif reached:
                when = f"from step {start:,}"
            else:
                when = "not in this run"
            table.add_row(f"phase: {recipe}", str(begins), when)
    table.add_row("tokens a run", f"{tokens * config.run.steps:,}", f"{config.run.steps:,} steps")
    return table


def _memory(config: Config, backend: str) -> Table:
    table = consoles.table("what", ">GiB", "in", "how", title="Memory of a device, estimated")
    lines = memory.lines(config, backend)
    for name, line in lines.items():
        table.add_row(name, _gib(line.size), _span(line.at), line.formula)
    moment, size = memory.most(lines)
    fits = ", ".join(
        f"{'fits' if size <= gpu.memory else 'DOES NOT FIT'} {gpu.name} ({_gib(gpu.memory)})"
        for gpu in GPUS.values()
    )
    table.add_row("the most at one time", _gib(size), moment, fits)
    if config.numerics.schedule:
        table.title = (
            f"Memory of a device, estimated, under recipe {memory.largest(config, backend)!r}, "
            "the largest of the schedule"
        )
    if config.parallel.checkpointing == "none":
        checkpointing = "no activation checkpointing"
    else:
        checkpointing = f"checkpointing {config.parallel.checkpointing}"
    table.caption = (
        "in: moments of a step, in order: the backward pass of the loss, the last layer, the "
        "first layer and the embedding; the update. H, A, KV, F: hidden, query, key and value, "
        f"inner features on a device; {checkpointing}"
    )
    if config.model.num_experts:
        table.caption += (
            f"; k: a token's experts, {config.model.num_experts_per_tok}, whose features F is "
            "all of"
        )
    return table


def _span(at: Sequence[memory.Moment]) -> str:
    """The moments of a step in which a line is there; they follow each other."""
    if tuple(at) == memory.MOMENTS:
        return "all"
    if tuple(at) == memory.LAYERS:
        return "last to first layer"
    return at[0] if len(at) == 1 else f"{at[0]} to {at[-1]}"


def _linears(config: Config, backend: str) -> Table:
    columns = (">weight [N, K]", ">count", "FP8", "why")
    title = f"Linears under recipe {config.numerics.recipe!r}"
    table = consoles.table("linear", *columns, title=title)
    groups: dict[tuple, int] = {}
    for d in config.decisions():
        shape = d.shape if d.experts is None else (d.experts, *d.shape)
        name = roofline.short_name(d.path)
        key = name, shape, d.fp8, d.reason.replace(d.path, name)
        groups[key] = groups.get(key, 0) + 1
    for (name, shape, fp8, why), count in groups.items():
        table.add_row(name, f"{list(shape)}", str(count), "yes" if fp8 else "no", why)
    if config.model.tie_word_embeddings and config.architecture.kind == "llama":
        size = f"{[config.model.vocab_size, config.model.hidden_size]}"
        table.add_row("lm_head", size, "1", "no", "tied to the embedding (R-2)")
    return table


def _gemms(config: Config, backend: str) -> Table:
    """Distinct GEMM shapes [M, K] x [N, K], and how often a device runs each in a step."""
    columns = ("GEMM", ">M", ">N", ">K", ">times", "of", "runs in")
    table = consoles.table(*columns, title="GEMMs of a device in a step")
    groups: dict[tuple, list[str]] = {}
    flops, in_fp8 = 0, 0
    for d in roofline.with_tied(config):
        # experts of a device
        own = (d.experts or 1) // (config.parallel.expert if d.experts else 1)
        for which, m, n, k in roofline.gemm_sizes(d, config, backend):
            spec, by = d.recipe.gemms[which], config.numerics.products
            names = groups.setdefault((which, m, n, k, roofline.runs_in(spec, backend, by)), [])
            names += [roofline.short_name(d.path)] * own
            flops += 2 * m * n * k * own
            in_fp8 += 2 * m * n * k * own * kernels.multiplies_fp8(spec, backend, by)
    for (which, *sizes, runs_in), names in groups.items():
        counts = [f"{n:,}" for n in (*sizes, len(names) * config.data.microbatches)]
        table.add_row(which, *counts, ", ".join(dict.fromkeys(names)), runs_in)
    checkpointed = config.parallel.checkpointing != "none"
    again = "; what checkpointing runs again is not counted" * checkpointed
    share = (
        f"{100 * in_fp8 / flops:.1f} % of their {flops * config.data.microbatches:.3g} FLOPs in FP8"
    )
    model, keys = config.model, config.parallel
    rows = (
        device_shapes.tokens(config)
        * keys.expert
        * model.num_experts_per_tok
        // max(model.num_experts, 1)
    )
    grouped = f"; an expert has {rows:,} rows on average" if model.num_experts else ""
    table.caption = f"{share}; attention's own products are not linears{again}{grouped}"
    return table


def _traffic(config: Config, backend: str) -> Table:
    columns = ("for", ">as configured", ">all bf16", ">all float32")
    table = consoles.table(*columns, title="What a device receives in a step, GiB")
    flows = collectives.flows(config, backend)
    for purpose, flow in flows.items():
        if not flow.elements and _gib(flow.bytes) == "0.00":
            continue  # amaxes, scales, the loss
        table.add_row(purpose, _gib(flow.bytes), _gib(2 * flow.elements), _gib(4 * flow.elements))
    if not flows:
        table.add_row("nothing: one device", "0", "0", "0")
    return table


def _break_even(config: Config, backend: str) -> Table:
    by = config.numerics.products
    rates = [each for each in PUBLISHED.values() if products.runs(by, each.sheet.capability)]
    names = [each.gpu for each in rates]
    title = "Where FP8 would pay: bf16's time by FP8's, predicted"
    table = consoles.table("linear", *(f">{name}" for name in names), "", title=title)
    columns = [roofline.linears(config, backend, ceilings) for ceilings in rates]
    lost = [roofline.losing(config, backend, ceilings) for ceilings in rates]
    # the last of equal linears, as fp8ref estimate has it
    rows: dict[tuple, list[float | None]] = {}
    for row in zip(*columns, strict=True):
        decision, ratios = row[0][0], [ledger.ratio for _, ledger in row]
        rows[filtering.kind(decision), decision.shape, decision.experts] = ratios
    for (kind, *_), ratios in rows.items():
        cells = ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        slower = [name for name, kinds in zip(names, lost, strict=True) if kind in kinds]
        advice = f"SLOWER in FP8 on {', '.join(slower)}: name it in filter_fqns" * bool(slower)
        table.add_row(roofline.short_name(kind[0]), *cells, advice)
    eager = ""
    if kernels.fusion(config, backend) == "eager" and not kernels.casts_by_triton(config, backend):
        eager = "; casts not fused, as without parallel.compile"
    table.caption = (
        f"Estimates from published rates, not measurements{eager}; fp8ref estimate says what "
        "they are made of."
    )
    return table


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f}"
