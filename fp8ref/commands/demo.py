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
    from fp8ref.train.config.config import Config
    from fp8ref.train.report.runs import Run
    from fp8ref.train.report.verdict import Verdict

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
    command = shared.config_command(
        commands,
        "demo",
        _demo,
        "Train with both backends in bf16 and FP8, cross-check them, print a table, and plot "
        "the losses.",
    )
    command.add_argument(
        "--out",
        type=Path,
        default=Path("demo"),
        help="directory for the runs and the picture (default demo)",
    )


def _demo(arguments: argparse.Namespace, options: list[str]) -> int:
    arguments.config = arguments.config or Path("tiny")
    config = shared.config(arguments, options)
    check_whole(config)
    return 0 if demo(config, arguments.out) else FAILED


def demo(config: "Config", out: Path) -> bool:
    """Train, cross-check, print and draw.

    Runs go to ``out``, where they replace those of an earlier demo.

    Returns:  whether every cross-check held.
    """
    from rich.table import Table

    from fp8ref import plots
    from fp8ref.crosscheck.one_device import crosscheck
    from fp8ref.shared import console as consoles
    from fp8ref.train import loop, tensors
    from fp8ref.train.data import loader
    from fp8ref.train.report import verdict as verdicts
    from fp8ref.train.report.runs import read_all

    console = consoles.console()
    runs = {
        (backend, recipe): _train(
            _config(config, backend, recipe), backend, out / f"{backend}-{recipe}"
        )
        for backend in loop.BACKENDS
        for recipe in RECIPES
    }
    directories = [out / f"{backend}-{recipe}" for backend, recipe in runs]
    for backend, i, recipe in itertools.product(loop.BACKENDS, range(1, SEEDS), RECIPES):
        keys = {"run": {"seed": config.run.seed + i}, "data": {"seed": config.data.seed + i}}
        directories.append(out / f"{backend}-{recipe}-seed{config.run.seed + i}")
        _train(_config(config, backend, recipe).replace(**keys), backend, directories[-1])
    final = {key: lines[-1]["val_loss"] for key, lines in runs.items()}
    reports = {recipe: crosscheck(_config(config, "jax", recipe)) for recipe in RECIPES[1:]}
    for recipe, report in reports.items():
        report.write(out / f"crosscheck-{recipe}.json")
    # of shards nobody counts it
    entropy = loader.open_batches(config).description.get("validation_unigram_entropy")

    (group,) = verdicts.groups(read_all(directories))
    judged = {_key(arm.runs[0]): verdicts.verdict(arm, group) for arm in verdicts.judged(group)}
    table = Table(
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
        bits, verdict = ["-", "-"], "-"
        if recipe in reports:
            rows = [row for row in reports[recipe].table() if row.name.startswith("layers/")]
            for i, kind in enumerate(("codes", "scale")):
                counts = [
                    (row.compared, row.equal)
                    for row in rows
                    if row.name.endswith(f"/{kind}/{backend}")
                ]
                compared, equal = map(sum, zip(*counts, strict=True))
                bits[i] = (
                    f"all {compared:,}"
                    if equal == compared
                    else f"all but {compared - equal:,} of {compared:,}"
                )
            verdict = "holds" if reports[recipe].ok else "FAILS"
        gap = _gap(judged[backend, recipe]) if recipe != "bf16" else "-"
        table.add_row(
            backend,
            recipe,
            f"{lines[-1]['loss']:.4f}",
            f"{final[backend, recipe]:.4f}",
            gap,
            *bits,
            verdict,
        )
    console.print(table)
    reference = (
        "" if entropy is None else f"; unigram entropy of the validation text {entropy:.3f} nats"
    )
    console.print(f"highest validation loss {max(final.values()):.3f}{reference}")
    for (backend, recipe), one in judged.items():
        if recipe != "bf16":
            console.print(
                f"{backend} {recipe}: {one.said}", markup=False, highlight=False, soft_wrap=True
            )
    for report in reports.values():
        for failure in report.failures[:5]:
            console.print(failure.detail, markup=False)

    picture, axes = plots.figure(2)
    plots.loss_curves(axes[0], runs, entropy=entropy)
    shown = {
        " ".join(key): one.compared.gap.last
        for key, one in judged.items()
        if one.compared and key[1] != "bf16"
    }
    margin = max((one.margin for one in judged.values() if one.margin), default=0.0)
    plots.loss_gaps(
        axes[1],
        {name: (float(gap.mean), float(gap.low), float(gap.high)) for name, gap in shown.items()},
        margin=margin,
    )
    picture.savefig(out / "loss.png")
    tensors.write(out / tensors.FILE, tensors.of_run(out / "-".join(OBSERVED), _kept(config)))
    console.print(
        f"wrote {out / 'loss.png'}, {out / tensors.FILE}, {out}/crosscheck-*.json and "
        f"{len(directories)} runs in {out}/",
        soft_wrap=True,
    )
    return all(report.ok for report in reports.values())


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
