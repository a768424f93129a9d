"""What recording FP8 statistics costs a run of tiny.toml: python benchmarks/recording.py [--json FILE]

Steps and measured steps take turns, so that both meet the same machine. With a the median of steps and b that of measured ones, a run with
statistics.every = 50 takes (49 a + b) / 50 in the place of a. Compilation, once a run, is told apart.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fp8ref.train import config as configs
from fp8ref.train import loop
from fp8ref.train.data import loader

EVERY, AT_MOST = 50, 1.03


def measure(backend: str, recipe: str, pairs: int, *, quick: bool) -> dict:
    config = configs.load("tiny").replace(numerics={"recipe": recipe})
    if quick:
        config = config.replace(model={"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}, data={"batch_size": 2})
    batches, trainer = loader.open_batches(config), loop.trainer(backend, config)

    def timed(step, i: int) -> float:
        begin = time.perf_counter()
        step(batches.step(i))
        return time.perf_counter() - begin

    timed(trainer.step, 0)
    first = timed(trainer.measured_step, 1)
    times = [(timed(trainer.step, i), timed(trainer.measured_step, i)) for i in range(2, 2 + pairs)]
    plain, measured = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = ((EVERY - 1) * plain + measured) / (EVERY * plain)
    return {
        "backend": backend,
        "recipe": recipe,
        "step_s": plain,
        "measured_s": measured,
        "first_s": first,
        "ratio": ratio,
        "at_most": AT_MOST,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a tiny model, two pairs: whether it runs")
    parser.add_argument("--pairs", type=int, default=20, help="of a step and a measured one, for each backend and recipe")
    known = parser.parse_args()
    recipes = ("tensorwise",) if known.quick else ("tensorwise", "rowwise", "delayed")
    rows = [
        measure(backend, recipe, 2 if known.quick else known.pairs, quick=known.quick) for backend in loop.BACKENDS for recipe in recipes
    ]
    table = Table(title=f"statistics.every = {EVERY}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for column in ("backend", "recipe", "step, s", "measured step, s", "first measured, s", "ratio", "at most"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            row["backend"], row["recipe"], *(f"{row[key]:.3f}" for key in ("step_s", "measured_s", "first_s", "ratio")), str(AT_MOST)
        )
    Console().print(table)
    if known.json:
        known.json.write_text(json.dumps({"every": EVERY, "load": os.getloadavg()[0], "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
