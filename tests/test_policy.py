import dataclasses

import numpy as np
import pytest

from fp8ref import policy
from fp8ref.policy import POLICIES, ScalePolicy


def test_torchao_is_eps_1e_12_and_no_power_of_two():  # S-3
    assert (POLICIES["torchao"].eps, POLICIES["torchao"].power_of_two) == (1e-12, None)


def test_eps_is_that_of_torchao():  # S-3
    from torchao.float8.float8_utils import EPS

    assert {p.eps for p in POLICIES.values()} == {EPS}


@pytest.mark.parametrize(("name", "power_of_two"), [("torchao_pow2", "exp2_log2"), ("torchao_mask", "mask")])
def test_the_power_of_two_policies_differ_in_that_alone(name, power_of_two):  # S-4
    assert POLICIES[name] == ScalePolicy(name=name, eps=1e-12, power_of_two=power_of_two)


def test_by_name_finds_every_policy():
    assert [policy.by_name(name).name for name in POLICIES] == ["torchao", "torchao_pow2", "torchao_mask"]


def test_by_name_returns_a_policy_itself():
    mine = ScalePolicy(name="mine", eps=1e-6)
    assert policy.by_name(mine) is mine


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'deepseek'") as error:
        policy.by_name("deepseek")
    assert all(name in str(error.value) for name in POLICIES)


@pytest.mark.parametrize("eps", [0.0, -1e-12, 1e-34, 1e-29, 1.0, float("inf"), float("nan")])
def test_an_eps_out_of_range_is_refused(eps):
    with pytest.raises(ValueError, match="eps lies in"):
        ScalePolicy(name="mine", eps=eps)


def accepted(eps: float) -> bool:
    try:
        ScalePolicy(name="mine", eps=eps)
    except ValueError:
        return False
    return True


EPS = [eps for exponent in range(-45, 1) for digit in range(1, 10) if accepted(eps := float(f"{digit}e{exponent}"))]


def test_scales_are_finite_under_every_accepted_eps():  # S-3
    assert 1e-12 in EPS
    assert np.isfinite(np.float32([57344.0 / eps for eps in EPS])).all()


def test_subnormals_underflow_in_every_format_under_every_accepted_eps():  # S-3
    """2^-126 bounds the subnormals of float32; below half a format's smallest subnormal they round to zero."""
    for largest, smallest_subnormal in [(448.0, 2.0**-9), (57344.0, 2.0**-16), (240.0, 2.0**-10), (57344.0, 2.0**-17)]:
        assert 2.0**-126 * largest / min(EPS) < smallest_subnormal / 2


@pytest.mark.parametrize("power_of_two", ["nearest", "", True, 2])
def test_an_unknown_power_of_two_is_refused(power_of_two):
    with pytest.raises(ValueError, match="power_of_two is None, 'mask' or 'exp2_log2'"):
        ScalePolicy(name="mine", eps=1e-12, power_of_two=power_of_two)


def test_policies_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        POLICIES["torchao"].eps = 1e-6


def test_policies_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        ScalePolicy("mine", 1e-12)
