"""What 4 bits cost in loss, and what each part of NVFP4 training saves.

Usage: python benchmarks/losses/nvfp4_losses.py [--seeds 3] [--variants ...] [--runs DIR] [--show]

Runs of one seed start from the same weights and see the same batches. Each variant is judged by
bf16, and those without one part of ``nvfp4`` by ``nvfp4`` too, with the verdict of ``fp8ref
compare``. Parts are left out by rules of the config. Runs are kept in DIR, so that the same command
goes on where it was stopped; more --seeds or other --variants add runs. The JSON file has the
losses of all of them, from which --show prints the table without training.
"""

import argparse
import json
import platform
import statistics
from pathlib import Path

from fp8ref.selection.rules import Rule
from fp8ref.train.config import config as configs
from fp8ref.train.config.config import Config
from fp8ref.train.experiments import sweep
from fp8ref.train.report import runs, verdict
from fp8ref.train.report.foreign_logs import Log

RESULTS = Path(__file__).parents[1] / "results" / "nvfp4_losses.json"
RUNS = Path(__file__).parents[2] / "build" / "nvfp4-losses"

BLOCKS = ("layers",)
VARIANTS: dict[str, tuple[str, tuple[Rule, ...]]] = {
    "bf16": ("bf16", ()),
    "mxfp8": ("mxfp8", ()),
    "mxfp4": ("mxfp4", ()),
    "nvfp4": ("nvfp4", ()),
    "no rotation": ("nvfp4", (Rule(layers=BLOCKS, gemms=("grad_weight",), rotation="none"),)),
    "gradients to nearest": (
        "nvfp4",
        (Rule(layers=BLOCKS, roles=("grad_output",), rounding="nearest_even"),),
    ),
    "weights in rows of 16": (
        "nvfp4",
        (Rule(layers=BLOCKS, roles=("weight",), granularity="nvfp4_1x16"),),
    ),
    "last block in bf16": ("nvfp4", (Rule(layers=("layers.1",), recipe="bf16"),)),
    "8 random bits": (
        "nvfp4",
        (Rule(layers=BLOCKS, roles=("grad_output",), rounding="stochastic_8"),),
    ),
    "four over six": ("nvfp4", (Rule(layers=BLOCKS, policy="te_nvfp4_4over6"),)),
}
"""{variant: its recipe, and the rules that change it}."""

PARTS = tuple(VARIANTS)[4:]
"""Variants that are ``nvfp4`` but for one part."""


def planned(config: Config, backend: str, seed: int, folder: Path) -> dict[str, sweep.Planned]:
    """{variant: its run} of one seed."""
    trials = {}
    for variant, (recipe, rules) in VARIANTS.items():
        trial = config.replace(
            numerics={"recipe": recipe, "rules": rules or None},
            run={"seed": config.run.seed + seed, "eval_every": config.run.steps},
            data={"seed": config.data.seed + seed},
            statistics={"every": 0},
        )
        out = folder / f"{backend}-{variant.replace(' ', '-')}-seed{seed}"
        trials[variant] = sweep.Planned(config=trial, backend=backend, out=out)
    return trials


def record(trial: sweep.Planned, variant: str, seed: int) -> dict:
    """The losses of a run, in nats to 6 decimals, by step; val_loss: None if it diverged."""
    run = runs.read(trial.out)
    losses = [round(loss, 6) for loss in run.losses.values()]
    last = None if run.diverged else round(run.curve("val_loss")[len(losses) - 1], 6)
    return {"variant": variant, "seed": seed, "val_loss": last, "losses": losses}


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


def table(rows: list[dict]) -> str:
    """A row a variant, in Markdown, as the page has it."""
    lines = [["variant", "seeds", "validation loss", "gap to bf16", "gap to nvfp4"]]
    lines.append(["---"] * len(lines[0]))
    for variant in VARIANTS:
        losses = [row["val_loss"] for row in rows if row["variant"] == variant]
        if losses:
            finite = [loss for loss in losses if loss is not None]
            shown = f"{statistics.mean(finite):.4f}" if len(finite) == len(losses) else "not finite"
            by_bf16 = cell(judged(rows, variant, "bf16")) if variant != "bf16" else "-"
            by_nvfp4 = cell(judged(rows, variant, "nvfp4")) if variant in PARTS else "-"
            name = f"`{variant}`" if variant == VARIANTS[variant][0] else f"`nvfp4`, {variant}"
            lines.append([name, str(len(losses)), shown, by_bf16, by_nvfp4])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="tiny", help="a config of two blocks (default tiny)")
    parser.add_argument("--backend", default="jax", choices=("jax", "torch"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, help="of each run (default: the config's)")
    parser.add_argument("--runs", type=Path, default=RUNS, help="where runs are kept")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--show", action="store_true", help="print the table that is kept")
    given = parser.parse_args()
    if given.show:
        print(table(json.loads(given.json.read_text())["runs"]))
        return
    config = configs.load(given.config)
    config = config.replace(run={"steps": given.steps or config.run.steps})
    about = {
        "machine": platform.platform(),
        "config": given.config,
        "backend": given.backend,
        "steps": config.run.steps,
    }
    trials = {
        (variant, seed): trial
        for seed in range(given.seeds)
        for variant, trial in planned(config, given.backend, seed, given.runs).items()
    }
    sweep.train([trial for (variant, _), trial in trials.items() if variant in given.variants])
    rows = [record(trial, *key) for key, trial in trials.items() if trial.ended]
    lines = ",\n".join(json.dumps(row) for row in rows)
    given.json.write_text(f'{json.dumps(about)[:-1]}, "runs": [\n{lines}\n]}}\n')
    print(table(rows))


if __name__ == "__main__":
    main()
