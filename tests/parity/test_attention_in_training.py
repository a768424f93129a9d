"""Attention by a variant in the trainers, numerics.attention (A-1): on one device, on meshes, and
in what replays a step.
"""

import numpy as np
import pytest
import torch

from fp8ref.crosscheck import one_device, rerun
from fp8ref.jax.attention import attention as attention_jax
from fp8ref.shared.errors import ConfigError
from fp8ref.sim import llama as simulated
from fp8ref.spec import llama
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import VARIANTS, Mask
from fp8ref.torch.attention import attention as attention_torch
from fp8ref.torch.attention import kernel as attention_kernel
from fp8ref.train import loop
from fp8ref.train.config import hardware
from fp8ref.train.data import loader
from fp8ref.train.run import failed_step
from fp8ref.train.run.processes import Alone

WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Heads of 32 features, of which mxfp8 takes multiples."""


@pytest.fixture
def config(small):
    return small.replace(model=WIDE, numerics={"recipe": "bf16", "attention": "cudnn"})


@pytest.mark.grid(2)
@pytest.mark.parametrize("backend", loop.BACKENDS)
@pytest.mark.parametrize("variant", ["cudnn", "mxfp8", "bf16"])
def test_logits_are_mostly_the_simulators_and_no_other_variants(backend, variant, config):
    config = config.replace(numerics={"attention": variant})
    # so that probabilities differ
    weights = {name: 4 * w for name, w in llama.initial_weights(config.model, seed=0).items()}
    tokens = loader.open_batches(config).step(0)[:, :-1]
    found = loop.trainer(backend, config, weights).logits(tokens)

    def equal(attention) -> float:
        return float(
            (
                simulated.forward(
                    tokens, weights, config.model, simulated.Numerics(attention=attention)
                )
                == found
            ).mean()
        )

    # A backend's sums are in float32 and its exponentials an ulp off: a rounding in a hundred may
    # be another.
    others = [equal(other) for other in (None, "cudnn", "mxfp8") if other != variant]
    assert equal(variant) > 0.9
    assert max(others[1:] if variant == "bf16" else others) < 0.8


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_it_trains(backend, config):
    trainer = loop.trainer(backend, config)
    tokens = loader.open_batches(config).step(0)
    losses = [trainer.step(tokens)["loss"] for _ in range(6)]
    assert losses[-1] < losses[0] - 0.05


FORWARD_ALONE = [name for name, variant in VARIANTS.items() if variant.backward is None]


@pytest.mark.slow
@pytest.mark.parametrize("backend", loop.BACKENDS)
@pytest.mark.parametrize("variant", [*FORWARD_ALONE, "cudnn"])
def test_each_variant_trains_with_a_backward_pass_in_bf16(backend, variant, config):  # A-25, B-15
    """The proof has two products in FP8; gradients are near those of real arithmetic."""
    numerics = {
        "attention": variant,
        "attention_backward": "bf16",
        "attention_arithmetic": "stated",
    }
    trainer, exact = (
        loop.trainer(backend, config.replace(numerics=keys))
        for keys in (numerics, {"attention": "exact"})
    )
    tokens = loader.open_batches(config).step(0)
    proven = trainer.prove(tokens)
    assert proven["missing"] == []
    assert (proven["attention"]["variant"], proven["attention"]["backward"]) == (variant, "bf16")
    in_fp8 = [
        gemm["gemm"].rpartition("/")[2] for gemm in proven["attention"]["gemms"] if gemm["fp8"]
    ]
    assert sorted(in_fp8) == ["scores", "values"]
    mine, right = trainer.gradients(tokens), exact.gradients(tokens)
    name = "model.layers.0.self_attn.v_proj.weight"
    # P is off by FP8's log-sum-exp, below 2^-4
    assert np.linalg.norm(mine[name] - right[name]) < 2**-4 * np.linalg.norm(right[name])
    losses = [trainer.step(tokens)["loss"] for _ in range(4)]
    assert losses[-1] < losses[0] - 0.02


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_fa3_trains(backend, config):
    config = config.replace(numerics={"attention": "fa3", "attention_backward": "bf16"})
    trainer, tokens = loop.trainer(backend, config), loader.open_batches(config).step(0)
    found = trainer.statistics(tokens)
    # dO and dS are not in FP8
    assert {name.partition("self_attn/")[2] for name in found} == {
        "scores/q",
        "scores/k",
        "values/v",
        "values/p",
    }
    losses = [trainer.step(tokens)["loss"] for _ in range(4)]
    assert losses[-1] < losses[0] - 0.02


@pytest.mark.slow
def test_a_cross_check_holds_with_a_backward_pass_in_bf16(config):  # B-2, B-3, A-25
    report = one_device.crosscheck(
        config.replace(numerics={"attention": "fa4", "attention_backward": "bf16"}), steps=1
    )
    assert [name for name, check in report.checks.items() if not check.ok] == []
    assert any("self_attn/q/codes" in name for name in report.checks)
    assert not any("self_attn/do/codes" in name for name in report.checks)


@pytest.mark.slow
def test_a_cross_check_holds(config):  # B-2, B-3
    report = one_device.crosscheck(config.replace(numerics={"recipe": "tensorwise"}), steps=2)
    assert [name for name, check in report.checks.items() if not check.ok] == []
    assert any("/gradient/" in name for name in report.checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"fsdp": 2, "tensor": 2, "through": "jit"},
        {"scan": True, "checkpointing": "selective"},
    ],
)
def test_a_mesh_takes_the_scales_of_whole_tensors_in_jax(parallel, config):
    tokens = loader.open_batches(config).step(0)
    one, mesh = (loop.trainer("jax", config.replace(parallel=keys)) for keys in ({}, parallel))
    # Linears in bfloat16 sum partial products; a relative error of 2^-8 a rounding, averaged over
    # 64 tokens.
    assert mesh.evaluate(tokens) == pytest.approx(one.evaluate(tokens), rel=2**-10)


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_failed_step_is_replayed_with_it(backend, config, tmp_path, monkeypatch):
    weights = llama.initial_weights(config.model, seed=0)
    weights["model.norm.weight"] = np.full_like(weights["model.norm.weight"], 3e38)
    trainer = loop.trainer(backend, config, weights)
    tokens = loader.open_batches(config).step(0)
    metrics = {"step": 0, **trainer.step(tokens)}
    written = failed_step.write(tmp_path, trainer, config, tokens, metrics, Alone())
    asked = []
    of_sim = rerun.model.forward
    monkeypatch.setattr(
        rerun.model, "forward", lambda *a, **k: asked.append(a[3].attention) or of_sim(*a, **k)
    )
    found = rerun.rerun(tmp_path / written)
    assert asked == ["cudnn"]
    assert found.reproduced


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_failed_step_names_the_scores(backend, config, tmp_path):  # K-9
    """q and k of 1e20 are finite, and so are their scales: their scores are not."""
    weights = llama.initial_weights(config.model, seed=0)
    for role in "qk":
        weights[f"model.layers.0.self_attn.{role}_proj.weight"] *= np.float32(1e21)
    trainer, tokens = loop.trainer(backend, config, weights), loader.open_batches(config).step(0)
    written = failed_step.write(
        tmp_path, trainer, config, tokens, {"step": 0, **trainer.step(tokens)}, Alone()
    )
    found = rerun.rerun(tmp_path / written)
    assert (found.first.layer, found.first.role, found.first.found_by) == (
        "model.layers.0.self_attn",
        "S",
        backend,
    )
    assert found.first.why == "q, k and their scales are finite: their product left float32's range"
    assert (found.operands, found.faithful) == (3, True)  # q, k and v; dO is not finite


REFUSED = [
    (
        {"attention": "fa3"},
        r"is one of exact, bf16, cudnn, mxfp8, which have gradients, or with "
        r"numerics.attention_backward 'bf16' of .*; got 'fa3'",
    ),
    (
        {"attention": "bf16", "attention_backward": "bf16"},
        r"'bf16' is of a forward pass in FP8; got numerics.attention 'bf16'",
    ),
    (
        {"attention": None, "attention_backward": "bf16"},
        r"attention_backward is of numerics.attention, which is left out; got 'bf16'",
    ),
    ({"attention_backward": "fp8"}, r"attention_backward is one of own, bf16; got 'fp8'"),
    ({"attention": "flash"}, r"numerics.attention is one of .*; got 'flash'"),
    (
        {"attention": "cudnn", "attention_arithmetic": "exact"},
        r"attention_arithmetic is one of fast, stated; got 'exact'",
    ),
    (
        {"attention": None, "attention_arithmetic": "stated"},
        r"is of numerics.attention, which is left out; got 'stated'",
    ),
    (
        {"attention": "cudnn", "attention_arithmetic": "stated", "attention_operands": ("p",)},
        r"attention_operands are of .*, fast arithmetic .*; got 'cudnn', 'own', 'current', "
        r"'stated'",
    ),
    (
        {"attention": "mxfp8", "accumulate": "hopper"},
        r"attention multiplies MX blocks dequantized; got 'hopper' with .* 'mxfp8'",
    ),
]


@pytest.mark.parametrize(("numerics", "said"), REFUSED)
def test_what_cannot_be_trained_is_refused(numerics, said, config):
    with pytest.raises(ValueError, match=said):
        config.replace(numerics=numerics)


def test_heads_that_a_variant_does_not_take_are_refused(small):
    with pytest.raises(
        ValueError, match=r"'mxfp8' takes heads of a multiple of 32 up to 256; got 16"
    ):
        small.replace(numerics={"attention": "mxfp8"})
    with pytest.raises(ValueError, match=r"'cudnn' takes heads of at most 256 features; got 512"):
        small.replace(model={"hidden_size": 1024}, numerics={"attention": "cudnn"})


KERNEL = {"parallel": {"attention": "kernel"}}
REFUSED_KERNELS = [
    (
        {},
        r"numerics.attention 'cudnn' with numerics.attention_scaling 'delayed' .*; got 'cudnn' "
        r"with 'current' and 'own'. Use parallel.attention 'tiles'",
    ),
    (
        {"numerics": {"attention_scaling": "delayed"}},
        r"heads of 128 features, and data.sequence_length in multiples of 128; got 32 and 16",
    ),
    (
        {"numerics": {"attention": "fa4", "attention_backward": "bf16"}},
        r"'fa3_promoted' with .* 'bf16'; got 'fa4' with 'current' and 'bf16'",
    ),
    (
        {"numerics": {"attention": "fa3", "attention_backward": "bf16", "accumulate": "hopper"}},
        r"of FlashAttention-3 takes heads of multiples of 16, in eager mode, without .*; got "
        r"32, 'none', 'hopper' and 0",
    ),
    (
        {"numerics": {"attention": None}},
        r"got None with 'current'|is of numerics.attention, which is left out",
    ),
]


@pytest.mark.parametrize(("change", "said"), REFUSED_KERNELS)
def test_a_kernel_that_cannot_train_is_refused(change, said, config):
    with pytest.raises(ValueError, match=said):
        config.replace(**KERNEL, **change)


def test_a_kernel_is_never_replaced(small):
    wide = small.replace(model={"hidden_size": 256}, data={"sequence_length": 128})
    config = wide.replace(numerics={"attention": "cudnn", "attention_scaling": "delayed"}, **KERNEL)
    with pytest.raises(
        ConfigError,
        match=r"'kernel' needs an NVIDIA GPU; jax runs on cpu. Set parallel.attention to tiles",
    ):
        loop.trainer("jax", config)
    with pytest.raises(
        ConfigError,
        match=r"no FP8 kernel of variant 'cudnn' with gradients.*Set parallel.attention to "
        r"tiles, or train in JAX",
    ):
        loop.trainer("torch", config)
    with pytest.raises(
        ValueError,
        match=r"without numerics.accumulate and statistics.every, which look into the tiles; got "
        r"1 devices, 'hopper'",
    ):
        config.replace(numerics={"accumulate": "hopper"})


@torch.library.custom_op("flash_attn_3::fwd", mutates_args=())
def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, descales: list[torch.Tensor], scale: float
) -> list[torch.Tensor]:
    """A stand-in for the operator of FlashAttention-3's kernel: causal, of codes [B, T, heads, D],
    computed by tiles.
    """
    x = [
        code.transpose(1, 2).float()
        * one[:, :, None, None].repeat_interleave(code.shape[2] // one.shape[1], dim=1)
        for code, one in zip((q, k, v), descales, strict=True)
    ]
    scales = {role: 1 / one[:, :, None, None] for role, one in zip("qkv", descales, strict=True)}
    call = Call(variant="fa3", mask=Mask(causal=True), scale=scale)
    result = attention_torch.forward(*x, variant=call, scales=scales)
    return [result.o.bfloat16().transpose(1, 2).contiguous(), result.lse]


def stand_in(
    q,
    k,
    v,
    *,
    softmax_scale,
    causal,
    window_size,
    return_attn_probs,
    q_descale,
    k_descale,
    v_descale,
):
    assert (causal, window_size, return_attn_probs) == (True, (-1, -1), True)
    return torch.ops.flash_attn_3.fwd(q, k, v, [q_descale, k_descale, v_descale], softmax_scale)


def test_flash_attention_trains_by_its_kernel(config, monkeypatch):  # B-15
    """The manifest names the operator of each layer; losses are those of tiles, but for ties of o
    (see tests/torch/test_attention_kernel).
    """
    config = config.replace(numerics={"attention": "fa3", "attention_backward": "bf16"})
    by_kernel = config.replace(**KERNEL)
    with pytest.raises(
        ConfigError,
        match=r"'kernel': FlashAttention-3's FP8 kernel needs a Hopper GPU.*In the trainer set "
        r"parallel.attention to tiles",
    ):
        loop.trainer("torch", by_kernel)
    with pytest.raises(
        ConfigError, match=r"JAX has no kernel of variant 'fa3': .*train in PyTorch"
    ):
        loop.trainer("jax", by_kernel)
    monkeypatch.setattr(attention_kernel, "library", lambda device: stand_in)
    tokens, trainers = (
        loader.open_batches(config).step(0),
        [loop.trainer("torch", each) for each in (by_kernel, config)],
    )
    proven = trainers[0].prove(tokens)
    assert proven["attention"]["kernels"] == ["model.layers.0.self_attn: flash_attn_3::fwd"]
    assert proven["missing"] == []
    losses = [[trainer.step(tokens)["loss"] for _ in range(2)] for trainer in trainers]
    assert losses[0] == pytest.approx(losses[1], rel=2**-10)
    monkeypatch.setattr(
        attention_kernel, "apply", lambda q, k, v, **how: attention_torch.apply(q, k, v, **how)
    )
    with pytest.raises(
        ConfigError,
        match=r"self_attn/attention: planned the kernel flash_attn_3::fwd; no call of it was seen",
    ):
        trainers[0].prove(tokens)


@pytest.mark.parametrize("backend", loop.BACKENDS)
def test_tiles_may_be_named(backend, config):
    assert (
        loop.trainer(
            backend, config.replace(parallel={"attention": "tiles"})
        ).config.parallel.attention
        == "tiles"
    )


def test_two_choices_of_attention_are_refused(config):
    with pytest.raises(
        ValueError, match=r"numerics.attention 'cudnn' is none of them; got 'chunked'"
    ):
        config.replace(parallel={"attention": "chunked"})


def test_a_compiler_that_writes_out_every_addition_is_refused(config):
    stated = config.replace(numerics={"attention_arithmetic": "stated"})
    with pytest.raises(
        ValueError,
        match=r"every addition of numerics.attention_arithmetic 'stated'.*; got parallel.compile "
        r"'block'",
    ):
        stated.replace(parallel={"compile": "block"})


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch", "ignore::UserWarning:torch"
)  # inductor and dynamo
def test_a_compiled_block_trains(config):  # A-18, B-9
    """The loss is eager's, but for roundings of norms and activations that inductor keeps in
    float32: 2^-8 each, averaged over tokens.
    """
    tokens = loader.open_batches(config).step(0)
    eager, compiled = (
        loop.trainer("torch", config.replace(parallel={"compile": how}))
        for how in ("none", "block")
    )
    assert compiled.evaluate(tokens) == pytest.approx(eager.evaluate(tokens), rel=2**-10)
    losses = [[trainer.step(tokens)["loss"] for _ in range(3)] for trainer in (eager, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=2**-8)
    assert losses[1][2] < losses[1][0]


@pytest.mark.parametrize("backend", loop.BACKENDS)
def test_the_stated_arithmetic_is_a_choice_by_name(backend, config, monkeypatch):
    module, name = (
        (attention_jax, "apply_with_stats") if backend == "jax" else (attention_torch, "apply")
    )
    asked, apply = [], getattr(module, name)

    def applied(*args, **options):
        asked.append(options.get("arithmetic") or options["variant"].arithmetic)
        return apply(*args, **options)

    monkeypatch.setattr(module, name, applied)
    tokens = loader.open_batches(config).step(0)
    found = [
        loop.trainer(backend, config.replace(numerics={"attention_arithmetic": how})).evaluate(
            tokens
        )
        for how in ("fast", "stated")
    ]
    assert set(asked[: len(asked) // 2]) == {"fast"}
    assert set(asked[len(asked) // 2 :]) == {"stated"}
    # a code in a thousand is a neighbor, averaged over tokens
    assert found[0] == pytest.approx(found[1], rel=2**-10)


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_simulated_hardware_multiplies_its_products(backend, config):  # G-19, B-12, B-15
    """The simulator has the logits of the same plan, but for roundings of norms and rotations: more
    than of exact sums.
    """
    config = config.replace(
        model={"num_key_value_heads": 1},
        numerics={"attention_arithmetic": "stated", "accumulate": "hopper"},
    )
    weights = {name: 4 * w for name, w in llama.initial_weights(config.model, seed=0).items()}
    trainer, tokens = loop.trainer(backend, config, weights), loader.open_batches(config).step(0)
    found = trainer.logits(tokens[:, :-1])
    equal = [
        float(
            (
                simulated.forward(
                    tokens[:, :-1],
                    weights,
                    config.model,
                    simulated.Numerics(attention="cudnn", multiply=plan),
                )
                == found
            ).mean()
        )
        for plan in (hardware.of(config), None)
    ]
    assert equal[0] > 0.95
    assert equal[1] < equal[0] - 0.02
    proven = trainer.prove(tokens)
    assert {(gemm["plan"], gemm["accumulate"]) for gemm in proven["attention"]["gemms"]} == {
        ("hopper", "slow")
    }
    assert len(proven["attention"]["gemms"]) == 6
    assert proven["missing"] == []
