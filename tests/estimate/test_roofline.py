import dataclasses
import math

import pytest
from helpers.models import sizes

from fp8ref.estimate import kernels, report, roofline
from fp8ref.estimate.gpu_rates import GPUS, PUBLISHED
from fp8ref.recipe import RECIPES
from fp8ref.selection.rules import Rule
from fp8ref.shared.errors import ConfigError
from fp8ref.train.config import config as configs

H100 = PUBLISHED["h100"]
COMPILED = {"compile": "block"}
FULL = {"compile": "block", "checkpointing": "full"}
ROUND = dataclasses.replace(
    H100, bf16=5e14, fp8=1e15, fp8_rowwise=8e14, bandwidth=1e12, launch=1e-6
)


def made(recipe="tensorwise", m=8192, n=4096, k=4096, how="inductor", **keys):
    return roofline.gemms_ledger(RECIPES[recipe], roofline.sizes_of(m, n, k), how, ROUND, **keys)


def test_a_gemm_that_fills_every_processor_takes_its_flops():
    """11 x 12 tiles of 128 x 256 on 132 processors."""
    m, n, k = 11 * 128, 12 * 256, 8192
    assert roofline.gemm_seconds(m, n, k, 5e14, 0, ROUND) == pytest.approx(2 * m * n * k / 5e14)


def test_a_wave_that_is_part_empty_takes_as_long():
    """One row of tiles more; sums in pieces would move more bytes than they save."""
    m, n, k = 11 * 128 + 1, 12 * 256, 8192
    assert roofline.gemm_seconds(m, n, k, 5e14, 0, ROUND) > 1.2 * roofline.gemm_seconds(
        m - 1, n, k, 5e14, 0, ROUND
    )


def test_a_long_sum_is_cut_into_pieces():
    """One tile's sum of 2^20, by 8 processors in an eighth of the time, and float32 parts, written
    and read.
    """
    whole = 132 * 2 * 128 * 128 * 2**20 / 5e14
    assert roofline.gemm_seconds(128, 128, 2**20, 5e14, 0, ROUND) == pytest.approx(
        whole / 8 + 8 * 8 * 128 * 128 / 1e12
    )


def test_a_gemm_takes_no_less_than_its_bytes_nor_a_launch():
    assert roofline.gemm_seconds(128, 128, 128, 5e14, 1e9, ROUND) == 1e-3
    assert roofline.gemm_seconds(128, 128, 128, 5e14, 1, ROUND) == 1e-6


def test_a_gemm_of_few_rows_takes_the_bytes_of_its_codes():
    """Operands of one byte an element, a result of two, at 1e12 bytes a second."""
    m, n, k = 16, 8192, 8192
    one = roofline.gemms_ledger(RECIPES["tensorwise"], [("output", m, n, k)], "inductor", ROUND)
    assert one.parts["gemm"] == pytest.approx((k * (m + n) + 2 * m * n) / 1e12)
    assert one.bf16 == pytest.approx(2 * (k * (m + n) + m * n) / 1e12)


def test_the_parts_of_a_linear():
    """Tensorwise, inductor: amaxes of 2 bytes, casts of 4, a weight's of 6, at 1e12 bytes a second;
    a scale's kernel is a launch.
    """
    one, elements = (
        made(),
        {"input": 8192 * 4096, "weight": 4096 * 4096, "grad_output": 8192 * 4096},
    )
    assert one.parts["amax"] == pytest.approx(2 * sum(elements.values()) / 1e12)
    assert one.parts["cast"] == pytest.approx(
        (4 * sum(elements.values()) + 2 * elements["weight"]) / 1e12
    )
    assert one.parts["scale"] == pytest.approx(3e-6)
    assert one.parts["layout"] == one.parts["rescale"] == 0
    assert one.parts["gemm"] == pytest.approx(one.bf16 / 2)
    assert (one.kernels, one.floor) == (3 + 3 + 3 + 4, pytest.approx(13e-6))
    assert one.seconds == pytest.approx(sum(one.parts.values()))
    assert one.ratio == pytest.approx(one.bf16 / one.seconds)


def test_rowwise_gemms_run_at_their_rate_where_they_scale_themselves():
    """output at the rowwise rate; the other two, slow, at the tensorwise one with a kernel after
    them of 4 bytes a result.
    """
    one, flops = made("rowwise"), 2 * 8192 * 4096 * 4096
    assert one.parts["rescale"] == pytest.approx(4 * (8192 * 4096 + 4096 * 4096) / 1e12)
    ideal = flops / 8e14 + 2 * flops / 1e15
    assert ideal < one.parts["gemm"] < 1.1 * ideal  # waves


