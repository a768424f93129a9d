"""Predictions next to what others published for H100s; pytest -s shows the errors,
python benchmarks/published/estimate_published.py the table.

Bounds, none of which a constant was fitted to:
 - compiled linears, a factor of 1.4: GEMMs on H100s are published from 57 % of the peak
   (pytorch/FBGEMM#2546) to torchao's 78 %, whose quotient is 1.37; a ratio moves with the rate of
   GEMMs by no more than that.
 - a rowwise forward pass, a factor of 2: CUTLASS's kernel is at "90-100 %" of cuBLAS's tensorwise
   one for most shapes, with "a long tail going down to 50 %" (pytorch/pytorch#147971). nanochat's K
   = 1664 is in the tail: without casts its 1.84 ms are 790 TFLOP/s. There the prediction has
   rowwise before tensorwise, which has a pass for amaxes more; the measurement has it behind.
 - eager, a factor of 2: kernels of single operations are counted, not what autograd and the
   allocator add.
 - steps of Llama 3 8B, a tenth: half of what tensorwise gained there is an eighth, all of what
   rowwise gained a tenth; a prediction further off would say nothing of either. What is left out
   (collectives, host) brings the ratio nearer to 1: predictions are above.
"""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "published" / "estimate_published.py"
_spec = importlib.util.spec_from_file_location("estimate_published", SCRIPT)
published = importlib.util.module_from_spec(_spec)
sys.modules["estimate_published"] = published  # dataclasses look their module up
_spec.loader.exec_module(published)
ROWS = published.rows()


def bound(row) -> float:
    if "Llama" in row.what:
        return 1.1
    return (
        2.0
        if "eager" in row.what or (row.recipe == "rowwise" and row.what.endswith("forward"))
        else 1.4
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.what} {row.recipe}")
def test_a_published_ratio(row):
    print(
        f"{row.what}, {row.recipe}: published {row.published:.2f}, predicted "
        f"{row.predicted:.2f}, error {100 * row.error:+.0f} %"
    )
    assert 1 / bound(row) < row.predicted / row.published < bound(row)


def test_all_that_was_asked_for_is_there():
    assert sorted((row.recipe, round(row.published, 2)) for row in ROWS if "Llama" in row.what) == [
        ("rowwise", 1.1),
        ("tensorwise", 1.25),
    ]
    assert {round(row.published, 2) for row in ROWS if "forward" in row.what} >= {1.38, 1.09}
    assert {
        row.published for row in ROWS if row.source == published.TORCHAO and "linear" in row.what
    } == {0.80, 1.39}


@pytest.mark.parametrize(
    "what", ["65536 x 1664 x 6656 and grad_weight", "a step of Llama 3 8B, 8 x H100"]
)
def test_tensorwise_beats_rowwise_which_beats_bf16(what):
    found = {row.recipe: row.predicted for row in ROWS if row.what == what}
    assert found["tensorwise"] > found["rowwise"] > 1


def test_without_torch_compile_fp8_loses():
    assert all(row.predicted < 1 and row.published < 1 for row in ROWS if "eager" in row.what)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torchaos_thresholds(recipe):
    """Break-even is on the same side of shapes clearly beyond them: a linear of 1024 loses, one of
    8192 wins.

    Where torchao filters, no more than a quarter is predicted to be gained, and that of 16384
    tokens: its rules know no M.
    """
    found = published.verdicts(recipe)
    agree = sum(converts == (ratio > 1) for converts, ratio in found.values())
    print(
        f"{recipe}: torchao's thresholds and the prediction agree on {agree} of {len(found)} shapes"
    )
    assert agree > len(found) / 2
    assert max(ratio for converts, ratio in found.values() if not converts) < 1.25
    for (m, k, n), (converts, ratio) in found.items():
        if max(m, k, n) == 1024:
            assert not converts
            assert ratio < 1
        if min(k, n) >= 8192 and m >= 4096:
            assert converts
            assert ratio > 1


def test_tensorwise_beats_rowwise_at_every_shape():
    whole, rows = published.verdicts("tensorwise"), published.verdicts("rowwise")
    losers = [shape for shape in whole if min(shape) >= 4096 and whole[shape][1] <= rows[shape][1]]
    assert losers == []


def test_the_table_is_the_pages(monkeypatch, capsys, tmp_path):
    written = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["estimate_published.py", "--json", str(written)])
    published.main()
    assert [(row["what"], row["recipe"]) for row in json.loads(written.read_text())] == [
        (row.what, row.recipe) for row in ROWS
    ]
    page = (SCRIPT.parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    printed = capsys.readouterr().out.splitlines()
    table = [line for line in printed if line.startswith("|")]
    assert len(table) == 2 + len(ROWS)
    assert "\n".join(table) in page
    assert all(
        line in page for line in printed if line.startswith(("nanochat", "Llama", "torchao"))
    )
