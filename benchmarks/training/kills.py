"""Training that is killed at random moments: python benchmarks/training/kills.py [--kills 100]
[--backend torch|jax] [--recipe delayed]

A small model trains with frequent checkpoints; its process gets SIGKILL after a random time, again
and again, and each next one resumes. After every kill: all checkpoints are intact, the newest is no
older than before, no line of metrics before it is lost, and the next process starts from it. Every
run that comes to its end is compared with one that was never killed: losses and weights bit for
bit. Exits with 1 where any of it fails.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from fp8ref.spec.llama import LlamaConfig
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import CheckpointConfig, DataConfig, NumericsConfig, RunConfig
from fp8ref.train.run import checkpoint, log

MODEL = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
# a server that imported what processes need, and ran nothing of it, forks them within a moment
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["fp8ref.train.loop", "fp8ref.train.torch.trainer", "fp8ref.train.jax.trainer"]
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--backend", choices=("torch", "jax"), default="torch")
    parser.add_argument("--recipe", default="delayed")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return Killing(Path(folder), given).all()


class Killing:
    def __init__(self, folder: Path, given: argparse.Namespace) -> None:
        self.folder, self.given, self.random = folder, given, random.Random(given.seed)
        self.config = Config(
            model=MODEL,
            data=DataConfig(source=str(text(folder / "text")), sequence_length=32, batch_size=4),
            numerics=NumericsConfig(recipe=given.recipe),
            run=RunConfig(steps=given.steps, eval_every=10**6, eval_batches=1),
            checkpoint=CheckpointConfig(every=3, keep_last=2),
        )

    def all(self) -> int:
        whole = self.folder / "whole"
        idle = CONTEXT.Process(target=time.sleep, args=(0,))  # the server imports, once
        idle.start()
        idle.join()
        begun = time.perf_counter()
        process = self.start(whole)
        process.join()
        longest = time.perf_counter() - begun
        kills = finished = lost = resumed = 0
        problems: list[str] = []
        out = self.folder / "run-0"
        newest = 0
        while kills < self.given.kills and not problems:
            before = starts(out)
            process = self.start(out)
            process.join(self.random.uniform(0.02, longest))
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join()
                kills += 1
            elif process.exitcode:
                problems.append(f"{out.name} ended with {process.exitcode}")
            problems += self.problems(out, newest, before)
            found = checkpoint.saved(out)
            was, newest = newest, int(found[0].name.removeprefix("step-")) if found else 0
            resumed += was > 0
            lines = len(log.read_metrics(out)) if (out / "metrics.jsonl").exists() else 0
            lost = max(lost, lines - newest)
            if (out / "manifest.json").exists() and log.read_manifest(out)["status"] == "finished":
                problems += self.differences(whole, out)
                finished, newest = finished + 1, 0
                out = self.folder / f"run-{finished}"
        print(
            f"{self.given.backend} {self.given.recipe}: {kills} kills, {resumed} processes that "
            f"resumed, {finished} runs of {self.given.steps} steps came to their end as if "
            f"never killed; at most {lost} steps were trained again, with a checkpoint every "
            f"{self.config.checkpoint.every}"
        )
        for problem in problems:
            print(problem, file=sys.stderr)
        return 1 if problems else 0

    def start(self, out: Path):
        process = CONTEXT.Process(target=train, args=(self.config, self.given.backend, out))
        process.start()
        return process

    def problems(self, out: Path, newest: int, before: list[int]) -> list[str]:
        """What is wrong after a process. newest, before: checkpoint and starts when it began."""
        found = []
        for path in checkpoint.saved(out):
            try:
                checkpoint.verify(path)
            except ValueError as error:
                found.append(str(error))
        steps = [int(p.name.removeprefix("step-")) for p in checkpoint.saved(out)]
        if newest and (not steps or steps[0] < newest):
            found.append(f"{out.name}: the newest checkpoint was {newest}, and is {steps[:1]}")
        if steps and [line["step"] for line in log.read_metrics(out)][: steps[0]] != list(
            range(steps[0])
        ):
            found.append(f"{out.name}: metrics before checkpoint {steps[0]} are lost")
        now = starts(out)
        if newest and len(now) > len(before) and now[-1] != newest:
            found.append(f"{out.name}: resumed at {now[-1]}, and {newest} was saved")
        return found

    def differences(self, whole: Path, out: Path) -> list[str]:
        """Of a run that was killed from one that was not."""
        losses = [
            [(line["step"], line["loss"], line["grad_norm"]) for line in log.read_metrics(run)]
            for run in (whole, out)
        ]
        weights = [self.weights(run) for run in (whole, out)]
        found = [f"{out.name}: other losses"] if losses[0] != losses[1] else []
        return found + [
            f"{out.name}: another {name}"
            for name, value in weights[0].items()
            if not np.array_equal(value, weights[1][name])
        ]

    def weights(self, run: Path) -> dict[str, np.ndarray]:
        from fp8ref.train.models import export

        made = self.folder / f"{run.name}-weights"
        if not made.exists():
            export.export(run, made)
        return {name: weight[...] for name, weight in export.read(made, self.config.model).items()}


def starts(out: Path) -> list[int]:
    """The steps at which the processes of a run began to train."""
    return log.read_manifest(out)["starts"] if (out / "manifest.json").exists() else []


def train(config: Config, backend: str, out: Path) -> None:
    """In a process of its own, on one thread."""
    if backend == "torch":
        import torch

        torch.set_num_threads(1)
    from fp8ref.train import loop

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        loop.train(config, backend, out, resume=True)


def text(folder: Path) -> Path:
    folder.mkdir()
    words = np.random.default_rng(1).choice(["fp8 ", "amax ", "scale\n", "bits "], size=(40, 400))
    for i, row in enumerate(words):
        (folder / f"{i}.txt").write_text("".join(row))
    return folder


if __name__ == "__main__":
    sys.exit(main())
