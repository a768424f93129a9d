"""fp8ref estimate: predict what FP8 gains on a GPU."""

import argparse
from pathlib import Path

from fp8ref.commands import shared
from fp8ref.commands.shared import check_json, conclude
from fp8ref.shared import console


def add(commands) -> None:
    """Add ``fp8ref estimate``."""
    made = shared.of_config(
        commands,
        "estimate",
        _estimate,
        "Predict the speed-up of FP8 on a GPU, for each linear and for a step, and the linears "
        "to keep in bf16.",
    )
    made.add_argument("--gpu", help="h100 or h200 (required)")
    made.add_argument(
        "--backend",
        choices=("jax", "torch"),
        default="torch",
        help="the framework whose kernels to assume (default torch)",
    )
    made.add_argument(
        "--ceilings",
        type=Path,
        metavar="FILE",
        help="JSON file of measured GPU rates (default: published rates)",
    )
    made.add_argument(
        "--json", type=Path, metavar="FILE", help="write all times, in seconds, to FILE"
    )


def _estimate(known: argparse.Namespace, options: list[str]) -> int:
    config = shared.config(known, options)
    check_json(known.json, known.config, known.ceilings)
    from fp8ref.estimate import gpu_rates, report
    from fp8ref.shared.errors import ConfigError
    from fp8ref.train.config import architecture

    if known.gpu is None:
        raise ConfigError("fp8ref estimate needs --gpu h100 or --gpu h200.")
    architecture.require_llama(config, "an estimate")
    if config.numerics.simulates:
        raise ConfigError(
            "an estimate is for a GPU's own GEMMs; got numerics.accumulate "
            f"{config.numerics.accumulate!r}, which is simulated on a CPU. Leave it out."
        )
    with console.waiting("estimate"):
        found = report.of(config, known.backend, gpu_rates.of(known.gpu, known.ceilings))
    return conclude(found, known.json)
