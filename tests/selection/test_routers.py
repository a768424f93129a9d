"""Routers stay in high precision by their names and sizes (spec X-11)."""

import pytest

from fp8ref.recipe import RECIPES
from fp8ref.selection import routers
from fp8ref.selection.linears import Decision


def linear(path, n=16, **more):
    return Decision(
        path=path,
        shape=(n, 32),
        recipe=RECIPES["rowwise"],
        reason="every linear not filtered",
        **more,
    )


@pytest.mark.parametrize(
    ("decision", "fp8_fqns", "left_out"),
    [
        (linear("layers.0.mlp.gate"), [], True),
        (linear("layers.0.router.layer"), [], True),
        (linear("layers.0.mlp.gate"), ["layers.0"], False),
        (linear("layers.0.mlp.gate"), ["layers.1"], True),
        (linear("layers.0.mlp.gate", n=48), [], False),
        (linear("layers.0.mlp.gate_proj"), [], False),
        (linear("layers.0.mlp.gate", experts=16), [], False),  # a projection of experts
    ],
)
def test_a_linear_of_that_name_with_an_output_for_each_expert(decision, fp8_fqns, left_out):
    (found,) = routers.left_out([decision], {16}, fp8_fqns)
    assert found.fp8 != left_out
    assert found.reason == (routers.ROUTER if left_out else decision.reason)


def test_without_experts_there_is_no_router():
    assert routers.left_out([linear("gate")], set(), []) == [linear("gate")]
