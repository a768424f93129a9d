"""Grouped GEMMs and experts in the estimate, counted by hand."""

import collections
import json
import math
from pathlib import Path

import pytest

from fp8ref.estimate import grouped, memory, report, roofline
from fp8ref.estimate.collectives import collectives
from fp8ref.estimate.gpu_rates import PUBLISHED
from fp8ref.jax.experts import operands as grouped_operands
from fp8ref.recipe import RECIPES
from fp8ref.train.config import config as configs
from fp8ref.train.config import device_shapes

COMPILED = json.loads((Path(__file__).parents[2] / "benchmarks/results/aot.json").read_text())[
    "moe"
]
H200 = PUBLISHED["h200"]
ONE, EACH, BLOCKS = "one kernel", "a GEMM for each expert", "a GEMM for each block of rows"


@pytest.mark.parametrize(
    ("rows", "experts"), [(32768, 128), (100, 8), (7, 8), (1 << 20, 4), (65536, 128)]
)
def test_blocks_of_rows_are_those_that_jax_multiplies(rows, experts):
    block = grouped.block_rows(rows, experts)
    assert (rows // block + experts) * block == grouped_operands.rows_multiplied(rows, experts)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("bf16", [ONE, ONE, ONE]),
        ("rowwise", [ONE, ONE, ONE]),
        ("tensorwise", [ONE, EACH, EACH]),  # gradients in e5m2
        ("delayed", [ONE, EACH, EACH]),
        ("blockwise", [EACH, EACH, EACH]),
        ("mxfp8", [ONE, ONE, ONE]),
    ],
)
def test_what_multiplies(recipe, expected):
    assert [grouped.by(spec, "torch") for spec in RECIPES[recipe].gemms.values()] == expected
    assert {grouped.by(spec, "jax") for spec in RECIPES[recipe].gemms.values()} == {BLOCKS}


def test_times_of_each_way():
    """Eight experts of 512 rows, 1024 to 1024: 8 x 4 x 4 = 128 tiles of 128 x 256, one wave of 132
    processors.
    """
    size = (512, 1024, 1024)
    one, each, looped = (grouped.GroupedGemm("output", *size, 8, by) for by in (ONE, EACH, BLOCKS))
    rates = H200.fp8, 1, 2, H200
    assert one.seconds(*rates) == pytest.approx(
        max(
            132 * 2 * 128 * 256 * 1024 / H200.fp8,
            8 * (1024 * 1536 + 2 * 512 * 1024) / H200.bandwidth,
        )
    )
    alone = roofline.gemm_seconds(*size, H200.fp8, 1024 * 1536 + 2 * 512 * 1024, H200)
    assert each.seconds(*rates) == pytest.approx(8 * alone)
    # blocks of 512 rows: 8 and one more for each expert; a weight's slice read and written, two
    # launches beside the GEMM
    block = roofline.gemm_seconds(512, 1024, 1024, H200.fp8, 1024 * 1536 + 2 * 512 * 1024, H200)
    assert looped.seconds(*rates) == pytest.approx(
        16 * (block + 2 * H200.launch + 2 * 1024 * 1024 / H200.bandwidth)
    )
    assert [gemm.launches for gemm in (one, each, looped)] == [1, 8, 48]


def test_a_kernel_of_one_expert_cuts_no_sum():
    """One tile, of a sum that a GEMM alone would share among processors."""
    size, rates = (128, 128, 1 << 16), (H200.fp8, 1, 2, H200)
    one, each = (grouped.GroupedGemm("output", *size, 1, by).seconds(*rates) for by in (ONE, EACH))
    assert one == pytest.approx(132 * 2 * math.prod(size) / H200.fp8)
    assert each < one / 2


def tiny(**parallel):
    return configs.load("tiny-moe").replace(parallel=parallel)


def test_parameters_that_take_a_token():
    for name, all_, active in (
        ("tiny-moe", None, None),
        ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704),
    ):
        config = configs.load(name)
        kinds = device_shapes.kinds(config)
        assert device_shapes.active(config) == kinds["all"] - kinds["experts"] * (
            1 - config.model.num_experts_per_tok / config.model.num_experts
        )
        assert all_ in (None, kinds["all"])
        assert active in (None, device_shapes.active(config))
    assert (
        device_shapes.active(configs.load("tiny"))
        == device_shapes.kinds(configs.load("tiny"))["all"]
    )


