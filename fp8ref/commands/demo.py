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

if TYPE_CHECKING:
    from rich.table import Table

    from fp8ref.conformance.kit.compare import Report
    from fp8ref.train.config.config import Config
    from fp8ref.train.experiments.demo import Job
    from fp8ref.train.report.verdict import Verdict

    Lines = dict[tuple[str, str], list[dict]]
    """(backend, recipe) -> the metrics of each step, of the first seed."""

    Verdicts = dict[tuple[str, str], Verdict]
    """(backend, recipe) -> the verdict on its runs."""

__all__ = ["KEPT", "Options", "add"]

KEPT = ("gate_proj", "down_proj")
"""The linears of the last block whose operands the long form keeps.

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
    planted   the backend that trains a fault too; None: none.
    full      the long form: it records a run, and keeps its operands.
    """

    recipes: tuple[str, ...]
    seeds: dict[str, int]
    planted: str | None = None
    full: bool = False
    confidence: float = 0.95
    margin: float | None = None


def add(commands) -> None:
    """Add ``fp8ref demo``."""
    command = shared.config_command(commands, "demo", _demo)
    command.option("--out", "DIR", "directory for the runs and the pictures", Path("demo"))
    command.option("--backend", "NAME", "jax or torch alone", choices=shared.BACKENDS)
    command.option("--recipes", "NAMES", "recipes, with commas (default tensorwise)")
    command.option("--seeds", "N", "seeds of each recipe that is judged (default 4)")
    command.option("--full", None, "15 minutes: 150 steps, two recipes, 3 seeds of both backends")
    shared.add_judging(command)


def _demo(arguments: argparse.Namespace) -> int:
    """FP8 in two minutes: quantize, train, compare with the simulator, judge.

    $ fp8ref demo
    $ fp8ref demo --backend torch --recipes rowwise,mxfp8
    $ fp8ref demo --full
    """
    arguments.config = arguments.config or Path("tiny" if arguments.full else "demo")
    config = shared.config(arguments)
    check_whole(config)
    return 0 if demo(config, arguments.out, _options(arguments)) else FAILED


