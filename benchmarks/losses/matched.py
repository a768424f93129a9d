"""Runs of matched seeds under several variants, and the verdict on each.

Runs of one seed start from the same weights and see the same batches. Runs are kept in a directory,
so that the same command goes on where it was stopped; more --seeds or other --variants add runs.
The JSON file has the losses of all of them, from which --show prints the table without training.
"""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fp8ref import plots
from fp8ref.train.config import config as configs
from fp8ref.train.config.config import Config
from fp8ref.train.experiments import sweep
from fp8ref.train.report import gap as intervals
from fp8ref.train.report import runs, verdict
from fp8ref.train.report.foreign_logs import Log

RESULTS = Path(__file__).parents[1] / "results"
RUNS = Path(__file__).parents[2] / "build"


@dataclass(frozen=True, kw_only=True)
class Study:
    """Variants of one config, each judged by bf16.

    variants   {name: the sections of the config that it changes}; bf16 is one.
    parts      those that are a variant but for one part, which judges them too: ``whole``.
    sections   of the config, for every run.
    every      losses are kept as means of so many steps.
    """

    name: str
    variants: Mapping[str, Mapping[str, Mapping[str, Any]]]
    whole: str = ""
    parts: tuple[str, ...] = ()
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    every: int = 1

    @property
    def results(self) -> Path:
        """Where its losses are kept."""
        return RESULTS / f"{self.name}.json"

    def planned(
        self, config: Config, backend: str, seed: int, folder: Path
    ) -> dict[str, sweep.Planned]:
        """{variant: its run} of one seed."""
        trials = {}
        for variant, sections in self.variants.items():
            trial = config.replace(
                numerics=sections.get("numerics", {}),
                optimizer=sections.get("optimizer", {}),
                run={"seed": config.run.seed + seed, "eval_every": config.run.steps},
                data={"seed": config.data.seed + seed},
                statistics={"every": 0},
            )
            words = variant.replace(",", "").replace(" ", "-")
            out = folder / f"{backend}-{words}-seed{seed}"
            trials[variant] = sweep.Planned(config=trial, backend=backend, out=out)
        return trials

    def record(self, trial: sweep.Planned, variant: str, seed: int) -> dict:
        """The losses of a run in nats to 6 decimals, means of ``every`` steps; val_loss: None if it
        diverged.
        """
        run = runs.read(trial.out)
        steps = np.array(list(run.losses.values()))
        whole = steps[: len(steps) // self.every * self.every].reshape(-1, self.every)
        losses = [round(float(loss), 6) for loss in whole.mean(1)]
        last = None if run.diverged else round(run.curve("val_loss")[len(steps) - 1], 6)
        return {"variant": variant, "seed": seed, "val_loss": last, "losses": losses}

    def table(self, rows: list[dict]) -> str:
        """A row a variant, in Markdown, as the page has it."""
        heads = ["variant", "seeds", "validation loss", "gap to bf16"]
        lines = [heads + [f"gap to {self.whole}"] * bool(self.whole)]
        lines.append(["---"] * len(lines[0]))
        for variant, sections in self.variants.items():
            losses = [row["val_loss"] for row in rows if row["variant"] == variant]
            if losses:
                finite = [loss for loss in losses if loss is not None]
                mean = statistics.mean(finite) if len(finite) == len(losses) else None
                shown = "not finite" if mean is None else f"{mean:.4f}"
                by_bf16 = cell(judged(rows, variant, "bf16")) if variant != "bf16" else "-"
                recipe = sections.get("numerics", {}).get("recipe")
                name = f"`{variant}`" if variant == recipe else f"`{recipe}`, {variant}"
                cells = [name, str(len(losses)), shown, by_bf16]
                if self.whole:
                    part = variant in self.parts
                    cells.append(cell(judged(rows, variant, self.whole)) if part else "-")
                lines.append(cells)
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

    def picture(self, rows: list[dict]) -> bytes:
        """The gap of each variant to bf16 by step, of a running mean of a twentieth of the run,
        with its interval over seeds: a PNG.
        """
        curves = {(row["variant"], row["seed"]): row["losses"] for row in rows}
        diverged = {(r["variant"], r["seed"]) for r in rows if r["val_loss"] is None}
        gaps, steps = {}, {}
        for variant in self.variants:
            seeds = [s for v, s in curves if v == variant and ("bf16", s) in curves]
            seeds = [s for s in seeds if (variant, s) not in diverged]
            if variant == "bf16" or len(seeds) < 2:
                continue
            size = min(len(curves[name, s]) for s in seeds for name in (variant, "bf16"))
            apart = [
                np.subtract(curves[variant, s][:size], curves["bf16", s][:size]) for s in seeds
            ]
            width = max(1, size // 20)
            gap = intervals.matched(intervals.running_mean(np.array(apart), width))
            gaps[variant] = gap.mean, gap.low, gap.high
            steps[variant] = self.every * np.arange(width, size + 1)
        figure, (ax,) = plots.figure(width=7)
        plots.loss_gaps(ax, gaps, steps=steps)
        return plots.png(figure)


def logs(rows: list[dict], variant: str) -> list[Log]:
    """The runs of a variant, by seed."""
    mine = sorted((r for r in rows if r["variant"] == variant), key=lambda row: row["seed"])
    return [
        Log(name=f"{variant}, seed {row['seed']}", losses=dict(enumerate(row["losses"])))
        for row in mine
    ]


def judged(rows: list[dict], variant: str, by: str) -> verdict.Verdict:
    """The verdict on a variant by another one (spec E), over the seeds that both have."""
    seeds = [{r["seed"] for r in rows if r["variant"] == name} for name in (variant, by)]
    matched = [row for row in rows if row["seed"] in seeds[0] & seeds[1]]
    if any(row["val_loss"] is None for row in matched if row["variant"] == variant):
        return verdict.Verdict(kind="worse", reason="a loss was not finite")
    return verdict.between(logs(matched, variant), logs(matched, by))


def cell(answer: verdict.Verdict) -> str:
    """The gap, its interval and the verdict."""
    if answer.compared is None:
        return f"{answer.kind}: {answer.reason}"
    gap = answer.compared.gap.last
    pair = " for this pair" * answer.of_pair
    return f"{gap.mean:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}]: {answer.kind}{pair}"


def main(study: Study, description: str, *, backend: str, seeds: int = 3) -> None:
    """Train what is missing of a study, record it and print its table."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--backend", default=backend, choices=("jax", "torch"))
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument(
        "--variants", nargs="+", choices=study.variants, default=list(study.variants)
    )
    parser.add_argument("--steps", type=int, help="of each run (default: the config's)")
    parser.add_argument("--runs", type=Path, default=RUNS / study.name, help="where runs are kept")
    parser.add_argument("--json", type=Path, default=study.results)
    parser.add_argument("--picture", type=Path, help="draw the gaps by step")
    parser.add_argument("--show", action="store_true", help="print the table that is kept")
    given = parser.parse_args()
    if given.show:
        show(study, given)
        return
    config = configs.load(given.config)
    for section, keys in study.sections.items():
        config = config.replace(**{section: keys})
    config = config.replace(run={"steps": given.steps or config.run.steps})
    trials = {
        (variant, seed): trial
        for seed in range(given.seeds)
        for variant, trial in study.planned(config, given.backend, seed, given.runs).items()
    }
    write(study, trials, given.json, config, given)
    for (variant, _), trial in trials.items():
        if variant in given.variants:
            sweep.train([trial])
            write(study, trials, given.json, config, given)
    show(study, given)


def show(study: Study, given: argparse.Namespace) -> None:
    """Print the table of the runs that are kept, and draw them if that is asked for."""
    rows = json.loads(given.json.read_text())["runs"]
    print(study.table(rows))
    if given.picture:
        given.picture.write_bytes(study.picture(rows))


def write(
    study: Study,
    trials: Mapping[tuple[str, int], sweep.Planned],
    path: Path,
    config: Config,
    given: argparse.Namespace,
) -> None:
    """Record every run that has ended, so that what a night trained is kept run by run."""
    about = {
        "machine": platform.platform(),
        "config": given.config,
        "backend": given.backend,
        "steps": config.run.steps,
    }
    if study.sections:
        about["sections"] = study.sections
    whole = json.loads(path.read_text()) if path.exists() else about | {"runs": []}
    kept = whole.pop("runs")
    if {**whole, "machine": ""} != {**about, "machine": ""}:
        raise SystemExit(f"{path} holds runs of other settings: {whole}. Name another --json.")
    rows = {(row["variant"], row["seed"]): row for row in kept}
    rows |= {key: study.record(trial, *key) for key, trial in trials.items() if trial.ended}
    lines = ",\n".join(json.dumps(row) for row in rows.values())
    part = path.with_suffix(".part")
    part.write_text(f'{json.dumps(about)[:-1]}, "runs": [\n{lines}\n]}}\n')
    os.replace(part, path)
