"""Kinds of difficulty that inputs of a state or a collective have, one at a time, by name."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fp8ref.shared import package_data

_Departure = TypeVar("_Departure")


@dataclass(frozen=True)
class Difficulty:
    """What inputs have beside ordinary ones.

    words    what it is, for messages; clause: that decides it.
    special  the operations or numbers that they have, the simplest first.
    """

    words: str
    clause: str
    special: tuple[Any, ...] = ()


def difficulty_table(module: str) -> dict[str, Difficulty]:
    """{name: difficulty} of difficulties.toml beside a module, named by its ``__file__``."""
    tables = package_data.tables(module, "difficulties").items()
    return {
        name: Difficulty(one["words"], one["clause"], one.get("special", ()))
        for name, one in tables
    }


def check_without(without: Collection[str], difficulties: Mapping[str, Difficulty]) -> None:
    """ValueError unless these are names of difficulties; ``ordinary`` cannot be left out."""
    if unknown := sorted(set(without) - set(difficulties) | {"ordinary"} & set(without)):
        raise ValueError(
            f"without names difficulties, of {', '.join(list(difficulties)[1:])}; got "
            f"{', '.join(unknown)}."
        )


def departures(
    difficulties: Iterable[str], departure: Callable[[str], _Departure | None]
) -> list[_Departure]:
    """The departure of each difficulty that has one; of ``ordinary`` that alone, which would show
    in all others."""
    every = []
    for difficulty in difficulties:
        if (one := departure(difficulty)) is not None:
            every.append(one)
            if difficulty == "ordinary":
                break
    return every
