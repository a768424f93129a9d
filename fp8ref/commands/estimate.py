"""fp8ref estimate: predict what FP8 gains on a GPU."""

import argparse
from pathlib import Path

from fp8ref.commands import shared
from fp8ref.commands.shared import check_json, conclude
from fp8ref.shared import console


def add(commands) -> None:
    """Add ``fp8ref estimate``."""
    command = shared.config_command(
        commands,
        "estimate",
        _estimate,
        "Predict the speed-up of FP8 on a GPU, for each linear and for a step, and the linears "
        "to keep in bf16.",
    )
    command.add_argument("--gpu", help="h100 or h200 (required)")
    command.add_argument(
        "--backend",
        choices=("jax", "torch"),
        default="torch",
        help="the framework whose kernels to assume (default torch)",
    )
    command.add_argument(
        "--ceilings",
        type=Path,
        metavar="FILE",
        help="JSON file of measured GPU rates (default: published rates)",
    )
    shared.add_json(command, "write all times, in seconds, to FILE")


def _estimate(arguments: argparse.Namespace, options: list[str]) -> int:
    config = shared.config(arguments, options)
    check_json(arguments.json, arguments.config, arguments.ceilings)
    from fp8ref.estimate import gpu_rates, report
    from fp8ref.shared.errors import ConfigError
    from fp8ref.train.config import architecture

    if arguments.gpu is None:
        raise ConfigError("fp8ref estimate needs --gpu h100 or --gpu h200.")
    architecture.require_llama(config, "an estimate")
    if config.numerics.simulates:
        raise ConfigError(
            "an estimate is for a GPU's own GEMMs; got numerics.accumulate "
            f"{config.numerics.accumulate!r}, which is simulated on a CPU. Leave it out."
        )
    with console.waiting("estimate"):
        forecast = report.of(
            config, arguments.backend, gpu_rates.of(arguments.gpu, arguments.ceilings)
        )
    return conclude(forecast, arguments.json)
