"""Sweeps of distributions, casts and sums."""

import dataclasses
import html
import math
import sys

import ml_dtypes
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import fp8ref as f8
from fp8ref import plots
from fp8ref.front import sweeps
from fp8ref.policy import POLICIES

FLOAT8 = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def cast(x, fmt):
    """(numbers of the format, scale) of a tensor with one scale, by ml_dtypes."""
    scale = np.float32(ml_dtypes.finfo(FLOAT8[fmt]).max) / np.abs(x).max()
    return (x * scale).astype(FLOAT8[fmt]).astype(np.float32), scale


@pytest.mark.parametrize("fmt", FLOAT8)
def test_measures_of_a_cast_are_those_of_their_definitions(fmt):
    (row,) = f8.sweep("lognormal", fmt, seed=3).rows
    x = np.random.default_rng([3, 0]).lognormal(0, 1, (1024, 1024)).astype(np.float32)
    numbers, scale = cast(x, fmt)
    e = (numbers * (1 / scale)).astype(np.float64) - x
    noise, signal = e**2, x.astype(np.float64) ** 2
    assert row["sqnr"] == pytest.approx(10 * np.log10(signal.sum() / noise.sum()), rel=1e-12)
    by_row = 10 * np.log10(signal.sum(axis=1) / noise.sum(axis=1))
    assert row["worst"] == pytest.approx(by_row.min(), rel=1e-12)
    assert row["zeroed"] == np.mean(numbers == 0)
    assert row["bias"] == pytest.approx(e.sum() / x.sum(dtype=np.float64), rel=1e-9)
    assert row["clipped"] == 0


def test_a_scale_that_is_rounded_down_clips():
    table = f8.sweep("normal", "e2m1fn", "mx_1x32", ("mx_floor", "mx_rceil"))
    floor, ceil = table.rows
    x = np.random.default_rng([0, 0]).standard_normal((1024, 1024)).astype(np.float32)
    blocks = x.reshape(-1, 32)
    exponent = np.floor(np.log2(np.abs(blocks).max(axis=1, keepdims=True))) - 2
    # what rounds up from 6 with an exponent unbounded: a tie at 7 goes to the even 8
    assert floor["clipped"] == np.mean(np.abs(blocks) >= 7 * 2.0**exponent)
    assert ceil["clipped"] == 0


@pytest.mark.parametrize("fmt", FLOAT8)
def test_errors_of_casts_and_sums_are_apart(fmt):
    (row,) = f8.sweep("uniform", fmt, k=96, accumulate="f32", seed=2).rows
    a = np.random.default_rng([2, 0]).uniform(-1, 1, (64, 96)).astype(np.float32)
    b = np.random.default_rng([2, 3]).standard_normal((64, 96)).astype(np.float32)
    (x, scale_a), (y, scale_b) = cast(a, fmt), cast(b, fmt)
    inverse = np.float32(1 / scale_a) * np.float32(1 / scale_b)
    # sums of 96 products of numbers of e5m2, multiples of 2^-32 below 2^39, may need 71 bits
    exact = (x.astype(np.longdouble) @ y.T.astype(np.longdouble)).astype(np.float32) * inverse
    total = np.zeros((64, 64), np.float32)
    for i in range(96):
        total += x[:, i, None] * y[None, :, i]
    reference = (a.astype(np.float64) @ b.T.astype(np.float64)).astype(np.float32)

    def error(out, of):
        of = of.astype(np.float64)
        return np.sqrt(np.sum((out - of) ** 2) / np.sum(of**2))

    # both are rounded to float32 after their sums: 2^-24 of each
    assert row["cast_error"] == pytest.approx(error(exact, reference), abs=2e-7)
    assert row["sum_error"] == pytest.approx(error(total * inverse, exact), abs=1e-7)
    assert 0 < row["sum_error"] < 1e-5 < row["cast_error"] < 0.1
    assert (row["k"], row["accumulate"]) == (96, "f32")


