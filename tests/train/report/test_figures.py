import numpy as np
import pytest
from helpers.training import made_runs
from helpers.training.made_runs import falling

from fp8ref.train.report import figures, svg, verdict
from fp8ref.train.report import gap as gaps


@pytest.fixture
def group(tmp_path, small):
    return [
        *made_runs.three_seeds(tmp_path, small),
        made_runs.make(tmp_path / "_fp8", small, falling(above=0.3, wobble=0), recipe="tensorwise"),
    ]


@pytest.fixture
def seeds(group):
    return verdict.seeds_of(group)


def band_of(ax) -> np.ndarray:
    """The corners of an axes' first band."""
    return ax.collections[0].get_paths()[0].vertices


def test_losses_are_running_means_over_the_band(group, seeds):
    (ax,) = figures.losses(group, seeds).axes
    assert len(ax.lines) == 4
    np.testing.assert_allclose(
        ax.lines[3].get_ydata(), gaps.running_mean(np.array(list(group[3].losses.values())), 5)
    )
    np.testing.assert_array_equal(ax.lines[3].get_xdata(), range(4, 60))
    assert [line.get_color() for line in ax.lines] == [*[svg.SEED] * 3, svg.RUNS[0]]
    np.testing.assert_allclose(
        (band_of(ax)[:, 1].min(), band_of(ax)[:, 1].max()),
        (seeds.band[0].min(), seeds.band[1].max()),
    )


def test_a_legend_names_seeds_once_and_runs_as_they_are(group, seeds):
    (legend,) = figures.losses(group, seeds).legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown[0] == "bf16 seeds"
    assert len(shown) == 2
    assert shown[1].replace("\n", "") == group[3].name
    assert not any(text.get_parse_math() for text in legend.get_texts())


def test_gaps_are_drawn_with_their_interval_over_the_margin(group, seeds):
    compared = verdict.compare([group[3]], [group[0]], matched=True)
    (ax,) = figures.gaps([compared], group, seeds, margin=0.1).axes
    margin, interval = ax.collections
    np.testing.assert_allclose(margin.get_paths()[0].vertices[:, 1].max(), 0.1)
    np.testing.assert_allclose(
        interval.get_paths()[0].vertices[:, 1].max(), compared.gap.high.max()
    )
    np.testing.assert_allclose(ax.lines[1].get_ydata(), compared.gap.mean)


def test_without_noise_there_is_no_band(group):
    few = verdict.seeds_of(group[:1])
    assert not figures.losses(group[:1], few).axes[0].collections


def test_a_metric_is_drawn_where_it_was_written(group, seeds):
    (ax,) = figures.metric(group, seeds, "val_loss", "loss").axes
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), [9, 19, 29, 39, 49, 59])
    assert figures.metric(group, seeds, "absent", "nothing") is None


def line(step: int, **operands) -> dict:
    return {
        "step": step,
        "statistics": {
            key.replace("__", "/").replace("_of_", "."): values for key, values in operands.items()
        },
    }


def test_maps_of_a_group_have_one_scale():
    runs = [
        [line(0, a__output__input={"sqnr": low}, a__output__weight={"sqnr": 35.0})]
        for low in (12.0, 30.0)
    ]
    ends = figures.scale(runs, "sqnr")
    assert ends == (12, 35)
    figure = figures.heat_map(runs[1], "sqnr", ends)
    images = [ax.images[0] for ax in figure.axes if ax.images]
    assert [image.get_clim() for image in images] == [ends, ends]
    assert len(figure.axes) == 3  # two roles and one colorbar
    assert figures.scale([[line(0, a__output__input={"amax": 1.0})]], "amax") is None
    assert figures.scale([[]], "sqnr") is None


def maps(measure: str, *lines) -> dict:
    figure = figures.heat_map(lines, measure)
    return {
        ax.get_title(loc="left"): np.ma.filled(ax.images[0].get_array(), np.nan)
        for ax in figure.axes
        if ax.images and ax.get_title(loc="left")
    }


def test_a_heat_map_is_layers_by_steps_one_a_role():
    lines = [
        line(
            s,
            a__output__input={"amax": 2.0**s},
            b__output__input={"amax": 8.0},
            a__output__weight={"amax": 1.0},
        )
        for s in (0, 5)
    ]
    found = maps("amax", *lines)
    assert found.keys() == {"input", "weight"}
    np.testing.assert_array_equal(found["input"], [[0, 5], [3, 3]])


@pytest.mark.parametrize(
    ("measure", "worse"), [("underflow_rate", 20.0), ("saturation_rate", 20.0), ("sqnr", 0.1)]
)
def test_of_two_gemms_the_worse_is_shown(measure, worse):
    found = maps(
        measure, line(0, a__output__input={measure: 0.1}, a__grad_weight__input={measure: 0.2})
    )
    np.testing.assert_allclose(found["input"], [[worse]])


def test_what_is_not_finite_or_was_not_recorded_is_blank():
    lines = (
        line(0, a__output__input={"sqnr": 30.0}, b__output__input={"sqnr": None}),
        line(9, b__output__input={"sqnr": 20.0}),
    )
    np.testing.assert_array_equal(maps("sqnr", *lines)["input"], [[30, np.nan], [np.nan, 20]])
    assert figures.heat_map(lines, "amax") is None


def test_many_layers_keep_their_labels_apart():
    lines = [
        line(
            0, **{f"model_of_layers_of_{i}_of_up__output__input": {"amax": 1.0} for i in range(100)}
        )
    ]
    ax = figures.heat_map(lines, "amax").axes[0]
    assert [text.get_text() for text in ax.get_yticklabels()][:2] == ["0.up", "5.up"]


def test_a_long_run_is_drawn_by_some_of_its_points_and_all_of_its_peaks(tmp_path, small):
    losses = np.full(2500, 2.0)
    losses[1234] = 90.0
    run = made_runs.make(tmp_path / "long", small, losses)
    seeds = verdict.seeds_of([run])
    (line,) = figures.metric([run], seeds, "grad_norm", "norm").axes[0].lines
    assert len(line.get_xdata()) == 834  # every third
    assert line.get_xdata()[-1] == 2499
    assert max(line.get_ydata()) == 91.0
    (line,) = figures.losses([run], seeds).axes[0].lines
    assert len(line.get_xdata()) == 751  # of the 2251 from the end of the first window on
    assert line.get_xdata()[-1] == 2499


def test_the_health_of_states_over_steps():
    counts = {
        "count": 200,
        "v_lost": 0,
        "bounded": 0,
        "clipped_m": 0,
        "clipped_v": 0,
        "stalled_m": 50,
        "stalled_v": 100,
    }
    lines = [
        {
            "step": step,
            "statistics": {},
            "states": {"": counts | {"update_error": error, "root_bias": -0.125}},
        }
        for step, error in ((0, 0.5), (4, None))
    ]
    upper, lower = figures.states(lines).axes
    assert {line.get_label(): line.get_ydata().tolist() for line in upper.lines} == {
        "m stalled": [25, 25],
        "v stalled": [50, 50],
    }
    error, bias = (line.get_ydata() for line in lower.lines[:2])
    assert error[0] == 50
    assert np.isnan(error[1])
    assert bias.tolist() == [-12.5, -12.5]
    assert figures.states([{"step": 0, "statistics": {}}]) is None
