"""What training under simulated hardware costs.

Usage: python benchmarks/speed/simulated_hardware.py [--quick] [--rounds N] [--plan NAME] [--json
FILE]

Steps of tiny.toml by each backend's own FP8 GEMMs and under simulated ones, in turns, so that all
meet the same machine; the ratio of the medians.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fp8ref.train import loop
from fp8ref.train.config import config as configs
from fp8ref.train.data import loader

AT_MOST = 4.0  # times a step by the framework's own GEMMs
RECIPES = ("tensorwise", "rowwise")


def measure(backend: str, recipe: str, plan: str, rounds: int, *, quick: bool) -> dict:
    config = configs.load("tiny").replace(numerics={"recipe": recipe})
    if quick:
        config = config.replace(
            model={"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
            data={"batch_size": 2},
        )
    batches = loader.open_batches(config)
    trainers = [
        loop.trainer(backend, config.replace(numerics={"accumulate": accumulate}))
        for accumulate in (None, plan)
    ]
    for trainer in trainers:
        trainer.step(batches.step(0))  # compiles
    seconds: tuple[list[float], list[float]] = ([], [])
    for i in range(1, 1 + rounds):
        for trainer, own in zip(trainers, seconds, strict=True):
            begun = time.perf_counter()
            trainer.step(batches.step(i))
            own.append(time.perf_counter() - begun)
    native, simulated = map(statistics.median, seconds)
    return {
        "backend": backend,
        "recipe": recipe,
        "plan": plan,
        "native_s": native,
        "simulated_s": simulated,
        "ratio": simulated / native,
        "at_most": AT_MOST,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, two rounds: whether it runs"
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="of a step each, for each backend and recipe"
    )
    parser.add_argument("--plan", default="hopper", help="what numerics.accumulate names")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    rounds = 2 if given.quick else given.rounds
    rows = [
        measure(backend, recipe, given.plan, rounds, quick=given.quick)
        for backend in loop.BACKENDS
        for recipe in RECIPES
    ]
    table = Table("backend", "recipe", "own GEMMs, s", f"under {given.plan}, s", "ratio", "at most")
    for row in rows:
        table.add_row(
            row["backend"],
            row["recipe"],
            f"{row['native_s']:.3f}",
            f"{row['simulated_s']:.3f}",
            f"{row['ratio']:.2f}x",
            f"{row['at_most']:.0f}x",
        )
    Console(width=120).print(table, f"{os.cpu_count()} cores, load {load:.1f} before")
    if given.json:
        told = {"cores": os.cpu_count(), "load": load, "rounds": rounds, "rows": rows}
        given.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
