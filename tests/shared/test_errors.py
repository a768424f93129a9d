"""Checks of names, integers and seeds that every room shares: what passes, and the error."""

import pytest

from fp8ref.shared import errors


def test_one_of_takes_a_choice_and_names_all_others():
    assert errors.one_of("bias", None, (None, "fused")) is None
    with pytest.raises(ValueError, match=r"^scope is one of global, local; got 'shard'\.$"):
        errors.one_of("scope", "shard", iter(("global", "local")))


@pytest.mark.parametrize(("value", "most"), [(1, None), (10**30, None), (1, 1), (16, 16)])
def test_integers_within_bounds_pass(value, most):
    assert errors.integer("n", value, 1, most) is None


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
def test_an_integer_below_its_least_is_refused(value):
    with pytest.raises(ValueError, match=rf"^n is an integer of at least 1; got {value!r}\.$"):
        errors.integer("n", value, 1)


@pytest.mark.parametrize("value", [-1, 17, False, 3.5])
def test_an_integer_outside_its_range_is_refused(value):
    with pytest.raises(ValueError, match=rf"^n is an integer in \[0, 16\]; got {value!r}\.$"):
        errors.integer("n", value, 0, 16)


@pytest.mark.parametrize("value", [0, 2**64 - 1])
def test_seeds_pass(value):
    assert errors.seed(value) is None


@pytest.mark.parametrize("value", [-1, 2**64, True, 1.0, None])
def test_what_is_no_seed_is_refused(value):
    with pytest.raises(ValueError, match=rf"^a seed is an integer in \[0, 2\^64\); got {value!r}"):
        errors.seed(value)
