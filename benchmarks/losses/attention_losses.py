"""Validation losses of runs that attend by each variant: python
benchmarks/losses/attention_losses.py [--sequence-length N] [--json FILE]

Runs of one seed start from the same weights and see the same batches, so that the loss of a variant
is compared with that of the framework's own attention in bfloat16 seed by seed, as
``layout_losses`` does. Linears are in bfloat16 unless --recipe names another. --resume keeps the
runs that are in the JSON file.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

import layout_losses
from fp8ref.shared.errors import NonFiniteError
from fp8ref.train import loop
from fp8ref.train.config import config as configs
from fp8ref.train.config.config import Config

OWN = "framework's"
DELAYED = "cudnn, delayed"
VARIANTS = (OWN, "bf16", "cudnn", "mxfp8")
RESULTS = Path(__file__).parents[1] / "results" / "attention_losses.json"


def keys_of(variant: str) -> dict:
    """The keys of section numerics that choose one of VARIANTS, or DELAYED."""
    if variant == OWN:
        return {"attention": None}
    name, _, scaling = variant.partition(", ")
    return {"attention": name, "attention_scaling": scaling or "current"}


def run(config: Config, backend: str, variant: str, seed: int) -> dict:
    """The last validation loss of a run, None if it is not finite."""
    chosen = config.replace(
        numerics=keys_of(variant),
        run={"seed": config.run.seed + seed},
        data={"seed": config.data.seed + seed},
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            loss = loop.train(chosen, backend, Path(folder, "run"))[-1]["val_loss"]
        except NonFiniteError:
            loss = math.nan
    return {
        "backend": backend,
        "attention": variant,
        "seed": seed,
        "val_loss": loss if math.isfinite(loss) else None,
    }


def gaps(runs: list[dict]) -> dict[tuple[str, str], tuple[float, float] | None]:
    """{(backend, variant): (mean of the losses minus the framework's, its standard error)}, as of
    layouts.
    """
    return layout_losses.gaps(runs, "attention", OWN)


def page(found: dict) -> list[str]:
    """The rows of a page's table, a variant each: the gaps in JAX and in PyTorch."""
    of_each = gaps(found["runs"])
    return [
        f"| {found['sequence_length']} | `{variant}` | "
        + " | ".join(layout_losses.written(of_each[backend, variant]) for backend in loop.BACKENDS)
        + " |"
        for variant in (*VARIANTS[1:], DELAYED)
        if any(run["attention"] == variant for run in found["runs"])
    ]


def table(runs: list[dict]) -> Table:
    """A row a backend and variant."""
    shown = Table("backend", "attention", "validation losses", "minus the framework's")
    for (backend, variant), gap in gaps(runs).items():
        losses = [
            r["val_loss"] for r in runs if (r["backend"], r["attention"]) == (backend, variant)
        ]
        said = ", ".join("-" if loss is None else f"{loss:.4f}" for loss in losses)
        shown.add_row(backend, variant, said, layout_losses.written(gap))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--config", default="tiny", help="a packaged config or a file (default tiny)"
    )
    parser.add_argument("--backends", nargs="+", choices=loop.BACKENDS, default=list(loop.BACKENDS))
    parser.add_argument(
        "--variants", nargs="+", choices=(*VARIANTS[1:], DELAYED), default=list(VARIANTS[1:])
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
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    config = configs.load(given.config).replace(numerics={"recipe": given.recipe})
    config = config.replace(run={"steps": given.steps or config.run.steps})
    sizes = {"batch_size": given.batch_size, "sequence_length": given.sequence_length}
    config = config.replace(
        data={key: value for key, value in sizes.items() if value},
        run={"eval_every": config.run.steps},
    )
    found = layout_losses.about(given.config, config)
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
    done = {(r["backend"], r["attention"], r["seed"]) for r in found["runs"]}
    for seed in range(given.seeds):
        for backend in given.backends:
            for variant in (OWN, *given.variants):
                if (backend, variant, seed) not in done:
                    found["runs"].append(run(config, backend, variant, seed))
                    given.json.write_text(json.dumps(found, indent=1) + "\n")
    Console(width=150).print(table(found["runs"]))


if __name__ == "__main__":
    main()