def test_tails_are_numpys_and_outliers_a_share():
    shape = (50, 40)
    draws = {
        "normal": lambda generator: generator.standard_normal(shape),
        "uniform": lambda generator: generator.uniform(-1, 1, shape),
        "laplace": lambda generator: generator.laplace(size=shape),
        "student_t": lambda generator: generator.standard_t(3, shape),
        "lognormal": lambda generator: generator.lognormal(0, 2, shape),
    }
    for tail, draw in draws.items():
        drawn = f8.Distribution(tail, nu=3, sigma=2, scale=0.5).draw(7, shape)
        assert drawn.dtype == np.float32
        expected = 0.5 * draw(np.random.default_rng([7, 0]))
        np.testing.assert_array_equal(drawn, expected.astype(np.float32))
    plain = f8.Distribution().draw(7, shape)
    tokens = f8.Distribution(token_factor=4, token_share=0.1).draw(7, shape)
    rows = np.flatnonzero((tokens != plain).any(axis=1))
    assert len(rows) == 5
    np.testing.assert_array_equal(tokens[rows], 4 * plain[rows])
    channels = f8.Distribution(channel_factor=8, channel_share=1e-6).draw(7, shape)
    (column,) = np.flatnonzero((channels != plain).any(axis=0))
    np.testing.assert_array_equal(channels[:, column], 8 * plain[:, column])


def test_axes_are_crossed_and_a_parameter_is_of_its_tail():
    tails = f8.Distribution(["normal", "student_t"], nu=np.array([3.0, 5.0]), scale=(1, 2))
    table = f8.sweep(tails, ("e4m3fn", "e5m2"))
    places = [(row["tail"], row["scale"], row["format"]) for row in table.rows]
    names = ["normal", "student_t nu=3", "student_t nu=5"]
    assert len(places) == len({*places}) == 12
    assert {*places} == {(n, s, f) for n in names for s in (1, 2) for f in ("e4m3fn", "e5m2")}
    assert [key for key in table.columns if key not in sweeps.MEASURES] == [
        "tail",
        "scale",
        "format",
    ]


def test_a_sweep_takes_several_distributions_and_recipes():
    table = f8.sweep(["normal", f8.Distribution("laplace", scale=[1.0])], None, ["mxfp8", "nvfp4"])
    named = [(r["tail"], r["granularity"], r["format"], r["policy"]) for r in table.rows]
    assert named == [
        (tail, *recipe)
        for tail in ("normal", "laplace")
        for recipe in (("mxfp8", "e4m3fn", "mx_rceil"), ("nvfp4", "e2m1fn", "te_nvfp4"))
    ]


def test_what_does_not_exist_is_left_out_with_a_reason():
    table = f8.sweep("normal", "e2m1fn", ("rowwise", "nvfp4_1x16"), ("torchao", "te_nvfp4"))
    assert [(row["granularity"], row["policy"]) for row in table.rows] == [
        ("rowwise", "torchao"),
        ("nvfp4_1x16", "torchao"),
        ("nvfp4_1x16", "te_nvfp4"),
    ]
    (reason,) = table.left_out
    assert reason == "granularity of te_nvfp4 is one of nvfp4_1x16, nvfp4_16x16; got 'rowwise'."
    assert repr(table).endswith(f"\nLeft out: {reason}")
    assert html.escape(f"Left out: {reason}") in table._repr_html_()
    table = f8.sweep("normal", ("e4m3fn", "e2m1fn"), k=64, accumulate=("hopper_fast", "exact"))
    assert [(r["format"], r["accumulate"]) for r in table.rows] == [
        ("e4m3fn", "hopper_fast"),
        ("e4m3fn", "exact"),
        ("e2m1fn", "exact"),
    ]
    assert "tensor cores multiply e4m3fn and e5m2" in table.left_out[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"distributions": "gaussian"}, "tail is one of normal, .*; got 'gaussian'"),
        ({"distributions": np.ones((2, 2))}, r"one value or a flat sequence of some; got array"),
        ({"distributions": np.ones(2)}, "got float. Use compare for a tensor"),
        ({"formats": "e4m3"}, "Did you mean 'e4m3fn'"),
        ({"formats": ()}, r"got \(\)"),
        ({"granularities": ("rowwise", "row")}, "got 'row'"),
        ({"policies": "mx_flor"}, "Did you mean 'mx_floor'"),
        ({"roundings": "up"}, "rounding is one of nearest_even, stochastic, .*got 'up'"),
        ({"k": 0}, r"k is an integer in \[1, 1048576\]; got 0"),
        ({"k": 1 << 40}, r"k is an integer in \[1, 1048576\]; got 1099511627776"),
        ({"k": 64, "accumulate": "hoper_fast"}, "Did you mean 'hopper_fast'"),
        ({"accumulate": "f32"}, "accumulate is of a sum over k; got no k"),
        ({"seed": -1}, "got -1"),
        (
            {"formats": "e2m1fn", "policies": "te_nvfp4"},
            "no combination exists: granularity of te_nvfp4",
        ),
        ({"k": 100}, "no combination exists: a tensor core needs K divisible by 32"),
    ],
    ids=str,
)
def test_bad_input_is_refused_before_anything_runs(options, text, monkeypatch):
    if "no combination" not in text:
        monkeypatch.setattr(sweeps, "_measure", None)
    with pytest.raises(ValueError, match=text):
        f8.sweep(**options)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"nu": 0}, "nu is from 0.001 to 1e"),
        ({"scale": "1"}, "scale is from 1e-30 to .* got '1'"),
        ({"token_share": (0.5, 2)}, r"token_share is from 0 to 1; got \(0.5, 2\)"),
        ({"channel_factor": -1}, "channel_factor is from 0"),
    ],
    ids=str,
)
def test_a_distribution_has_numbers_in_range(fields, text):
    with pytest.raises(ValueError, match=text):
        f8.Distribution(**fields)


