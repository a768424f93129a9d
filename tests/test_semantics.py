"""docs/SEMANTICS.md and what cites it: every citation has its clause, every clause is cited by a test, and says by which."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
_spec = importlib.util.spec_from_file_location("clauses", DOCS / "scripts" / "clauses.py")
docs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(docs)
CLAUSES = docs.clauses()


def test_clauses_are_numbered_without_gaps():
    assert len(CLAUSES) == len(set(CLAUSES))
    for letter in {clause[0] for clause in CLAUSES}:
        numbers = sorted(int(clause[2:]) for clause in CLAUSES if clause[0] == letter)
        assert numbers == list(range(1, len(numbers) + 1)), letter


def test_every_citation_has_its_clause():
    unknown = {clause: where for clause, where in docs.citations().items() if clause not in CLAUSES}
    assert not unknown


def test_every_clause_is_cited_by_a_test():
    cited = {clause for clause, where in docs.citations().items() if any(file.startswith("tests/") for file in where)}
    assert not set(CLAUSES) - cited


def test_every_clause_says_where_it_is_tested():
    text = docs.SEMANTICS.read_text(encoding="utf-8")
    assert text == docs.written(text), "run make clauses"
