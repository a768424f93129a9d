import re
from pathlib import Path

import pytest

from fp8ref.shared import clauses as specification
from fp8ref.shared.clauses import address, addresses

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def afresh():
    specification.site.cache_clear()
    yield
    specification.site.cache_clear()


def metadata(monkeypatch, entries):
    class Metadata:
        def get_all(self, name):
            assert name == "Project-URL"
            return entries

    monkeypatch.setattr("importlib.metadata.metadata", lambda name: Metadata())


def test_without_an_address_it_is_a_file_with_that_anchor(monkeypatch):
    metadata(monkeypatch, None)
    page, _, anchor = address("S-9").partition("#")
    assert re.search(
        rf"^### S-9 .*\{{ #{anchor} \}}$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE
    )


def test_with_an_address_it_is_a_page_of_the_site(monkeypatch):
    metadata(
        monkeypatch,
        ["Source, https://code.example/fp8ref", "Documentation, https://docs.example/fp8ref/"],
    )
    assert addresses("needs multiples of 16 (L-5, S-6); got 8 (L-5)") == [
        "L-5: https://docs.example/fp8ref/spec/l.html#l-5",
        "S-6: https://docs.example/fp8ref/spec/s.html#s-6",
    ]


@pytest.mark.parametrize(
    "message", ["no clause", "Llama-3", "utf-8 or Z-1", "gpt-2's N-1", "e4m3-2"]
)
def test_other_words_are_no_clauses(message):
    assert addresses(message) == []
