"""fp8ref vectors gen, verify and dataset: test vectors for programs in any language."""

import argparse
import contextlib
import sys
from collections.abc import Iterable
from typing import Any

from fp8ref.commands import shared
from fp8ref.commands.shared import check_json
from fp8ref.shared import console, files, package_data
from fp8ref.shared.arguments import Parser

_TABLES = package_data.tables(__file__, "vectors")

FORM: str = _TABLES["form"]
"""The text format of vectors, for --help."""

SETTINGS: dict[str, tuple[str, str]] = _TABLES["settings"]
"""{option: (metavar, help) of what is asked}."""

OPERATIONS: dict[str, dict[str, Any]] = _TABLES["operations"]
"""{operation: ``what`` it tests, in words; the options of what is ``asked``; ``rules``, {option:
help} of how answers are judged}."""

_EXAMPLE = {"--format": "e4m3fn", "--variant": "fa3"}


def add(commands) -> None:
    """Add ``fp8ref vectors gen``, ``verify`` and ``dataset``."""
    text, operations = "Test vectors for programs in any language.", "|".join(OPERATIONS)
    verbs = shared.group(commands, "vectors gen|verify|dataset", f"{text}\n\n{FORM}")
    data_set = shared.plain(verbs, "dataset DIR", _data_set)
    data_set.option("folder", "DIR", "a folder, new or empty")
    data_set.option("--seed", *SETTINGS["seed"])
    data_set.option("--check", None, "compare DIR with its manifest, and write nothing")
    shared.add_json(data_set)
    text = f"Write test vectors to standard output.\n\n{FORM}"
    makers = shared.group(verbs, f"gen {operations}", text)
    text = f"Judge answers from standard input.\n\n{FORM}"
    judges = shared.group(verbs, f"verify {operations}", text)
    for operation, texts in OPERATIONS.items():
        what = texts["what"]
        needs = "--variant" if operation == "attention" else "--format"
        gen = f"$ fp8ref vectors gen {operation} {needs} {_EXAMPLE[needs]}"
        judge = f"$ fp8ref vectors verify {operation}"
        examples = f"{gen} | ./yours > answers.txt\n{judge} < answers.txt\n"
        text = f"Write test vectors of {what} to standard output.\n\n{examples}{gen} --count 8"
        maker = shared.plain(makers, f"{operation} {needs} NAME", _gen, text)
        _add_settings(maker, operation, needs)
        text = f"Judge {what} by vectors with answers, from standard input.\n\nExits with 1 if an "
        text += f"answer differs, or a vector is missing, unasked or repeated.\n\n{examples}"
        _add_verify(judges, operation, f"{text}{judge} --some --json - < answers.txt")


def _add_verify(commands, operation: str, text: str) -> None:
    judge = shared.plain(commands, operation, _verify, text)
    _add_settings(judge, operation)
    for option, about in OPERATIONS[operation].get("rules", {}).items():
        judge.option(f"--{option}", "NAME", about)
    if operation == "cast":
        about = "overflow gives Inf, or NaN in a format without Inf (C-4)"
        judge.option("--no-saturate", None, about)
    if operation == "gemm":
        about = "accept sums of float32 in any order: within B-1's bound of the exact sum"
        judge.option("--bound", None, about)
    judge.option("--some", None, "judge what came, even if vectors are missing or unasked")
    shared.add_json(judge)


def _add_settings(command: Parser, operation: str, needed: str = "") -> None:
    command.set_defaults(operation=operation)
    for option in OPERATIONS[operation]["asked"]:
        metavar, about = SETTINGS[option]
        command.option(f"--{option}", metavar, about, required=f"--{option}" == needed)


def _gen(arguments: argparse.Namespace) -> int:
    from fp8ref.conformance.vectors.operations import generate

    waiting = console.waiting("vectors gen")
    with contextlib.nullcontext() if sys.stdout.isatty() else waiting:
        sys.stdout.writelines(
            f"{line}\n" for line in generate(arguments.operation, _settings(arguments))
        )
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    check_json(arguments.json)
    rules = _named(arguments, OPERATIONS[arguments.operation].get("rules", ()))
    if arguments.operation == "cast":
        rules["saturate"] = not arguments.no_saturate
    if arguments.operation == "gemm":
        rules["bound"] = arguments.bound
    from fp8ref.conformance.vectors.operations import judge

    with console.waiting("vectors verify"):
        verdict = judge(
            arguments.operation,
            files.short_lines(sys.stdin.buffer),
            settings=_settings(arguments),
            rules=rules,
            some=arguments.some,
        )
    console.show(*verdict.text().split("\n"))  # plain text: vectors need no console
    if arguments.json:
        verdict.write(arguments.json)
    return verdict.exit_code


def _data_set(arguments: argparse.Namespace) -> int:
    """Write vectors of every operation and format with their answers, and a manifest of checksums.

    At most 32 MiB in some 230 files, the same bytes for the same fp8ref and seed.

    $ fp8ref vectors dataset fp8-vectors
    $ fp8ref vectors dataset fp8-vectors --check
    $ fp8ref vectors dataset other-vectors --seed 7
    """
    check_json(arguments.json)
    from fp8ref.conformance.vectors import dataset

    if arguments.check:
        shared.refuse(arguments, "--check writes nothing", "seed")
        return shared.conclude(dataset.check(arguments.folder), arguments.json)
    return shared.conclude(dataset.write(arguments.folder, arguments.seed or 0), arguments.json)


def _settings(arguments: argparse.Namespace) -> dict:
    return _named(arguments, OPERATIONS[arguments.operation]["asked"])


def _named(arguments: argparse.Namespace, options: Iterable[str]) -> dict:
    """{name: value} of those options that the command line names."""
    names = (option.replace("-", "_") for option in options)
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}
