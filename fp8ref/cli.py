"""The ``fp8ref`` command.

Exit codes: 0 done, 1 a comparison failed or a defect of ours, 2 a user's error, 3 a loss that is not finite, 4 another process of the run is gone,
5 SIGTERM, after the state was saved, 130 Ctrl-C.
"""

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

ERROR, FAILED, DEFECT, NON_FINITE, LOST, STOPPED, INTERRUPTED = 2, 1, 1, 3, 4, 5, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; arguments are those of the command line."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    known, options = _parser().parse_known_args(arguments)
    try:
        code = known.run(known, options)
    except KeyboardInterrupt:
        print("interrupted; what was written so far is kept", file=sys.stderr)
        code = INTERRUPTED
    except Exception as error:
        code = _code_of(error)
        if code is None and known.leave is None:
            raise
        if code is None:
            traceback.print_exc()
            code = DEFECT
        else:
            print(f"fp8ref: {error}", file=sys.stderr)
    if known.leave:
        known.leave(code)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fp8ref", description="Train in FP8 with JAX or PyTorch from one config, and hold both to the specification."
    )
    parser.set_defaults(leave=None)  # how a process of several ends, given the exit code
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run, help: str) -> argparse.ArgumentParser:
        # CONFIG's keys are options too, and tyro reads those, so --help shows both (see _config)
        made = commands.add_parser(name, help=help, description=help, allow_abbrev=False, add_help=False)
        made.add_argument("config", metavar="CONFIG", type=Path, nargs="?", help="a TOML file, such as configs/tiny.toml")
        made.add_argument("-h", "--help", action="store_true", help="show this, and every key of CONFIG")
        made.set_defaults(run=run, parser=made)
        return made

    train = command("train", _train, "Train a model and write a run directory.")
    train.add_argument("--backend", choices=("jax", "torch"), help="the framework to train with (required)")
    train.add_argument("--resume", action="store_true", help="continue a run that stopped; leave a finished one alone")
    train.add_argument("--overwrite", action="store_true", help="replace a run that is already there")
    train.add_argument("--dry-run", action="store_true", help="print sizes, memory, GEMMs and where FP8 would pay; build and read nothing")
    train.add_argument("--distributed", action="store_true", help="one of several processes that train together")
    check = command("crosscheck", _crosscheck, "Hold the backends to the simulator on a config's real operands.")
    check.add_argument("--backend", choices=("jax", "torch"), help="one backend alone (default: both)")
    check.add_argument("--steps", type=int, help="optimizer steps before operands are taken again (default 5)")
    check.add_argument(
        "--sharded",
        type=int,
        metavar="N",
        help="with --backend jax: on every mesh of N devices, of a CPU if it has no others; torch: of N processes of its own, data x fsdp",
    )
    check.add_argument(
        "--replay",
        type=Path,
        metavar="PATH",
        help="instead of CONFIG: a step that failed, RUN/failures/step-..., on one device; names the first layer, role and element that is not "
        "finite. Exits with 1 if there is one, or a code or scale is not the simulator's; with 0 if the step does not fail again",
    )
    check.add_argument("--json", type=Path, metavar="FILE", help="write every comparison to FILE")
    show = command("demo", _demo, "Train with both backends in bf16 and FP8, cross-check, print a table and draw the losses.")
    show.add_argument("--out", type=Path, default=Path("demo"), help="directory for the runs and the picture (default demo)")
    weights = commands.add_parser("export", help="Write a run's weights as transformers reads them.", allow_abbrev=False)
    weights.add_argument("run_directory", metavar="RUN", type=Path, help="a run directory, of either backend")
    weights.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory for config.json and safetensors")
    weights.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="tokenizer.json, or a directory of a tokenizer's files, to copy there"
    )
    weights.set_defaults(run=_export, parser=weights)
    reported = commands.add_parser("report", help="Write a page on runs: is this FP8 loss normal?", allow_abbrev=False)
    reported.description = (
        "One HTML page, and its figures as PNGs: losses over the noise of the bf16 runs' seeds, what ran in FP8, speed, statistics."
    )
    reported.add_argument(
        "runs", metavar="RUN", type=Path, nargs="+", help="a run directory; two or more in bf16 of different seeds for a verdict"
    )
    reported.add_argument("--out", type=Path, default=Path("report.html"), help="the page (default report.html)")
    reported.set_defaults(run=_report, parser=reported)
    compared = commands.add_parser("compare", help="Compare two runs' configs and losses.", allow_abbrev=False)
    compared.description = "What differs between two runs. Exit code 1: their losses do beyond noise."
    compared.add_argument("a", metavar="A", type=Path, help="a run directory")
    compared.add_argument("b", metavar="B", type=Path, help="another")
    compared.add_argument(
        "--seeds", metavar="RUN", type=Path, nargs="+", default=[], help="bf16 runs of different seeds, to take noise from"
    )
    compared.add_argument("--json", type=Path, metavar="FILE", help="write the comparison to FILE")
    compared.set_defaults(run=_compare, parser=compared)
    for one in (reported, compared):
        one.add_argument("--confidence", type=float, default=0.95, help="of the noise's limits (default 0.95)")
    other = commands.add_parser("replay", help="Put a run's recorded amaxes through another scaling.", allow_abbrev=False)
    other.description = (
        "What delayed scaling, or a dynamic policy, would have clipped and wasted of the amaxes that a run recorded (statistics.every)."
    )
    other.add_argument("run_directory", metavar="RUN", type=Path, help="the directory of a run")
    other.add_argument("--policy", required=True, help="delayed, te_delayed or flax; or a dynamic policy, such as torchao")
    other.add_argument("--history", type=int, metavar="N", help="recorded amaxes that a delayed scale is of (default: the policy's)")
    other.add_argument("--margin", type=int, metavar="M", help="powers of two of room (default: the policy's)")
    other.add_argument("--json", type=Path, metavar="FILE", help="write the outcome of every layer and role to FILE")
    other.set_defaults(run=_replay, parser=other)
    certificate = commands.add_parser(
        "certify", help="Compare casts and scales of the libraries at hand with the simulator.", allow_abbrev=False
    )
    certificate.description = "Casts and scales of torch, jax, ml_dtypes, torchao and fp8ref's own backends against the simulator."
    certificate.add_argument("--exhaustive", action="store_true", help="all 2^32 inputs of a cast, all 2^31 of a scale (minutes)")
    certificate.add_argument("--json", type=Path, metavar="FILE", help="write every comparison to FILE")
    certificate.set_defaults(run=_certify, parser=certificate)
    _add_data(commands)
    return parser