def _options(arguments: argparse.Namespace) -> Options:
    from fp8ref import recipe as every
    from fp8ref.shared.errors import ConfigError

    full = arguments.full
    if arguments.seeds is not None and arguments.seeds < 1:
        raise ConfigError(f"--seeds is at least 1; got {arguments.seeds}.")
    count = arguments.seeds or (3 if full else 4)
    own = vars(arguments).get("numerics.recipe")  # --recipe
    recipes = arguments.recipes or own or ("tensorwise,rowwise" if full else "tensorwise")
    names = [name.strip() for name in recipes.split(",")]
    for name in names:
        every.check_trained(name, "--recipes")
    names = [name for name in dict.fromkeys(names) if name != "bf16"]
    if not names:
        raise ConfigError(
            f"--recipes names a recipe in FP8; got {recipes!r}. bf16 is trained anyway."
        )
    backends = [arguments.backend] if arguments.backend else list(shared.installed())
    return Options(
        recipes=tuple(names),
        # of the short form the last backend is judged, torch of both: it compiles nothing
        seeds={name: count if full or name == backends[-1] else 1 for name in backends},
        planted=None if full else backends[-1],
        full=full,
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
    from fp8ref.shared import console as consoles
    from fp8ref.train.experiments import demo as experiment

    begin, console = time.monotonic(), consoles.console()
    out.mkdir(parents=True, exist_ok=True)
    experiment.set_up(out)
    if missing := sorted({*shared.BACKENDS} - {*shared.installed()}):
        console.print(f"without {' and '.join(missing)}, which is not installed")
    jobs = experiment.plan(
        config,
        out,
        recipes=options.recipes,
        seeds=options.seeds,
        planted=options.planted,
        observed=options.full,
    )
    with experiment.training(jobs, out) as wait:
        if not options.full:
            _quantize(out / "outlier.png")
        _train(jobs, wait)
    reports = {}
    for recipe in options.recipes:
        checked = experiment.configured(config, recipe)
        steps = one_device.STEPS if options.full else 2
        report = one_device.crosscheck(checked, backends=tuple(options.seeds), steps=steps)
        report.write(out / f"crosscheck-{recipe}.json")
        _show_equal(recipe, report)
        reports[recipe] = report
    judged = _judge(jobs, options)
    _show(jobs, reports, judged, options, out)
    right = _decides(reports, judged)
    files = ["report.html", "loss.png", *(f"crosscheck-{recipe}.json" for recipe in reports)]
    if options.full:
        files += _keep(config, out)
    else:
        files.insert(0, "outlier.png")
    console.print(f"\nwrote {', '.join(str(out / name) for name in files)}", soft_wrap=True)
    console.print(f"and {len(jobs)} runs in {out}/; {time.monotonic() - begin:.0f} s in all")
    more = "" if options.full else ", or the long form: fp8ref demo --full"
    console.print(f"next: fp8ref train tiny --recipe rowwise --run.steps 40{more}")
    return right


def _quantize(path: Path) -> None:
    """Quantize the packaged tensor with an outlier: a table, and a picture."""
    import fp8ref as f8
    from fp8ref import plots
    from fp8ref.shared import console as consoles
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
    consoles.show(f"picture: {path}", "")


def _train(jobs: list["Job"], wait) -> None:
    """Wait for the runs, with a bar, and a line for each."""
    from fp8ref.shared import console as consoles
    from fp8ref.train.experiments import demo as experiment

    faults = {job.recipe for job in jobs} & {experiment.PLANTED}
    consoles.show(f"training {len(jobs)} runs of {jobs[0].config.run.steps} steps")
    if faults:
        consoles.show(f"{experiment.PLANTED}: {experiment.FAULT}")

    def ended(job: "Job", first: dict, last: dict) -> None:
        consoles.show(f"  {job.title}: loss {first['loss']:.3f} -> {last['loss']:.3f}")

    with consoles.bar("training", len(jobs)) as advance:
        wait(ended, advance)


def _show_equal(recipe: str, report: "Report") -> None:
    """The headline of a cross-check, and its failures."""
    from fp8ref.shared import console as consoles

    counts = []
    for kind, what in (("codes", "FP8 codes"), ("scale", "scales")):
        compared, equal = _equal(report, f"/{kind}/")
        counts.append(f"{equal:,} of {compared:,} {what}")
    consoles.show("", f"{recipe}: {' and '.join(counts)} equal the simulator's.")
    consoles.show(f"{sum(row.ok for row in report.table())} of {len(report.table())} checks hold")
    consoles.show(*(failure.detail for failure in report.failures[:5]), "")


def _equal(report: "Report", part: str) -> tuple[int, int]:
    """How many elements were compared, and are equal, in checks of layers whose names have a
    part."""
    rows = [
        row for row in report.table() if row.name.startswith("layers/") and part in f"{row.name}/"
    ]
    return sum(row.compared for row in rows), sum(row.equal for row in rows)


def _judge(jobs: list["Job"], options: Options) -> "Verdicts":
    """The verdict on each recipe with as many seeds as any: one pair of runs decides little."""
    from fp8ref.train.report import verdict as verdicts
    from fp8ref.train.report.runs import read_all

    names = {job.directory: (job.backend, job.recipe) for job in jobs}
    (group,) = verdicts.groups(read_all(list(names)))
    most = max(options.seeds.values())
    return {
        names[arm.runs[0].path]: verdicts.verdict(
            arm, group, confidence=options.confidence, margin=options.margin
        )
        for arm in verdicts.judged(group)
        if len(arm.runs) == most and not arm.bf16
    }


def _show(
    jobs: list["Job"], reports: dict[str, "Report"], judged: "Verdicts", options: Options, out: Path
) -> None:
    """Print the table and the verdicts, draw the losses, and write report.html."""
    from fp8ref.shared import console as consoles
    from fp8ref.train.data import loader
    from fp8ref.train.experiments import demo as experiment
    from fp8ref.train.report import gap, page
    from fp8ref.train.report.runs import read_all
    from fp8ref.train.run import log

    first = {(job.backend, job.recipe): job for job in reversed(jobs)}
    runs = {(j.backend, j.recipe): log.read_metrics(j.directory) for j in first.values()}
    runs = dict(sorted(runs.items(), key=lambda item: jobs.index(first[item[0]])))
    console = consoles.console()
    console.print(_table(runs, reports, judged))
    # of shards nobody counts it
    entropy = loader.open_batches(jobs[0].config).description.get("validation_unigram_entropy")
    if entropy is not None:
        consoles.show(f"unigram entropy of the validation text {entropy:.3f} nats")
    _draw(out / "loss.png", runs, judged, entropy)
    for (backend, recipe), verdict in judged.items():
        told = f" ({experiment.FAULT})" if recipe == experiment.PLANTED else ""
        consoles.show("", f"{backend} {recipe}{told}: {verdict.said}")
    margins = [v.margin for v in judged.values() if v.margin is not None and v.compared]
    if margins:
        share = margins[0] / next(v.compared.level for v in judged.values() if v.compared)
        usual = abs(share - gap.MARGIN) < 1e-9
        why = ", within which DeepSeek-V3 calls FP8 acceptable" if usual else ""
        consoles.show("", f"margin: {margins[0]:.4f} nats, {share:.2%} of bf16's loss{why}")
    every = read_all([job.directory for job in jobs])
    # maps of the first seeds that are judged alone: they are what takes long to draw
    mapped = {first[key].directory for key in judged}
    shown = [
        run if run.path in mapped else dataclasses.replace(run, statistics=[]) for run in every
    ]
    page.write(shown, out / "report.html", confidence=options.confidence, margin=options.margin)


def _decides(reports: dict[str, "Report"], judged: "Verdicts") -> bool:
    """Whether all came out as it should. A verdict that cannot tell is no failure."""
    from fp8ref.train.experiments import demo as experiment

    return all(report.ok for report in reports.values()) and all(
        verdict.kind not in (("equivalent", "better") if fault else ("worse",))
        for (_, recipe), verdict in judged.items()
        for fault in [recipe == experiment.PLANTED]
    )


def _table(runs: "Lines", reports: dict[str, "Report"], judged: "Verdicts") -> "Table":
    """A row for each backend and recipe: losses, gap to bf16, and what the cross-check found."""
    from fp8ref.shared import console as consoles

    table = consoles.table(
        *("backend", "recipe", "final loss", "val loss", "gap to bf16"),
        *("codes equal", "scales equal", "cross-check"),
    )
    for (backend, recipe), lines in runs.items():
        gap, bits, holds = "-", ["-", "-"], "-"
        if verdict := judged.get((backend, recipe)):
            judged_gap = verdict.compared and verdict.compared.gap.last
            gap = f"{judged_gap.mean:+.4f}" if judged_gap else verdict.kind
        if report := reports.get(recipe):
            for i, kind in enumerate(("codes", "scale")):
                compared, equal = _equal(report, f"/{kind}/{backend}/")
                few = f"all but {compared - equal:,} of {compared:,}"
                bits[i] = f"all {compared:,}" if equal == compared else few
            holds = "holds" if report.ok else "FAILS"
        losses = (f"{lines[-1][key]:.4f}" for key in ("loss", "val_loss"))
        table.add_row(backend, recipe, *losses, gap, *bits, holds)
    return table


def _draw(path: Path, runs: "Lines", judged: "Verdicts", entropy: float | None) -> None:
    """Draw losses, and gaps to bf16."""
    from fp8ref import plots

    picture, axes = plots.figure(2)
    plots.loss_curves(axes[0], runs, entropy=entropy)
    gaps = {}
    for (backend, recipe), verdict in judged.items():
        if verdict.compared:
            gap = verdict.compared.gap.last
            gaps[f"{backend} {recipe}"] = float(gap.mean), float(gap.low), float(gap.high)
    margin = max((one.margin for one in judged.values() if one.margin), default=0.0)
    plots.loss_gaps(axes[1], gaps, margin=margin)
    picture.savefig(path)


def _keep(config: "Config", out: Path) -> list[str]:
    """Write operands of the observed run, if it was trained."""
    from fp8ref.train import tensors
    from fp8ref.train.experiments import demo as experiment

    run = out / "-".join(experiment.OBSERVED)
    if not run.is_dir():
        return []
    tensors.write(out / tensors.FILE, tensors.of_run(run, _kept(config)))
    return [tensors.FILE]


def _kept(config: "Config") -> list[str]:
    """Those linears of the last block named by KEPT that run in FP8."""
    from fp8ref.train.experiments import demo as experiment

    last = f"model.layers.{config.model.num_hidden_layers - 1}."
    return [
        d.path
        for d in experiment.configured(config, experiment.OBSERVED[1]).decisions()
        if d.fp8 and d.path.startswith(last) and d.path.endswith(KEPT)
    ]
