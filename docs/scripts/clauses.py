"""List, for each clause of the specification, the tests that cite it; writes docs/spec/tests.md:
python docs/scripts/clauses.py
"""

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "docs" / "spec"
PAGE = SPEC / "tests.md"
LETTERS = "FCSHOGALXRMTDKPQBE"  # in the order of the pages
REMOVED = ("A-26",)
"""Clauses that the specification no longer has. No other clause takes their numbers."""
CLAUSE = re.compile(r"\b([A-Z]-\d+)\b")
_HEADING = re.compile(r"^### ([A-Z]-\d+) .*\{ #([a-z]-\d+) \}$", re.MULTILINE)


def clauses() -> dict[str, str]:
    """{clause: its anchor}, in the order of the pages and, within one, of the numbers."""
    found: dict[str, str] = {}
    for letter in LETTERS:
        of_page = _HEADING.findall((SPEC / f"{letter.lower()}.md").read_text(encoding="utf-8"))
        found.update(sorted(of_page, key=lambda clause: int(clause[0][2:])))
    return found


def citations() -> dict[str, set[str]]:
    """Each clause that the package or a test cites -> the files, from the repository's root; "X-1
    to X-3" cites three.
    """
    found: dict[str, set[str]] = {}
    for folder in ("fp8ref", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            text = re.sub(
                r"\b([A-Z])-(\d+) to \1-(\d+)\b", _spelled_out, path.read_text(encoding="utf-8")
            )
            for clause in CLAUSE.findall(text):
                if clause[0] in LETTERS:
                    found.setdefault(clause, set()).add(path.relative_to(ROOT).as_posix())
    return found


def written() -> str:
    """The page: an entry for each clause, with the tests that cite it."""
    found = citations()
    rows = [
        f"{clause}\n" + _wrapped(", ".join(_tests(found.get(clause, set()))))
        for clause in clauses()
    ]
    head = (
        "# Where each clause is tested\n\nFiles of tests/ that cite each clause, written by "
        "`make clauses`.\n\n"
    )
    return head + "\n\n".join(rows) + "\n"


def _wrapped(text: str) -> str:
    """The definition of a Markdown definition list."""
    return textwrap.fill(
        text,
        120,
        initial_indent=":   ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _tests(files: set[str]) -> list[str]:
    return sorted(name.removeprefix("tests/") for name in files if name.startswith("tests/"))


def _spelled_out(match: re.Match) -> str:
    letter, first, last = match[1], int(match[2]), int(match[3])
    return " ".join(f"{letter}-{i}" for i in range(first, last + 1))


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
