"""fp8ref estimate and ablate: what FP8 gains on a GPU, and which layer and GEMM costs loss."""

import argparse
from pathlib import Path

from fp8ref.commands import shared
from fp8ref.commands.shared import check_json, conclude
from fp8ref.shared import console
from fp8ref.shared.errors import ConfigError, require

_GEMMS = ("output", "grad_input", "grad_weight", "attention", "states")


def add(commands) -> None:
    """Add ``fp8ref estimate`` and ``fp8ref ablate``."""
    command = shared.config_command(commands, "estimate", _estimate)
    command.option("--gpu", "NAME", "h100, h200 or b200 (required)")
    shared.add_backend(command, "whose kernels to assume, jax or torch")
    command.option("--ceilings", "FILE", "JSON of measured GPU rates (default: published ones)")
    shared.add_json(command, "write all times, in seconds, to FILE")
    command = shared.plain(commands, "ablate RUN", _ablate)
    option, rare = command.option, command.rare_option
    option("run_directory", "RUN", "a run directory, or one of Hugging Face's format")
    option("--recipe", "NAME", "recipe of the casts (default: the run's; tensorwise)")
    text = "grouping of linears: layer, linear, kind or model"
    option("--by", "NAME", text, "layer", choices=("layer", "linear", "kind", "model"))
    text = "all other operands are in bf16 or fp8"
    option("--base", "NAME", text, "bf16", choices=("bf16", "fp8"))
    option("--layers", "PATTERN", "linears (default: all in FP8)", [], nargs="+")
    option("--gemms", "NAMES", f"of {','.join(_GEMMS)} (default: all)")
    option("--roles", "NAMES", "roles, such as weight,p,v (default: all)")
    option("--steps", "N", "train N steps; 0: forward passes, GEMM output alone", 0)
    option("--seeds", "N", "orders of data to train with, under --steps", 3)
    option("--batches", "N", "validation batches", 8)
    option("--out", "DIR", "results, which resume (default RUN/ablation)")
    shared.add_json(command, "write the result to FILE too")
    rare("--learning-rate", "X", "under --steps (default: the run's peak, or 0.001)")
    rare("--attention", "VARIANT", "study casts of attention's operands by this variant")
    rare("--states", "LAYOUT", "under --steps, study moments and masters of this layout")
    rare("--confidence", "X", "confidence of the intervals", 0.95)
    for_weights = "of Hugging Face's format"
    rare("--backend", "NAME", f"{for_weights}: jax or torch", choices=shared.BACKENDS)
    rare("--data", "SOURCE", f"{for_weights}: as data.source (default stdlib)")
    rare("--sequence-length", "N", f"{for_weights}: as data.sequence_length (128)")
    rare("--batch-size", "N", f"{for_weights}: as data.batch_size (16)")
    shared.add_trust(command)


def _estimate(arguments: argparse.Namespace) -> int:
    """Predict the speed-up of FP8 on a GPU, and what to keep in bf16.

    $ fp8ref estimate llama-8b --gpu h100
    $ fp8ref estimate llama-8b --gpu h200 --recipe rowwise --backend jax
    $ fp8ref estimate tiny --gpu h100 --json estimate.json
    """
    config = shared.config(arguments)
    check_json(arguments.json, arguments.config, arguments.ceilings)
    from fp8ref.estimate import gpu_rates, report
    from fp8ref.train.config import architecture

    if arguments.gpu is None:
        raise ConfigError("needs --gpu h100, h200 or b200; got none.")
    architecture.require_llama(config, "an estimate")
    if config.numerics.simulates:
        raise ConfigError(
            "an estimate is for a GPU's own GEMMs; got numerics.accumulate "
            f"{config.numerics.accumulate!r}, which is simulated on a CPU. Leave it out."
        )
    backend = shared.backend(arguments, config)
    with console.waiting("estimate"):
        forecast = report.of(config, backend, gpu_rates.of(arguments.gpu, arguments.ceilings))
    step = f"next: fp8ref train {arguments.config} --dry-run"
    return conclude(forecast, arguments.json, step)


def _ablate(arguments: argparse.Namespace) -> int:
    """Find which layer, GEMM and role costs loss in FP8.

    From a run's last checkpoint, cast one operand to FP8 at a time, or leave one out, on the same
    data, and rank operands by their cost.

    $ fp8ref ablate runs/tiny-torch-tensorwise
    $ fp8ref ablate runs/tiny-torch-tensorwise --by kind --roles weight --steps 20
    $ fp8ref ablate Qwen3-0.6B --recipe rowwise --data text --batches 4
    """
    check_json(arguments.json)
    from fp8ref.train.config import config as configs
    from fp8ref.train.experiments import ablation_start
    from fp8ref.train.experiments.ablate import Measurement, ablate
    from fp8ref.train.experiments.ablation_operands import KINDS, ROLES, Studied

    rate = arguments.learning_rate
    require(arguments.steps >= 0, f"--steps is not negative; got {arguments.steps}.")
    require(rate is None or 0 < rate < 1e3, f"--learning-rate is between 0 and 1000; got {rate}.")
    settings, run = _data_settings(arguments), arguments.run_directory
    start: Path | ablation_start.Start = run
    if settings is not None:
        data = configs.Config().replace(data=settings).data
        start = ablation_start.weights_start(run, shared.backend(arguments), arguments.recipe, data)
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
    directory = arguments.run_directory
    require(
        directory.is_dir(),
        "RUN is the directory of a run, or of Hugging Face's format; there is no directory "
        f"{directory}. Check its name.",
    )
    keys = {"data": "source", "sequence_length": "sequence_length", "batch_size": "batch_size"}
    if not (directory / "config.json").is_file() or (directory / "manifest.json").is_file():
        reason = "a run has its own backend and data, unlike a directory of Hugging Face's format"
        shared.refuse(arguments, reason, "backend", *keys)
        return None
    values = {key: getattr(arguments, name) for name, key in keys.items()}
    return {key: value for key, value in values.items() if value is not None}


def _names(option: str, text: str | None, choices: tuple) -> list:
    named = list(choices) if text is None else shared.names(text)
    valid = bool(named) and all(name in choices for name in named)
    require(valid, f"{option} takes names of {', '.join(choices)}, with commas; got {text!r}.")
    return named
