"""Look up frozen data by name: policies, recipes, epilogues, accumulation plans and hardware share
one lookup and one error."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

_T = TypeVar("_T")


def lookup(
    requirement: str, table: Mapping[str, _T], key: str | _T, kind: type[_T] | None = None
) -> _T:
    """The entry of table under that name; an instance of ``kind`` is returned as it is.

    requirement  the beginning of the error, up to the names: ``policy is a ScalePolicy or``.

    Raises:      ValueError: anything else, with the name most like it.

    >>> lookup("size is an int or", {"small": 1, "large": 9}, "large", int)
    9
    >>> lookup("size is an int or", {"small": 1}, 5, int)
    5
    """
    if kind is not None and isinstance(key, kind):
        return key
    # The type is asked first: an unhashable key, such as a list, would raise TypeError in the
    # table.
    if not isinstance(key, str) or key not in table:
        near = nearest(key, table) if isinstance(key, str) else ""
        raise ValueError(f"{requirement} one of {', '.join(table)}; got {key!r}.{near}")
    return table[key]


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of an error: the name that a mistyped word may mean; empty where none is like it.

    >>> nearest("rowise", ["tensorwise", "rowwise"])
    " Did you mean 'rowwise'?"
    """
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""
