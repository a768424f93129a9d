"""fp8ref crosscheck and certify: compare backends, and installed libraries, with the simulator."""

import argparse
import os
from pathlib import Path

from fp8ref.commands import shared
from fp8ref.commands.shared import check_json, check_whole, conclude


def add(commands) -> None:
    """Add ``fp8ref crosscheck`` and ``fp8ref certify``."""
    check = shared.config_command(
        commands,
        "crosscheck",
        _crosscheck,
        "Compare both backends with the simulator on a training step.",
        examples=(
            "crosscheck tiny",
            "crosscheck tiny --backend torch --recipe rowwise",
            "crosscheck tiny --first-divergence jax torch",
        ),
    )
    check.option(
        "--backend",
        "NAME",
        "check one of jax, torch (default: all installed)",
        choices=shared.BACKENDS,
    )
    check.option("--steps", "N", "optimizer steps before the second comparison (default 5)")
    check.option(
        "--sharded", "N", "with --backend: every mesh of N devices (jax) or processes (torch)"
    )
    check.option(
        "--replay",
        "PATH",
        "instead of CONFIG: repeat a failed step, RUN/failures/step-..., and name the first layer, "
        "role and element that is not finite. Exits with 1 if one is found or a code or scale "
        "differs from the simulator's",
        rare=True,
    )
    check.option(
        "--first-divergence",
        ("A", "B"),
        "the first difference of two runs or, with CONFIG, of jax and torch",
        nargs=2,
    )
    shared.add_json(check, "write all comparisons to FILE")
    certificate = shared.plain(
        commands,
        "certify",
        _certify,
        "Compare the casts of installed libraries with the simulator.",
        "Compare casts and scales of torch, jax, ml_dtypes, torchao and fp8ref's own backends "
        "with the simulator.",
        examples=("certify", "certify --json certificate.json", "certify --exhaustive"),
    )
    certificate.option(
        "--exhaustive", None, "compare all 2^32 inputs of each cast and all 2^31 amaxes (minutes)"
    )
    shared.add_json(certificate, "write every comparison to FILE")


def _certify(arguments: argparse.Namespace) -> int:
    check_json(arguments.json)
    from fp8ref.conformance.certify import certify

    return conclude(certify(exhaustive=arguments.exhaustive), arguments.json)


def _crosscheck(arguments: argparse.Namespace) -> int:
    if arguments.first_divergence is not None:
        return _crosscheck_first(arguments)
    if arguments.replay is not None:
        return _crosscheck_replay(arguments)
    config = shared.config(arguments)
    from fp8ref.crosscheck import one_device
    from fp8ref.shared.errors import ConfigError

    check_whole(config)
    check_json(arguments.json, arguments.config)
    if arguments.sharded is not None:
        return _crosscheck_sharded(arguments, config)
    steps = one_device.STEPS if arguments.steps is None else arguments.steps
    if not 0 <= steps <= config.run.steps:
        raise ConfigError(
            f"--steps must be between 0 and run.steps = {config.run.steps}; got {steps}."
        )
    backends = (arguments.backend,) if arguments.backend else shared.installed()
    report = one_device.crosscheck(config, backends=backends, steps=steps)
    step = (
        f"train {arguments.config}"
        if report.ok
        else f"crosscheck {arguments.config} --first-divergence jax torch"
    )
    return conclude(report, arguments.json, f"next: fp8ref {step}")


def _crosscheck_first(arguments: argparse.Namespace) -> int:
    from fp8ref.shared.errors import ConfigError

    if unused := shared.used(arguments, "backend", "sharded", "replay"):
        raise ConfigError(
            f"--first-divergence compares A with B; got {', '.join(unused)} too, which is "
            "another cross-check. Leave one out."
        )
    a, b = arguments.first_divergence
    check_json(arguments.json)
    backends = [name for name in (a, b) if name in shared.BACKENDS]
    if len(backends) == 1:
        raise ConfigError(
            "--first-divergence compares two runs, or two backends that train one CONFIG; got "
            f"{a} and {b}, but only {backends[0]} is a backend. Name two run directories, or "
            f"two of {' and '.join(shared.BACKENDS)}. For a run directory named {backends[0]}, "
            f"write ./{backends[0]}."
        )
    if backends:
        if arguments.config is None:
            raise ConfigError(
                f"--first-divergence of two backends trains a CONFIG in both; got {a} and {b} "
                f"without one. Name it first: fp8ref crosscheck tiny --first-divergence {a} {b}."
            )
        config = shared.config(arguments)
        from fp8ref.crosscheck import one_device
        from fp8ref.crosscheck.divergence import live

        report = live.compare_backends(
            config, a, b, steps=one_device.STEPS if arguments.steps is None else arguments.steps
        )
    else:
        config_file = ["CONFIG"] * (arguments.config is not None)
        if unused := shared.keys(arguments) or config_file + shared.used(arguments, "steps"):
            raise ConfigError(
                "--first-divergence of two runs takes config and steps from them; got "
                f"{', '.join(unused)} too. Leave it out, or name two backends: fp8ref "
                f"crosscheck CONFIG --first-divergence {' '.join(shared.BACKENDS)}."
            )
        from fp8ref.crosscheck.divergence import from_runs

        report = from_runs.compare_runs(Path(a), Path(b))
    return conclude(report, arguments.json)


def _crosscheck_replay(arguments: argparse.Namespace) -> int:
    from fp8ref.shared.errors import ConfigError

    config_file = ["CONFIG"] * (arguments.config is not None)
    if unused := shared.keys(arguments) or config_file + shared.used(
        arguments, "backend", "steps", "sharded"
    ):
        raise ConfigError(
            "--replay takes config and backend from the step that failed; got "
            f"{', '.join(unused)} too. Leave it out."
        )
    check_json(arguments.json)
    from fp8ref.crosscheck.rerun import rerun

    report = rerun(arguments.replay)
    return conclude(report, arguments.json)


def _crosscheck_sharded(arguments: argparse.Namespace, config) -> int:
    from fp8ref.shared.errors import ConfigError

    if config.numerics.simulates:
        raise ConfigError(
            "--sharded checks the frameworks' own GEMMs on meshes; got numerics.accumulate "
            f"{config.numerics.accumulate!r}. Leave one of them out."
        )
    if arguments.backend is None or arguments.sharded < 2:
        raise ConfigError("--sharded takes 2 or more devices or ranks, and --backend jax or torch.")
    if arguments.backend == "torch":
        from fp8ref.crosscheck.sharded import torch_ranks as sharded_torch

        steps = sharded_torch.STEPS if arguments.steps is None else arguments.steps
        report, unfit = sharded_torch.crosscheck(config, arguments.sharded, steps=steps)
    else:
        report, unfit = _sharded_jax(arguments, config)
    lines = [f"left out {name}: {why}" for name, why in unfit.items()]
    return conclude(report, arguments.json, *lines)


def _sharded_jax(arguments: argparse.Namespace, config):
    from fp8ref.shared.errors import ConfigError

    if arguments.steps is not None:
        raise ConfigError("--sharded with --backend jax takes no --steps: it replays step 0.")
    import jax

    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # a CPU is as many devices as it is told before it is asked
        jax.config.update("jax_num_cpu_devices", arguments.sharded)
    from fp8ref.crosscheck.sharded import jax_mesh as sharded_jax

    return sharded_jax.crosscheck(config, arguments.sharded)
