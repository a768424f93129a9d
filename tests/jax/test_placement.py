"""Placements that contradict themselves, and what follows from one. What a mesh makes of them: ``test_sharding.py``."""

import pytest

from fp8ref.jax.placement import Placement, Reduction


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"m": "data"}, r"m is a tuple.*\('data',\)"),
        ({"m": ("data",), "n": ("data",)}, "one of m, n and k; got data"),
        ({"fsdp": ("fsdp",)}, "among m; got fsdp"),
        ({"sequence": True}, "column-parallel"),
        ({"scope": "shard"}, "'global' or 'local'; got 'shard'"),
    ],
)
def test_placements_check_themselves(fields, message):
    with pytest.raises(ValueError, match=message):
        Placement(**fields)


def test_what_is_gathered_and_summed_follows_from_the_cuts():  # P-2, P-6, P-7
    """Tokens over data and fsdp, output features over tensor; the weight's shards over fsdp."""
    placement = Placement(m=("data", "fsdp"), n=("tensor",), fsdp=("fsdp",))
    assert placement.at_rest("input") == (("data", "fsdp"), ())
    assert placement.at_rest("weight") == (("tensor", "fsdp"), ())
    assert placement.gathered("weight") == ("fsdp",)
    assert placement.reduction("output", 1).axes == ()
    assert placement.reduction("grad_input", 1) == Reduction(sum=("tensor",), parts="result")
    grad_weight = placement.reduction("grad_weight", 1)
    assert (grad_weight.sum, grad_weight.scatter) == (("data",), ("fsdp",))
