import re
from pathlib import Path

from fp8ref.crosscheck.divergence.reasons import REASONS

ROOT = Path(__file__).parents[3]


def test_every_clause_of_the_table_is_there():
    known = set(re.findall(r"^- \*\*([A-Z]-\d+)\*\*", (ROOT / "docs/SEMANTICS.md").read_text(), re.MULTILINE))
    for reason in REASONS.values():
        assert set(reason.clauses) <= known
        assert set(re.findall(r"\b[A-Z]-\d+\b", reason.text)) <= known
        assert reason.text.startswith("no clause explains it") == (not reason.clauses)
