"""Collectives of a step, against programs that XLA compiles for H200s:
benchmarks/results/aot.json.
"""

import collections
import json
from pathlib import Path

import pytest
from helpers.models import sizes

from fp8ref.estimate.collectives import collectives
from fp8ref.spec.llama import LlamaConfig
from fp8ref.train.config import config as configs
from fp8ref.train.config.config import Config

COMPILED = json.loads((Path(__file__).parents[3] / "benchmarks/results/aot.json").read_text())
ROWS = [row for row in COMPILED["rows"] if row["collectives_mib"]]
# as XLA names them
DTYPES = {
    "float32": "f32",
    "bfloat16": "bf16",
    "int32": "s32",
    "uint32": "u32",
    "uint8": "u8",
    "e4m3fn": "f8e4m3fn",
    "e5m2": "f8e5m2",
}


def compiled(row: dict) -> Config:
    """The config that a row of the recorded compile is of."""
    model = COMPILED["model"] | row.get("model", {})
    length, sequences = model.pop("sequence_length"), model.pop("sequences_per_device")
    config = Config(model=LlamaConfig(**model)).replace(
        numerics={"recipe": row["recipe"]}, parallel=row["mesh"]
    )
    return config.replace(
        data={"sequence_length": length, "batch_size": sequences * config.parallel.devices}
    )


def moved(config: Config) -> dict[str, float]:
    """{kind and dtype, as recorded: MiB}"""
    made: collections.Counter = collections.Counter()
    for one, times in collectives.step_collectives(config, "jax"):
        made[f"{one.kind} {DTYPES[one.dtype]}"] += times * one.bytes / 2**20
    return dict(made)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['recipe']} {row['mesh']}")
def test_bytes_are_those_that_xla_compiles_for_h200s(row):  # P-2, P-6, P-9, P-10
    """To the byte, by kind and dtype: amaxes, scales, the loss and the norm too."""
    assert moved(compiled(row)) == row["collectives_mib"]


def with_experts(row: dict) -> Config:
    """The config that a recorded compile with experts is of (benchmarks/compiled/aot_moe.py): one
    layer of Qwen3-30B-A3B.
    """
    config = configs.load("qwen3-30b-a3b")
    config = config.replace(
        model={"num_hidden_layers": 1, "vocab_size": 1024},
        numerics={"recipe": row["recipe"]},
        parallel={**vars(type(config.parallel)()), **row["mesh"]},
    )
    return config.replace(
        data={"sequence_length": 1024, "batch_size": 4 * config.parallel.devices, "microbatches": 1}
    )


@pytest.mark.parametrize(
    "row",
    [row for row in COMPILED["moe"] if row["collectives_mib"]],
    ids=lambda row: f"{row['recipe']} {row['mesh']}",
)
def test_bytes_of_experts_are_those_that_xla_compiles_for_h200s(row):  # P-10
    """To the byte: amaxes of groups, the sizes of groups and their balance too."""
    assert moved(with_experts(row)) == row["collectives_mib"]


def test_the_balance_of_all_layers_is_one_sum():
    """Two layers of the model above under recipe bf16 and {"expert": 4}, compiled by
    ``aot_moe.py``, sum 535,312 floats: the gradients of routers and norms, squares of parameters
    that are cut, 2 x 128 of the balance, and the loss."""
    config = with_experts({"recipe": "bf16", "mesh": {"expert": 4}}).replace(
        model={"num_hidden_layers": 2}
    )
    assert moved(config)["all-reduce f32"] == 4 * 535_312 / 2**20


def test_what_is_received_of_the_whole():
    """Of n devices' pieces those of the others; in an all-reduce a sum of pieces, and then the
    sums.
    """
    gather, total = (
        collectives.Collective("", kind, "bfloat16", 4, 100)
        for kind in ("all-gather", "all-reduce")
    )
    assert (gather.received, total.received, gather.bytes, total.bytes) == (75, 150, 200, 200)


def test_squares_of_parameters_that_follow_on_each_other_are_added_first():
    """lm_head and the table are first by name, then a norm, which no mesh cuts: XLA sums both over
    devices as one. A tied table is alone.
    """

    def squares(**model):
        config = sizes.config(fsdp=2).replace(model=model)
        return [
            one.elements
            for one, _ in collectives.step_collectives(config, "jax")
            if one.purpose.startswith("norm")
        ]

    linears = 2 * 7
    assert (squares(), squares(tie_word_embeddings=True)) == ([1 + linears], [1 + linears])


def test_scanned_layers_have_one_square_of_each_parameter():
    """Their parameters are one stack.

    Two layers of the recorded model under {"fsdp": 8, "scan": true}, compiled by ``aot.py``, sum 1
    + 7, and the loss.
    """
    config = sizes.config(fsdp=2, scan=True)
    assert [
        one.elements
        for one, _ in collectives.step_collectives(config, "jax")
        if one.purpose.startswith("norm")
    ] == [1 + 7]


def test_a_tied_last_linear_gathers_and_scatters_by_itself():
    """The table of 256 x 64: gathered once for its rows, and twice as lm_head, or once where the
    loss is in parts (P-29). Gradients are scattered apart and added before their sum over data.
    PyTorch's root gathers the table once."""
    table = sizes.TABLE

    def of(backend="jax", **keys):
        config = sizes.config("bf16", data=2, fsdp=2, **keys)
        found: collections.Counter = collections.Counter()
        for one, times in collectives.step_collectives(
            config.replace(model={"tie_word_embeddings": True}), backend
        ):
            found[one.kind, one.dtype] += times * one.elements
        return found

    linears = 2 * sizes.LAYER
    assert of()["all-gather", "bfloat16"] == 2 * linears + 3 * table
    assert of(loss="chunked")["all-gather", "bfloat16"] == 2 * linears + 2 * table
    assert of()["reduce-scatter", "float32"] == linears + 2 * table
    gradients = linears / 2 + table / 2 + sizes.NORMS
    assert of()["all-reduce", "float32"] == gradients + 1 + 15  # the loss and the norm
    # in bfloat16 of lm_head, and in float32 of the table: two sums
    assert of(reduce_dtype="bfloat16")["all-reduce", "bfloat16"] == linears / 2 + table / 2
    assert of("torch")["all-gather", "float32"] == table


def test_a_step_shares_norms_and_amaxes_of_weights_once():
    one, two = (
        collectives.step_collectives(sizes.config(fsdp=2, parts=parts), "jax") for parts in (1, 2)
    )
    assert [c.purpose for c, _ in one] == [c.purpose for c, _ in two]
    once = {"norm of the gradients, summed", "amaxes of weights, shared"}
    assert {c.purpose for c, times in two if times == 1} == once
    assert {times for c, times in two if c.purpose not in once} == {2}


def test_pytorchs_few_bytes_are_not_counted():
    purposes = {
        one.purpose
        for one, _ in collectives.step_collectives(sizes.config("rowwise", **sizes.MESH), "torch")
    }
    assert purposes
    assert all(
        "amax" not in purpose and "loss" not in purpose and "norm of" not in purpose
        for purpose in purposes
    )
