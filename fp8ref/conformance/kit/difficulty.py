"""Kinds of difficulty that inputs of a state or a collective have, one at a time, by name."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difficulty:
    """What inputs have beside ordinary ones.

    words    what it is, for messages; clause: that decides it.
    special  the operations or numbers that they have, the simplest first.
    """

    words: str
    clause: str
    special: tuple[Any, ...] = ()


def check_without(without: Collection[str], difficulties: Mapping[str, Difficulty]) -> None:
    """ValueError unless these are names of difficulties; ``ordinary`` cannot be left out."""
    if unknown := sorted(set(without) - set(difficulties) | {"ordinary"} & set(without)):
        raise ValueError(
            f"without names difficulties, of {', '.join(list(difficulties)[1:])}; got "
            f"{', '.join(unknown)}."
        )