def _add_data(commands) -> None:
    data = commands.add_parser("data", help="Prepare what a model is trained on.", description="Prepare what a model is trained on.")
    prepare = data.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "prepare", help="Turn text into shards of tokens.", description="Turn text into shards of tokens.", allow_abbrev=False
    )
    # the defaults are those of the config's keys (DataConfig), which are not imported for --help alone
    key = {"default": argparse.SUPPRESS}
    prepare.add_argument(
        "--source",
        required=True,
        help="stdlib, a directory of text, .jsonl or .parquet (file, directory, pattern), or hf:org/name[:config]",
    )
    prepare.add_argument("--out", required=True, type=Path, metavar="DIR", help="directory to write, which is not there yet or empty")
    prepare.add_argument("--tokenizer", **key, help="a tokenizer.json, or tiktoken:NAME (default: bytes)")
    prepare.add_argument(
        "--end-of-document", **key, metavar="TOKEN", help="the token after each document; '' for none (default: the tokenizer's)"
    )
    prepare.add_argument("--text-column", **key, metavar="NAME", help="the column that holds the text (default text)")
    prepare.add_argument("--hf-split", **key, metavar="NAME", help="the split of a dataset of the hub (default train)")
    prepare.add_argument(
        "--validation-fraction", **key, type=float, metavar="F", help="share for validation (default 0.1); unused where files are named val"
    )
    prepare.add_argument("--shard-tokens", **key, type=int, metavar="N", help="most tokens in a file (default 10^8)")
    prepare.set_defaults(run=_prepare, parser=prepare)


def _config(known: argparse.Namespace, options: list[str]):
    """The config file with the remaining options applied."""
    from fp8ref.run import config

    prog = known.parser.prog
    if known.help:
        print(known.parser.format_help())
        config.override(config.Config(), ["--help"], prog=f"{prog} CONFIG")  # prints, and exits with 0
    if known.config is None:
        raise config.ConfigError(f"{prog} needs a CONFIG, such as configs/tiny.toml. See {prog} --help.")
    if options and not known.config.exists():
        raise config.ConfigError(
            f"{known.config}: no such file. {prog} takes CONFIG first, then the options of its keys: {prog} CONFIG {' '.join(options)}."
        )
    return config.override(config.load(known.config), options, prog=f"{prog} {known.config}")


