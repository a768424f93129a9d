"""Each picture of docs/gallery.md is what the code under it draws, in ten lines at most."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("gallery", ROOT / "docs" / "scripts" / "gallery.py")
gallery = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gallery)

BLOCKS = gallery.blocks()
FAST = "numbers"


def test_every_picture_has_its_code_and_no_other_is_kept():
    page = gallery.PAGE.read_text(encoding="utf-8")
    assert len(BLOCKS) == page.count("```py\n") == page.count("![") >= 8
    assert {path.stem for path in (ROOT / "docs" / "gallery").glob("*")} == {*BLOCKS}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_has_at_most_ten_lines_and_its_picture_is_small(name):
    assert len(BLOCKS[name].splitlines()) <= 10
    assert (ROOT / "docs" / "gallery" / f"{name}.png").stat().st_size < 60_000


@pytest.mark.parametrize(
    "name",
    [name if name == FAST else pytest.param(name, marks=pytest.mark.slow) for name in BLOCKS],
)
def test_a_block_draws_its_picture(name):
    assert gallery.picture(name, BLOCKS[name]).startswith(b"\x89PNG")
