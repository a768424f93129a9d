from fp8ref.train.report import worst_layers


def line(step: int, **layers) -> dict:
    return {
        "step": step,
        "statistics": {
            f"{layer}/output/{role}": values
            for layer, of in layers.items()
            for role, values in of.items()
        },
    }


def test_layers_are_ordered_by_their_lowest_sqnr_of_any_step():
    lines = [
        line(
            0,
            a={"input": {"sqnr": 30.0, "underflow_rate": 0.5}, "weight": {"sqnr": 25.0}},
            b={"input": {"sqnr": 28.0}},
        ),
        line(
            5,
            a={"input": {"sqnr": 29.0}, "weight": {"sqnr": 27.0, "saturation_rate": 0.25}},
            b={"input": {"sqnr": 20.0}},
        ),
        line(9, a={"input": {"sqnr": 29.0}, "weight": {"sqnr": 26.0}}, b={"input": {"sqnr": 24.0}}),
    ]
    b, a = worst_layers.worst(lines)
    assert (b.layer, b.operand, b.step, b.sqnr, b.last) == ("b", "output/input", 5, 20.0, 24.0)
    assert (a.layer, a.operand, a.step, a.sqnr, a.last, a.lost, a.clipped) == (
        "a",
        "output/weight",
        0,
        25.0,
        26.0,
        0.5,
        0.25,
    )


def test_what_is_not_finite_is_worst_and_others_are_left_out():
    lines = [
        line(0, **{f"l{i}": {"input": {"sqnr": 20.0 + i}} for i in range(12)}),
        line(
            1,
            late={"input": {"sqnr": None, "non_finite": 1}},
            zeros={"input": {"sqnr": None, "non_finite": 0, "amax": 0.0}},
        ),
    ]
    found = worst_layers.worst(lines)
    assert [one.layer for one in found] == ["late", *(f"l{i}" for i in range(9))]
    assert found[1].last is None
    assert (found[0].sqnr, found[0].last) == (float("-inf"), float("-inf"))
    assert worst_layers.worst(lines, count=20)[-1].layer == "zeros"  # which lost nothing
    assert worst_layers.worst([]) == []


def test_clipped_probabilities_and_ds_show():
    counted = {
        "amax": 1.0,
        "count": 8,
        "saturated": 4,
        "lost": 2,
        "underflow_rate": 0.25,
        "overflow_rate": 0.5,
    }
    statistics = {
        "a/values/v": {"sqnr": 30.0, "saturation_rate": 0.125, "overflow_rate": 0.0},
        "a/values/p": counted,
    }
    (one,) = worst_layers.worst([{"step": 0, "statistics": statistics}])
    assert (one.operand, one.lost, one.clipped) == ("values/v", 0.25, 0.5)
    statistics["a/values/p"] = counted | {"overflow_rate": 0.0}
    assert worst_layers.worst([{"step": 0, "statistics": statistics}])[0].clipped == 0.125
