"""The fewest bytes of a block, and the tables that docs/concepts/speed.md shows of them."""

import json
import re
from pathlib import Path

import pytest

import floor

PAGE = Path(__file__).parents[1] / "docs" / "concepts" / "speed.md"


def test_bytes_of_a_block_counted_by_hand():
    """A tensor [8192, 4096] has 33.6 MB a byte, one of the MLP 117.4, weights 218.1; of q, k and v
    10/8 and 12/8 of the first. Another reading is of all but RoPE and the last gradient."""
    wide, inner, weights = 8192 * 4096, 8192 * 14336, 218_103_808
    once = wide * (8 + 4 + 8 + 2 + 12 + 12 + 4 * 5 // 4 + 4 * 3 // 2) + inner * 16 + weights * 4
    again = wide * (2 + 2 + 2 + 2 + 2 + 2 * 3 // 2) + inner * 10 + weights * 2
    assert floor.least("delayed") == floor.least("blockwise") == once
    assert floor.least("tensorwise") == floor.least("rowwise_native") == once + again


def cells(table):
    heads, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return [dict(zip(heads, row, strict=True)) for row in rows]


def test_no_count_is_below_the_floor_and_no_prediction_above_its_own():
    rows = cells(floor.markdown())
    assert [row["recipe"] for row in rows] == [f"`{recipe}`" for recipe in floor.SHOWN]
    for row in rows:
        for who in ("torchao", "plain operations", "kernels"):
            assert row[who] == "-" or float(row[who]) >= float(row["floor"]), row
        assert row["as counted"] == "-" or row["as counted"] <= row["at the floor"], row
    for row in cells(floor.markdown_jax()):
        assert row["floor"] == "-" or float(row["counted"]) >= float(row["floor"]), row


def test_a_prediction_is_of_what_an_h100_measured(monkeypatch):
    """A step of 10 seconds in bf16; 4 without casts, which move 85 bytes a second each of four
    blocks."""
    monkeypatch.setattr(floor, "rates", lambda: (10.0, 4.0, 100.0))
    monkeypatch.setattr(floor, "least", lambda recipe: 85.0)
    assert cells(floor.markdown())[0]["at the floor"] == "1.25"  # 10 / (4 + 4)


def test_kernels_do_not_change_what_a_recipe_must_move(monkeypatch, tmp_path):
    names = ("bf16", "fp8ref tensorwise", "fp8ref tensorwise, Triton's kernels", "fp8ref delayed")
    rows = [{"linears": name, "gb": 50.0} for name in names]
    (tmp_path / "aot.json").write_text(json.dumps({"blocks": rows}))
    monkeypatch.setattr(floor, "RESULTS", tmp_path)
    plain, ours, kernels, delayed = (row["floor"] for row in cells(floor.markdown_jax()))
    assert plain == "-"
    assert float(ours) == float(kernels) > float(delayed) > 0


def test_the_page_shows_the_tables():
    page = PAGE.read_text(encoding="utf-8")
    filled = floor.filled(page)
    assert len(re.findall("<!-- floor", page)) == 2
    assert "<!--" not in filled
    assert floor.markdown() in filled
    assert floor.markdown_jax() in filled


@pytest.mark.parametrize("kind", floor.CASTS)
def test_what_casts_take_is_no_part_of_the_rest(kind):
    """Every kind of kernel that the floor replaces is one that profiles have."""
    from reporting import breakdown

    assert kind in breakdown.NAMES
