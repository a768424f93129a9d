import json
from pathlib import Path

import pytest
from helpers.models import sizes

from fp8ref.estimate import linear_place, outside_linears, roofline
from fp8ref.estimate.gpu_rates import PUBLISHED
from fp8ref.spec.llama import LlamaConfig
from fp8ref.train.config.config import Config

H100 = PUBLISHED["h100"]
COMPILED = json.loads((Path(__file__).parents[2] / "benchmarks/results/aot.json").read_text())
MESHES: dict[str, dict] = {
    "one": {},
    "data": {"data": 2},
    "fsdp": {"fsdp": 2},
    "bfloat16": {"fsdp": 2, "reduce_dtype": "bfloat16"},
    "accumulators": {"fsdp": 2, "reduce": "accumulators"},
    "jit": {"fsdp": 2, "through": "jit"},
}
ROWS = [row for row in COMPILED["rows"] if not any("triton" in kernel for kernel in row["kernels"])]


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


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['recipe']} {row['mesh']}")
def test_bytes_of_all_kernels_are_those_that_xla_compiles_for_h200s(row):
    """Of all kernels but GEMMs and collectives: at most 2 % below and 1 % above, under plain jit
    too; of bf16 under tensor parallelism, where XLA also moves pieces of heads that the estimate
    does not count, at most 2.6 % below, and of rowwise_with_gw_hp there 2.8 %. No error is derived:
    these are the recorded rows' own, rounded up (0.980 of bf16 at 2048 features, 1.0095 of
    tensorwise with bfloat16 sums, 0.975 of bf16 with tensor 2). They hold a change of what is
    counted; the rows of other blocks, to which no constant was fitted, hold the constants."""
    config = compiled(row)
    made = sum(outside_linears.moved(config, "jax").values())
    for decision in config.decisions():
        if decision.fp8:
            gemms = [
                (g.which, g.m, g.n, g.k) for g in roofline.gemm_shapes(decision, config, "jax")
            ]
            made += sum(
                kernel.bytes
                for kernel in roofline.quantizing(
                    decision.recipe, gemms, "xla", linear_place.of(decision, config, "jax")
                )
            )
    least = (
        {"bf16": 0.974, "rowwise_with_gw_hp": 0.972}.get(row["recipe"], 0.98)
        if config.parallel.tensor > 1
        else 0.98
    )
    assert least <= made / 1e9 / row["outside_gemms"]["gb"] <= 1.01


def test_gradients_are_widened_where_devices_sum_them_in_float32():
    """A gradient is read in 2 bytes and written in 4, whole: it is cut by its sum."""
    widened = "gradients in float32, for their sums"
    of = {
        name: outside_linears.moved(sizes.config(recipe="tensorwise", **keys), "jax")
        for name, keys in MESHES.items()
    }
    assert of["fsdp"][widened] == of["data"][widened] == 6 * 106816
    assert all(widened not in of[name] for name in ("one", "bfloat16", "accumulators", "jit"))
    assert widened not in outside_linears.moved(
        sizes.config(recipe="tensorwise", **MESHES["fsdp"]), "torch"
    )


def test_pieces_of_several_sequences_are_put_in_order():
    """Read and written, of 128 tokens in 4 sequences and 2 layers, H = A = 64, KV 32, F 128, halves
    of A, KV and F on a device. In bfloat16 six gathers of a layer, and rows of what q, k, v, gate
    and up's grad_inputs and o's output are made of; FP8's are among what quantizes."""
    put, keys = "pieces of sequences, put in order", {"data": 2, "tensor": 2, "sequence": True}
    rows = 32 + 16 + 16 + 64 + 64 + 32
    of = {
        name: outside_linears.moved(sizes.config(recipe=name, **keys), "jax")
        for name in ("bf16", "rowwise", "rowwise_with_gw_hp")
    }
    assert [found.get(put, 0) for found in of.values()] == [
        128 * 2 * 2 * n for n in (2 * (6 * 64 + rows), 0, 4 * 2 * 64)
    ]
    one = sizes.config(recipe="bf16", **keys).replace(data={"batch_size": 2})
    assert put not in outside_linears.moved(one, "jax")
    assert put not in outside_linears.moved(sizes.config(recipe="bf16", **keys), "torch")


def test_the_rest_by_hand():
    """256 tokens in sequences of 32, 2 layers; H = A = 64, KV 32, F 128; a vocabulary of 256."""
    config = sizes.config(compile="block")
    rest = roofline.predict_step(config, "torch", H100).rest
    assert rest["attention"] == pytest.approx(2 * 7 * 256 * 32 * 64 / H100.attention)
    forward, backward = 18 * 64 + 4 * 64 + 4 * 32 + 6 * 128, 38 * 64 + 4 * 64 + 4 * 32 + 10 * 128
    moved = {
        "norms, rotations, SwiGLU, sums": 256 * 2 * (forward + backward),
        "embedding and loss": 12 * 256 * 64 + 2 * 28 * 256 * 256,
        "AdamW": (22 + 16) * 106816,
    }
    assert {what: rest[what] * H100.bandwidth for what in moved} == pytest.approx(moved)
    jax = roofline.predict_step(sizes.config(), "jax", H100).rest
    assert (
        roofline.predict_step(sizes.config(attention="cudnn"), "jax", H100).rest["attention"]
        == rest["attention"]
    )
    assert jax["attention"] == pytest.approx(
        2 * (12 * 256 * 32 * 64 / H100.bf16 + 40 * 256 * 32 * 4 / H100.bandwidth)
    )


