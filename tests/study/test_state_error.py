import dataclasses
import json

import numpy as np
import pytest
import torch

from fp8ref import study
from fp8ref.sim.states import health, states
from fp8ref.spec.states.layouts import LAYOUTS


def gradients(steps: int = 3) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    size = np.exp(2 * rng.standard_normal((64, 64)))
    return [
        {
            "w": (1e-3 * size * rng.standard_normal((64, 64))).astype(np.float32),
            "b": rng.standard_normal(8).astype(np.float32),
        }
        for _ in range(steps)
    ]


def test_figures_are_those_of_the_simulators_steps():  # O-12
    found = study.judge_states(gradients(), ["te", "sqrt_e4m3"], b2=0.99)
    assert found.steps == 3
    for layout in ("te", "sqrt_e4m3"):
        state, p = states.init((64 * 64,), layout), np.zeros(64 * 64, np.float32)
        for of_step in gradients():
            before, g = state, of_step["w"].reshape(-1)
            # figures depend on no weight
            p, state = states.step(
                p, g, before, states.AdamW(learning_rate=1e-3, b2=0.99, layout=layout)
            )
        assert found.layouts[layout]["w"] == health.measure(
            g, before, state, b1=0.9, b2=0.99, layout=layout
        )
    whole, parts = found.layouts["te"][""], [found.layouts["te"][name] for name in ("w", "b")]
    assert whole.count == 64 * 64 + 8
    assert whole.v_lost == sum(one.v_lost for one in parts)
    assert found.layouts["sqrt_e4m3"][""].v_lost < whole.v_lost


def test_all_layouts_are_judged_and_float32_costs_nothing():
    found = study.judge_states(gradients(2))
    assert found.layouts.keys() == LAYOUTS.keys()
    assert found.layouts["float32"][""].update_error == 0
    assert found.worst("te", 1)[0][0] == max(
        ("w", "b"), key=lambda name: found.layouts["te"][name].update_error
    )
    said = json.loads(json.dumps(found.to_dict()))
    assert said["layouts"]["te"]["w"]["count"] == 64 * 64
    found.print()


def test_large_parameters_are_sampled():
    found = study.judge_states([{"w": np.ones((100, 100), np.float32)}], ["te"], most=3000)
    assert found.layouts["te"]["w"].count == 2048


@pytest.mark.parametrize(
    ("steps", "layouts", "message"),
    [
        ([], None, "at least one step"),
        ([{}], None, "at least one step"),
        ([{"a": np.ones(2)}, {"b": np.ones(2)}], ["te"], "step 1 has others"),
        ([{"a": np.ones(2)}, {"a": np.ones(3)}], ["te"], "step 1 has others"),
        ([{"a": np.ones(2)}], ["msamp_o2"], "'msamp_o2' stores masters too"),
        ([{"a": np.ones(2)}], ["absent"], "absent"),
    ],
)
def test_what_cannot_be_judged_is_refused(steps, layouts, message):
    with pytest.raises(ValueError, match=message):
        study.judge_states(steps, layouts)


def test_gradients_as_tensors_of_pytorch():
    g = torch.linspace(-1, 1, 64).reshape(4, 16)
    for given in (g, g.bfloat16(), g.double()):
        found, expected = (
            study.judge_states([{"w": x}], ["torchao"]).to_dict()
            for x in (given, given.float().numpy())
        )
        assert found == expected


def test_gradients_that_are_no_floats():
    with pytest.raises(ValueError, match="gradients are of floats; got int64 for 'w'"):
        study.judge_states([{"w": np.ones((4, 4), np.int64)}], ["torchao"])
    with pytest.raises(ValueError, match="gradients are of floats; got <U1 for 'w'"):
        study.judge_states([{"w": ["a"]}], ["torchao"])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.int32])
def test_gradients_of_pytorch_are_of_any_dtype(dtype):
    gradient = torch.arange(1, 65).reshape(8, 8) % 8
    found = study.judge_states([{"w": gradient.to(dtype)}], ["torchao"])
    assert found == study.judge_states([{"w": gradient.float().numpy()}], ["torchao"])


def test_a_layout_whose_error_is_not_a_number_ranks_last():
    found = study.judge_states(gradients(2), ["te", "float32"])
    nan = {
        name: dataclasses.replace(one, update_error=float("nan"))
        for name, one in found.layouts["float32"].items()
    }
    judged = study.JudgedStates(steps=2, layouts={"nan": nan, **found.layouts})
    assert judged.ranked() == ["float32", "te", "nan"]
    mixed = study.JudgedStates(steps=2, layouts={"te": {**found.layouts["te"], "w": nan["w"]}})
    assert mixed.worst("te", 1)[0][0] == "w"