def _train(known: argparse.Namespace, options: list[str]) -> int:
    config = _config(known, options)
    from fp8ref.run.config import ConfigError

    if known.backend is None:
        raise ConfigError("fp8ref train needs --backend jax or --backend torch.")
    if known.dry_run:
        if given := [key for key in ("resume", "overwrite", "distributed") if getattr(known, key)]:
            raise ConfigError(f"--dry-run is of a config alone, in one process; got --{given[0]} beside it. Leave that out.")
        from fp8ref.run import dry_run, progress

        dry_run.show(config, known.backend, progress.console())
        return 0
    from fp8ref.run import loop

    out = Path(config.run.out or f"runs/{known.config.stem}-{known.backend}-{config.numerics.recipe}")
    processes = _processes(known, config) if known.distributed else None
    with processes.telling() if processes else contextlib.nullcontext():
        lines = loop.train(config, known.backend, out, resume=known.resume, overwrite=known.overwrite, processes=processes)
    if processes and not processes.first:
        return 0
    if lines is None:
        print(f"{out} is finished; nothing to do")
    else:
        print(f"{out}: {config.run.steps} steps, loss {lines[-1]['loss']:.4f}, validation loss {lines[-1]['val_loss']:.4f}")
    return 0


def _processes(known: argparse.Namespace, config):
    if known.backend == "jax":
        from fp8ref.jax.processes import join

        return join()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is loaded; its warning of a lost process is a page of C++ frames
    from fp8ref.torch import processes

    known.leave = processes.leave
    return processes.join(config.parallel.timeout_s)


def _crosscheck(known: argparse.Namespace, options: list[str]) -> int:
    if known.replay is not None and not known.help:
        return _crosscheck_replay(known, options)
    config = _config(known, options)
    from fp8ref.check import crosscheck
    from fp8ref.run.config import ConfigError
    from fp8ref.run.loop import BACKENDS

    _check_whole(config)
    _check_json(known.json)
    if known.sharded is not None:
        return _crosscheck_sharded(known, config)
    steps = crosscheck.STEPS if known.steps is None else known.steps
    if not 0 <= steps <= config.run.steps:
        raise ConfigError(f"--steps lies between 0 and run.steps = {config.run.steps}; got {steps}.")
    _check_json(known.json)
    report = crosscheck.crosscheck(config, backends=(known.backend,) if known.backend else BACKENDS, steps=steps)
    report.print()
    if known.json:
        report.write(known.json)
    return 0 if report.ok else FAILED


def _check_whole(config) -> None:
    from fp8ref.run.config import ConfigError

    if config.data.microbatches > 1:
        raise ConfigError(f"a cross-check takes whole batches; got data.microbatches = {config.data.microbatches}. Set it to 1.")


def _crosscheck_replay(known: argparse.Namespace, options: list[str]) -> int:
    from fp8ref.run.config import ConfigError

    given = {"CONFIG": known.config, "--backend": known.backend, "--steps": known.steps, "--sharded": known.sharded}
    unused = options or [name for name, value in given.items() if value is not None]  # an option's value would pass for CONFIG
    if unused:
        raise ConfigError(f"--replay takes config and backend from the step that failed; got {', '.join(unused)} too. Leave it out.")
    _check_json(known.json)
    from fp8ref.check.replay import replay

    found = replay(known.replay)
    found.print()
    if known.json:
        found.write(known.json)
    return 0 if found.ok else FAILED


def _crosscheck_sharded(known: argparse.Namespace, config) -> int:
    from fp8ref.run.config import ConfigError

    if known.backend is None or known.sharded < 2:
        raise ConfigError("--sharded takes 2 devices or ranks, or more, and --backend jax or torch.")
    if known.backend == "torch":
        from fp8ref.check import sharded_torch

        steps = sharded_torch.STEPS if known.steps is None else known.steps
        report, unfit = sharded_torch.crosscheck(config, known.sharded, steps=steps)
    else:
        report, unfit = _sharded_jax(known, config)
    report.print()
    for name, why in unfit.items():
        print(f"left out {name}: {why}")
    if known.json:
        report.write(known.json)
    return 0 if report.ok else FAILED


