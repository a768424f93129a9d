"""What the trainer costs around its steps: python benchmarks/training/trainer.py [--quick] [--json
FILE]

First the share of a run of tiny.toml that lies outside the calls that train and validate,
checkpoints included; its first step, which compiles, is left out. Then, of a larger model, what
saving adds to a step: the seconds until ``save`` returns next to those of a plain copy of the same
state, in turns, and a step while a checkpoint is written next to one while none is.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from fp8ref.spec.llama import LlamaConfig
from fp8ref.train import loop
from fp8ref.train.config import config as configs
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import DataConfig, NumericsConfig
from fp8ref.train.run import log

AT_MOST = 0.02  # of a run, around its steps
LARGE = LlamaConfig(
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="sizes too small to say anything")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    rows = [
        around(backend, given.quick) | saving(backend, given.quick) | {"at_most": AT_MOST}
        for backend in loop.BACKENDS
    ]
    table = Table(
        "backend",
        "outside steps",
        "at most",
        "state, MB",
        "save returns after, s",
        "a copy, s",
        "step while writing / not",
    )
    for row in rows:
        table.add_row(
            row["backend"],
            f"{row['outside']:.2%}",
            f"{AT_MOST:.0%}",
            f"{row['megabytes']:.0f}",
            f"{row['save_s']:.3f}",
            f"{row['copy_s']:.3f}",
            f"{row['writing']:.2f}x",
        )
    Console(width=140).print(table)
    if given.json:
        given.json.write_text(
            json.dumps({"machine": platform.machine(), "rows": rows}, indent=1) + "\n",
            encoding="utf-8",
        )


def around(backend: str, quick: bool) -> dict:
    config = configs.load("tiny")
    if quick:
        config = config.replace(
            model={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
            run={"steps": 12},
        )
    with tempfile.TemporaryDirectory() as folder:
        lines = loop.train(config, backend, Path(folder, "run"))
        evaluation = log.read_manifest(Path(folder, "run"))["seconds"]["evaluation"]
    assert lines is not None
    tokens = config.data.batch_size * config.data.sequence_length
    in_steps = sum(tokens / line["tokens_per_second"] for line in lines[1:])
    total = lines[-1]["seconds"] - lines[0]["seconds"]
    return {"backend": backend, "outside": (total - in_steps - evaluation) / total}


def saving(backend: str, quick: bool) -> dict:
    model = (
        LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1) if quick else LARGE
    )
    config = Config(
        model=model,
        data=DataConfig(batch_size=2, sequence_length=128),
        numerics=NumericsConfig(recipe="tensorwise"),
    )
    trainer = loop.trainer(backend, config)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 129))
    # weights and two moments
    state = [value for _ in range(3) for value in trainer.weights().values()]
    timed(lambda: trainer.step(tokens))
    saves, copies, alone, beside = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(2 if quick else 9):
            alone.append(timed(lambda: trainer.step(tokens)))
            copies.append(timed(lambda: [value.copy() for value in state]))
            begun = time.perf_counter()
            written = trainer.save(Path(folder, str(i)))
            saves.append(time.perf_counter() - begun)
            beside.append(timed(lambda: trainer.step(tokens)))
            written()
    ratio = statistics.median(b / a for a, b in zip(alone, beside, strict=True))
    return {
        "megabytes": sum(value.nbytes for value in state) / 1e6,
        "save_s": statistics.median(saves),
        "copy_s": statistics.median(copies),
        "writing": ratio,
    }


def timed(f) -> float:
    begun = time.perf_counter()
    f()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
