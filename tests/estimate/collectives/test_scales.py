"""Amaxes and scales that devices share, by hand from the sizes in tests/helpers/models/sizes.py;
``test_collectives`` compares compiled programs.
"""

import collections

from helpers.models import sizes

from fp8ref.estimate.collectives import scales as scale_collectives

LAYERS, MESH = 2, {"fsdp": 2}


def shared(recipe="tensorwise", **parallel):
    """{(devices, whether they are scales that are gathered): numbers}"""
    found: collections.Counter = collections.Counter()
    config = sizes.config(recipe, **parallel)
    for one in (*scale_collectives.part_amaxes(config), *scale_collectives.step_amaxes(config)):
        if one.devices > 1 and one.elements:
            found[one.devices, one.kind == "all-gather"] += one.elements
    return found


def test_one_amax_of_each_tensor():  # P-2
    """Seven weights and grad_outputs, and four inputs: q, k and v read one, and so do gate and
    up.
    """
    assert shared(**MESH) == {(2, False): LAYERS * (7 + 7 + 4)}
    # all but down_proj runs again
    assert shared(**MESH, checkpointing="full") == {(2, False): LAYERS * (7 + 7 + 4 + 3)}
    assert shared(**MESH, checkpointing="full", precompute_scales=False) == {
        (2, False): LAYERS * (7 + 7 + 4 + 6 + 3)
    }
    assert shared("bf16", **MESH) == {}


def test_amaxes_of_weights_are_shared_once_a_step():  # P-9
    """Over all devices that cut any weight."""
    (together,) = scale_collectives.step_amaxes(sizes.config(**sizes.MESH))
    assert (together.devices, together.elements) == (4, LAYERS * 7)
    assert [
        one.devices for one in scale_collectives.step_amaxes(sizes.config(**MESH, through="jit"))
    ] == [2] * LAYERS * 7
    for recipe, keys in (
        ("rowwise", {}),
        ("delayed", {}),
        ("tensorwise", {"precompute_scales": False}),
    ):
        assert list(scale_collectives.step_amaxes(sizes.config(recipe, **MESH, **keys))) == []


def test_amaxes_of_local_scope_are_weights():  # P-4
    assert shared(**MESH, amax_scope="local") == {(2, False): LAYERS * 7}


def test_amaxes_of_rows():
    """Of groups that fsdp cuts: a weight's columns K, an input's K and a grad_output's N, whose
    groups are tokens. Scales of a weight's rows are gathered. H = A = 64, KV 32, F 128."""
    n, k = 64 + 32 + 32 + 64 + 128 + 128 + 64, 6 * 64 + 128
    inputs = 64 + 64 + 64 + 128
    assert shared("rowwise", **MESH) == {
        (2, False): LAYERS * (k + inputs + n),
        (2, True): LAYERS * n,
    }


def test_scales_of_gathered_tokens():  # P-6
    """Under sequence parallelism those of q, k and v's one input, and gate and up's; of o's and
    down's gradients with what undoes them.
    """
    found = shared("rowwise", tensor=2, sequence=True)
    tokens = 8 * 32
    assert found[2, True] == LAYERS * tokens * (2 + 2 * 2)


def test_what_delayed_scaling_observes_is_shared_likewise():  # H-4
    assert shared("delayed", **MESH) == shared(**MESH)
    # what a pass observes again nothing wants
    assert shared("delayed", **MESH, checkpointing="full") == shared(**MESH)


def test_plain_jit_shares_no_amax_of_an_input():
    """And of groups that fsdp cuts it takes a weight's and an input's K twice, scatters a
    grad_output's N, and gathers their scales.
    """
    assert shared(**MESH, through="jit") == {(2, False): LAYERS * (7 + 7 + 7)}
    n, k = 64 + 32 + 32 + 64 + 128 + 128 + 64, 6 * 64 + 128
    found = shared("rowwise", **MESH, through="jit")
    assert found == {(2, False): LAYERS * (2 * (k + k) + n), (2, True): LAYERS * 2 * n}
