"""fp8ref crosscheck and certify: compare backends, and installed libraries, with the simulator."""

import argparse
import os
from pathlib import Path

from fp8ref.commands import shared
from fp8ref.commands.shared import FAILED, check_json, check_whole, conclude
from fp8ref.shared import console


def add(commands) -> None:
    """Add ``fp8ref crosscheck`` and ``fp8ref certify``."""
    check = shared.config_command(
        commands,
        "crosscheck",
        _crosscheck,
        "Compare both backends with the simulator, on the operands of a config's training step.",
    )
    check.add_argument(
        "--backend", choices=("jax", "torch"), help="check one backend (default: both)"
    )
    check.add_argument(
        "--steps", type=int, help="optimizer steps before the second comparison (default 5)"
    )
    check.add_argument(
        "--sharded",
        type=int,
        metavar="N",
        help="check every mesh of N devices (jax; on a CPU, N virtual ones) or of N processes "
        "(torch). Needs --backend",
    )
    check.add_argument(
        "--replay",
        type=Path,
        metavar="PATH",
        help="instead of CONFIG: repeat a failed step, RUN/failures/step-..., and name the "
        "first layer, role and element that is not finite. Exits with 1 if one is found or "
        "a code or scale differs from the simulator's",
    )
    check.add_argument(
        "--first-divergence",
        nargs=2,
        metavar=("A", "B"),
        help="find the first difference of A and B: step, layer, role, GEMM, element, and the "
        "clause that explains it. A and B are two run directories; or, with CONFIG, two of "
        "jax and torch, trained for --steps. Exits with 1 if they differ",
    )
    shared.add_json(check, "write all comparisons to FILE")
    certificate = shared.plain(
        commands,
        "certify",
        _certify,
        "Compare casts and scales of the installed libraries with the simulator.",
        "Compare casts and scales of torch, jax, ml_dtypes, torchao and fp8ref's own backends "
        "with the simulator.",
    )
    certificate.add_argument(
        "--exhaustive",
        action="store_true",
        help="compare all 2^32 inputs of each cast and all 2^31 amaxes (minutes)",
    )
    shared.add_json(certificate, "write every comparison to FILE")


def _certify(arguments: argparse.Namespace) -> int:
    check_json(arguments.json)
    from fp8ref.conformance.certify import certify

    return conclude(certify(exhaustive=arguments.exhaustive), arguments.json)


def _crosscheck(arguments: argparse.Namespace, options: list[str]) -> int:
    if arguments.first_divergence is not None and not arguments.help:
        return _crosscheck_first(arguments, options)
    if arguments.replay is not None and not arguments.help:
        return _crosscheck_replay(arguments, options)
    config = shared.config(arguments, options)
    from fp8ref.crosscheck import one_device
    from fp8ref.shared.errors import ConfigError
    from fp8ref.train.loop import BACKENDS

    check_whole(config)
    check_json(arguments.json, arguments.config)
    if arguments.sharded is not None:
        return _crosscheck_sharded(arguments, config)
    steps = one_device.STEPS if arguments.steps is None else arguments.steps
    if not 0 <= steps <= config.run.steps:
        raise ConfigError(
            f"--steps must be between 0 and run.steps = {config.run.steps}; got {steps}."
        )
    report = one_device.crosscheck(
        config, backends=(arguments.backend,) if arguments.backend else BACKENDS, steps=steps
    )
    return conclude(report, arguments.json)


def _crosscheck_first(arguments: argparse.Namespace, options: list[str]) -> int:
    from fp8ref.shared.errors import ConfigError
    from fp8ref.train.loop import BACKENDS

    if unused := shared.used(arguments, "backend", "sharded", "replay"):
        raise ConfigError(
            f"--first-divergence compares A with B; got {', '.join(unused)} too, which is "
            "another cross-check. Leave one out."
        )
    a, b = arguments.first_divergence
    check_json(arguments.json)
    backends = [name for name in (a, b) if name in BACKENDS]
    if len(backends) == 1:
        raise ConfigError(
            "--first-divergence compares two runs, or two backends that train one CONFIG; got "
            f"{a} and {b}, but only {backends[0]} is a backend. Name two run directories, or "
            f"two of {' and '.join(BACKENDS)}. For a run directory named {backends[0]}, write "
            f"./{backends[0]}."
        )
    if backends:
        if arguments.config is None:
            raise ConfigError(
                f"--first-divergence of two backends trains a CONFIG in both; got {a} and {b} "
                f"without one. Name it first: fp8ref crosscheck tiny --first-divergence {a} {b}."
            )
        config = shared.config(arguments, options)
        from fp8ref.crosscheck import one_device
        from fp8ref.crosscheck.divergence import live

        report = live.compare_backends(
            config, a, b, steps=one_device.STEPS if arguments.steps is None else arguments.steps
        )
    else:
        config_file = ["CONFIG"] * (arguments.config is not None)
        if unused := options or config_file + shared.used(arguments, "steps"):
            raise ConfigError(
                "--first-divergence of two runs takes config and steps from them; got "
                f"{', '.join(unused)} too. Leave it out, or name two backends: fp8ref "
                f"crosscheck CONFIG --first-divergence {' '.join(BACKENDS)}."
            )
        from fp8ref.crosscheck.divergence import from_runs

        report = from_runs.compare_runs(Path(a), Path(b))
    return conclude(report, arguments.json)


def _crosscheck_replay(arguments: argparse.Namespace, options: list[str]) -> int:
    from fp8ref.shared.errors import ConfigError

    config_file = ["CONFIG"] * (arguments.config is not None)
    # an option's value would pass for CONFIG
    if unused := options or config_file + shared.used(arguments, "backend", "steps", "sharded"):
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
    report.print()
    for name, why in unfit.items():
        console.show(f"left out {name}: {why}")
    if arguments.json:
        report.write(arguments.json)
    return 0 if report.ok else FAILED


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
