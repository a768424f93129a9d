"""Check a JSON file against the types of its keys; an error names file, key, value and remedy."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, dataclass_transform

import pydantic

from fp8ref.shared import console
from fp8ref.shared.errors import ConfigError

_T = TypeVar("_T")


@dataclass_transform(field_specifiers=(field,))
def record(kind: type[_T]) -> type[_T]:
    """A dataclass that is checked strictly by the types of its keys; other keys are ignored."""
    kind = dataclass(kind)
    kind.__pydantic_config__ = pydantic.ConfigDict(strict=True, extra="ignore")  # type: ignore[attr-defined]
    return kind


def check(kind: pydantic.TypeAdapter, value: Mapping[str, Any], where: str, remedy: str) -> None:
    """ConfigError unless an object has the keys and types of a kind."""
    check_text(kind, json.dumps(value, ensure_ascii=False), where, remedy)


def check_text(kind: pydantic.TypeAdapter, text: str, where: str, remedy: str) -> None:
    """As ``check``, for JSON.

    Raises:   ConfigError: as ``check``.
    """
    try:
        kind.validate_json(text.encode(errors="replace"))  # file names may hold unpaired surrogates
    except pydantic.ValidationError as error:
        raise ConfigError(f"{where} {_problem(error.errors()[0])}. {remedy}") from error


def _problem(error) -> str:
    """pydantic's error in a few words."""
    dotted = console.one_line(".".join(str(part) for part in error["loc"] if part != "[key]"))
    if not dotted:
        return "is not a JSON object"
    if error["type"] == "missing":
        return f"has no {dotted}"
    if error["type"] == "value_error":
        return f"has {dotted}: {error['ctx']['error']}"
    got = json.dumps(error["input"])
    return (
        f"has {dotted} = {got if len(got) <= 60 else got[:57] + '...'}: "
        f"{error['msg'].replace('Input', 'it', 1)}"
    )
