"""Shared by all commands: adding one, reading its config, choosing a backend, printing."""

import argparse
import functools
import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from fp8ref.shared import console
from fp8ref.shared.arguments import Parser
from fp8ref.shared.errors import ConfigError, require
from fp8ref.shared.result import STDOUT, Result

__all__ = ["DEFECT", "ERROR", "INTERRUPTED", "LOST", "NON_FINITE", "PIPE", "STOPPED", "check_whole"]

ERROR, FAILED, DEFECT, NON_FINITE = 2, 1, 1, 3
LOST, STOPPED, INTERRUPTED, PIPE = 4, 5, 130, 141
RUN_FILES = (
    *("manifest.json", "metrics.jsonl", "statistics.jsonl", "config.toml"),
    *("shards.json", "batch.npy"),
)
"""Names of files of runs, checkpoints and shards, which --json does not replace."""

BACKENDS = ("jax", "torch")
"""The backends, of which the last that is installed is the default."""

Run = Callable[[argparse.Namespace], int]
"""A command's function: parsed arguments -> exit code."""


def plain(commands, usage: str, run: Run, text: str = "") -> Parser:
    """Add a command. usage: its name, then its needs; text: of ``Parser.describe``, or run's."""
    name, _, needs = usage.partition(" ")
    text = text or run.__doc__ or name
    parser: Parser = commands.add_parser(name, help=text.partition("\n")[0])
    parser.describe(needs, text)
    parser.set_defaults(run=run, parser=parser)
    return parser


def group(commands, usage: str, text: str):
    """Add a command of commands, and return what they are added to."""
    parser = plain(commands, usage, lambda arguments: ERROR, text)
    metavar = usage.partition(" ")[2]
    return parser.add_subparsers(required=True, metavar=metavar, prog=parser.prog)


def config_command(commands, name: str, run: Run) -> Parser:
    """Add a command that takes a CONFIG and options for its keys, which ``config`` applies."""
    parser = plain(commands, f"{name} CONFIG", run)
    parser.option("config", "CONFIG", "a TOML file, or a name of fp8ref configs", nargs="?")
    parser.before = functools.partial(_add_keys, parser)
    parser.more = functools.partial(_describe_keys, parser)
    parser.epilog = f"All keys, with the values of a config: {parser.prog} CONFIG --help-all"
    return parser


def _add_keys(parser: Parser, words: list[str]) -> list[str]:
    """Add the keys of a config before words are parsed, and spell them as they are declared."""
    try:
        from fp8ref.train.config import options
    except ImportError as error:
        if {"-h", "--help", "--help-all"} & {*words}:
            return words
        parser.error(str(error))
    if "--help-all" not in words:
        options.add(parser)
    return options.spelled(words)


def _describe_keys(parser: Parser, words: Sequence[str]) -> str:
    """Every key, with its value in the CONFIG of the words."""
    from fp8ref.train.config import config as configs
    from fp8ref.train.config import options

    arguments, rest = parser.parse_known_args([word for word in words if word != "--help-all"])
    if rest:
        parser.refuse(rest)
    current = config(arguments) if arguments.config else configs.Config()
    every = Parser(add_help=False, usage=argparse.SUPPRESS)
    options.add(every, current)
    return f"\nkeys of CONFIG, by section:\n\n{every.format_help()}"


def config(arguments: argparse.Namespace):
    """The CONFIG of a command line with its options applied."""
    from fp8ref import configs as shipped
    from fp8ref.train.config import config as configs
    from fp8ref.train.config import options

    if arguments.config is None:
        raise ConfigError(
            f"needs a CONFIG, a TOML file or one of {', '.join(shipped.NAMES)}; got none."
        )
    return options.apply(configs.load(arguments.config), arguments)


def installed() -> tuple[str, ...]:
    """The backends whose framework is installed; all where none is, and importing one says so."""
    return tuple(name for name in BACKENDS if importlib.util.find_spec(name)) or BACKENDS


def add_backend(command: Parser, help: str = "jax or torch") -> None:
    """Add ``--backend``, which ``backend`` reads."""
    default = "default: what is installed, or torch"
    command.option("--backend", "NAME", f"{help} ({default})", choices=BACKENDS)


def backend(arguments: argparse.Namespace, config=None) -> str:
    """--backend; by default the framework of the config's own model, or the installed one, PyTorch
    of both. The first line of standard error says which.
    """
    if arguments.backend is not None:
        return arguments.backend
    from fp8ref.train.config import architecture

    kind = "llama" if config is None else config.architecture.kind
    name = architecture.BACKEND.get(kind, installed()[-1])
    if not getattr(arguments, "distributed", False):  # else the first process says it
        say_backend(name)
    return name


def say_backend(name: str) -> None:
    """Say which backend is the default one."""
    console.say(f"backend: {name} (by default; --backend names another)")


