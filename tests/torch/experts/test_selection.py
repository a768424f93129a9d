"""Which layers of experts a conversion takes, with rules, and what it refuses before anything
changes (spec X-11, X-16).
"""

import pytest
import torch
from helpers.models.experts_mixture import mixture
from torch import distributed, nn

from fp8ref.recipe import RECIPES
from fp8ref.selection.routers import ROUTER
from fp8ref.selection.rules import Rule
from fp8ref.torch.experts import selection as experts_selection
from fp8ref.torch.experts.layer import GroupedLinear
from fp8ref.torch.experts.models import Experts
from fp8ref.torch.model import convert
from fp8ref.torch.model.convert import FP8_LINEARS
from fp8ref.torch.model.report import report


class OneMethod(nn.Module):
    """Experts whose products are of one method, as torchtitan's newest."""

    def __init__(self):
        super().__init__()
        self.num_experts = 4
        self.w13, self.w2_EDF = (
            nn.Parameter(torch.randn(4, 64, 32)),
            nn.Parameter(torch.randn(4, 32, 32)),
        )

    def _grouped_mm(self, *, A, weight_EOI, offs):
        raise AssertionError("replaced")


def one_method():
    return nn.ModuleDict({"up": nn.Linear(32, 32), "experts": OneMethod()}).bfloat16()


class Projections(nn.Module):
    """A router, and a projection of 16 experts."""

    def __init__(self):
        super().__init__()
        self.router, self.plain = nn.Linear(32, 16), nn.Linear(32, 16)
        self.up = GroupedLinear(16, 32, 32)


def unchanged(model):
    return not any(
        isinstance(m, (Experts, *FP8_LINEARS)) or (isinstance(m, GroupedLinear) and m.in_fp8)
        for m in model.modules()
    )


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (
            Rule(layers=("first.w2",), gemms=("output",), recipe="mxfp8"),
            "first.w2: blocks begin with their group",
        ),
        (
            Rule(layers=("first.w1",), roles=("input",), granularity="mx_32x32"),
            "first.w1: no block of a grouped input has several",
        ),
    ],
)
def test_rules_that_no_grouped_linear_runs_change_nothing(rule, said):
    model = mixture()
    with pytest.raises(ValueError, match=said):
        convert.convert(model, "delayed" if rule.recipe else "mxfp8", experts=True, rules=(rule,))
    assert unchanged(model)


def test_rules_that_no_projection_runs_change_nothing():
    model = Projections()
    with pytest.raises(ValueError, match="up: blocks begin with their group"):
        convert.convert(
            model, "delayed", rules=(Rule(layers=("up",), gemms=("output",), recipe="mxfp8"),)
        )
    assert unchanged(model)


@pytest.fixture
def group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("made", "recipe", "rules", "path"),
    [
        (mixture, "tensorwise", (), "first.w1"),
        (mixture, "rowwise", (), "first.w1"),
        (mixture, "delayed", (Rule(layers=("first", "second"), recipe="tensorwise"),), "first.w1"),
        (
            mixture,
            "delayed",
            (Rule(layers=("second.w3",), roles=("grad_output",), recipe="tensorwise"),),
            "second.w3",
        ),
        (one_method, "tensorwise", (), "experts"),
        (
            Projections,
            "delayed",
            (Rule(layers=("up",), roles=("input",), recipe="tensorwise"),),
            "up",
        ),
    ],
)
def test_ranks_scale_by_shared_amaxes_or_say_so(made, recipe, rules, path, group):  # P-2, X-3, X-11
    model = made()
    with pytest.raises(
        ValueError,
        match="experts scale by their own rank's amaxes.* got amax_group with recipe .* of "
        f"{path}\\. Leave",
    ):
        convert.convert(
            model, recipe, experts=made is not Projections, amax_group=group, rules=rules
        )
    assert unchanged(model)


def test_ranks_share_amaxes_of_experts_under_delayed_scaling(group):  # P-2, X-9
    """Weights are the same on all ranks: their own amaxes are shared ones.

    So are those of groups in grouped linears.
    """
    rule = Rule(layers=("first",), roles=("weight",), recipe="tensorwise")
    model = convert.convert(mixture(), "delayed", experts=True, amax_group=group, rules=(rule,))
    assert isinstance(model.first, Experts)
    # and so a dynamic recipe for the linears alone
    every = Rule(layers=("first", "second"), recipe="delayed")
    model = convert.convert(mixture(), "tensorwise", experts=True, amax_group=group, rules=(every,))
    assert {one.recipe.delayed for one in model.first.grouped_recipes.values()} == {True}
    assert (
        convert.convert(Projections(), "tensorwise", amax_group=group).up.shared == group.group_name
    )


def test_the_report_says_what_rules_did_to_experts():
    rules = (Rule(layers=("first",), recipe="bf16"), Rule(layers=("second.w2",), recipe="rowwise"))
    model = convert.convert(mixture(), "tensorwise", experts=True, rules=rules)
    rows = {row.path: row for row in report(model).rows}
    assert (
        rows["first"].recipe,
        rows["first"].kernel,
        rows["first"].in_fp8,
        rows["first"].reason,
    ) == (None, None, 0, "rule 1")
    assert rows["second"].recipe == "tensorwise, tensorwise with rules"
    assert rows["second"].kernel == "one GEMM for each group"
    assert rows["second"].reason == "converted; w2: rule 2"
    assert "(w1=bf16" not in repr(model)
    assert model.first.extra_repr() == "w1=bf16, w2=bf16, w3=bf16"
    assert model.second.extra_repr() == "w1=tensorwise, w2=tensorwise with rules, w3=tensorwise"
    model = convert.convert(mixture(), "tensorwise", experts=True)
    assert model.first.extra_repr() == "recipe=tensorwise"
    assert {row.path: row.reason for row in report(model).rows}["first"] == "converted"


def test_the_report_names_rules_that_do_not_reach_one_method():
    rules = (
        Rule(layers=("up",), recipe="rowwise"),
        Rule(layers=("*",), roles=("input",), recipe="bf16"),
    )
    model = convert.convert(one_method(), "tensorwise", experts=True, rules=rules)
    (row,) = (row for row in report(model).rows if row.path == "experts")
    assert (row.recipe, row.in_fp8) == ("tensorwise", 4 * 96 * 32)
    assert (
        row.reason
        == "converted; its weights share one method, so that rule 2 does not change them (X-16)"
    )
    convert.convert(plain := one_method(), "tensorwise", experts=True)
    assert {row.path: row.reason for row in report(plain).rows}["experts"] == "converted"


def test_a_router_beside_projections_stays_in_high_precision():
    model = convert.convert(Projections(), "rowwise")
    assert {row.path: row.reason for row in report(model).rows}["router"] == ROUTER
    assert isinstance(model.plain, FP8_LINEARS)
    assert isinstance(
        convert.convert(Projections(), "rowwise", fp8_fqns=["router"]).router, FP8_LINEARS
    )
    # no experts in FP8
    assert isinstance(
        convert.convert(Projections(), "rowwise", filter_fqns=["up"]).router, FP8_LINEARS
    )


def test_patterns_of_experts_alone_are_not_left_to_linears():
    model = mixture()
    chosen, others = experts_selection.choose(model, RECIPES["rowwise"], ["first", "up"], ["up"])
    assert list(chosen) == ["second"]
    assert others == ["up"]
