"""Where each clause of SEMANTICS.md is cited by a test, written as its last section: python docs/clauses.py"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SEMANTICS = ROOT / "docs" / "SEMANTICS.md"
HEADING = "## Where each clause is tested\n\n"
CLAUSE = re.compile(r"\b([A-Z]-\d+)\b")


def clauses() -> list[str]:
    """In the order in which they are stated."""
    return re.findall(r"^- \*\*([A-Z]-\d+)\*\*", SEMANTICS.read_text(encoding="utf-8"), re.MULTILINE)


def citations() -> dict[str, set[str]]:
    """Each clause that the package or a test cites -> the files, from the repository's root; "X-1 to X-3" cites three."""
    letters = {clause[0] for clause in clauses()}
    found: dict[str, set[str]] = {}
    for folder in ("fp8ref", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            text = re.sub(r"\b([A-Z])-(\d+) to \1-(\d+)\b", _spelled_out, path.read_text(encoding="utf-8"))
            for clause in CLAUSE.findall(text):
                if clause[0] in letters:
                    found.setdefault(clause, set()).add(path.relative_to(ROOT).as_posix())
    return found


def index() -> str:
    """A line for each clause: the tests that cite it."""
    found = citations()
    lines = [f"- {clause}: {', '.join(_tests(found.get(clause, set())))}" for clause in clauses()]
    return f"{HEADING}Files of tests/ that cite it, written by `make clauses`.\n\n" + "\n".join(lines) + "\n"


def written(text: str) -> str:
    """The specification with its last section made anew."""
    return text.split(f"\n{HEADING}")[0].rstrip("\n") + f"\n\n{index()}"


def _tests(files: set[str]) -> list[str]:
    return sorted(name.removeprefix("tests/") for name in files if name.startswith("tests/"))


def _spelled_out(match: re.Match) -> str:
    letter, first, last = match[1], int(match[2]), int(match[3])
    return " ".join(f"{letter}-{i}" for i in range(first, last + 1))


if __name__ == "__main__":
    SEMANTICS.write_text(written(SEMANTICS.read_text(encoding="utf-8")), encoding="utf-8")
