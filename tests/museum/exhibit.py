"""An exhibit of the museum: a public fault in a few lines, its fixed twin, and how the conformance
kit is asked about both."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Verdict(NamedTuple):
    """What the kit says of a function: whether it raises no objection, and its report."""

    ok: bool
    report: str


Ask = Callable[[Callable[..., Any]], Verdict]
"""A question to the kit: a function under test -> the verdict."""


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """A fault that somebody reported in public.

    name     repository and number of the thread; link: the thread, from ``year``.
    library  where it was; title: the mistake, in a sentence.
    fault    the function with the mistake; twin: the function without it.
    ask      how the kit is asked about either.
    named    a part of the report that is the right cause; "": the kit has no name for it.
    unnamed  what the report says of a fault without a name: the smallest input, got, expected and
             the clause, or as much of these as it says.
    missed   why the kit does not see the fault; "": it does.
    slow     whether the question takes seconds.
    """

    name: str
    link: str
    library: str
    year: int
    title: str
    fault: Callable[..., Any]
    twin: Callable[..., Any]
    ask: Ask
    named: str = ""
    unnamed: str = ""
    missed: str = ""
    slow: bool = False
