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
        "From a run's last checkpoint, cast one operand to FP8 at a time, or leave one out, on "
        "the same data, and rank operands by their cost.",
    )
    made.add_argument(
        "run_directory",
        metavar="RUN",
        type=Path,
        help="a run directory with a checkpoint, of either backend; or one of Hugging Face's "
        "format",
    )
    made.add_argument(
        "--recipe",
        metavar="NAME",
        help="the recipe of the casts (default: the run's own; of a run in bf16, tensorwise)",
    )
    made.add_argument(
        "--attention",
        metavar="VARIANT",
        help="study casts of attention's operands by this variant (default: the run's own)",
    )
    made.add_argument(
        "--states",
        metavar="LAYOUT",
        help="under --steps, study moments and masters of this layout (default: the run's own)",
    )
    made.add_argument(
        "--base",
        choices=("bf16", "fp8"),
        default="bf16",
        help="what all other operands are in (default bf16)",
    )
    made.add_argument(
        "--by",
        choices=("layer", "linear", "kind", "model"),
        default="layer",
        help="how linears are grouped (default layer)",
    )
    made.add_argument(
        "--layers",
        metavar="PATTERN",
        nargs="+",
        default=[],
        help="linears to study, by patterns (default: all in FP8)",
    )
    made.add_argument(
        "--gemms",
        metavar="NAMES",
        help="of output, grad_input, grad_weight, attention, states: what to study, with commas "
        "(default: all)",
    )
    made.add_argument(
        "--roles",
        metavar="NAMES",
        help="roles to study, such as weight, p or v, with commas (default: all)",
    )
    made.add_argument(
        "--steps",
        type=int,
        default=0,
        metavar="N",
        help="train N steps; 0, the default: forward passes, with GEMM output alone",
    )
    made.add_argument(
        "--seeds",
        type=int,
        default=3,
        metavar="N",
        help="orders of data to train with, under --steps (default 3)",
    )
    made.add_argument(
        "--batches", type=int, default=8, metavar="N", help="validation batches (default 8)"
    )
    made.add_argument(
        "--learning-rate",
        type=float,
        metavar="RATE",
        help="of --steps (default: the run's peak; of Hugging Face's format 0.001, a config's)",
    )
    made.add_argument(
        "--backend",
        choices=("jax", "torch"),
        help="of a directory of Hugging Face's format (default torch)",
    )
    made.add_argument(
        "--data", metavar="SOURCE", help="as data.source, of such a directory (default stdlib)"
    )
    made.add_argument(
        "--sequence-length",
        type=int,
        metavar="N",
        help="as data.sequence_length, of such a directory (default 128)",
    )
    made.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="as data.batch_size, of such a directory (default 16)",
    )
    made.add_argument(
        "--confidence", type=float, default=0.95, help="confidence of the intervals (default 0.95)"
    )
    made.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="directory of results, which resumes (default RUN/ablation; of Hugging Face's "
        "format <name>-ablation)",
    )
    shared.add_trust(made)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE too")


def _ablate(known: argparse.Namespace) -> int:
    check_json(known.json)
    from fp8ref.train.config import config as configs
    from fp8ref.train.experiments import ablation_start
    from fp8ref.train.experiments.ablate import ablate
    from fp8ref.train.experiments.ablation_operands import KINDS, ROLES

    if known.steps < 0:
        raise ValueError(f"--steps is not negative; got {known.steps}.")
    if known.learning_rate is not None and not 0 < known.learning_rate < 1e3:
        raise ValueError(f"--learning-rate is positive; got {known.learning_rate}.")
    weights, run = _of_weights(known), known.run_directory
    if known.trust and not weights:
        shared.trust_source(known, run / "config.toml", configs.load(run / "config.toml"))
    found = ablate(
        ablation_start.of_weights(run, known.backend or "torch", known.recipe, **weights)
        if weights
        else run,
        out=known.out,
        recipe=known.recipe,
        attention=known.attention,
        states=known.states,
        base=known.base,
        by=known.by,
        layers=known.layers,
        gemms=_names("--gemms", known.gemms, KINDS),
        roles=_names("--roles", known.roles, ROLES),
        steps=known.steps,
        seeds=known.seeds,
        batches=known.batches,
        learning_rate=known.learning_rate,
        confidence=shared.confidence(known),
    )
    return conclude(found, known.json)


def _of_weights(known: argparse.Namespace) -> dict:
    """The data of a directory of Hugging Face's format; {} of a run, which has its own."""
    given = {
        "data": known.data,
        "sequence_length": known.sequence_length,
        "batch_size": known.batch_size,
    }
    if not known.run_directory.is_dir():
        raise ValueError(
            "RUN is the directory of a run, or of Hugging Face's format; there is no directory "
            f"{known.run_directory}. Check its name."
        )
    if (
        not (known.run_directory / "config.json").is_file()
        or (known.run_directory / "manifest.json").is_file()
    ):
        if options := [
            key for key, value in ({"backend": known.backend} | given).items() if value is not None
        ]:
            raise ValueError(
                f"--{options[0].replace('_', '-')} is of a directory of Hugging Face's format; "
                "a run has its own. Leave it out."
            )
        return {}
    return {"data": "stdlib", "sequence_length": 128, "batch_size": 16} | {
        key: value for key, value in given.items() if value is not None
    }


def _names(option: str, given: str | None, known: tuple) -> list:
    if given is None:
        return list(known)
    names = [name.strip() for name in given.split(",") if name.strip()]
    if not names or any(name not in known for name in names):
        raise ValueError(f"{option} takes names of {', '.join(known)}, with commas; got {given!r}.")
    return names
