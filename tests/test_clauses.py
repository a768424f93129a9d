"""docs/spec and what cites it: every citation has its clause, every clause is cited by a test, and
the last page says by which.
"""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
_spec = importlib.util.spec_from_file_location("clauses", DOCS / "scripts" / "clauses.py")
docs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(docs)
CLAUSES = docs.clauses()


def test_every_page_of_clauses_is_read():
    assert sorted(docs.LETTERS) == sorted(path.stem.upper() for path in docs.SPEC.glob("?.md"))


def test_clauses_are_numbered_without_gaps_but_of_removed_ones_and_anchored():
    for letter in docs.LETTERS:
        numbers = [int(clause[2:]) for clause in (*CLAUSES, *docs.REMOVED) if clause[0] == letter]
        assert sorted(numbers) == list(range(1, len(numbers) + 1)), letter
    assert all(anchor == clause.lower() for clause, anchor in CLAUSES.items())


def test_every_citation_has_its_clause():
    unknown = {clause: where for clause, where in docs.citations().items() if clause not in CLAUSES}
    assert not unknown


def test_every_clause_is_cited_by_a_test():
    cited = {
        clause
        for clause, where in docs.citations().items()
        if any(file.startswith("tests/") for file in where)
    }
    assert not set(CLAUSES) - cited


def test_every_clause_says_where_it_is_tested():
    assert docs.PAGE.read_text(encoding="utf-8") == docs.written(), "run make clauses"
