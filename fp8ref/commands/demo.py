"""fp8ref demo: train one config in bf16 and FP8 with both backends, cross-check, and draw
losses.
"""

import argparse
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from fp8ref.commands import shared
from fp8ref.commands.shared import FAILED, check_whole

if TYPE_CHECKING:
    from rich.table import Table

    from fp8ref.conformance.kit.compare import Report
    from fp8ref.train.config.config import Config
    from fp8ref.train.report.runs import Run
    from fp8ref.train.report.verdict import Verdict

    Lines = dict[tuple[str, str], list[dict]]
    """(backend, recipe) -> the metrics of each step."""

    Verdicts = dict[tuple[str, str], Verdict]
    """(backend, recipe) -> the verdict on its runs."""

__all__ = ["KEPT", "OBSERVED", "RECIPES", "add"]

RECIPES = ("bf16", "tensorwise", "rowwise")
"""The recipes that the demo trains with."""

OBSERVED = ("torch", "tensorwise")
"""The run whose amaxes are recorded, and some of whose operands are kept: (backend, recipe)."""

KEPT = ("gate_proj", "down_proj")
"""The linears of the last block whose operands are kept.

They have the widest gradient, and the input with the most exponents.
"""

SEEDS = 3
"""How many seeds each recipe is trained with: FP8 is judged by the bf16 run of equal seeds."""


def add(commands) -> None:
    """Add ``fp8ref demo``."""
    command = shared.config_command(commands, "demo", _demo)
    command.option("--out", "DIR", "directory for the runs and the picture", Path("demo"))


def _demo(arguments: argparse.Namespace) -> int:
    """Train in bf16 and FP8 with both backends, cross-check and plot.

    $ fp8ref demo
    $ fp8ref demo --out here --run.steps 40
    $ fp8ref demo tiny-moe --run.steps 20
    """
    arguments.config = arguments.config or Path("tiny")
    config = shared.config(arguments)
    check_whole(config)
    return 0 if demo(config, arguments.out) else FAILED


def demo(config: "Config", out: Path) -> bool:
    """Train, cross-check, print and draw.

    Runs go to ``out``, where they replace those of an earlier demo.

    Returns:  whether every cross-check held.
    """
    from fp8ref.crosscheck.one_device import crosscheck
    from fp8ref.shared import console as consoles
    from fp8ref.train import loop, tensors
    from fp8ref.train.data import loader
    from fp8ref.train.report import verdict as verdicts
    from fp8ref.train.report.runs import read_all

    console = consoles.console()
    pairs = list(itertools.product(loop.BACKENDS, RECIPES))
    directories = [out / f"{backend}-{recipe}" for backend, recipe in pairs]
    runs = {
        (backend, recipe): _train(_config(config, backend, recipe), backend, directory)
        for (backend, recipe), directory in zip(pairs, directories, strict=True)
    }
    for backend, i, recipe in itertools.product(loop.BACKENDS, range(1, SEEDS), RECIPES):
        seed = config.run.seed + i
        again = _config(config, backend, recipe).replace(
            run={"seed": seed}, data={"seed": config.data.seed + i}
        )
        directories.append(out / f"{backend}-{recipe}-seed{seed}")
        _train(again, backend, directories[-1])
    reports = {recipe: crosscheck(_config(config, "jax", recipe)) for recipe in RECIPES[1:]}
    for recipe, report in reports.items():
        report.write(out / f"crosscheck-{recipe}.json")
    # of shards nobody counts it
    entropy = loader.open_batches(config).description.get("validation_unigram_entropy")
    (group,) = verdicts.groups(read_all(directories))
    judged = {_key(arm.runs[0]): verdicts.verdict(arm, group) for arm in verdicts.judged(group)}
    console.print(_table(runs, reports, judged))
    highest = max(lines[-1]["val_loss"] for lines in runs.values())
    reference = (
        "" if entropy is None else f"; unigram entropy of the validation text {entropy:.3f} nats"
    )
    console.print(f"highest validation loss {highest:.3f}{reference}")
    for (backend, recipe), one in judged.items():
        if recipe != "bf16":
            text = f"{backend} {recipe}: {one.said}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    for report in reports.values():
        for failure in report.failures[:5]:
            console.print(failure.detail, markup=False)
    _draw(out / "loss.png", runs, judged, entropy)
    tensors.write(out / tensors.FILE, tensors.of_run(out / "-".join(OBSERVED), _kept(config)))
    console.print(
        f"wrote {out / 'loss.png'}, {out / tensors.FILE}, {out}/crosscheck-*.json and "
        f"{len(directories)} runs in {out}/",
        soft_wrap=True,
    )
    return all(report.ok for report in reports.values())


