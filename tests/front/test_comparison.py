"""A table of recipes on one tensor."""

import re
import sys

import numpy as np
import pytest

import fp8ref as f8
from fp8ref import plots
from fp8ref.formats import E5M2
from fp8ref.recipe import RECIPES, CastSpec


@pytest.fixture
def x(rng):
    """One row is 100,000 times as large."""
    x = rng.standard_normal((64, 128), dtype=np.float32)
    x[7] *= 1e5
    return x


def test_a_row_has_what_quantize_and_error_say(x):
    table = f8.compare(x, ["tensorwise", RECIPES["mxfp8"], "nvfp4"], axis=0)
    for row, name in zip(table.rows, ("tensorwise", "mxfp8", "nvfp4"), strict=True):
        q = f8.quantize(x, recipe=name, axis=0)
        accuracy = q.error(x)
        assert row == {
            "recipe": name,
            "format": q.fmt.name,
            "granularity": q.granularity,
            "policy": q.policy.name,
            "scales": q.scale.size,
            "bits": q.bits,
            "sqnr": accuracy.sqnr,
            "zeroed": accuracy.zeroed,
            "clipped": accuracy.clipped,
            "median": accuracy.median,
            "worst": accuracy.worst,
        }
        np.testing.assert_array_equal(table.accuracies[name].rows, accuracy.rows)


def test_the_default_recipes_are_compared_on_any_length(x):
    table = f8.compare(x[:, :100])
    assert [row["recipe"] for row in table.rows] == [
        "tensorwise",
        "rowwise",
        "blockwise",
        "mxfp8",
        "nvfp4",
    ]
    assert table.rows[2]["scales"] == 64


def test_labels_may_name_casts_and_one_name_is_one_recipe(x):
    table = f8.compare(x, {"wide": CastSpec(fmt=E5M2), "mine": "rowwise"})
    assert [(row["recipe"], row["format"]) for row in table.rows] == [
        ("wide", "e5m2"),
        ("mine", "e4m3fn"),
    ]
    assert len(f8.compare(x, "rowwise").rows) == 1


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_arrays_of_frameworks_give_the_same_table(framework, x):
    if framework == "torch":
        import torch

        theirs = torch.from_numpy(x)
    else:
        import jax.numpy as jnp

        theirs = jnp.asarray(x)
    assert repr(f8.compare(theirs)) == repr(f8.compare(x))


def test_a_table_is_printed_with_its_finding(x):
    table = f8.compare(x, ["tensorwise", "rowwise"])
    header, tensorwise, rowwise, finding = repr(table).splitlines()
    assert re.split(r"  +", header) == [
        "recipe",
        "format",
        "scales",
        "bits",
        "SQNR, dB",
        "became zero",
        "clipped",
        "worst row, dB",
    ]
    assert tensorwise.split()[:4] == ["tensorwise", "e4m3fn", "1", "tensorwise"]
    assert rowwise.split()[:5] == ["rowwise", "e4m3fn", "64", "rowwise", "8.25"]
    share = table.rows[0]["zeroed"]
    assert 0.4 < share < 0.7
    assert finding.startswith(f"tensorwise makes {share:.1%} of the elements zero, rowwise ")


@pytest.mark.parametrize(
    ("recipes", "finding"),
    [
        (["rowwise", "mxfp8"], r"The worst row keeps \d\d\.\d dB or more under rowwise, mxfp8$"),
        (["nvfp4"], r"^nvfp4 makes \d+\.\d% of the elements zero$"),
        (["rowwise", "nvfp4"], r"^nvfp4 makes .* rowwise (none|under 0.1%)$"),
        ({"e4m3": "rowwise", "e5m2": CastSpec(fmt=E5M2)}, r"dB under e5m2, .* dB under e4m3$"),
    ],
    ids=str,
)
def test_the_finding_names_what_loses_most(recipes, finding, rng):
    x = 1 + rng.random((16, 128), dtype=np.float32)
    if "nvfp4" in recipes:
        x *= rng.choice(np.float32([1e-3, 1]), x.shape)
    assert re.search(finding, f8.compare(x, recipes).finding())


def test_no_recipe_and_another_name_are_refused(x):
    with pytest.raises(ValueError, match="needs a recipe; got none"):
        f8.compare(x, [])
    with pytest.raises(ValueError, match=r"got 'tensorwize'\. Did you mean 'tensorwise'"):
        f8.compare(x, ["tensorwize"])


@pytest.mark.parametrize(
    ("rows", "finding"),
    [
        ({}, "x has no finite element other than zero: no recipe loses any"),
        (
            {0: np.nan},
            "x holds 64 NaN or infinite elements, which spoil their blocks. Compare without them.",
        ),
        ({1: 1}, "Every row is exact under tensorwise, nvfp4"),
        (
            {1: np.r_[np.nan, np.ones(63)]},
            "x holds 1 NaN or infinite elements, which spoil their blocks. Compare without them.",
        ),
    ],
    ids=["zeros", "NaN", "exact", "a NaN"],
)
def test_the_finding_without_a_finite_sqnr(rows, finding):
    x = np.zeros((4, 64), np.float32)
    for row, value in rows.items():
        x[row] = value
    assert f8.compare(x, ["tensorwise", "nvfp4"]).finding() == finding


@pytest.mark.parametrize(
    ("recipes", "got"),
    [
        (["rowwise", RECIPES["rowwise"]], "rowwise, rowwise"),
        (CastSpec(fmt=E5M2), "CastSpec"),
        (["rowwise", CastSpec(fmt=E5M2)], "rowwise, CastSpec"),
        ({1: "rowwise"}, "int"),
    ],
    ids=str,
)
def test_each_recipe_has_its_own_name(x, recipes, got):
    with pytest.raises(ValueError, match=f"has a name of its own.*got {got}\\. Give {{label: rec"):
        f8.compare(x, recipes)


def test_html_is_escaped(x):
    html = f8.compare(x, {"<b>&": "tensorwise"})._repr_html_()
    assert "<b>&" not in html
    assert html.count("&lt;b&gt;&amp;") == 2  # its row, and the finding


def test_pandas_is_asked_for_by_name(x, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        f8.compare(x, "rowwise").to_pandas()


def test_pandas_has_a_line_for_each_recipe(x):
    pandas = pytest.importorskip("pandas")
    table = f8.compare(x, ["tensorwise", "rowwise"])
    frame = table.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.loc["rowwise", "worst"] == table.rows[1]["worst"]


def test_the_picture_has_a_line_for_each_recipe_and_says_the_finding(x):
    table = f8.compare(x, ["tensorwise", "rowwise"])
    ax = table.plot()
    assert ax.get_title() == table.finding()
    assert [line.get_label() for line in ax.patches] == ["tensorwise", "rowwise"]
    values = ax.patches[0].get_data().values
    np.testing.assert_array_equal(values, np.sort(table.accuracies["tensorwise"].rows))
    own = plots.figure()[1][0]
    assert table.plot(own) is own
