import dataclasses

import pytest

from fp8ref.policy import POLICIES
from fp8ref.spec.delayed import DELAYED, DelayedScaling


def test_fp8refs_own_is_sixteen_amaxes_and_their_maximum():  # H-1
    own = DELAYED["delayed"]
    assert (own.history_length, own.amax_compute, own.interval) == (16, "max", 1)
    assert own.policy == POLICIES["te_delayed"]
    assert own.policy.margin == 0
    assert own == DelayedScaling(name="delayed")


def test_the_libraries_defaults():  # H-7, H-8
    assert DELAYED["te_delayed"].history_length == DELAYED["flax"].history_length == 1024
    assert DELAYED["flax"].policy.stored == "scale_inv"


def test_every_config_has_its_own_name_and_decisions():
    assert all(name == config.name for name, config in DELAYED.items())
    assert len(
        {dataclasses.replace(c, name="", history_length=1) for c in DELAYED.values()}
    ) == len(DELAYED)


def test_configs_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DELAYED["delayed"].interval = 2
    with pytest.raises(TypeError, match="positional"):
        DelayedScaling("mine")


@pytest.mark.parametrize(
    ("decisions", "message"),
    [
        ({"history_length": 0}, "history_length is an integer of at least 1; got 0"),
        ({"history_length": 1.0}, "history_length"),
        ({"interval": 0}, "interval is an integer"),
        ({"interval": True}, "interval"),
        ({"amax_compute": "mean"}, "amax_compute is one of max, most_recent"),
        ({"timing": "late"}, "timing is one of update, use"),
        ({"reuse": "mean"}, "reuse is one of max, sum"),
        ({"unused": "drop"}, "unused is one of keep, zero"),
        ({"zero": "keep"}, "zero is one of record, skip"),
        ({"non_finite": "keep"}, "non_finite is one of skip, record"),
        ({"nan_in_history": "keep"}, "nan_in_history is one of propagate, drop"),
        ({"policy": POLICIES["mx_floor"]}, "'mx_floor' has e8m0 scales"),
        ({"timing": "use", "interval": 2}, "interval=2"),
    ],
)
def test_decisions_that_do_not_exist_or_go_together_are_refused(decisions, message):
    with pytest.raises(ValueError, match=message):
        DelayedScaling(name="mine", **decisions)
