"""fp8ref demo: FP8 in two minutes. A tensor quantized, both backends trained in bf16 and FP8, their
layers compared with the simulator, and a verdict on a right recipe and on a planted fault.
"""

import argparse
import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fp8ref.commands import shared
from fp8ref.commands.shared import FAILED, check_whole
from fp8ref.shared import console
from fp8ref.shared.errors import require

if TYPE_CHECKING:
    from fp8ref.conformance.kit.compare import Report
    from fp8ref.train.config.config import Config
    from fp8ref.train.experiments.sweep import Planned
    from fp8ref.train.report.verdict import Verdict

    Runs = dict[tuple[str, str], list[Planned]]
    """(backend, recipe) -> its runs, a seed after another."""

    Verdicts = dict[tuple[str, str], Verdict]
    """(backend, recipe) -> the verdict on its runs."""

__all__ = ["KEPT", "OBSERVED", "Options", "add"]

OBSERVED = ("torch", "tensorwise")
"""The run of the long form whose amaxes are recorded, and some of whose operands are kept."""

KEPT = ("gate_proj", "down_proj")
"""The linears of the last block whose operands are kept.

They have the widest gradient, and the input with the most exponents.
"""

OUTLIER = ("model.layers.1.mlp.down_proj/input", 20_000)
"""The packaged tensor that is quantized, and the factor by which its first token is made larger."""

FIRST = ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4")
"""The recipes that quantize it, of which the first three are drawn."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a demo does.

    recipes   those in FP8, of each backend.
    seeds     {backend: how many seeds it trains}.
    planted   the backend that trains a fault too; None: the long form, which records a run.
    """

    recipes: tuple[str, ...]
    seeds: dict[str, int]
    planted: str | None = None
    confidence: float = 0.95
    margin: float | None = None


def add(commands) -> None:
    """Add ``fp8ref demo``."""
    command = shared.config_command(commands, "demo", _demo)
    command.usage = "fp8ref demo [CONFIG] [options]"
    command.option("--out", "DIR", "directory for the runs and the pictures", Path("demo"))
    command.option("--backend", "NAME", "jax or torch alone", choices=shared.BACKENDS)
    command.option("--recipes", "NAMES", "recipes, with commas (default tensorwise)")
    command.option("--seeds", "N", "seeds of each recipe that is judged (default 4)")
    command.option("--full", None, "15 minutes: 150 steps, two recipes, 3 seeds of both backends")
    shared.add_judging(command)


def _demo(arguments: argparse.Namespace) -> int:
    """FP8 in two minutes: quantize, train, cross-check, judge.

    $ fp8ref demo
    $ fp8ref demo --backend torch --recipes rowwise,mxfp8
    $ fp8ref demo --full
    """
    arguments.config = arguments.config or Path("tiny" if arguments.full else "demo")
    config = shared.config(arguments)
    shared.check_out(arguments.out, config)
    check_whole(config)
    return 0 if demo(config, arguments.out, _options(arguments)) else FAILED


def _options(arguments: argparse.Namespace) -> Options:
    full = arguments.full
    count = (3 if full else 4) if arguments.seeds is None else arguments.seeds
    own = vars(arguments).get("numerics.recipe")  # --recipe
    if arguments.recipes:
        shared.refuse(arguments, "--recipes names every recipe", "numerics.recipe")
    recipes = arguments.recipes or own or ("tensorwise,rowwise" if full else "tensorwise")
    names = [name for name in shared.names(recipes) if name != "bf16"]
    require(bool(names), f"--recipes takes recipes in FP8, with commas; got {recipes!r}.")
    backends = [arguments.backend] if arguments.backend else list(shared.installed())
    return Options(
        recipes=tuple(names),
        # of the short form the last backend is judged, torch of both: it compiles nothing
        seeds={name: count if full or name == backends[-1] else 1 for name in backends},
        planted=None if full else backends[-1],
        confidence=shared.confidence(arguments),
        margin=shared.margin(arguments),
    )


