"""fp8ref ablate: which layer, GEMM and role costs loss in FP8."""

import argparse
from pathlib import Path

from fp8ref.commands import shared
from fp8ref.commands.shared import check_json, conclude


def add(commands) -> None:
    """Add ``fp8ref ablate``."""
    made = shared.plain(
        commands,
        "ablate",
        _ablate,
        "Find which layer, GEMM and role costs loss in FP8.",
        "From a run's last checkpoint, cast one operand to FP8 at a time, or leave one out, on the same data, and rank operands by their cost.",
    )
    made.add_argument("run_directory", metavar="RUN", type=Path, help="a run directory with a checkpoint, of either backend")
    made.add_argument("--recipe", metavar="NAME", help="the recipe of the casts (default: the run's own; of a run in bf16, tensorwise)")
    made.add_argument("--base", choices=("bf16", "fp8"), default="bf16", help="what all other operands are in (default bf16)")
    made.add_argument("--by", choices=("layer", "linear", "kind", "model"), default="layer", help="how linears are grouped (default layer)")
    made.add_argument("--layers", metavar="PATTERN", nargs="+", default=[], help="linears to study, by patterns (default: all in FP8)")
    made.add_argument(
        "--gemms", metavar="NAMES", default="output,grad_input,grad_weight", help="GEMMs to study, with commas (default: all)"
    )
    made.add_argument("--roles", metavar="NAMES", default="input,weight,grad_output", help="roles to study, with commas (default: all)")
    made.add_argument(
        "--steps", type=int, default=0, metavar="N", help="train N steps; 0, the default: forward passes, with GEMM output alone"
    )
    made.add_argument("--seeds", type=int, default=3, metavar="N", help="orders of data to train with, under --steps (default 3)")
    made.add_argument("--batches", type=int, default=8, metavar="N", help="validation batches (default 8)")
    made.add_argument("--learning-rate", type=float, metavar="RATE", help="of --steps (default: the run's at the checkpoint)")
    made.add_argument("--confidence", type=float, default=0.95, help="confidence of the intervals (default 0.95)")
    made.add_argument("--out", type=Path, metavar="DIR", help="directory of results, which resumes (default RUN/ablation)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE too")


def _ablate(known: argparse.Namespace) -> int:
    check_json(known.json)
    from fp8ref.linear_rules import GEMMS
    from fp8ref.recipe import ROLES
    from fp8ref.train.ablate import ablate

    if known.steps < 0:
        raise ValueError(f"--steps is not negative; got {known.steps}.")
    if known.learning_rate is not None and not 0 < known.learning_rate < 1e3:
        raise ValueError(f"--learning-rate is positive; got {known.learning_rate}.")
    found = ablate(
        known.run_directory,
        out=known.out,
        recipe=known.recipe,
        base=known.base,
        by=known.by,
        layers=known.layers,
        gemms=_names("--gemms", known.gemms, GEMMS),
        roles=_names("--roles", known.roles, ROLES),
        steps=known.steps,
        seeds=known.seeds,
        batches=known.batches,
        learning_rate=known.learning_rate,
        confidence=shared.confidence(known),
    )
    return conclude(found, known.json)


def _names(option: str, given: str, known: tuple) -> list:
    names = [name.strip() for name in given.split(",") if name.strip()]
    if not names or any(name not in known for name in names):
        raise ValueError(f"{option} takes names of {', '.join(known)}, with commas; got {given!r}.")
    return names