def test_high_precision_has_no_ratio():
    one = made("bf16")
    assert (one.ratio, one.parts, one.seconds) == (None, {}, one.bf16)


def test_operands_without_a_kernel_multiply_in_bf16():  # G-16
    one = made("mxfp8", how="xla")
    assert one.parts["gemm"] == pytest.approx(one.bf16)
    assert one.ratio < 1


def test_small_linears_lose_and_large_ones_win():
    ratios = [made(m=length, n=length, k=length).ratio for length in (256, 1024, 4096, 16384)]
    assert ratios == sorted(ratios)
    assert ratios[0] < 1 < ratios[-1] < 2


def test_a_sum_of_no_time_leaves_the_launches():
    """Of a tiny linear, every kernel takes a launch: FP8's floor is its time."""
    one = made(m=16, n=16, k=16)
    assert one.seconds == pytest.approx(one.floor)
    assert one.bf16 == pytest.approx(3e-6)


def test_each_device_casts_its_own_rows_of_a_weight_that_is_gathered_in_fp8():
    config = sizes.config(fsdp=2, compile="block")
    decision = next(d for d in config.decisions() if d.path.endswith("0.mlp.up_proj"))
    slow = dataclasses.replace(ROUND, bandwidth=H100.sheet.bandwidth / 100, launch=1e-8)
    one = roofline.linear_ledger(decision, config, "torch", slow)
    tokens, weight, outputs = 128 * 64, 128 * 64, 128 * 128
    assert one.parts["amax"] == pytest.approx(2 * (tokens + weight / 2 + outputs) / slow.bandwidth)
    assert one.parts["cast"] == pytest.approx(
        (4 * tokens + 3 * weight / 2 + 4 * outputs) / slow.bandwidth
    )
    assert one.parts["layout"] == pytest.approx(2 * weight / slow.bandwidth)
    alone = roofline.linear_ledger(
        decision, sizes.config(fsdp=2, compile="block", gather="compute"), "torch", slow
    )
    assert alone.parts["layout"] == 0
    assert alone.parts["cast"] == pytest.approx(
        (4 * tokens + 6 * weight + 4 * outputs) / slow.bandwidth
    )


def test_a_forward_pass_alone():
    config = sizes.config(compile="block")
    decision = config.decisions()[0]
    whole, forward = (
        roofline.linear_ledger(decision, config, "torch", H100, gemms=g)
        for g in (("output", "grad_input", "grad_weight"), ("output",))
    )
    assert forward.kernels < whole.kernels
    assert forward.bf16 < whole.bf16


def shapes(recipe, path, backend="torch", **keys):
    config = sizes.config(recipe, **keys)
    decision = next(d for d in config.decisions() if d.path.endswith(path))
    return {g.which: g for g in roofline.gemm_sizes(decision, config, backend)}


def test_shapes_are_those_of_a_device():  # L-2
    found = shapes("tensorwise", "0.mlp.down_proj", **sizes.MESH)
    assert {which: (g.m, g.n, g.k) for which, g in found.items()} == {
        "output": (128, 64, 64),
        "grad_input": (128, 64, 64),
        "grad_weight": (64, 64, 128),
    }
    found = shapes("tensorwise", "0.mlp.up_proj")
    assert {which: (g.m, g.n, g.k) for which, g in found.items()} == {
        "output": (256, 128, 64),
        "grad_input": (256, 64, 128),
        "grad_weight": (128, 64, 256),
    }


@pytest.mark.parametrize(
    ("recipe", "which", "backend", "how"),
    [
        ("tensorwise", "grad_input", "jax", "e5m2 tensorwise x e4m3fn tensorwise, slow"),
        ("rowwise_with_gw_hp", "grad_input", "torch", "e4m3fn rowwise x e4m3fn tensorwise, slow"),
        ("rowwise_with_gw_hp", "grad_weight", "torch", "bf16"),
        ("delayed", "output", "jax", "e4m3fn tensorwise delayed x e4m3fn tensorwise delayed, fast"),
    ],
)
def test_what_a_gemm_runs_in(recipe, which, backend, how):
    assert roofline.runs_in(RECIPES[recipe].gemms[which], backend) == how


@pytest.mark.parametrize(
    ("recipe", "backend"), [("mxfp8", "torch"), ("mxfp8", "jax"), ("blockwise", "jax")]
)
def test_operands_in_blocks_without_a_kernel_are_no_fp8_gemm(recipe, backend):  # G-16
    assert "dequantized: no FP8 GEMM" in roofline.runs_in(RECIPES[recipe].output, backend)