def _table(runs: "Lines", reports: dict[str, "Report"], judged: "Verdicts") -> "Table":
    """A row for each run: losses, its gap to bf16, and what the cross-check found."""
    from fp8ref.shared import console as consoles

    table = consoles.table(
        "backend",
        "recipe",
        "final loss",
        "val loss",
        "gap to bf16",
        "codes equal",
        "scales equal",
        "cross-check",
    )
    for (backend, recipe), lines in runs.items():
        gap, bits, verdict = "-", ["-", "-"], "-"
        if recipe != "bf16":
            gap = _gap(judged[backend, recipe])
        if report := reports.get(recipe):
            bits = [_equal(report, f"/{kind}/{backend}") for kind in ("codes", "scale")]
            verdict = "holds" if report.ok else "FAILS"
        losses = (f"{lines[-1][key]:.4f}" for key in ("loss", "val_loss"))
        table.add_row(backend, recipe, *losses, gap, *bits, verdict)
    return table


def _equal(report: "Report", ending: str) -> str:
    """How many elements are equal, of the checks of layers whose names end so."""
    rows = [
        row
        for row in report.table()
        if row.name.startswith("layers/") and row.name.endswith(ending)
    ]
    compared, equal = sum(row.compared for row in rows), sum(row.equal for row in rows)
    if equal == compared:
        return f"all {compared:,}"
    return f"all but {compared - equal:,} of {compared:,}"


def _draw(path: Path, runs: "Lines", judged: "Verdicts", entropy: float | None) -> None:
    """Draw losses, and gaps to bf16."""
    from fp8ref import plots

    picture, axes = plots.figure(2)
    plots.loss_curves(axes[0], runs, entropy=entropy)
    gaps = {}
    for (backend, recipe), one in judged.items():
        if one.compared and recipe != "bf16":
            gap = one.compared.gap.last
            gaps[f"{backend} {recipe}"] = float(gap.mean), float(gap.low), float(gap.high)
    margin = max((one.margin for one in judged.values() if one.margin), default=0.0)
    plots.loss_gaps(axes[1], gaps, margin=margin)
    picture.savefig(path)


def _config(config: "Config", backend: str, recipe: str) -> "Config":
    every = 1 if (backend, recipe) == OBSERVED else config.statistics.every
    # bf16 has no FP8 GEMM to run under simulated hardware
    plan = {"accumulate": None} if recipe == "bf16" else {}
    return config.replace(numerics={"recipe": recipe} | plan, statistics={"every": every})


def _key(run: "Run") -> tuple[str, str]:
    return run.manifest["backend"], run.key("numerics.recipe")


def _gap(verdict: "Verdict") -> str:
    if verdict.compared is None:
        return verdict.kind
    return f"{verdict.compared.gap.last.mean:+.4f}"


def _kept(config: "Config") -> list[str]:
    """Those linears of the last block named by KEPT that run in FP8."""
    last = f"model.layers.{config.model.num_hidden_layers - 1}."
    return [
        d.path
        for d in _config(config, *OBSERVED).decisions()
        if d.fp8 and d.path.startswith(last) and d.path.endswith(KEPT)
    ]


def _train(config: "Config", backend: str, out: Path) -> list[dict]:
    from fp8ref.train import loop

    lines = loop.train(config, backend, out, overwrite=True)
    assert lines is not None  # only a resumed run has nothing to do
    return lines
