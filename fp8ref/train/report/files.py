"""The files of a run directory, checked as they are read: whoever uses what they hold need not doubt it.

What is wrong with one is said with the file, the line, the value and a remedy. What they hold: ``schema``.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pydantic

from fp8ref.errors import ConfigError
from fp8ref.train import log
from fp8ref.train.report.schema import Manifest, Metrics, Statistics

_MANIFEST, _METRICS, _STATISTICS = (pydantic.TypeAdapter(kind) for kind in (Manifest, Metrics, Statistics))


def manifest(run: Path) -> dict:
    """manifest.json.

    Raises:   ConfigError: no directory, no such file, or one that no run leaves.
    """
    if not run.is_dir():
        raise ConfigError(f"{run} is no directory. Name a run, as fp8ref train --run.out wrote it.")
    found = log.read_manifest(run)
    _check(_MANIFEST, json.dumps(found, ensure_ascii=False), f"{run / 'manifest.json'}", f"{run} is no intact run. Leave it out.")
    return found


def metrics(run: Path) -> list[dict]:
    """The lines of metrics.jsonl, in the order of their steps; none of a file that is not there.

    Raises:   ConfigError: a line that is no JSON object, lacks a step or loss, has a value of another kind, or a step out of order.
    """
    return list(_lines(run / log.METRICS, _METRICS))


def statistics(run: Path) -> list[dict]:
    """The same of statistics.jsonl, whose lines have a step and statistics."""
    return list(_lines(run / log.STATISTICS, _STATISTICS))


def _lines(path: Path, kind: pydantic.TypeAdapter) -> Iterator[dict]:
    """A torn last line is left out."""
    if not path.exists():
        return
    remedy = f"Mend it, or leave {path.parent} out."
    try:
        *whole, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}). {remedy}") from error
    before = -1
    for number, text in enumerate(whole, 1):
        where = f"{path}, line {number},"
        _check(kind, text, where, remedy)
        line = json.loads(text)
        if line["step"] <= before:
            raise ConfigError(f"{where} has step {line['step']} after step {before}; every step is there once, in their order. {remedy}")
        before = line["step"]
        yield line


def _check(kind: pydantic.TypeAdapter, text: str, where: str, remedy: str) -> None:
    try:
        kind.validate_json(text.encode(errors="replace"))  # half a surrogate pair, as names of files may hold, is text too
    except pydantic.ValidationError as error:
        raise ConfigError(f"{where} {_problem(error.errors()[0])}. {remedy}") from error


def _problem(error) -> str:
    """What pydantic found, in a few words."""
    dotted = ".".join(str(part) for part in error["loc"] if part != "[key]")
    if not dotted:
        return "is not a JSON object"
    if error["type"] == "missing":
        return f"has no {dotted}"
    if error["type"] == "value_error":
        return f"has {dotted}: {error['ctx']['error']}"
    got = json.dumps(error["input"])
    return f"has {dotted} = {got if len(got) <= 60 else got[:57] + '...'}: {error['msg'].replace('Input', 'it', 1)}"
