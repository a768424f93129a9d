import json

import numpy as np
import pytest
from matplotlib.figure import Figure

from fp8ref.plots import readout


def test_named_lines_and_labels_are_read():
    figure = Figure(figsize=(4, 3))
    ax = figure.add_axes((0.25, 0.5, 0.5, 0.25))
    (named,) = ax.plot([0, 1, 2], [1.23456789, np.nan, 4], color="#0067a8")
    readout.name(named, "$run_", low=np.array([1, 1, 1]), high=np.array([2, 2, 2]))
    ax.plot([5], [123456.75], label="other", color="red")
    ax.axhline(0)  # has no name
    ax.set(xlabel="step", yscale="log")
    (found,) = json.loads(readout.of(figure))
    assert found["box"] == [72, 54, 216, 108]  # of 288 x 216 points, from the top
    assert (found["log"], found["xlabel"]) == (True, "step")
    first, second = found["series"]
    assert first == {
        "name": "$run_",
        "color": "#0067a8",
        "x": [0, 1, 2],
        "y": [1.2346, None, 4],
        "low": [1, 1, 1],
        "high": [2, 2, 2],
    }
    assert second == {"name": "other", "color": "#ff0000", "x": [5], "y": [123456.75]}
    assert readout.name_of(named) == "$run_"
    assert readout.name_of(ax.lines[1]) is None


def test_maps_have_their_cells_and_colorbars_nothing():
    figure = Figure()
    ax = figure.subplots()
    image = ax.imshow(np.ma.masked_invalid([[1.0, np.nan], [3.0, 4.0]]))
    readout.cells(image, ["a", "b"], ["step 0", "step 5"], what="dB", places=[0, 5])
    figure.colorbar(image, ax=ax)
    found, bar = json.loads(readout.of(figure))
    assert bar is None
    assert found["values"] == [[1, None], [3, 4]]
    assert (found["rows"], found["labels"], found["columns"], found["places"]) == (
        ["a", "b"],
        ["a", "b"],
        ["step 0", "step 5"],
        ["0", "5"],
    )
    assert found["y"] == [1.5, -0.5]
    with pytest.raises(ValueError, match="as many names as rows and columns"):
        readout.cells(image, ["a"], ["0", "5"], what="dB")


def test_places_of_a_line_have_names():
    figure = Figure()
    ax = figure.subplots()
    ax.plot([1, 2], [0, 1], label="x")
    readout.points(ax, ["first", "last"])
    assert json.loads(readout.of(figure))[0]["points"] == ["first", "last"]