@pytest.mark.parametrize(("recipe", "factor"), [("mxfp8", 2), ("mxfp8_32x32", 2), ("nvfp4", 4)])
def test_hardware_multiplies_blocks_by_name(recipe, factor):  # G-26
    """At the data sheet's ratio to bfloat16, of GEMMs that memory does not bound."""
    m, b200 = 8192, PUBLISHED["b200"]
    for how, by in (("inductor", "scaled_mm"), ("xla", "scaled_matmul")):
        place = kernels.Place(products=by)
        gemms = roofline.sizes_of(m, m, m)
        one = roofline.gemms_ledger(RECIPES[recipe], gemms, how, b200, place)
        assert one.bf16 / one.parts["gemm"] == pytest.approx(factor)
        emulated = roofline.gemms_ledger(RECIPES[recipe], gemms, how, b200)
        assert emulated.parts["gemm"] == pytest.approx(one.bf16)
        assert one.parts["cast"] < emulated.parts["cast"]
    assert roofline.runs_in(RECIPES[recipe].output, "torch", "scaled_mm").endswith("scaled_mm")


def test_products_that_a_gpu_lacks_are_refused():  # G-26
    config = sizes.config(**COMPILED).replace(numerics={"recipe": "mxfp8", "products": "scaled_mm"})
    with pytest.raises(ConfigError, match=r"capability 10.0 or later; got H100 SXM"):
        report.of(config, "torch", H100)
    assert report.of(config, "torch", PUBLISHED["b200"]).ceilings.gpu == "B200"


def test_data_sheets():
    assert {name: (g.fp8 / g.bf16, g.bandwidth, g.processors) for name, g in GPUS.items()} == {
        "H100 SXM": (2.0, 3.35e12, 132),
        "H200 SXM": (2.0, 4.8e12, 132),
        "B200": (2.0, 8e12, 148),
    }
    assert all("data sheet" in g.source for g in GPUS.values())


def test_linears_are_those_of_the_plan():
    config = sizes.config(**COMPILED)
    found = roofline.linears(config, "torch", H100)
    assert [decision.path for decision, _ in found] == [
        decision.path for decision in config.decisions()
    ]
    assert found[0][1] is found[7][1]  # q_proj of either layer
    assert found[-1][1].ratio is None
    tied = roofline.linears(config.replace(model={"tie_word_embeddings": True}), "torch", H100)
    assert tied[-1][0].path == "lm_head"


def test_a_step_is_its_parts_of_a_batch():
    whole, parts = (
        roofline.predict_step(sizes.config(parts=n, **COMPILED), "torch", H100) for n in (1, 2)
    )
    once = sum(one.bf16 for _, one in roofline.linears(sizes.config(**COMPILED), "torch", H100))
    assert whole.bf16 == pytest.approx(once)
    assert parts.bf16 == pytest.approx(
        2
        * sum(
            one.bf16
            for _, one in roofline.linears(sizes.config(parts=2, **COMPILED), "torch", H100)
        )
    )
    assert "sums of gradients over parts" not in whole.rest
    # every parameter
    assert parts.rest["sums of gradients over parts"] == pytest.approx(
        12 * 2 * 106816 / H100.bandwidth
    )
    assert parts.rest["attention"] == pytest.approx(whole.rest["attention"])


def test_ratios_are_limited_by_the_rest():
    rest = {"a": 0.25, "b": 0.75}
    made = roofline.Step(3.0, configured=1.0, filtered=0.5, rest=rest, in_bf16=rest, after=rest)
    assert (made.ratio, made.filtered_ratio, made.limit) == (4 / 2, 4 / 1.5, 4 / 1)


def test_what_loses_is_filtered():
    """Every linear of 64 features loses: filtered, a step takes what bfloat16 does."""
    made = roofline.predict_step(sizes.config(**COMPILED), "torch", H100)
    assert made.ratio < 1
    assert made.filtered == pytest.approx(made.bf16)
    assert made.filtered_ratio == pytest.approx(1)


def test_checkpointing_runs_a_layers_forward_pass_again():
    none, selective, full = (
        roofline.predict_step(sizes.config(checkpointing=what, **COMPILED), "torch", H100)
        for what in ("none", "selective", "full")
    )
    assert none.bf16 == selective.bf16 < full.bf16
    assert none.configured == selective.configured < full.configured
    elementwise = [one.rest["norms, rotations, SwiGLU, sums"] for one in (none, selective, full)]
    assert elementwise[0] < elementwise[1] == elementwise[2]
    assert full.rest["attention"] == pytest.approx(9 / 7 * none.rest["attention"])


