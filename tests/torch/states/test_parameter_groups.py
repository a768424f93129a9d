"""What a group of parameters says.

What the optimizer does with it is tested in ``test_states.py``.
"""

import pytest
import torch

from fp8ref.spec.states import saved as layout_decisions
from fp8ref.spec.states.layouts import by_name, scalars
from fp8ref.torch.states import parameter_groups

LAYOUT = by_name("sqrt_e4m3")
GROUP = {
    "lr": 1e-3,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "seed": 0,
    "layout": LAYOUT.name,
}
GROUP |= {"decisions": layout_decisions.written(LAYOUT)}


def test_numbers_may_be_tensors_and_have_their_own_value():
    numbers = {
        "lr": torch.tensor(0.25),
        "betas": [torch.tensor(0.5), 0.75],
        "eps": torch.tensor([2.0**-20]),
    }
    wanted = scalars(3, learning_rate=0.25, b1=0.5, b2=0.75, eps=2.0**-20, weight_decay=0.0)
    assert parameter_groups.scalars(GROUP | numbers, LAYOUT, 3) == wanted


@pytest.mark.parametrize("key", parameter_groups.LACKING)
def test_options_that_are_not_there_may_not_be_set(key):
    parameter_groups.check(GROUP | {key: False, "name": "decayed"}, LAYOUT)
    with pytest.raises(ValueError, match=f"fp8ref.torch.states has no {key}; a group sets it"):
        parameter_groups.check(GROUP | {key: True}, LAYOUT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"betas": (0.9,)}, r"betas are two numbers, such as \(0.9, 0.95\); got \(0.9,\)"),
        ({"betas": (0.9, "x")}, "b2 is a number, or a tensor of one element; got 'x'"),
        ({"lr": torch.ones(2)}, "lr is a number, or a tensor of one element; got tensor"),
        ({"weight_decay": None}, "weight_decay is a number"),
    ],
)
def test_what_is_no_number_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        parameter_groups.check(GROUP | changes, LAYOUT)
