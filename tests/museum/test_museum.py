"""The kit finds the faults of the museum, names them as the exhibits say, and has no objection to
their fixed twins."""

import functools
import importlib.util
from pathlib import Path

import pytest
from museum.exhibit import Exhibit

FOUND, NAMED = 0.95, 0.80
"""The least shares of exhibits that the kit finds, and whose right cause it says."""

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("exhibits_page", ROOT / "docs/scripts/exhibits.py")
exhibits_page = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(exhibits_page)

EXHIBITS = exhibits_page.exhibits()


@functools.cache
def verdict_of(ask, function):
    return ask(function)


def marked(exhibit: Exhibit):
    return pytest.param(exhibit, id=exhibit.name, marks=[pytest.mark.slow] if exhibit.slow else [])


@pytest.mark.parametrize("exhibit", [marked(one) for one in EXHIBITS])
def test_the_fault_is_found(exhibit):
    verdict = verdict_of(exhibit.ask, exhibit.fault)
    assert verdict.ok is bool(exhibit.missed), verdict.report
    assert exhibit.named in verdict.report, verdict.report
    assert exhibit.unnamed in verdict.report, verdict.report


@pytest.mark.parametrize("exhibit", [marked(one) for one in EXHIBITS])
def test_the_twin_raises_no_alarm(exhibit):
    verdict = verdict_of(exhibit.ask, exhibit.twin)
    assert verdict.ok, verdict.report


def test_shares():
    """Of the exhibits as they stand, each of which the tests above hold to what it says."""
    found = [one for one in EXHIBITS if not one.missed]
    assert len(EXHIBITS) >= 60
    assert len(found) >= FOUND * len(EXHIBITS)
    assert sum(bool(one.named) for one in found) >= NAMED * len(EXHIBITS)


def test_an_exhibit_says_one_thing():
    """A name, or what the report says without one, or why the fault is missed."""
    for one in EXHIBITS:
        assert [bool(one.named), bool(one.unnamed), bool(one.missed)].count(True) == 1, one.name
    names = [one.name for one in EXHIBITS]
    assert len(set(names)) == len(names)
    assert all(one.link.startswith("https://github.com/") for one in EXHIBITS)


def test_the_page_is_written_from_the_exhibits():
    assert exhibits_page.PAGE.read_text(encoding="utf-8") == exhibits_page.written()
