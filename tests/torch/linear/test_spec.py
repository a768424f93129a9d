"""What is constant of a linear: how GEMMs take its operands, and what casts them."""

import contextlib

import pytest
import torch
from helpers.processes.ranks import run
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8ref.recipe import RECIPES, ROLES
from fp8ref.spec import kernels
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


def error_of(recipe, kernels):
    """What the first pass by a choice says, or nothing ("")."""
    try:
        spec(recipe, kernels).by_kernels("input", torch.device("cpu"))
    except ValueError as error:
        return str(error)
    return ""


def failing(ranks):
    """What the first pass says where these ranks' self-check fails."""
    failed = distributed.get_rank() in ranks
    choice.explain = lambda *_: Kernels(not failed, "codes differ" if failed else "it passed")
    return error_of("tensorwise", "auto")


@pytest.mark.parametrize("ranks", [(), (0, 1), (0,), (1,)], ids=str)
def test_ranks_that_share_amaxes_cast_by_one_kind_of_kernels(ranks):  # M-11, P-2
    messages = run(2, failing, ranks)
    if len(ranks) != 1:
        assert messages == ["", ""]
        return
    for message in messages:
        assert "on another one they do not" in message
        assert "'plain' on every rank" in message


def chosen(recipe, *by_rank, traced=False):
    """What a pass by each of a rank's choices says; by_rank: the choices of each rank."""
    with FakeTensorMode() if traced else contextlib.nullcontext():
        return [error_of(recipe, kernels) for kernels in by_rank[distributed.get_rank()]]


@pytest.mark.parametrize("first", ["plain", "triton"])
def test_ranks_of_other_choices_raise_one_error(first):  # M-11, P-2
    second = {"plain": "triton", "triton": "plain"}[first]
    messages = dict(
        zip((first, second), run(2, chosen, "tensorwise", [first], [second]), strict=True)
    )
    assert "plain operations cast (asked for), on another one" in messages["plain"][0]
    assert "Triton kernels cast (interpreted on a CPU), on another" in messages["triton"][0]


def test_models_of_one_group_may_have_choices_of_their_own():
    both = ["plain", "triton", "auto"]
    assert run(2, chosen, "tensorwise", both, both) == [["", "", ""]] * 2
    # on a CPU "auto" is "plain"
    assert run(2, chosen, "tensorwise", ["auto", "triton"], ["plain", "triton"]) == [["", ""]] * 2


def test_a_rank_whose_choice_is_refused_ends_the_others():
    """A rank without Triton: the others do not wait for it."""
    refused, other = run(2, without_triton, timeout=60)
    assert "triton" in refused
    assert "on another one they do not" in other


def without_triton():
    if distributed.get_rank() == 0:
        kernels.installed = lambda: False
    return error_of("tensorwise", "triton")


@pytest.mark.parametrize(("recipe", "traced"), [("delayed", False), ("tensorwise", True)])
def test_no_rank_waits_where_none_merges_amaxes(recipe, traced):
    """Under delayed scaling, and in a trace: another rank may have its graph from a cache."""
    assert run(2, chosen_alone, recipe, traced, timeout=60) == [[""], []]


def chosen_alone(recipe, traced):
    messages = chosen(recipe, ["plain"], [], traced=traced)
    distributed.barrier()  # no rank ends before, whose store others read
    return messages


def test_a_rank_alone_compares_with_none(monkeypatch):
    monkeypatch.setattr(choice, "explain", lambda *_: Kernels(True, "it passed"))
    assert spec("tensorwise", groups=Groups()).by_kernels("input", torch.device("cpu"))
