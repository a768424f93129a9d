"""Whether FP8's loss is bf16's on a GPU: parity.toml in both backends, every recipe, three seeds of
bf16 for the noise; one report.

What is finished is not trained again: a run that was cut off goes on. The report goes to
benchmarks/results/parity; the runs stay where --runs says. --dry trains one layer of tiny.toml for
a few steps on a CPU, elsewhere.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fp8ref.recipe import RECIPES
from fp8ref.shared import console
from measuring.results import LEFT

ROOT = Path(__file__).parents[2]
SEEDS = 3
BACKENDS = ("torch", "jax")
GRACE = 90  # seconds that a run which began in time may take beyond the budget
# those with kernels of FP8 in both backends
FIRST = tuple(name for name, r in RECIPES.items() if r.fp8 and not r.in_blocks)


def asked(*, dry: bool) -> Iterator[tuple[str, list[str]]]:
    """(name of a run, options), the most wanted first."""
    first = FIRST[:1] if dry else FIRST
    for backend in BACKENDS:
        # compiled, as a GPU is used; JAX always is
        compiled = ["--parallel.compile", "block"] if backend == "torch" and not dry else []
        for seed in range((2 if dry else SEEDS) if backend == BACKENDS[0] else 1):
            named = f"{backend}-bf16" + f"-seed{seed}" * bool(seed)
            yield (
                named,
                [
                    "--backend",
                    backend,
                    "--numerics.recipe",
                    "bf16",
                    "--run.seed",
                    str(seed),
                    "--data.seed",
                    str(seed),
                    *compiled,
                ],
            )
        for recipe in first:
            yield (
                f"{backend}-{recipe}",
                ["--backend", backend, "--numerics.recipe", recipe, *compiled],
            )
    if not dry:
        for backend in BACKENDS:
            for recipe in RECIPES:
                if recipe not in ("bf16", *FIRST):
                    yield f"{backend}-{recipe}", ["--backend", backend, "--numerics.recipe", recipe]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=480,
        help="seconds, after which no other run is started (default 480)",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default=ROOT / "runs" / "parity",
        help="where runs are kept (default runs/parity)",
    )
    parser.add_argument(
        "--dry", action="store_true", help="a few steps of tiny.toml on a CPU; needs --out"
    )
    parser.add_argument("--out", type=Path, help="instead of benchmarks/results/parity")
    known = parser.parse_args()
    if known.dry and not known.out:
        parser.error("--dry takes --out: what a CPU gives is no evidence of a GPU.")
    if not known.dry and not on_gpu():
        parser.error("no NVIDIA GPU is here. --dry --out DIR runs the same on a CPU.")
    out = known.out or ROOT / "benchmarks" / "results" / "parity"
    out.mkdir(parents=True, exist_ok=True)
    runs = out / "runs" if known.dry else known.runs
    config = ["tiny" if known.dry else "parity"]
    config += (
        ["--model.num_hidden_layers", "1", "--run.steps", "10", "--run.eval_every", "5"]
        if known.dry
        else []
    )
    begin, left, failed, lines = time.monotonic(), [], [], []
    for name, options in asked(dry=known.dry):
        if not (runs / name / "finished").exists() and time.monotonic() - begin > known.budget:
            left.append(name)
            continue
        said = train(
            runs / name, [*config, *options], known.budget - (time.monotonic() - begin) + GRACE
        )
        lines.append(f"| {name} | {said} |")
        if not (runs / name / "finished").exists():
            failed.append(name)
        console.say(f"{time.monotonic() - begin:5.0f} s  {name}: {said}")
    finished = sorted(folder.parent for folder in runs.glob("*/finished"))
    verdicts = report(finished, out / "report.html") if finished else "no run is finished"
    note = ["Dry run on a CPU: no evidence of a GPU.", ""] if known.dry else []
    table = "\n".join(
        [*note, "| run | ended |", "|---|---|", *lines, "", "```", verdicts, "```", ""]
    )
    (out / "parity.md").write_text(table)
    print(table)
    print(
        *(f"failed: {name}" for name in failed),
        f"left for another run: {', '.join(left)}" if left else "no run is left",
        sep="\n",
    )
    return 1 if failed else LEFT if left else 0


def train(folder: Path, options: list[str], seconds: float) -> str:
    """One run in a process of its own, which goes on from its checkpoint where time runs out; its
    weights, which no report reads, are not kept once it is finished.
    """
    finished = folder / "finished"
    if not finished.exists():
        resumed = ["--resume"] if (folder / "manifest.json").exists() else []
        command = [
            sys.executable,
            "-m",
            "fp8ref",
            "train",
            *options,
            "--run.out",
            str(folder),
            *resumed,
        ]
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        try:
            ended = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return f"not finished when {seconds:.0f} s were over"
        said = (ended.stdout if not ended.returncode else ended.stderr).strip().splitlines()
        if ended.returncode:
            return f"exit code {ended.returncode}: {said[-1] if said else ''}"
        (result,) = (line for line in said if line.startswith(f"{folder}: "))
        finished.write_text(result.removeprefix(f"{folder}: ") + "\n")
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return finished.read_text().strip()


def report(folders: list[Path], page: Path) -> str:
    """What fp8ref report says of the runs, and its page."""
    command = [
        sys.executable,
        "-m",
        "fp8ref",
        "report",
        *(folder.name for folder in folders),
        "--out",
        str(page.absolute()),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folders[0].parent)
    if ended.returncode not in (0, 1):
        return f"no report: {ended.stderr.strip()}"
    said = ended.stdout.strip().splitlines()
    return "\n".join(line for line in said if not line.startswith("wrote"))


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