def demo(config: "Config", out: Path, options: Options) -> bool:
    """Quantize, train, cross-check, judge, print and draw.

    Runs go to ``out``, where they replace those of an earlier demo.

    Returns:  whether every cross-check held, no right recipe is worse than bf16, and the planted
              fault is neither equivalent nor better.
    """
    from fp8ref.crosscheck import one_device
    from fp8ref.train.experiments import demo as experiment

    begin, full = time.monotonic(), options.planted is None
    planned = experiment.plan(config, out, options.recipes, options.seeds, options.planted)
    runs: Runs = {}
    for run in planned:
        runs.setdefault(experiment.name_of(run), []).append(run)
    if full and OBSERVED in runs:
        first = runs[OBSERVED][0]
        observed = dataclasses.replace(first, config=first.config.replace(statistics={"every": 1}))
        runs[OBSERVED][0] = planned[planned.index(first)] = observed
    out.mkdir(parents=True, exist_ok=True)
    experiment.set_up(out)
    if missing := sorted({*shared.BACKENDS} - {*shared.installed()}):
        console.show(f"without {' and '.join(missing)}, which is not installed")
    with experiment.training(planned, out) as wait:
        if not full:
            _quantize(out / "outlier.png")
        _wait(planned, wait)
    reports = {}
    for recipe in options.recipes:
        checked, steps = config.replace(numerics={"recipe": recipe}), one_device.STEPS
        reports[recipe] = one_device.crosscheck(
            checked, backends=tuple(options.seeds), steps=steps if full else 2
        )
        reports[recipe].write(out / f"crosscheck-{recipe}.json")
        _show_equal(recipe, reports[recipe])
    judged = _show(runs, reports, options, out)
    files = [*(() if full else ("outlier.png",)), "report.html", "loss.png"]
    files += [f"crosscheck-{recipe}.json" for recipe in reports]
    if full and OBSERVED in runs:
        from fp8ref.train import tensors

        operands = tensors.of_run(runs[OBSERVED][0].out, _kept(config))
        tensors.write(out / tensors.FILE, operands)
        files.append(tensors.FILE)
    console.show(
        "",
        f"wrote {', '.join(str(out / name) for name in files)}",
        f"and {len(planned)} runs in {out}/; {time.monotonic() - begin:.0f} s in all",
        "next: fp8ref train tiny --recipe rowwise --run.steps 40"
        + ("" if full else ", or the long form: fp8ref demo --full"),
    )
    return all(report.ok for report in reports.values()) and _decides(judged)


def _quantize(path: Path) -> None:
    """Quantize the packaged tensor with an outlier: a table, and a picture."""
    import fp8ref as f8
    from fp8ref import plots
    from fp8ref.train import tensors

    name, factor = OUTLIER
    x = tensors.read("tiny").operands[name].copy()
    x[0] *= factor
    rows, columns = x.shape
    print(f"An input of a linear, {rows} x {columns}, whose first token is {factor:,}x as large:\n")
    print(f8.compare(x, FIRST))
    picture, (axes,) = plots.figure()
    f8.compare(x, FIRST[:3]).plot(axes)
    picture.savefig(path)
    console.show(f"picture: {path}", "")


def _wait(planned: list["Planned"], wait) -> None:
    """Wait for the runs, with a bar, and a line for each."""
    from fp8ref.train.experiments import demo as experiment

    console.show(f"training {len(planned)} runs of {planned[0].config.run.steps} steps")
    if any(experiment.name_of(run)[1] == experiment.PLANTED for run in planned):
        console.show(f"{experiment.PLANTED}: {experiment.FAULT}")

    def ended(run: "Planned", first: dict, last: dict) -> None:
        title = f"{' '.join(experiment.name_of(run))}, seed {run.config.run.seed}"
        console.show(f"  {title}: loss {first['loss']:.3f} -> {last['loss']:.3f}")

    with console.bar("training", len(planned)) as advance:
        wait(ended, advance)


def _show_equal(recipe: str, report: "Report") -> None:
    """The headline of a cross-check, and its failures."""
    counts = []
    for part, what in (("/codes/", "FP8 codes"), ("/scale/", "scales")):
        compared, equal = _equal(report, part)
        counts.append(f"{equal:,} of {compared:,} {what}")
    console.show("", f"{recipe}: {' and '.join(counts)} equal the simulator's.")
    console.show(f"{sum(row.ok for row in report.table())} of {len(report.table())} checks hold")
    console.show(*(failure.detail for failure in report.failures[:5]), "")


def _equal(report: "Report", part: str) -> tuple[int, int]:
    """How many elements were compared, and are equal, in checks of layers that name ``part``."""
    rows = [
        row for row in report.table() if row.name.startswith("layers/") and part in f"{row.name}/"
    ]
    return sum(row.compared for row in rows), sum(row.equal for row in rows)


