"""docs/SEMANTICS.md and what cites it: every citation has its clause, and every clause is cited by the code or a test."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLAUSE = re.compile(r"\b([A-Z]-\d+)\b")
LETTERS = {"F", "C", "S", "G", "L", "R", "M", "T", "D", "K", "H", "P", "Q", "B", "E"}


def clauses() -> set[str]:
    return set(re.findall(r"^- \*\*([A-Z]-\d+)\*\*", (ROOT / "docs/SEMANTICS.md").read_text(), re.MULTILINE))


def citations() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for folder in ("fp8ref", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            text = re.sub(r"\b([A-Z])-(\d+) to \1-(\d+)\b", _spell_out, path.read_text())
            for clause in CLAUSE.findall(text):
                if clause[0] in LETTERS:
                    found.setdefault(clause, set()).add(f"{folder}/{path.name}")
    return found


def _spell_out(match: re.Match) -> str:
    letter, first, last = match[1], int(match[2]), int(match[3])
    return " ".join(f"{letter}-{i}" for i in range(first, last + 1))


def test_clauses_are_numbered_without_gaps():
    for letter in LETTERS:
        numbers = sorted(int(c[2:]) for c in clauses() if c[0] == letter)
        assert numbers == list(range(1, len(numbers) + 1)), letter


def test_every_citation_has_its_clause():
    unknown = {c: where for c, where in citations().items() if c not in clauses()}
    assert not unknown


def test_every_clause_is_cited_by_a_test():
    cited = {c for c, where in citations().items() if any(w.startswith("tests/") for w in where)}
    assert not clauses() - cited
