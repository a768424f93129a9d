"""Amaxes of experts that devices share, by hand from the sizes of tiny-moe; ``test_collectives``
compares compiled programs.
"""

import collections

import pytest

from fp8ref.estimate.collectives import experts as expert_collectives
from fp8ref.train.config import config as configs

LAYERS, EXPERTS, H, F = 2, 8, 128, 128


def shared(recipe, **parallel):
    """{devices: numbers}"""
    config = configs.load("tiny-moe").replace(numerics={"recipe": recipe}, parallel=parallel)
    assert (config.model.num_hidden_layers, config.model.num_experts) == (LAYERS, EXPERTS)
    assert (config.model.hidden_size, config.model.intermediate_size) == (H, F)
    found: collections.Counter = collections.Counter()
    for devices, numbers in expert_collectives.amaxes(config):
        if devices > 1 and numbers:
            found[devices] += numbers
    return found


def test_an_amax_of_each_expert():
    """Where all devices have all experts: the input of gate and up, down's, and three gradients."""
    assert shared("tensorwise", data=2) == {2: LAYERS * EXPERTS * (2 + 3)}
    assert shared("tensorwise", data=2, checkpointing="full") == {2: LAYERS * EXPERTS * (2 * 2 + 3)}
    assert shared("bf16", data=2) == shared("blockwise", data=2) == {}


def test_where_fsdp_gathers_experts_each_projection_takes_its_own_again():
    """One amax for gate and up in the forward pass and down's, three inputs and three gradients in
    the backward pass.
    """
    assert shared("tensorwise", fsdp=2) == {2: LAYERS * EXPERTS * (2 + 3 + 3)}


def test_experts_apart_share_amaxes_only_of_what_is_cast_before_it_moves():
    """Rows of gate and up and gradients of down's results, of all experts.

    With copies the others too, of a device's own experts.
    """
    assert shared("tensorwise", expert=4) == {4: LAYERS * EXPERTS * 2}
    assert shared("tensorwise", expert=4, expert_dispatch="compute") == {}
    assert shared("tensorwise", data=2, expert=2) == {
        4: LAYERS * EXPERTS * 2,
        2: LAYERS * EXPERTS // 2 * 3,
    }


def test_columns_of_a_group():
    """Of what grad_weight reduces over rows: the inputs of gate and up, and of down; three
    gradients. A row's amax is its device's own.
    """
    assert shared("rowwise", expert=4) == {}
    assert shared("rowwise", data=2) == {2: LAYERS * EXPERTS * ((H + F) + (F + F + H))}
    assert shared("rowwise", fsdp=2) == {2: LAYERS * EXPERTS * ((2 * H + F) + (F + F + H))}
    assert shared("rowwise", data=2, amax_scope="local") == {}


@pytest.mark.parametrize(
    ("parallel", "asked"),
    [
        ({"expert": 4}, 1),
        ({"data": 4}, 1),
        ({"expert": 4, "checkpointing": "full"}, 2),
        ({"fsdp": 2, "expert": 2}, 3),
        ({"fsdp": 4}, 4),
    ],
    ids=str,
)
def test_what_delayed_scaling_observes(parallel, asked):
    """Two inputs, three weights, three gradients, and whether there are rows: once, again behind a
    barrier, and there for each projection that observes.
    """
    assert shared("delayed", **parallel) == {4: LAYERS * (8 + asked)}