def test_elements_beyond_float32_are_refused():
    with pytest.raises(ValueError, match="elements above 3e38"):
        f8.Distribution("lognormal", sigma=200).draw(0, (64, 64))


def test_one_seed_gives_the_same_bits_and_another_others():
    options = {"formats": "e4m3fn", "roundings": ("nearest_even", "stochastic"), "k": 64}
    first, again, other = (f8.sweep("normal", seed=seed, **options) for seed in (1, 1, 2))
    assert first.rows == again.rows
    assert first.rows[1]["sqnr"] < first.rows[0]["sqnr"] != other.rows[0]["sqnr"]


def test_stochastic_rounding_keeps_the_sum_of_small_numbers():
    small = f8.Distribution("lognormal", scale=2.0**-16)
    nearest, stochastic = f8.sweep(
        small, "e4m3fn", policies="unscaled", roundings=("nearest_even", "stochastic")
    ).rows
    assert nearest["bias"] < -0.98
    # 2^20 numbers of mean 1.65 * 2^-16 hit 2^-9 about 13,500 times: 0.9 % is one deviation
    assert abs(stochastic["bias"]) < 0.04
    assert nearest["policy"] == "unscaled"


@pytest.fixture(scope="module")
def table():
    tails = f8.Distribution(("normal", "laplace"), scale=(1, 1024))
    return f8.sweep(tails, ("e4m3fn", "e5m2"), policies="unscaled")


def test_the_table_has_a_column_for_what_varies_and_its_finding(table):
    header, *lines, finding, worst = repr(table).splitlines()
    assert header.split()[:5] == ["tail", "scale", "format", "SQNR,", "dB"]
    assert "worst row, dB" in header
    assert len(lines) == 8
    assert lines[0].split()[:4] == ["normal", "1", "e4m3fn", f"{table.rows[0]['sqnr']:.1f}"]
    best = max(table.rows, key=lambda row: row["sqnr"])
    text = f"SQNR, dB: best {best['sqnr']:.1f} (tail {best['tail']}, scale 1, format e4m3fn)"
    assert finding == text
    least = min(table.rows, key=lambda row: row["sqnr"])
    assert worst.startswith(f"and worst {least['sqnr']:.1f} (tail {least['tail']}, scale 1024")
    assert table.finding("clipped").startswith("clipped: best 0.00% (")
    shown = table._repr_html_()
    assert shown.count("<tr>") == 9
    assert "best" in shown


def test_equal_numbers_are_said_once():
    (row,) = (table := f8.sweep()).rows
    assert table.finding() == f"SQNR, dB: {row['sqnr']:.1f}"


def test_pandas_has_the_rows(table, monkeypatch):
    pandas = pytest.importorskip("pandas")
    frame = table.to_pandas()
    assert frame.equals(pandas.DataFrame(list(table.rows)))
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        table.to_pandas()


