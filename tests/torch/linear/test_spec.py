"""What is constant of a linear: how GEMMs take its operands, and what casts them."""

import pytest
import torch
from helpers.processes.ranks import run
from torch import distributed

from fp8ref.recipe import RECIPES, ROLES
from fp8ref.spec.kernels import Kernels
from fp8ref.torch.kernels import choice
from fp8ref.torch.linear.spec import Spec
from fp8ref.torch.quantize.scaling import Groups

GROUPS = Groups(batch="0", every="0")


def spec(recipe, kernels="auto", groups=GROUPS):
    return Spec(RECIPES[recipe], groups, kernels)


def test_both_gemms_of_a_role_are_in_the_order_of_a_step():  # L-2
    axes = {role: [use.axis for use in uses] for role, uses in spec("rowwise").role_uses.items()}
    assert axes == {role: [-1, -2] for role in ROLES}


def test_one_scale_in_one_format_serves_both_gemms():  # L-3
    assert all(spec("tensorwise").cast_once.values())
    assert not any(spec("rowwise").cast_once.values())


def test_ranks_merge_amaxes_of_what_they_cut():  # P-5
    groups = {role: [use.group for use in uses] for role, uses in spec("rowwise").role_uses.items()}
    assert groups == {"input": [None, "0"], "weight": [None] * 2, "grad_output": [None, "0"]}


def test_equal_specs_have_one_number():
    first, second = spec("tensorwise"), spec("rowwise")
    assert first.number == spec("tensorwise").number != second.number
    assert Spec.numbered(second.number) == second


def failing(ranks):
    """What the first pass says where these ranks' self-check fails."""
    failed = distributed.get_rank() in ranks
    choice.explain = lambda *_: Kernels(not failed, "codes differ" if failed else "it passed")
    try:
        spec("tensorwise").by_kernels("input", torch.device("cpu"))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ranks", [(), (0, 1), (0,), (1,)], ids=str)
def test_ranks_that_share_amaxes_cast_by_one_kind_of_kernels(ranks):  # M-11, P-2
    messages = sorted(run(2, failing, ranks))
    if len(ranks) != 1:
        assert messages == ["", ""]
        return
    assert messages[0] == ""
    assert "on another one" in messages[1]
    assert "'plain' on every rank" in messages[1]


def test_a_rank_alone_compares_with_none(monkeypatch):
    monkeypatch.setattr(choice, "explain", lambda *_: Kernels(True, "it passed"))
    assert spec("tensorwise", groups=Groups()).by_kernels("input", torch.device("cpu"))