def _sharded_jax(known: argparse.Namespace, config):
    from fp8ref.run.config import ConfigError

    if known.steps is not None:
        raise ConfigError("--sharded with --backend jax takes no --steps: it replays step 0.")
    import jax

    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", known.sharded)  # a CPU is as many devices as it is told before it is asked
    from fp8ref.check import sharded

    return sharded.crosscheck(config, known.sharded)


def _export(known: argparse.Namespace, options: list[str]) -> int:
    if options:
        known.parser.error(f"unrecognized arguments: {' '.join(options)}")
    from fp8ref.run import progress
    from fp8ref.run.export import export

    step = export(known.run_directory, known.out, tokenizer=known.tokenizer, say=progress.say)
    print(f"{known.out}: the weights after {step} steps")
    return 0


def _report(known: argparse.Namespace, options: list[str]) -> int:
    if options:
        known.parser.error(f"unrecognized arguments: {' '.join(options)}")
    from fp8ref.run import report, runs

    print(report.write(runs.read_all(known.runs), known.out, confidence=_confidence(known)))
    return 0


def _compare(known: argparse.Namespace, options: list[str]) -> int:
    if options:
        known.parser.error(f"unrecognized arguments: {' '.join(options)}")
    _check_json(known.json)
    from fp8ref.run import compare, progress, runs

    found = compare.compare(runs.read(known.a), runs.read(known.b), runs.read_all(known.seeds), confidence=_confidence(known))
    found.print(progress.console())
    if known.json:
        found.write(known.json)
    return 0 if found.ok else FAILED


def _confidence(known: argparse.Namespace) -> float:
    if not 0.5 < known.confidence < 1:
        raise ValueError(f"--confidence lies between 0.5 and 1; got {known.confidence}.")
    return known.confidence


def _certify(known: argparse.Namespace, options: list[str]) -> int:
    if options:
        known.parser.error(f"unrecognized arguments: {' '.join(options)}")
    _check_json(known.json)
    from fp8ref.check.certify import certify

    certificate = certify(exhaustive=known.exhaustive)
    certificate.print()
    if known.json:
        certificate.write(known.json)
    return 0 if certificate.report().ok else FAILED


def _prepare(known: argparse.Namespace, options: list[str]) -> int:
    if options:
        known.parser.error(f"unrecognized arguments: {' '.join(options)}")
    from fp8ref.run.config import DataConfig
    from fp8ref.run.prepare import prepare

    names = ("source", "tokenizer", "end_of_document", "text_column", "validation_fraction")
    data = DataConfig(**{name: getattr(known, name) for name in names if hasattr(known, name)})
    try:
        made = prepare(data, known.out, **{name: getattr(known, name) for name in ("shard_tokens", "hf_split") if hasattr(known, name)})
    except KeyboardInterrupt:
        print(f"interrupted; nothing is kept of {known.out}", file=sys.stderr)
        return INTERRUPTED
    tokens = {split: sum(f.tokens for name, f in made.files.items() if name.startswith(split)) for split in ("train", "val")}
    print(
        f"{known.out}: {tokens['train']:,} tokens for training, {tokens['val']:,} for validation, {made.dtype}, in {len(made.files)} files\n"
        f"train from them with --data.source {known.out} --model.vocab_size {made.vocab_size}"
    )
    return 0


def _replay(known: argparse.Namespace, options: list[str]) -> int:
    if options:
        known.parser.error(f"unrecognized arguments: {' '.join(options)}")
    _check_json(known.json)
    from fp8ref.run.replay import replay

    found = replay(known.run_directory, known.policy, history=known.history, margin=known.margin)
    found.print()
    if known.json:
        found.write(known.json)
    return 0


def _check_json(path: Path | None) -> None:
    if path and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"--json names a file in a directory that exists; got {path}.")


def _demo(known: argparse.Namespace, options: list[str]) -> int:
    config = _config(known, options)
    _check_whole(config)
    from fp8ref.run.demo import demo

    return 0 if demo(config, known.out) else FAILED


def _code_of(error: Exception) -> int | None:
    """The exit code of an error a user can cause; None for a defect of ours, which keeps its traceback."""
    if isinstance(error, ValueError | OSError | ImportError):
        return ERROR
    from fp8ref.run.loop import NonFiniteError
    from fp8ref.run.processes import LostProcessError
    from fp8ref.run.stopping import StoppedError

    codes = {NonFiniteError: NON_FINITE, LostProcessError: LOST, StoppedError: STOPPED}
    return next((code for kind, code in codes.items() if isinstance(error, kind)), None)
