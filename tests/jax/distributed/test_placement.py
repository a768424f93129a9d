"""Placements that contradict themselves, and what follows from one.

What a mesh makes of them: ``test_sharding.py``.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8ref.jax.distributed.placement import Placement, Reduction


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"m": "data"}, r"m is a tuple.*\('data',\)"),
        ({"m": ("data",), "n": ("data",)}, "one of m, n, k; got data twice"),
        ({"fsdp": ("fsdp",)}, "so m has them; got fsdp"),
        ({"sequence": True}, "column- or row-parallel"),
        ({"scope": "shard"}, "one of global, local; got 'shard'"),
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


@pytest.mark.parametrize(
    ("role", "cuts"),
    [
        ("input", (("m", "f"), ("k",))),
        ("weight", (("n", "f"), ("k",))),
        ("grad_output", (("m", "f"), ("n",))),
    ],
)
def test_an_amax_is_reduced_over_what_cuts_its_group(role, cuts):  # P-2
    """A tensor's scale spans rows and columns, a row's what is reduced, and no layout cuts a
    block.
    """
    placement = Placement(m=("m", "f"), n=("n",), k=("k",), fsdp=("f",))
    rows, columns = cuts
    assert placement.amax_axes(role, "tensorwise", -1) == (*rows, *columns)
    assert (
        placement.amax_axes(role, "rowwise", -1)
        == placement.amax_axes(role, "rowwise", 1)
        == columns
    )
    assert (
        placement.amax_axes(role, "rowwise", -2) == placement.amax_axes(role, "rowwise", 0) == rows
    )
    assert placement.amax_axes(role, "1x128", -1) == ()
    local = dataclasses.replace(placement, scope="local")  # of a device's own tokens
    expected = (*rows, *columns) if role == "weight" else columns
    assert local.amax_axes(role, "tensorwise", -1) == expected


def test_a_device_keeps_the_scales_of_its_rows_of_each_group():  # P-6
    """Two groups of four rows, whose results are scattered over four devices."""
    scale = jnp.arange(8, dtype=jnp.float32)[:, None]
    reduction = Reduction(scatter=("fsdp",), outer=2)
    found = jax.vmap(lambda _: reduction.own_rows(scale), axis_name="fsdp")(jnp.arange(4))
    np.testing.assert_array_equal(found[..., 0], [[0, 4], [1, 5], [2, 6], [3, 7]])
    arranged = jax.vmap(lambda _: reduction.arranged(scale), axis_name="fsdp")(jnp.arange(4))
    np.testing.assert_array_equal(arranged[0, :, 0], [0, 4, 1, 5, 2, 6, 3, 7])
