"""Counted by hand from the sizes in tests/helpers/models/sizes.py."""

import dataclasses

import pytest
from helpers.models import sizes

from fp8ref.estimate.collectives import collectives


def flows(config, backend):
    """Of tensors: not of what moves for FP8, the loss or the norm alone, which
    tests/estimate/collectives/test_collectives.py counts.
    """
    return {
        purpose: (flow.elements, flow.bytes)
        for purpose, flow in collectives.flows(config, backend).items()
        if flow.elements
    }


def test_one_device_receives_nothing():
    assert flows(sizes.config(), "jax") == flows(sizes.config(), "torch") == {}


def test_a_mesh_in_jax():
    """Two parts of 64 tokens a device: 64 x 64 / 2 = 2048 elements from the other of tensor."""
    layers, table = sizes.LAYER, sizes.TABLE  # two layers, cut over tensor
    assert flows(sizes.config(parts=2, **sizes.MESH), "jax") == {
        # half of the table once, in bfloat16; of the layers' codes and of lm_head twice
        "weights, gathered over fsdp": (
            2 * (table / 2 + layers + table),
            2 * (2 * table / 2 + layers + 2 * table),
        ),
        "gradients, reduced over fsdp": (
            2 * (2 * table + layers) / 2,
            2 * 4 * (2 * table + layers) / 2,
        ),
        "gradients, summed over data": (2 * 2 * 3 / 4 * 320, 4 * 2 * 2 * 3 / 4 * 320),
        # pieces of the table and of lm_head
        "gradients, summed over data and tensor": (2 * table, 4 * 2 * table),
        # of q, k, v together and of gate and up, both passes; a grad_input of both; a byte of
        # codes, and bfloat16
        "inputs, gathered over tensor": (2 * 2 * 4 * 2048, 2 * 2 * 4 * 2048),
        "grad_inputs, summed over tensor": (2 * 4 * 2048, 2 * 2 * 4 * 2048),
        "outputs, summed over tensor": (2 * 4 * 2048, 2 * 2 * 4 * 2048),
        "grad_outputs, gathered over tensor": (2 * 4 * 2048, 2 * 4 * 2048),
    }


def test_a_mesh_in_pytorch():
    # 128 tokens a device: 4096 elements; scales of rows gather in bf16
    found = flows(sizes.config("rowwise", **sizes.MESH), "torch")
    layers, table = sizes.LAYER, sizes.TABLE
    assert found == {
        "weights, gathered over fsdp": (
            table / 2 + layers + table + 320,
            4 * table / 2 + 2 * layers + 2 * table + 2 * 320,
        ),
        "gradients, reduced over fsdp": (
            (2 * table + layers + 320) / 2,
            4 * (2 * table + layers + 320) / 2,
        ),
        "inputs, gathered over tensor": (2 * 4 * 4096, 2 * 2 * 4 * 4096),
        "grad_inputs, summed over tensor": (4 * 4096, 2 * 4 * 4096),
        "outputs, summed over tensor": (4 * 4096, 2 * 4 * 4096),
        "grad_outputs, gathered over tensor": (4 * 4096, 2 * 4 * 4096),
    }


def test_gradients_in_fp8_are_a_byte_an_element():  # P-25
    keys = {**sizes.MESH, "reduce_dtype": "float8_e4m3fn"}
    layers, table = sizes.LAYER, sizes.TABLE
    jax, torch = (flows(sizes.config("rowwise", **keys), backend) for backend in ("jax", "torch"))
    # lm_head is summed over fsdp and tensor, two of each: codes of four devices; then half of
    # float32 sums over tensor
    assert jax["gradients in FP8, exchanged"] == (
        layers / 2 + 3 / 4 * table,
        layers / 2 + 3 / 4 * table,
    )
    assert jax["sums of gradients, gathered"] == (table / 2 / 2, 4 * table / 2 / 2)
    assert jax["gradients, reduced over fsdp"] == (table / 2, 4 * table / 2)  # of the table
    assert torch["gradients in FP8, exchanged"] == ((layers + table) / 2, (layers + table) / 2)
    assert torch["gradients, reduced over fsdp"] == ((table + 320) / 2, 4 * (table + 320) / 2)
    assert "sums of gradients, gathered" not in torch


def test_full_checkpointing_runs_output_gemms_again_in_jax():  # T-8
    """All of a layer but down_proj, of 8192: weights and inputs are gathered a third time, o_proj's
    outputs summed twice.
    """
    keys = {**sizes.MESH, "checkpointing": "full"}
    none, full = flows(sizes.config(**sizes.MESH), "jax"), flows(sizes.config(**keys), "jax")
    more = {
        purpose: full[purpose][0] - elements
        for purpose, (elements, _) in none.items()
        if full[purpose][0] != elements
    }
    assert more == {
        "weights, gathered over fsdp": 2
        * (sizes.LAYER - 8192)
        / 2
        / 2,  # two layers, half of each from the other device, cut over tensor
        "inputs, gathered over tensor": 2 * 2 * 4096,
        "outputs, summed over tensor": 2 * 4096,
    }


def test_copies_sum_their_gradients():
    elements = 106816
    assert flows(sizes.config(data=4), "jax") == {
        "gradients, summed over data": (2 * 3 / 4 * elements, 4 * 2 * 3 / 4 * elements)
    }
    assert flows(sizes.config(data=4), "torch")["gradients, summed over data"] == (
        2 * 3 / 4 * elements,
        4 * 2 * 3 / 4 * elements,
    )


def test_a_tensorwise_input_is_gathered_as_codes_in_pytorch():  # P-15
    found = flows(sizes.config(**sizes.MESH), "torch")
    assert found["inputs, gathered over tensor"] == (2 * 4 * 4096, 2 * 4 * 4096)
    assert found["grad_outputs, gathered over tensor"] == (4 * 4096, 4 * 4096)
    for config in (
        sizes.config(**sizes.MESH | {"amax_scope": "global"}),
        sizes.config("delayed", tensor=2, sequence=True),
    ):
        found = flows(config, "torch")  # fp8ref's own linear casts after the gather
        assert (
            found["inputs, gathered over tensor"][1] == 2 * found["inputs, gathered over tensor"][0]
        )


@pytest.mark.parametrize(
    ("recipe", "through", "size"),
    [
        ("tensorwise", "shard_map", 1),
        ("rowwise", "shard_map", 9 / 8),
        ("rowwise", "jit", 2),
        ("rowwise_with_gw_hp", "shard_map", 3),
        ("blockwise_ue8m0", "shard_map", 2),
        ("mxfp8", "shard_map", 2),
    ],
)
def test_bytes_of_a_gathered_gradient(recipe, through, size):  # P-6
    """Codes of each backward GEMM, or of both, or bfloat16 for one: of 8192 tokens, half from the
    other device, of o and down of a layer.
    """
    config = sizes.config(recipe, tensor=2, sequence=True, through=through)
    model = dataclasses.replace(
        config.model,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=1,
        num_key_value_heads=4,
    )
    config = dataclasses.replace(
        config, model=model, data=dataclasses.replace(config.data, sequence_length=1024)
    )
    elements = 2 * 8192 * 512 // 2
    assert flows(config, "jax")["grad_outputs, gathered over tensor"] == (elements, size * elements)


def test_without_sequence_parallelism_sums_are_all_reduces():
    found = flows(sizes.config(tensor=2), "torch")  # 256 tokens
    assert found == dict.fromkeys(
        ("grad_inputs, summed over tensor", "outputs, summed over tensor"),
        (2 * 4 * 8192, 4 * 4 * 8192),
    )
