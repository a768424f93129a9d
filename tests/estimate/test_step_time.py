import dataclasses

import pytest
import sizes

from fp8ref.estimate import step_time
from fp8ref.estimate.gpu_rates import PUBLISHED

H100 = PUBLISHED["h100"]
COMPILED = {"compile": "block"}


def test_linears_are_those_of_the_plan():
    config = sizes.config(**COMPILED)
    found = step_time.linears(config, "torch", H100)
    assert [decision.path for decision, _ in found] == [decision.path for decision in config.decisions()]
    assert found[0][1] is found[7][1]  # q_proj of either layer
    assert found[-1][1].ratio is None
    tied = step_time.linears(config.replace(model={"tie_word_embeddings": True}), "torch", H100)
    assert tied[-1][0].path == "lm_head"


def test_a_step_is_its_parts_of_a_batch():
    whole, parts = (step_time.of(sizes.config(parts=n, **COMPILED), "torch", H100) for n in (1, 2))
    once = sum(one.bf16 for _, one in step_time.linears(sizes.config(**COMPILED), "torch", H100))
    assert whole.bf16 == pytest.approx(once)
    assert parts.bf16 == pytest.approx(2 * sum(one.bf16 for _, one in step_time.linears(sizes.config(parts=2, **COMPILED), "torch", H100)))
    assert "sums of gradients over parts" not in whole.rest
    assert parts.rest["sums of gradients over parts"] == pytest.approx(12 * 2 * 106816 / H100.bandwidth)  # every parameter
    assert parts.rest["attention"] == pytest.approx(whole.rest["attention"])


def test_ratios_are_limited_by_the_rest():
    made = step_time.Step(bf16=3.0, configured=1.0, filtered=0.5, rest={"a": 0.25, "b": 0.75})
    assert (made.ratio, made.filtered_ratio, made.limit) == (4 / 2, 4 / 1.5, 4 / 1)


def test_what_loses_is_filtered():
    """Every linear of 64 features loses: filtered, a step takes what bfloat16 does."""
    made = step_time.of(sizes.config(**COMPILED), "torch", H100)
    assert made.ratio < 1
    assert made.filtered == pytest.approx(made.bf16)
    assert made.filtered_ratio == pytest.approx(1)


def test_the_rest_by_hand():
    """256 tokens in sequences of 32, 2 layers; H = A = 64, KV 32, F 128; a vocabulary of 256."""
    config = sizes.config(**COMPILED)
    rest = step_time.of(config, "torch", H100).rest
    assert rest["attention"] == pytest.approx(2 * 7 * 256 * 32 * 64 / H100.attention)
    forward, backward = 18 * 64 + 4 * 64 + 4 * 32 + 6 * 128, 38 * 64 + 4 * 64 + 4 * 32 + 10 * 128
    moved = {
        "norms, rotations, SwiGLU, sums": 256 * 2 * (forward + backward),
        "embedding and loss": 12 * 256 * 64 + 28 * 256 * 256,
        "AdamW": (22 + 16) * 106816,
    }
    assert {what: rest[what] * H100.bandwidth for what in moved} == pytest.approx(moved)
    jax = step_time.of(sizes.config(), "jax", H100).rest
    assert step_time.of(sizes.config(attention="cudnn"), "jax", H100).rest["attention"] == rest["attention"]
    assert jax["attention"] == pytest.approx(2 * (12 * 256 * 32 * 64 / H100.bf16 + 30 * 256 * 32 * 4 / H100.bandwidth))


def test_checkpointing_runs_a_layers_forward_pass_again():
    none, selective, full = (
        step_time.of(sizes.config(checkpointing=what, **COMPILED), "torch", H100) for what in ("none", "selective", "full")
    )
    assert none.bf16 == selective.bf16 < full.bf16
    assert none.configured == selective.configured < full.configured
    elementwise = [one.rest["norms, rotations, SwiGLU, sums"] for one in (none, selective, full)]
    assert elementwise[0] < elementwise[1] == elementwise[2]
    assert full.rest["attention"] == pytest.approx(9 / 7 * none.rest["attention"])


def test_moments_in_fp8_move_less():
    """Adam's moments are half of the rest's bytes, in float32."""
    plain, fp8 = (step_time.of(sizes.config(optimizer=kind), "torch", H100).rest["AdamW"] for kind in ("adamw", "adamw_fp8"))
    assert fp8 < 0.8 * plain


def test_faster_memory_helps_casts():
    """On an H200, whose memory alone is faster."""
    config = sizes.config(**COMPILED).replace(model={"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32})
    config = config.replace(data={"sequence_length": 8192})
    assert step_time.of(config, "torch", H100).configured > step_time.of(config, "torch", PUBLISHED["h200"]).configured
    faster = dataclasses.replace(H100, bandwidth=H100.sheet.bandwidth)
    assert step_time.of(config, "torch", faster).configured < step_time.of(config, "torch", H100).configured