def test_checkpointing_runs_a_layer_again_by_its_own_recipe():
    """A step with layer 0 in bfloat16 takes as long as one with layer 1."""
    either = [
        roofline.predict_step(
            configs.load("llama-8b").replace(
                numerics={"filter_fqns": ("lm_head", layer)}, parallel=FULL
            ),
            "torch",
            H100,
        )
        for layer in ("layers.0", "layers.1")
    ]
    assert either[0].configured == pytest.approx(either[1].configured, rel=1e-12)


def test_no_pass_reads_weights_for_amaxes_that_adamw_takes():  # P-9
    """In JAX; in two microbatches whose layers run again, but for down, that saves four passes over
    each layer's float32 weights.
    """
    config = configs.load("llama-8b").replace(
        parallel={**FULL, "scan": True, "compile": "none"}, data={"microbatches": 2}
    )
    apart, first = (
        roofline.predict_step(config.replace(parallel={"precompute_scales": on}), "jax", H100)
        for on in (False, True)
    )
    saved = [
        (2 if "down" in d.path else 4)
        * max(4 * math.prod(d.shape) / config.parallel.shards / H100.bandwidth, H100.launch)
        for d in config.decisions()
        if d.fp8
    ]
    assert apart.configured - first.configured == pytest.approx(sum(saved), rel=1e-9)
    assert apart.bf16 == first.bf16


def test_pytorch_casts_weights_once_a_step_by_tritons_kernels():
    """In two microbatches whose layers run again, three of four casts are saved, but not of weights
    that are gathered, nor in CUDA graphs."""
    config = configs.load("llama-8b").replace(
        parallel={**FULL, "fsdp": 1}, data={"microbatches": 2, "batch_size": 2}
    )

    def linears(config) -> tuple[float, float]:
        step = roofline.predict_step(config, "torch", H100)
        passes = (
            ledger.seconds
            for gemms in (("output", "grad_input", "grad_weight"), ("output",))
            for decision, ledger in roofline.linears(config, "torch", H100, gemms=gemms)
            if len(gemms) > 1 or decision.fp8
        )
        return step.configured, 2 * sum(passes)

    once, each = linears(config)
    weights = sum(math.prod(d.shape) for d in config.decisions() if d.fp8)
    assert each - once == pytest.approx(3 * (2 + 4) * weights / H100.bandwidth)
    masters = {"kind": "adamw_states", "layout": "sqrt_e4m3_f16"}
    for keys in ({"fsdp": 2}, {"cuda_graphs": True}):
        once, each = linears(config.replace(parallel=keys, optimizer=masters))
        assert once == pytest.approx(each)


def test_rules_make_several_recipes_of_one_name():
    """R-8: which of two layers has which of two rules changes no time."""
    rules = [
        Rule(layers=("layers.0",), gemms=("grad_weight",), recipe="bf16"),
        Rule(layers=("layers.0",), roles=("weight",), recipe="bf16"),
    ]
    either = []
    for names in (("layers.0", "layers.1"), ("layers.1", "layers.0")):
        made = tuple(
            dataclasses.replace(rule, layers=(name,))
            for rule, name in zip(rules, names, strict=True)
        )
        config = sizes.config(**COMPILED).replace(numerics={"rules": made})
        either.append(roofline.predict_step(config, "torch", H100).configured)
        assert len(report.of(config, "torch", H100).rows) == 7 + 7 + 1
    assert either[0] == pytest.approx(either[1], rel=1e-12)


@pytest.mark.parametrize("filtered", [(), ("layers.0.self_attn.q_proj",)])
def test_equal_linears_in_other_places_have_costs_of_their_own(filtered):
    """XLA quantizes a shared input with its first linear in FP8."""
    config = configs.load("llama-125m").replace(
        model={"num_hidden_layers": 3}, numerics={"filter_fqns": filtered}
    )
    for decision, one in roofline.linears(config, "jax", H100):
        assert one == roofline.linear_ledger(decision, config, "jax", H100), decision.path


def test_faster_memory_helps_casts():
    """On an H200, whose memory alone is faster."""
    config = sizes.config(**COMPILED).replace(
        model={"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    )
    config = config.replace(data={"sequence_length": 8192})
    assert (
        roofline.predict_step(config, "torch", H100).configured
        > roofline.predict_step(config, "torch", PUBLISHED["h200"]).configured
    )
    faster = dataclasses.replace(H100, bandwidth=H100.sheet.bandwidth)
    assert (
        roofline.predict_step(config, "torch", faster).configured
        < roofline.predict_step(config, "torch", H100).configured
    )
