"""The structure of the package. A limit is today's figure, and may be tightened, not loosened."""

import pytest
from house import figures

LIMITS = {
    "functions over 60 lines": 0,
    "functions over 8 parameters": 0,
    "calls with ** of a local": 0,
    "imports by string": 4,
    "guards": 947,
    "functions that cast outside quantize/": 0,
    "prefixes of three modules": 0,
    "lines at 88 columns": 132_254,
}
NAMES = {"found": 1, "given": 1, "made": 2, "how": 1, "known": 1, "told": 0, "taken": 1, "of_": 2}
"""Definitions in 10,000 lines."""


@pytest.fixture(scope="module")
def measured():
    return figures.figures()


@pytest.mark.parametrize("what", LIMITS)
def test_no_figure_is_above_its_limit(measured, what):
    assert measured[what] <= LIMITS[what]


def test_no_line_is_wider_than_100_columns():
    assert figures.too_wide() == []


def test_a_folder_has_at_most_14_modules_and_the_root_those_that_users_name():
    assert {folder for folder, held in figures.folders().items() if len(held) > 14} == set()
    assert set(figures.folders()["fp8ref"]) == figures.AT_ROOT


def test_rooms_of_one_idea_have_one_name():
    rooms = {
        (room.name, backend)
        for backend in ("sim", "jax", "torch")
        for room in (figures.PACKAGE / backend).iterdir()
        if (room / "__init__.py").exists()
    }
    named = {(name, who) for name, whose in figures.ROOMS.items() for who in whose.split()}
    assert rooms == named


def test_no_modules_import_each_other_in_a_circle():
    assert figures.circles() == []
    assert figures.module_getattrs() == []


@pytest.fixture(scope="module")
def dialect():
    return figures.dialect()


@pytest.mark.parametrize("word", figures.DIALECT)
def test_names_are_nouns_of_the_field(dialect, word):
    assert dialect[word] <= NAMES[word]


PLANTED = {
    "one": """import importlib
from planted import two as second

def long(a, b, c, d, e, f, g, h, i):
    found, how = a, {"x": b}
    if c:
        raise ValueError(c)
    return second.of_them(**how)
""",
    "two": """import importlib

def of_them(x):
    return importlib.import_module("fp8ref.one")

def __getattr__(name):
    return name
""",
}


def test_a_planted_fault_of_each_kind_is_seen(tmp_path, monkeypatch):
    package = tmp_path / "fp8ref"
    package.mkdir()
    for name, text in PLANTED.items():
        text = text.replace("from planted", "from fp8ref").replace(
            "    return second", "\n" * 60 + "    return second"
        )
        (package / f"{name}.py").write_text(text + f"# {'x' * 100}\n")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "PACKAGE", package)
    figures.modules.cache_clear()
    try:
        assert len(figures.too_wide()) == 2
        assert figures.circles() == [["fp8ref.one", "fp8ref.two"]]
        assert figures.module_getattrs() == ["fp8ref.two"]
        assert figures.wide_signatures() == figures.long_functions() == ["fp8ref/one.py:long"]
        assert figures.splats() == ["fp8ref/one.py:long **how"]
        assert figures.imports_by_string() == ["fp8ref.two: fp8ref.one"]
        assert figures.guards() == 1
        assert {word for word, n in figures.dialect().items() if n} == {"found", "how", "of_"}
        assert set(figures.folders()["fp8ref"]) != figures.AT_ROOT
    finally:
        figures.modules.cache_clear()