def names(text: str) -> list[str]:
    """The names of a text with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def add_json(command: Parser, help: str = "write the findings to FILE") -> None:
    """Add ``--json``, which ``check_json`` checks and ``conclude`` writes."""
    command.option("--json", "FILE", f"{help}, or - to print it")


def used(arguments: argparse.Namespace, *names: str) -> list[str]:
    """Those of these arguments that are not at their default, as "--name"; "*": keys of CONFIG."""
    default = arguments.parser.get_default
    keys = [name for name in vars(arguments) if "." in name] * ("*" in names)
    words = [
        name
        for name in names
        if name != "*" and getattr(arguments, name, default(name)) != default(name)
    ]
    positional = ("config", "subject")
    return [
        name.upper() if name in positional else f"--{name.replace('_', '-')}" for name in words
    ] + [f"--{key}" for key in keys]


def refuse(arguments: argparse.Namespace, reason: str, *names: str) -> None:
    """ValueError if arguments are used that have no meaning, for a reason."""
    if unused := used(arguments, *names):
        raise ValueError(f"{reason}; got {', '.join(unused)} too. Leave it out.")


def check_out(out: Path, config) -> None:
    """ValueError for run.out, where --out has a directory of several runs, and for a file."""
    require(
        config.run.out is None,
        f"the runs are in directories of --out; got run.out {config.run.out!r}. Leave it out.",
    )
    text = f"--out names a directory; {out} is a file. Name another."
    require(not out.exists() or out.is_dir(), text)


def add_trust(command: Parser) -> None:
    """Add ``--trust``, which ``trust_source`` reads."""
    command.option(
        "--trust", None, "import the code that architecture.source of a file names", rare=True
    )


def trust_source(arguments: argparse.Namespace, path: Path, config) -> None:
    """Let the module of architecture.source be imported, and say so, if an option allows it.

    A config may be a stranger's wherever it is, so a file alone imports nothing. A dry run needs
    --trust.
    """
    from fp8ref.train.config import user_model

    keys = config.architecture
    if keys.kind not in ("torch", "nnx") or not keys.source:
        return
    named = "architecture.source" in vars(arguments)
    if arguments.trust or (named and not getattr(arguments, "dry_run", False)):
        console.say(
            f"{path}: importing architecture.source {keys.source!r}, whose code runs in this "
            "process"
        )
        user_model.trust(keys.source)


def add_judging(command: Parser) -> None:
    """Add the options of a verdict on losses, which ``confidence`` and ``margin`` read."""
    command.option("--confidence", "X", "confidence of the intervals", 0.95, rare=True)
    command.option(
        "--margin", "NATS", "losses closer than this are equivalent (default: 0.25 %% of bf16's)"
    )


def confidence(arguments: argparse.Namespace) -> float:
    """--confidence; ValueError unless it is between 0.5 and 1."""
    text = f"--confidence must be between 0.5 and 1; got {arguments.confidence}."
    require(0.5 < arguments.confidence < 1, text)
    return arguments.confidence


def margin(arguments: argparse.Namespace) -> float | None:
    """--margin; ValueError unless it is positive and finite."""
    text = f"--margin is a number of nats above 0; got {arguments.margin}."
    require(arguments.margin is None or 0 < arguments.margin < math.inf, text)
    return arguments.margin


def conclude(report: Result, json: Path | None, *lines: str) -> int:
    """Print a result and lines, write it to --json if given, and return its exit code."""
    report.print()
    console.show(*lines)
    if json:
        report.write(json)
    return report.exit_code


def check_json(path: Path | None, *own: Path | None) -> None:
    """ValueError if --json cannot be written, or names a file of a run or of this command.

    own   what else the command reads and writes.
    """
    if path is None or path == STDOUT:
        return
    folder = path.absolute().parent
    writable = not path.is_dir() and folder.is_dir() and os.access(folder, os.W_OK)
    others, real = [other for other in own if other], os.path.realpath
    same = [other for other in others if other.exists() and path.exists()]
    apart = real(path) not in map(real, others) and not any(map(path.samefile, same))
    within = real(folder) in map(real, filter(Path.is_dir, others))
    apart = apart and not (within and path.exists())
    kept = f"no file of a run, checkpoint or shard directory, such as {path.name}"
    for fine, need in (
        (apart, "a file that this command neither reads nor writes"),
        (path.name not in RUN_FILES, kept),
        (writable, "a file in a directory that exists and can be written"),
    ):
        require(fine, f"--json names {need}; got {path}. Name another.")


def check_page(option: str, out: Path | None, generator: str) -> None:
    """ValueError if an option names no file that a page may be written to.

    generator   what the pages of this command say they are made by: those may be replaced.
    """
    if out is None:
        return
    text = f"{option} {out}: {out.parent} is no directory. Make it, or name another."
    require(out.parent.is_dir(), text)
    require(not out.is_dir(), f"{option} {out} is a directory. Name a file in it.")
    text = f"{out} exists and is no page of {generator}; it is left alone. Name another."
    mark = f'content="{generator}"'.encode()
    require(not out.exists() or mark in out.read_bytes()[:999], text)


def check_whole(config) -> None:
    """ConfigError for microbatches, schedules and users' models in a cross-check."""
    from fp8ref.train.config import architecture

    architecture.require_llama(config, "a cross-check")
    config.require_one_recipe("a cross-check")
    if config.data.microbatches > 1:
        raise ConfigError(
            "a cross-check takes whole batches; got data.microbatches = "
            f"{config.data.microbatches}. Set it to 1."
        )
