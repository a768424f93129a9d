"""Validation losses of runs that keep AdamW's moments in each layout.

Usage: python benchmarks/losses/layout_losses.py [--config tiny] [--json FILE]

Runs of one seed start from the same weights and see the same batches, so that the loss of a layout
is compared with that of float32 states seed by seed: the mean of the differences, and their
standard error. Figures of health are of the last recorded step, the worst of the seeds. A run whose
loss was not finite counts as such. --resume keeps the runs that are in the JSON file. JAX's runs
have no health: equal states have the same, and a measured step is another program to compile.
"""

import argparse
import json
import math
import platform
import statistics
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fp8ref.shared.errors import NonFiniteError
from fp8ref.spec.states.layouts import LAYOUTS, WITH_MASTERS, by_name
from fp8ref.train import loop
from fp8ref.train.config import config as configs
from fp8ref.train.config.config import Config

HEALTH = ("state_v_lost", "state_largest_ratio", "state_update_error", "state_stalled_v")
FORMS = ("{:.2%}", "{:.3g}", "{:.3g}", "{:.0%}")
RESULTS = Path(__file__).parents[1] / "results" / "layout_losses.json"


def run(config: Config, backend: str, layout: str, seed: int) -> dict:
    """The last validation loss of a run, None if it is not finite, and the health of its states."""
    chosen = config.replace(
        optimizer={"kind": "adamw_states", "layout": layout},
        run={"seed": config.run.seed + seed},
        data={"seed": config.data.seed + seed},
        statistics={"every": config.run.steps - 1 if backend == "torch" else 0},
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            lines = loop.train(chosen, backend, Path(folder, "run"))
        except NonFiniteError:
            lines = None
    lines = lines or [{"val_loss": math.nan}]
    health = next((line for line in reversed(lines) if HEALTH[0] in line), {})
    loss = lines[-1]["val_loss"]
    found = {
        "backend": backend,
        "layout": layout,
        "seed": seed,
        "val_loss": loss if math.isfinite(loss) else None,
    }
    return found | {key: health.get(key) for key in HEALTH}


def about(name: str, config: Config) -> dict:
    """What all runs of a file have in common; no runs yet."""
    return {
        "machine": platform.platform(),
        "config": name,
        "recipe": config.numerics.recipe,
        "steps": config.run.steps,
        "width": config.model.hidden_size,
        "batch_size": config.data.batch_size,
        "sequence_length": config.data.sequence_length,
        "runs": [],
    }


def gaps(
    runs: list[dict], by: str = "layout", base: str = "float32"
) -> dict[tuple[str, str], tuple[float, float] | None]:
    """{(backend, layout): (mean of the losses minus those of float32 states, seed by seed; its
    standard error)}.

    None where a loss was not finite. A pair of runs is left out until both are there. by: the key
    that runs differ by, in place of the layout; base: the one that all are compared with.
    """
    losses = {(r["backend"], r[by], r["seed"]): r["val_loss"] for r in runs}
    found: dict[tuple[str, str], tuple[float, float] | None] = {}
    for backend, one in dict.fromkeys((backend, one) for backend, one, _ in losses):
        of_seeds = {
            seed: loss for (b, name, seed), loss in losses.items() if (b, name) == (backend, one)
        }
        pairs = [
            (loss, losses[backend, base, seed])
            for seed, loss in of_seeds.items()
            if (backend, base, seed) in losses
        ]
        if any(loss is None for pair in pairs for loss in pair):
            found[backend, one] = None
        elif pairs:
            differences = [loss - wide for loss, wide in pairs]
            error = (
                statistics.stdev(differences) / len(differences) ** 0.5
                if len(differences) > 1
                else math.nan
            )
            found[backend, one] = statistics.mean(differences), error
    return found


def table(runs: list[dict]) -> Table:
    """A row a backend and layout."""
    shown = Table(
        "backend",
        "layout",
        "bytes",
        "validation losses",
        "minus float32",
        "v lost",
        "largest ratio",
        "update error",
        "stalled v",
    )
    for (backend, layout), gap in gaps(runs).items():
        of_seeds = [r for r in runs if (r["backend"], r["layout"]) == (backend, layout)]
        health = worst(of_seeds)
        losses = ", ".join(
            "-" if r["val_loss"] is None else f"{r['val_loss']:.4f}" for r in of_seeds
        )
        shown.add_row(
            backend,
            layout,
            f"{by_name(layout).bytes_with_master(1 << 20):.2f}",
            losses,
            written(gap),
            *health,
        )
    return shown


def worst(runs: list[dict]) -> list[str]:
    """The worst of each figure of health, as tables have it; "-" where no run has one."""
    found = [[r[key] for r in runs if r[key] is not None] for key in HEALTH]
    return [
        form.format(max(values)) if values else "-"
        for values, form in zip(found, FORMS, strict=True)
    ]


def written(gap: tuple[float, float] | None) -> str:
    """A gap as tables have it; of one seed without an error."""
    if gap is None:
        return "not finite"
    return f"{gap[0]:+.4f}" if math.isnan(gap[1]) else f"{gap[0]:+.4f} +- {gap[1]:.4f}"


def page(runs: list[dict]) -> list[str]:
    """The rows of a page's table, a layout each: its bytes, the gaps in JAX and in PyTorch, and the
    worst health.
    """
    of_each, rows = gaps(runs), []
    for layout in (
        name for name in (*LAYOUTS, *WITH_MASTERS) if any(r["layout"] == name for r in runs)
    ):
        both = [
            written(of_each[backend, layout]) if (backend, layout) in of_each else "-"
            for backend in ("jax", "torch")
        ]
        health = worst([r for r in runs if r["layout"] == layout])
        rows.append(
            "| "
            + " | ".join(
                [f"`{layout}`", f"{by_name(layout).bytes_with_master(1 << 20):.2f}", *both, *health]
            )
            + " |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--config", default="tiny", help="a packaged config or a file (default tiny)"
    )
    parser.add_argument("--backends", nargs="+", choices=loop.BACKENDS, default=list(loop.BACKENDS))
    parser.add_argument(
        "--layouts", nargs="+", choices=[*LAYOUTS, *WITH_MASTERS], default=[*LAYOUTS, *WITH_MASTERS]
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipe", default="bf16", help="of the linears (default bf16)")
    parser.add_argument("--steps", type=int, help="of each run (default: the config's)")
    parser.add_argument(
        "--batch-size", type=int, help="sequences in a batch (default: the config's)"
    )
    parser.add_argument(
        "--sequence-length", type=int, help="tokens in a sequence (default: the config's)"
    )
    parser.add_argument(
        "--width", type=int, help="another hidden size than the config's; the other sizes follow"
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument(
        "--show",
        action="store_true",
        help="print the page's rows of the JSON file, and run nothing",
    )
    given = parser.parse_args()
    if given.show:
        print("\n".join(page(json.loads(given.json.read_text())["runs"])))
        return
    config = configs.load(given.config)
    config = config.replace(numerics={"recipe": given.recipe})
    if given.steps:
        config = config.replace(run={"steps": given.steps})
    sizes = {"batch_size": given.batch_size, "sequence_length": given.sequence_length}
    config = config.replace(
        data={key: value for key, value in sizes.items() if value},
        run={"eval_every": config.run.steps},
    )
    if given.width:
        factor = given.width / config.model.hidden_size
        config = config.replace(
            model={
                "hidden_size": given.width,
                "intermediate_size": int(config.model.intermediate_size * factor),
            }
        )
    found = about(given.config, config)
    if given.resume and given.json.exists():
        kept = json.loads(given.json.read_text())
        if changed := [
            key for key in found if key not in ("machine", "runs") and kept.get(key) != found[key]
        ]:
            parser.error(
                f"--resume goes on with the runs of {given.json}, whose {', '.join(changed)} "
                "differ. Name another file."
            )
        found["runs"] = kept["runs"]
    done = {(r["backend"], r["layout"], r["seed"]) for r in found["runs"]}
    for seed in range(given.seeds):
        for backend in given.backends:
            for layout in given.layouts:
                if (backend, layout, seed) not in done:
                    found["runs"].append(run(config, backend, layout, seed))
                    given.json.write_text(json.dumps(found, indent=1) + "\n")
    Console(width=150).print(table(found["runs"]))


if __name__ == "__main__":
    main()