def test_rows_are_sent_to_their_experts_and_back():
    """Four sequences of 128 tokens on each of four devices, two experts a token, 128 features, two
    layers, both passes, bfloat16.
    """
    rows = 2 * 2 * (4 * 128) * 2 * 128
    torch, jax = (collectives.flows(tiny(expert=4), backend) for backend in ("torch", "jax"))
    for purpose in ("rows, sent to their experts", "rows, sent back"):
        assert torch[purpose].elements == rows * 3 / 4  # those of others
        assert jax[purpose].elements == rows * 3  # a buffer of all to each of three
        assert torch[purpose].bytes == 2 * torch[purpose].elements
    for recipe, size in (("tensorwise", 1), ("delayed", 1), ("blockwise", 2)):
        sent = collectives.flows(tiny(expert=4).replace(numerics={"recipe": recipe}), "jax")[
            "rows, sent to their experts"
        ]
        assert sent.bytes == size * sent.elements
    in_rows = collectives.flows(
        tiny(expert=4, expert_dispatch="compute").replace(numerics={"recipe": "tensorwise"}), "jax"
    )
    assert in_rows["rows, sent to their experts"].bytes == 2 * rows * 3
    assert "rows, sent back" not in collectives.flows(tiny(fsdp=4), "jax")
    again = collectives.flows(tiny(expert=4, checkpointing="full"), "torch")
    assert again["rows, sent back"].elements == torch["rows, sent back"].elements * 3 / 2


@pytest.mark.parametrize("row", COMPILED, ids=lambda row: f"{row['recipe']} {row['mesh']}")
def test_grouped_gemms_multiply_codes_on_an_h200(row):
    e4m3, e5m2 = "bf16" if row["recipe"] == "bf16" else "f8e4m3fn", "f8e5m2"
    gradients = e5m2 if row["recipe"] in ("tensorwise", "delayed") else e4m3
    # XLA takes grad_weight's operands in the other order
    pairs = ((e4m3, e4m3), (gradients, e4m3), (e4m3, gradients))
    # of three projections
    expected = collections.Counter(f"{a} x {b} -> f32" for a, b in pairs for _ in range(3))
    # outputs again, down's too: the weights of a token's experts want it
    if "checkpointing" in row["mesh"]:
        expected[f"{e4m3} x {e4m3} -> f32"] += 3
    assert row["taken"]["grouped"] == expected
    assert not row["lost"]


def test_experts_are_gathered_over_fsdp_in_the_compute_dtype():  # P-10
    experts = 2 * 3 * 8 * 128 * 128
    for parallel, gathered in (
        ({"fsdp": 4}, 3 / 4),
        ({"expert": 4}, 0),
        ({"fsdp": 2, "expert": 2}, 1 / 4),
    ):
        without = configs.load("tiny-moe").replace(
            model={"num_experts": 4, "num_experts_per_tok": 2}, parallel=parallel
        )
        # half the experts, and half of the router [E, hidden], which JAX does not gather
        many, few = (
            collectives.flows(config, "jax")["weights, gathered over fsdp"]
            for config in (tiny(**parallel), without)
        )
        assert many.elements - few.elements == 2 * gathered * experts / 2
        assert many.bytes - few.bytes == 2 * (many.elements - few.elements)


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "tensorwise", "delayed", "mxfp8"])
@pytest.mark.parametrize("name", ["tiny-moe", "qwen3-30b-a3b"])
def test_an_estimate_has_every_experts_products(name, recipe, backend):
    config = configs.load(name).under(recipe)
    found = report.of(config, backend, H200)
    experts = [row for row in found.rows if row.experts]
    assert [row.linear for row in experts] == ["gate_proj", "up_proj", "down_proj"]
    for row in experts:
        assert row.count == config.model.num_hidden_layers
        assert bool(row.ledger.parts) == (recipe != "bf16")
        # no kernel multiplies faster than its rate
        m = device_shapes.tokens(config) * config.model.num_experts_per_tok
        flops = 3 * 2 * m * math.prod(row.shape)
        assert row.ledger.bf16 > flops / H200.bf16
    assert found.step.rest["routers' products"] > 0
    assert math.isfinite(found.step.ratio)


def test_a_device_holds_its_own_experts():
    def held(**parallel):
        return memory.most(memory.lines(tiny(**parallel), "torch"))[1]

    assert held(expert=4) < held(fsdp=1)
    experts = {
        name: piece
        for name, (piece, _) in memory.piece_sizes(tiny(fsdp=2, expert=2), "jax").items()
        if ".experts." in name
    }
    assert set(experts.values()) == {2 * 128 * 128}  # of eight