def test_a_loss_in_parts_adds_gradients_and_multiplies_once_more():  # P-29
    """Of 256 tokens and 64 features a sum in float32 for each of three parts, read twice and
    written; and lm_head's output GEMM.
    """
    whole, parts = (
        sizes.config(loss=kind).replace(model={"vocab_size": 20_000})
        for kind in ("whole", "chunked")
    )
    of_loss = [
        outside_linears.moved(config, "jax")["embedding and loss"] for config in (whole, parts)
    ]
    assert of_loss[1] - of_loss[0] == 12 * 3 * 256 * 64
    (head,) = [d for d in whole.decisions() if d.path == "lm_head"]
    again = roofline.linear_ledger(head, whole, "jax", H100, gemms=("output",)).seconds
    assert roofline.predict_step(parts, "jax", H100).configured - roofline.predict_step(
        whole, "jax", H100
    ).configured == pytest.approx(again)


def test_heads_are_read_together_where_their_weights_are_joined():
    """A token and layer of H = A = 64, KV 32, F 128, and once 256 tokens. Joined, four kernels of
    the forward pass and one of the backward pass read 2 bytes of A + 2 KV; in bfloat16 attention's
    output and the gradients are put in order, and a layer's weights are joined."""
    norms, joined, loss = (
        "norms, rotations, SwiGLU, sums",
        "weights of q, k and v, joined",
        "embedding and loss",
    )
    of = {
        name: outside_linears.moved(sizes.config(recipe=name), "jax")
        for name in ("bf16", "tensorwise", "rowwise")
    }
    read, swiglu = 2 * (64 + 2 * 32), 16 * 128
    heads = {
        "bf16": 5 * read + 6 * 64 + 12 * 32 + 18 * 64 + (6 + 6 + 4) * 32 + 2 * read,
        "tensorwise": 4 * 64 + 18 * 32 + 18 * 64 + 14 * 32,
        "rowwise": 5 * read + 2 * 64 + 12 * 32 + 18 * 64 + 12 * 32,
    }
    layer = {"bf16": 62, "tensorwise": 59, "rowwise": 71}
    assert {name: found[norms] for name, found in of.items()} == {
        name: 256 * 2 * (layer[name] * 64 + swiglu + size) for name, size in heads.items()
    }
    assert [found.get(joined, 0) for found in of.values()] == [2 * 4 * 64 * (64 + 2 * 32), 0, 0]
    assert of["bf16"][loss] - of["tensorwise"][loss] == 2 * 256 * 64
    pieces = outside_linears.moved(sizes.config(recipe="bf16", tensor=2, sequence=True), "jax")
    assert joined not in pieces  # gathered in bfloat16, they are not joined
    weights = 2 * 64 * (64 + 2 * 32)
    assert (
        outside_linears.moved(sizes.config(recipe="bf16", fsdp=2, through="jit"), "jax")[joined]
        == (4 + 3 * 4 + 4) * weights
    )


@pytest.mark.parametrize("layer", [0, 1])
def test_each_layer_counts_by_its_own_recipe(layer):
    """One of two layers in bfloat16: half of the bytes of each recipe."""
    configs = {name: sizes.config(recipe=name, tensor=2) for name in ("bf16", "tensorwise")}
    configs["mixed"] = configs["tensorwise"].replace(
        numerics={"filter_fqns": ("lm_head", f"layers.{layer}")}
    )
    of = {name: outside_linears.moved(config, "jax") for name, config in configs.items()}
    for what in (
        "norms, rotations, SwiGLU, sums",
        "weights of q, k and v, joined",
        "grad_inputs, added before their sum",
    ):
        half = (of["bf16"][what] + of["tensorwise"].get(what, 0)) / 2
        assert of["mixed"][what] == half != of["tensorwise"].get(what, 0), what


def test_grad_inputs_of_one_input_are_added_before_their_sum():
    """gate's and up's, 2 bytes read each and written, and in FP8 q's, k's and v's, of 256 tokens
    and 64 features; the norm's kernel, of half of them, reads one fewer, or two."""
    added, keys = "grad_inputs, added before their sum", {"tensor": 2, "sequence": True}
    of = {
        name: outside_linears.moved(sizes.config(recipe=name, **keys), "jax")
        for name in ("bf16", "rowwise")
    }
    assert of["bf16"][added] == 256 * 2 * (6 * 64 - 2 * 32)
    assert of["rowwise"][added] == 256 * 2 * ((6 + 8) * 64 - (2 + 4) * 32)
    assert all(
        added not in outside_linears.moved(sizes.config(recipe="bf16", **other), "jax")
        for other in ({}, keys | {"reduce": "accumulators"})
    )


def test_moments_in_fp8_move_less():
    """Adam's moments are half of the rest's bytes, in float32."""
    plain, fp8 = (
        roofline.predict_step(sizes.config(optimizer=kind), "torch", H100).rest["AdamW"]
        for kind in ("adamw", "adamw_fp8")
    )
    assert fp8 < 0.8 * plain