def _show(runs: "Runs", reports: dict[str, "Report"], options: Options, out: Path) -> "Verdicts":
    """Judge each recipe with as many seeds as any, as one pair decides little; print the table and
    the verdicts, draw the losses, and write report.html."""
    from fp8ref.train.data import loader
    from fp8ref.train.experiments import demo as experiment
    from fp8ref.train.report import gap, page, verdict
    from fp8ref.train.report.runs import read_all
    from fp8ref.train.run import log

    confidence, margin = options.confidence, options.margin
    names = {run.out: name for name, of_name in runs.items() for run in of_name}
    every = read_all(list(names))
    (group,), most = verdict.groups(every), max(options.seeds.values())
    judged: Verdicts = {
        names[arm.runs[0].path]: verdict.verdict(arm, group, confidence=confidence, margin=margin)
        for arm in verdict.judged(group)
        if len(arm.runs) == most and not arm.bf16
    }
    lines = {name: log.read_metrics(of_name[0].out) for name, of_name in runs.items()}
    _show_table(lines, reports, judged)
    # of shards nobody counts it
    data = loader.open_batches(next(iter(runs.values()))[0].config).description
    entropy = data.get("validation_unigram_entropy")
    if entropy is not None:
        console.show(f"unigram entropy of the validation text {entropy:.3f} nats")
    _draw(out / "loss.png", lines, judged, entropy)
    for (backend, recipe), answer in judged.items():
        fault = f" ({experiment.FAULT})" if recipe == experiment.PLANTED else ""
        console.show("", f"{backend} {recipe}{fault}: {answer.said}")
        if answer.compared and answer.margin and not fault:
            share = answer.margin / answer.compared.level
            usual = abs(share - gap.MARGIN) < 1e-9
            why = ", within which DeepSeek-V3 calls FP8 acceptable" if usual else ""
            console.show(f"margin: {answer.margin:.4f} nats, {share:.2%} of bf16's loss{why}")
    # Maps of the first seeds that are judged alone: they are what takes long to draw.
    mapped = {runs[name][0].out for name in judged}
    shown = [
        run if run.path in mapped else dataclasses.replace(run, statistics=[]) for run in every
    ]
    page.write(shown, out / "report.html", confidence=confidence, margin=margin)
    return judged


def _decides(judged: "Verdicts") -> bool:
    """Whether the verdicts are as they should. One that cannot tell is no failure."""
    from fp8ref.train.experiments import demo as experiment

    wrong = {False: ("worse",), True: ("equivalent", "better")}
    return not any(
        answer.kind in wrong[recipe == experiment.PLANTED] for (_, recipe), answer in judged.items()
    )


def _show_table(lines: dict, reports: dict[str, "Report"], judged: "Verdicts") -> None:
    """A row for each backend and recipe: losses, gap to bf16, and what the cross-check found."""
    table = console.table(
        *("backend", "recipe", "final loss", "val loss", "gap to bf16"),
        *("codes equal", "scales equal", "cross-check"),
    )
    for (backend, recipe), metrics in lines.items():
        gap, bits, holds = "-", ["-", "-"], "-"
        if answer := judged.get((backend, recipe)):
            last = answer.compared and answer.compared.gap.last
            gap = f"{last.mean:+.4f}" if last else answer.kind
        if report := reports.get(recipe):
            for i, kind in enumerate(("codes", "scale")):
                compared, equal = _equal(report, f"/{kind}/{backend}/")
                few = f"all but {compared - equal:,} of {compared:,}"
                bits[i] = f"all {compared:,}" if equal == compared else few
            holds = "holds" if report.ok else "FAILS"
        losses = (f"{metrics[-1][key]:.4f}" for key in ("loss", "val_loss"))
        table.add_row(backend, recipe, *losses, gap, *bits, holds)
    console.console().print(table)


def _draw(path: Path, lines: dict, judged: "Verdicts", entropy: float | None) -> None:
    """Draw losses, and gaps to bf16."""
    from fp8ref import plots

    picture, axes = plots.figure(2)
    plots.loss_curves(axes[0], lines, entropy=entropy)
    gaps = {}
    for (backend, recipe), verdict in judged.items():
        if verdict.compared:
            gap = verdict.compared.gap.last
            gaps[f"{backend} {recipe}"] = tuple(map(float, (gap.mean, gap.low, gap.high)))
    margin = max((one.margin for one in judged.values() if one.margin), default=0.0)
    plots.loss_gaps(axes[1], gaps, margin=margin)
    picture.savefig(path)


def _kept(config: "Config") -> list[str]:
    """Those linears of the last block named by KEPT that run in FP8."""
    last = f"model.layers.{config.model.num_hidden_layers - 1}."
    return [
        d.path
        for d in config.replace(numerics={"recipe": OBSERVED[1]}).decisions()
        if d.fp8 and d.path.startswith(last) and d.path.endswith(KEPT)
    ]
