"""Render fp8ref's docstrings: their entries become definition lists in Markdown.

A docstring has entries such as these, whose text is aligned in a column:

    Shapes:   x [..., K]; output [..., N] of x's dtype.
    Raises:   ValueError: K of x and w differ.
    mesh      of dims data, fsdp and tensor.
              None: one device.

``markdown`` turns each into a term and its definition. mkdocstrings shows the result as Markdown
(``docstring_style: null``). ``Sections`` is the griffe extension that applies it.
"""

import functools
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import griffe

sys.path.insert(0, str(Path(__file__).parent))
from clauses import clauses

# "Shapes:   x [M, K]", "mesh      of dims", "sequence, tensor_plan": a term, and a text two spaces
# behind it.
_ENTRY = re.compile(
    r"^(?P<term>[\w*`\"'.\[\]()/-]+(?:,? [\w*`\"'.\[\]()-]+){0,3}?)(?P<colon>:?)  +(?P<text>\S.*)$"
)
_NAMES = re.compile(r"^[\w`]+(?:, [\w`]+)*:?$")  # names alone, whose text is on the lines below
_CLAUSE = re.compile(r"\b[A-Z]-\d{1,2}\b")
# Where a clause's number is no link: code, a link already, a heading, the attributes of a heading.
_KEPT = re.compile(
    r"```.*?^ *```|`[^`\n]*`|\[[^\]\n]*\]\([^)\n]*\)|^#+ .*?$|\{[^}\n]*\}", re.DOTALL | re.MULTILINE
)
_TITLES = [
    "Shapes",
    "Units",
    "Order",
    "Specials",
    "Raises",
    "Returns",
    "Gradient",
    "State",
    "Warns",
    "Keeps",
    "Source",
    "Threads",
    "Scope",
    "Ranks",
    "Devices",
]
_SECTIONS = re.compile(rf"^(?P<term>{'|'.join(_TITLES)}): (?P<text>\S.*)$")


def markdown(docstring: str) -> str:
    """A docstring as Markdown: entries as definition lists, doctests and indented blocks fenced."""
    lines = (
        textwrap.dedent(docstring.expandtabs()).splitlines()
        if docstring.startswith(" ")
        else docstring.expandtabs().splitlines()
    )
    out: list[str] = []
    at, column = 0, None  # column: where the text of the last entry begins
    while at < len(lines):
        line = lines[at]
        if line.startswith(">>>"):
            end = _end(lines, at, lambda text: bool(text.strip()))
            out += ["", "```pycon", *lines[at:end], "```", ""]
        elif line.startswith("    "):
            end = _end(lines, at, lambda text: not text.strip() or text.startswith("    "))
            while not lines[end - 1].strip():
                end -= 1
            out += [
                "",
                "```text",
                *textwrap.dedent("\n".join(lines[at:end])).splitlines(),
                "```",
                "",
            ]
        elif found := _entry(lines, at, column):
            term, text, column, end = found
            out += [
                "",
                f"**{term}**" if term in _TITLES else f"`{term.strip('`')}`",
                "",
                *_definition(text),
                "",
            ]
        else:
            end = at + 1
            out.append(line)
        at = end
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip() + "\n"


def linked(text: str, link_to: Callable[[str], str]) -> str:
    """Markdown in which each clause, such as S-9, is a link, outside of code, links and headings.

    link_to  the link of a clause, in Markdown.
    """

    def link(found: re.Match) -> str:
        return link_to(found[0]) if found[0] in _known() else found[0]

    out, at = [], 0
    for kept in _KEPT.finditer(text):
        out += [_CLAUSE.sub(link, text[at : kept.start()]), kept[0]]
        at = kept.end()
    return "".join([*out, _CLAUSE.sub(link, text[at:])])


@functools.cache
def _known() -> set[str]:
    return set(clauses())


def _entry(
    lines: list[str], at: int, column: int | None
) -> tuple[str, list[str], int | None, int] | None:
    """(term, lines of its text, its column, next line) of the entry that begins at a line.

    None: no entry.

    column: that of the entry before, or None. A term as long as its column has one space behind it.
    """
    line = lines[at]
    following = lines[at + 1] if at + 1 < len(lines) else ""
    if found := _ENTRY.match(line) or _SECTIONS.match(line):
        term, first, column = found["term"], [found["text"]], found.start("text")
    elif column and line[column - 1 : column] == " " and re.fullmatch(r"\w+:?", line[: column - 1]):
        term, first = line[: column - 1].rstrip(":"), [line[column:]]
    elif _NAMES.match(line) and following.startswith("    "):
        term, first = line.strip().rstrip(":"), []
    else:
        return None
    end = _end(lines, at + 1, lambda text: text.startswith("  "))
    return term, first + textwrap.dedent("\n".join(lines[at + 1 : end])).splitlines(), column, end


def _definition(text: list[str]) -> list[str]:
    return [(":   " if i == 0 else "    ") + line.strip() for i, line in enumerate(text)]


def _end(lines: list[str], at: int, within) -> int:
    """The first line from ``at`` on that is not within."""
    while at < len(lines) and within(lines[at]):
        at += 1
    return at


class Sections(griffe.Extension):
    """Rewrites the docstring of every object that griffe loads, and links the clauses that it
    cites.
    """

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = linked(
                markdown(obj.docstring.value), lambda clause: f"[{clause}][{clause.lower()}]"
            )  # by autorefs
