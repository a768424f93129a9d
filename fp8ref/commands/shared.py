"""Shared by all commands: argument parsers, exit codes, reading a config, printing results."""

import argparse
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from fp8ref.shared import console
from fp8ref.shared.result import Result

__all__ = ["DEFECT", "ERROR", "INTERRUPTED", "LOST", "NON_FINITE", "PIPE", "STOPPED", "check_whole"]

ERROR, FAILED, DEFECT, NON_FINITE, LOST, STOPPED, INTERRUPTED, PIPE = 2, 1, 1, 3, 4, 5, 130, 141
RUN_FILES = (
    *("manifest.json", "metrics.jsonl", "statistics.jsonl", "config.toml"),
    *("shards.json", "batch.npy"),
)
"""Names of files of runs, checkpoints and shards, which --json does not replace."""

Run = Callable[[argparse.Namespace], int]
"""A command's function: parsed arguments -> exit code."""


def config_command(
    commands, name: str, run: Callable[[argparse.Namespace, list[str]], int], help: str
) -> argparse.ArgumentParser:
    """Add a command that takes a CONFIG and options for its keys, which ``config`` applies.

    argparse reads the command's own options and tyro those of the config, so that --help prints
    both.
    """
    parser = commands.add_parser(
        name, help=help, description=help, allow_abbrev=False, add_help=False
    )
    parser.add_argument(
        "config",
        metavar="CONFIG",
        type=Path,
        nargs="?",
        help="a TOML file, or the name of a packaged one, such as tiny",
    )
    parser.add_argument(
        "-h", "--help", action="store_true", help="show this message and all keys of CONFIG"
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def plain(
    commands, name: str, run: Run, help: str, description: str | None = None
) -> argparse.ArgumentParser:
    """Add a command whose options are all declared to argparse."""
    about = description or help
    parser = commands.add_parser(name, help=help, description=about, allow_abbrev=False)

    def strict(arguments: argparse.Namespace, options: list[str]) -> int:
        if options:
            parser.error(console.one_line(f"unrecognized arguments: {' '.join(options)}"))
        return run(arguments)

    parser.set_defaults(run=strict, parser=parser)
    return parser


def config(arguments: argparse.Namespace, options: list[str]):
    """The config file with the remaining options applied.

    With --help it prints all options, and exits.
    """
    from fp8ref import configs as shipped
    from fp8ref.shared.errors import ConfigError
    from fp8ref.train.config import config as configs

    prog = arguments.parser.prog
    if arguments.help:
        print(arguments.parser.format_help())
        # prints, and exits with 0
        configs.override(configs.Config(), ["--help"], prog=f"{prog} CONFIG")
    if arguments.config is None:
        raise ConfigError(
            f"{prog} needs a CONFIG: a TOML file, or one of {', '.join(shipped.NAMES)}. See "
            f"{prog} --help."
        )
    if options and not shipped.find(arguments.config).exists():
        raise ConfigError(
            f"{arguments.config}: no such file. {prog} takes CONFIG first, then the options of its "
            f"keys, such as {prog} tiny --run.steps 20."
        )
    loaded = configs.load(arguments.config)
    return configs.override(loaded, options, prog=f"{prog} {arguments.config}")


def add_json(command: argparse.ArgumentParser, help: str = "write the findings to FILE") -> None:
    """Add ``--json``, which ``check_json`` checks and ``conclude`` writes."""
    command.add_argument("--json", type=Path, metavar="FILE", help=help)


def used(arguments: argparse.Namespace, *names: str) -> list[str]:
    """Those of these options that are not at their default, as "--name"."""
    default = arguments.parser.get_default
    return [
        f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) != default(name)
    ]


def add_trust(command: argparse.ArgumentParser) -> None:
    """Add ``--trust``, which ``trust_source`` reads."""
    command.add_argument(
        "--trust",
        action="store_true",
        help="import the code that architecture.source of a file names",
    )


def trust_source(
    arguments: argparse.Namespace, path: Path, config, options: Sequence[str] = ()
) -> None:
    """Let the module of architecture.source be imported, and say so, if --trust or an option of the
    command line names it.

    A config may be a stranger's wherever it is, so a file alone imports nothing. A dry run needs
    --trust.
    """
    from fp8ref.train.config import user_model

    keys = config.architecture
    if keys.kind not in ("torch", "nnx") or not keys.source:
        return
    named = any(option.partition("=")[0] == "--architecture.source" for option in options)
    if arguments.trust or (named and not getattr(arguments, "dry_run", False)):
        console.say(
            f"{path}: importing architecture.source {keys.source!r}, whose code runs in this "
            "process"
        )
        user_model.trust(keys.source)


def add_judging(command: argparse.ArgumentParser) -> None:
    """Add the options of a verdict on losses, which ``confidence`` and ``margin`` read."""
    command.add_argument(
        "--confidence", type=float, default=0.95, help="confidence of the intervals (default 0.95)"
    )
    command.add_argument(
        "--margin",
        type=float,
        metavar="NATS",
        help="losses closer than this are equivalent (default: 0.25 %% of bf16's)",
    )


def confidence(arguments: argparse.Namespace) -> float:
    """--confidence; ValueError unless it is between 0.5 and 1."""
    if not 0.5 < arguments.confidence < 1:
        raise ValueError(f"--confidence must be between 0.5 and 1; got {arguments.confidence}.")
    return arguments.confidence


def margin(arguments: argparse.Namespace) -> float | None:
    """--margin; ValueError unless it is positive and finite."""
    if arguments.margin is not None and not 0 < arguments.margin < math.inf:
        raise ValueError(f"--margin is a number of nats above 0; got {arguments.margin}.")
    return arguments.margin


def conclude(report: Result, json: Path | None) -> int:
    """Print a result, write it to --json where that was given, and return its exit code."""
    report.print()
    if json:
        report.write(json)
    return report.exit_code


def check_json(path: Path | None, *read: Path | None) -> None:
    """ValueError if --json cannot be written, or names a file of a run or of this command."""
    if path and any(
        other and other.exists() and path.exists() and path.samefile(other) for other in read
    ):
        raise ValueError(
            f"--json names a file that this command does not read; got {path}. Name another."
        )
    if path and str(path) == "-":
        raise ValueError("--json names a file; got '-'. Name /dev/stdout for standard output.")
    if path and path.name in RUN_FILES:
        raise ValueError(
            "--json names no file of a run, checkpoint or shard directory, such as "
            f"{path.name}; got {path}. Name another."
        )
    folder = path.absolute().parent if path else None
    if path and folder and (path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK)):
        raise ValueError(
            f"--json names a file in a directory that exists and can be written; got {path}."
        )


def check_whole(config) -> None:
    """ConfigError for microbatches, schedules and users' models in a cross-check."""
    from fp8ref.shared.errors import ConfigError
    from fp8ref.train.config import architecture

    architecture.require_llama(config, "a cross-check")
    config.require_one_recipe("a cross-check")
    if config.data.microbatches > 1:
        raise ConfigError(
            "a cross-check takes whole batches; got data.microbatches = "
            f"{config.data.microbatches}. Set it to 1."
        )