def test_a_heat_map_writes_each_number_and_names_its_axes(table):
    figure = table.heatmap("scale", "tail", "sqnr")
    assert isinstance(figure, Figure)
    assert [ax.get_title() for ax in figure.axes] == [
        "SQNR, dB, format e4m3fn",
        "SQNR, dB, format e5m2",
    ]
    for ax, fmt in zip(figure.axes, ("e4m3fn", "e5m2"), strict=True):
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("scale", "tail")
        assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1", "1024"]
        assert [tick.get_text() for tick in ax.get_yticklabels()] == ["normal", "laplace"]
        shown = {text.get_position(): text.get_text() for text in ax.texts}
        rows = [row for row in table.rows if row["format"] == fmt]
        assert shown == {
            ((1, 1024).index(row["scale"]), ("normal", "laplace").index(row["tail"])): (
                f"{row['sqnr']:.1f}"
            )
            for row in rows
        }
    ends = {ax.images[0].get_clim() for ax in figure.axes}
    numbers = [row["sqnr"] for row in table.rows]
    assert ends == {(min(numbers), max(numbers))}
    assert plots.png(figure).startswith(b"\x89PNG")


def test_a_map_of_all_that_varies_is_axes_and_its_gaps_are_what_was_left_out():
    table = f8.sweep("normal", "e2m1fn", ("rowwise", "nvfp4_1x16"), ("torchao", "te_nvfp4"))
    ax = table.heatmap("policy", "granularity", "zeroed")
    assert isinstance(ax, Axes)
    assert ax.get_title() == "became zero"
    assert sorted(text.get_position() for text in ax.texts) == [(0, 0), (0, 1), (1, 1)]
    share = table.rows[0]["zeroed"]
    assert f"{share:.2%}" in [text.get_text() for text in ax.texts]
    assert ax.figure.get_suptitle() == table.finding("zeroed")


def test_a_plot_has_a_line_for_each_of_the_other_axes(table):
    ax = table.plot("scale", "clipped")
    names = [f"tail {t}, format {f}" for t in ("normal", "laplace") for f in ("e4m3fn", "e5m2")]
    assert [line.get_label() for line in ax.lines] == names
    rows = [row for row in table.rows if (row["tail"], row["format"]) == ("laplace", "e4m3fn")]
    assert [*ax.lines[2].get_xdata()] == [1, 1024]
    assert [*ax.lines[2].get_ydata()] == [row["clipped"] for row in rows]
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_xscale()) == ("scale", "clipped", "log")


def test_a_figure_refuses_what_was_not_swept(table):
    with pytest.raises(ValueError, match="an axis is one of tail, scale, format; got 'policy'"):
        table.heatmap("policy", "tail")
    with pytest.raises(ValueError, match="a figure needs an axis of several values; got none"):
        f8.sweep().heatmap("tail", "format")
    with pytest.raises(ValueError, match=r"value is one of sqnr, .*; got 'sum_error'"):
        table.plot("scale", "sum_error")
    with pytest.raises(ValueError, match=r"tail has no numbers\. Use heatmap"):
        table.plot("tail")


def test_the_best_of_negative_decibels_is_the_largest():
    """Without a scale, small numbers rounded at random are noise far above themselves."""
    small = f8.Distribution("lognormal", scale=2.0**-16)
    roundings = ("nearest_even", "stochastic")
    sweep = f8.sweep(small, policies="unscaled", roundings=roundings)
    nearest, random = (row["sqnr"] for row in sweep.rows)
    assert random < -5 < nearest
    assert f"best {nearest:.1f}" in sweep.finding()


def test_two_policies_of_one_name_are_refused():
    own = [dataclasses.replace(POLICIES["te_delayed"], name="own", margin=n) for n in (0, 3)]
    with pytest.raises(ValueError, match="two policies or plans have one name"):
        f8.sweep(policies=own)


def test_a_map_without_finite_numbers_is_drawn():
    whole = f8.sweep(f8.Distribution(scale=[1.0, 2.0]), ("e4m3fn", "e5m2"))
    rows = tuple(row | {"sqnr": math.inf} for row in whole.rows)
    drawn = dataclasses.replace(whole, rows=rows).heatmap("scale", "format")
    assert [tick.get_text() for tick in drawn.get_yticklabels()] == ["e4m3fn", "e5m2"]
