"""fp8ref ablate: which layer, GEMM and role costs loss in FP8."""

import argparse
from pathlib import Path

from fp8ref.commands import shared
from fp8ref.commands.shared import check_json, conclude


def add(commands) -> None:
    """Add ``fp8ref ablate``."""
    command = shared.plain(
        commands,
        "ablate",
        _ablate,
        "Find which layer, GEMM and role costs loss in FP8.",
        "From a run's last checkpoint, cast one operand to FP8 at a time, or leave one out, on "
        "the same data, and rank operands by their cost.",
    )
    command.add_argument(
        "run_directory",
        metavar="RUN",
        type=Path,
        help="a run directory with a checkpoint, of either backend; or one of Hugging Face's "
        "format",
    )
    command.add_argument(
        "--recipe",
        metavar="NAME",
        help="the recipe of the casts (default: the run's own; of a run in bf16, tensorwise)",
    )
    command.add_argument(
        "--attention",
        metavar="VARIANT",
        help="study casts of attention's operands by this variant (default: the run's own)",
    )
    command.add_argument(
        "--states",
        metavar="LAYOUT",
        help="under --steps, study moments and masters of this layout (default: the run's own)",
    )
    _add_studied(command)
    _add_measurement(command)
    _add_directory(command)
    command.add_argument(
        "--confidence", type=float, default=0.95, help="confidence of the intervals (default 0.95)"
    )
    command.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="directory of results, which resumes (default RUN/ablation; of Hugging Face's "
        "format <name>-ablation)",
    )
    shared.add_trust(command)
    shared.add_json(command, "write the result to FILE too")


def _add_studied(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--base",
        choices=("bf16", "fp8"),
        default="bf16",
        help="what all other operands are in (default bf16)",
    )
    command.add_argument(
        "--by",
        choices=("layer", "linear", "kind", "model"),
        default="layer",
        help="how linears are grouped (default layer)",
    )
    command.add_argument(
        "--layers",
        metavar="PATTERN",
        nargs="+",
        default=[],
        help="linears to study, by patterns (default: all in FP8)",
    )
    command.add_argument(
        "--gemms",
        metavar="NAMES",
        help="of output, grad_input, grad_weight, attention, states: what to study, with commas "
        "(default: all)",
    )
    command.add_argument(
        "--roles",
        metavar="NAMES",
        help="roles to study, such as weight, p or v, with commas (default: all)",
    )


def _add_measurement(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--steps",
        type=int,
        default=0,
        metavar="N",
        help="train N steps; 0, the default: forward passes, with GEMM output alone",
    )
    command.add_argument(
        "--seeds",
        type=int,
        default=3,
        metavar="N",
        help="orders of data to train with, under --steps (default 3)",
    )
    command.add_argument(
        "--batches", type=int, default=8, metavar="N", help="validation batches (default 8)"
    )
    command.add_argument(
        "--learning-rate",
        type=float,
        metavar="RATE",
        help="of --steps (default: the run's peak; of Hugging Face's format 0.001, a config's)",
    )


def _add_directory(command: argparse.ArgumentParser) -> None:
    """Options of a directory of Hugging Face's format."""
    command.add_argument(
        "--backend",
        choices=("jax", "torch"),
        help="of a directory of Hugging Face's format (default torch)",
    )
    command.add_argument(
        "--data", metavar="SOURCE", help="as data.source, of such a directory (default stdlib)"
    )
    command.add_argument(
        "--sequence-length",
        type=int,
        metavar="N",
        help="as data.sequence_length, of such a directory (default 128)",
    )
    command.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="as data.batch_size, of such a directory (default 16)",
    )


def _ablate(arguments: argparse.Namespace) -> int:
    check_json(arguments.json)
    from fp8ref.train.config import config as configs
    from fp8ref.train.experiments import ablation_start
    from fp8ref.train.experiments.ablate import Measurement, ablate
    from fp8ref.train.experiments.ablation_operands import KINDS, ROLES, Studied

    if arguments.steps < 0:
        raise ValueError(f"--steps is not negative; got {arguments.steps}.")
    if arguments.learning_rate is not None and not 0 < arguments.learning_rate < 1e3:
        raise ValueError(f"--learning-rate is positive; got {arguments.learning_rate}.")
    settings, run = _data_settings(arguments), arguments.run_directory
    start: Path | ablation_start.Start = run
    if settings is not None:
        backend, data = arguments.backend or "torch", configs.Config().replace(data=settings).data
        start = ablation_start.weights_start(run, backend, arguments.recipe, data)
    elif arguments.trust:
        shared.trust_source(arguments, run / "config.toml", configs.load(run / "config.toml"))
    studied = Studied(
        by=arguments.by,
        layers=arguments.layers,
        gemms=_names("--gemms", arguments.gemms, KINDS),
        roles=_names("--roles", arguments.roles, ROLES),
        attention=arguments.attention,
        states=arguments.states,
    )
    measurement = Measurement(
        steps=arguments.steps,
        seeds=arguments.seeds,
        batches=arguments.batches,
        learning_rate=arguments.learning_rate,
    )
    ablation = ablate(
        start,
        studied,
        measurement,
        out=arguments.out,
        recipe=arguments.recipe,
        base=arguments.base,
        confidence=shared.confidence(arguments),
    )
    return conclude(ablation, arguments.json)


def _data_settings(arguments: argparse.Namespace) -> dict | None:
    """Keys of data for a directory of Hugging Face's format; None of a run."""
    options = {
        "backend": arguments.backend,
        "data": arguments.data,
        "sequence-length": arguments.sequence_length,
        "batch-size": arguments.batch_size,
    }
    used = {option: value for option, value in options.items() if value is not None}
    if not arguments.run_directory.is_dir():
        raise ValueError(
            "RUN is the directory of a run, or of Hugging Face's format; there is no directory "
            f"{arguments.run_directory}. Check its name."
        )
    directory = arguments.run_directory
    if not (directory / "config.json").is_file() or (directory / "manifest.json").is_file():
        for option in used:
            raise ValueError(
                f"--{option} is of a directory of Hugging Face's format; a run has its own. Leave "
                "it out."
            )
        return None
    keys = {"data": "source", "sequence-length": "sequence_length", "batch-size": "batch_size"}
    return {keys[option]: value for option, value in used.items() if option in keys}


def _names(option: str, text: str | None, choices: tuple) -> list:
    if text is None:
        return list(choices)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or any(name not in choices for name in names):
        raise ValueError(
            f"{option} takes names of {', '.join(choices)}, with commas; got {text!r}."
        )
    return names
