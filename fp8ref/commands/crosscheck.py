"""fp8ref crosscheck and certify: compare backends, and installed libraries, with the simulator."""

import argparse
import os
from pathlib import Path

from fp8ref.commands import shared
from fp8ref.commands.shared import check_json, check_whole, conclude
from fp8ref.shared.errors import require


def add(commands) -> None:
    """Add ``fp8ref crosscheck`` and ``fp8ref certify``."""
    check = shared.config_command(commands, "crosscheck", _crosscheck)
    option = check.option
    text = "check one of jax, torch (default: all installed)"
    option("--backend", "NAME", text, choices=shared.BACKENDS)
    option("--steps", "N", "optimizer steps before the second comparison (default 5)")
    option("--sharded", "N", "every mesh of N devices or processes")
    text = "first difference of two runs, or jax torch"
    option("--first-divergence", ("A", "B"), text, nargs=2)
    option("--replay", "PATH", "instead of CONFIG: repeat RUN/failures/step-...")
    shared.add_json(check, "write all comparisons to FILE")
    certificate = shared.plain(commands, "certify", _certify)
    certificate.option(
        "--exhaustive", None, "compare all 2^32 inputs of each cast and all 2^31 amaxes (minutes)"
    )
    text = "instead: what changed since FILE, which --json wrote with other versions"
    certificate.option("--against", "FILE", text)
    shared.add_json(certificate, "write every comparison to FILE")


def _certify(arguments: argparse.Namespace) -> int:
    """Compare the casts of installed libraries with the simulator.

    Casts and scales of torch, jax, ml_dtypes, torchao and fp8ref's own backends.

    $ fp8ref certify --json certificate.json
    $ fp8ref certify --against certificate.json
    $ fp8ref certify --exhaustive
    """
    check_json(arguments.json, arguments.against)
    from fp8ref.conformance import drift
    from fp8ref.conformance.certify import certify

    if arguments.against:
        shared.refuse(arguments, "--against compares the edges alone", "exhaustive")
        return conclude(drift.compare(arguments.against), arguments.json)
    return conclude(certify(exhaustive=arguments.exhaustive), arguments.json)


def _crosscheck(arguments: argparse.Namespace) -> int:
    """Compare both backends with the simulator on a training step.

    $ fp8ref crosscheck tiny
    $ fp8ref crosscheck tiny --backend torch --recipe rowwise
    $ fp8ref crosscheck tiny --first-divergence jax torch
    """
    if arguments.first_divergence is not None:
        return _crosscheck_first(arguments)
    if arguments.replay is not None:
        return _crosscheck_replay(arguments)
    config = shared.config(arguments)
    from fp8ref.crosscheck import one_device

    check_whole(config)
    check_json(arguments.json, arguments.config)
    if arguments.sharded is not None:
        return _crosscheck_sharded(arguments, config)
    steps = one_device.STEPS if arguments.steps is None else arguments.steps
    text = f"--steps must be between 0 and run.steps = {config.run.steps}; got {steps}."
    require(0 <= steps <= config.run.steps, text)
    backends = (arguments.backend,) if arguments.backend else shared.installed()
    report = one_device.crosscheck(config, backends=backends, steps=steps)
    step = "train {}" if report.ok else "crosscheck {} --first-divergence jax torch"
    return conclude(report, arguments.json, f"next: fp8ref {step.format(arguments.config)}")


def _crosscheck_first(arguments: argparse.Namespace) -> int:
    reason = "--first-divergence compares A with B"
    shared.refuse(arguments, reason, "backend", "sharded", "replay")
    a, b = arguments.first_divergence
    check_json(arguments.json)
    backends = [name for name in (a, b) if name in shared.BACKENDS]
    alone = "".join(backends[:1])
    require(
        len(backends) != 1,
        f"--first-divergence compares two runs, or two backends that train one CONFIG; got {a} and "
        f"{b}, but only {alone} is a backend. Name two run directories, or two of "
        f"{' and '.join(shared.BACKENDS)}. For a run directory named {alone}, write ./{alone}.",
    )
    if backends:
        require(
            arguments.config is not None,
            f"--first-divergence of two backends trains a CONFIG in both; got {a} and {b} "
            f"without one. Name it first: fp8ref crosscheck tiny --first-divergence {a} {b}.",
        )
        config = shared.config(arguments)
        from fp8ref.crosscheck import one_device
        from fp8ref.crosscheck.divergence import live

        steps = one_device.STEPS if arguments.steps is None else arguments.steps
        report = live.compare_backends(config, a, b, steps=steps)
    else:
        reason = "--first-divergence of two runs takes config and steps from them"
        shared.refuse(arguments, reason, "config", "steps", "*")
        from fp8ref.crosscheck.divergence import from_runs

        report = from_runs.compare_runs(Path(a), Path(b))
    return conclude(report, arguments.json)


def _crosscheck_replay(arguments: argparse.Namespace) -> int:
    reason = "--replay takes config and backend from the step that failed"
    shared.refuse(arguments, reason, "config", "backend", "steps", "sharded", "*")
    check_json(arguments.json)
    from fp8ref.crosscheck.rerun import rerun

    return conclude(rerun(arguments.replay), arguments.json)


def _crosscheck_sharded(arguments: argparse.Namespace, config) -> int:
    require(
        not config.numerics.simulates,
        "--sharded checks the frameworks' own GEMMs on meshes; got numerics.accumulate "
        f"{config.numerics.accumulate!r}. Leave one of them out.",
    )
    text = "--sharded takes 2 or more devices or ranks, and --backend jax or torch."
    require(arguments.backend is not None and arguments.sharded >= 2, text)
    if arguments.backend == "torch":
        from fp8ref.crosscheck.sharded import torch_ranks as sharded_torch

        steps = sharded_torch.STEPS if arguments.steps is None else arguments.steps
        report, unfit = sharded_torch.crosscheck(config, arguments.sharded, steps=steps)
    else:
        report, unfit = _sharded_jax(arguments, config)
    lines = [f"left out {name}: {why}" for name, why in unfit.items()]
    return conclude(report, arguments.json, *lines)


def _sharded_jax(arguments: argparse.Namespace, config):
    text = "--sharded with --backend jax takes no --steps: it replays step 0."
    require(arguments.steps is None, text)
    import jax

    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # a CPU is as many devices as it is told before it is asked
        jax.config.update("jax_num_cpu_devices", arguments.sharded)
    from fp8ref.crosscheck.sharded import jax_mesh as sharded_jax

    return sharded_jax.crosscheck(config, arguments.sharded)
