"""Attention by a variant in the trainers, numerics.attention (A-1): on one device, on meshes, and in what replays a step."""

import numpy as np
import pytest

from fp8ref import llama
from fp8ref.crosscheck import one_device, rerun
from fp8ref.errors import ConfigError
from fp8ref.jax import attention as attention_jax
from fp8ref.sim import llama as simulated
from fp8ref.torch import attention as attention_torch
from fp8ref.train import failed_step, hardware, loop
from fp8ref.train.data import loader
from fp8ref.train.processes import Alone

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
    weights = {name: 4 * w for name, w in llama.initial_weights(config.model, seed=0).items()}  # so that probabilities differ
    tokens = loader.open_batches(config).step(0)[:, :-1]
    found = loop.trainer(backend, config, weights).logits(tokens)

    def equal(attention) -> float:
        return float((simulated.forward(tokens, weights, config.model, {}, attention=attention) == found).mean())

    # A backend's sums are in float32 and its exponentials an ulp off: a rounding in a hundred may be another.
    others = [equal(other) for other in (None, "cudnn", "mxfp8") if other != variant]
    assert equal(variant) > 0.9
    assert max(others[1:] if variant == "bf16" else others) < 0.8


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_it_trains(backend, config):
    trainer = loop.trainer(backend, config)
    tokens = loader.open_batches(config).step(0)
    losses = [trainer.step(tokens)["loss"] for _ in range(6)]
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.slow
def test_a_cross_check_holds(config):  # B-2, B-3
    report = one_device.crosscheck(config.replace(numerics={"recipe": "tensorwise"}), steps=2)
    assert [name for name, check in report.checks.items() if not check.ok] == []
    assert any("/gradient/" in name for name in report.checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "tensor": 2, "through": "jit"}, {"scan": True, "checkpointing": "selective"}],
)
def test_a_mesh_takes_the_scales_of_whole_tensors_in_jax(parallel, config):
    tokens = loader.open_batches(config).step(0)
    one, mesh = (loop.trainer("jax", config.replace(parallel=keys)) for keys in ({}, parallel))
    # Linears in bfloat16 sum partial products; a relative error of 2^-8 a rounding, averaged over 64 tokens.
    assert mesh.evaluate(tokens) == pytest.approx(one.evaluate(tokens), rel=2**-10)


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_failed_step_is_replayed_with_it(backend, config, tmp_path, monkeypatch):
    weights = llama.initial_weights(config.model, seed=0)
    weights["model.norm.weight"] = np.full_like(weights["model.norm.weight"], 3e38)
    trainer = loop.trainer(backend, config, weights)
    tokens = loader.open_batches(config).step(0)
    metrics = {"step": 0, **trainer.step(tokens)}
    path = tmp_path / "step"
    written = failed_step.write(path, trainer, config, tokens, metrics, Alone())
    asked = []
    of_sim = rerun.model.forward
    monkeypatch.setattr(rerun.model, "forward", lambda *a, **k: asked.append(k["attention"]) or of_sim(*a, **k))
    found = rerun.rerun(path / written)
    assert asked == ["cudnn"]
    assert found.reproduced


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_failed_step_names_the_scores(backend, config, tmp_path):  # K-9
    """q and k of 1e20 are finite, and so are their scales: their scores are not."""
    weights = llama.initial_weights(config.model, seed=0)
    for role in "qk":
        weights[f"model.layers.0.self_attn.{role}_proj.weight"] *= np.float32(1e21)
    trainer, tokens = loop.trainer(backend, config, weights), loader.open_batches(config).step(0)
    written = failed_step.write(tmp_path, trainer, config, tokens, {"step": 0, **trainer.step(tokens)}, Alone())
    found = rerun.rerun(tmp_path / written)
    assert (found.first.layer, found.first.role, found.first.found_by) == ("model.layers.0.self_attn", "S", backend)
    assert found.first.why == "q, k and their scales are finite: their product left float32's range"
    assert (found.operands, found.faithful) == (3, True)  # q, k and v; dO is not finite


REFUSED = [
    ({"attention": "fa3"}, r"numerics.attention is one of exact, bf16, cudnn, mxfp8, which have gradients; got 'fa3'"),
    ({"attention": "flash"}, r"numerics.attention is one of .*; got 'flash'"),
    ({"attention": "cudnn", "attention_arithmetic": "exact"}, r"attention_arithmetic is one of fast, stated; got 'exact'"),
    ({"attention": None, "attention_arithmetic": "stated"}, r"is of numerics.attention, which is left out; got 'stated'"),
    ({"attention": "mxfp8", "accumulate": "hopper"}, r"attention multiplies MX blocks dequantized; got 'hopper' with .* 'mxfp8'"),
]


@pytest.mark.parametrize(("numerics", "said"), REFUSED)
def test_what_cannot_be_trained_is_refused(numerics, said, config):
    with pytest.raises(ValueError, match=said):
        config.replace(numerics=numerics)


def test_heads_that_a_variant_does_not_take_are_refused(small):
    with pytest.raises(ValueError, match=r"'mxfp8' takes heads of a multiple of 32 up to 256; got 16"):
        small.replace(numerics={"attention": "mxfp8"})
    with pytest.raises(ValueError, match=r"'cudnn' takes heads of at most 256 features; got 512"):
        small.replace(model={"hidden_size": 1024}, numerics={"attention": "cudnn"})


KERNEL = {"parallel": {"attention": "kernel"}}
REFUSED_KERNELS = [
    (
        {},
        r"numerics.attention 'cudnn' with numerics.attention_scaling 'delayed'; got 'cudnn' with 'current'. Use parallel.attention 'tiles'",
    ),
    ({"numerics": {"attention_scaling": "delayed"}}, r"heads of 128 features, and data.sequence_length in multiples of 128; got 32 and 16"),
    ({"numerics": {"attention": None}}, r"got None with 'current'|is of numerics.attention, which is left out"),
]


@pytest.mark.parametrize(("change", "said"), REFUSED_KERNELS)
def test_a_kernel_that_cannot_train_is_refused(change, said, config):
    with pytest.raises(ValueError, match=said):
        config.replace(**KERNEL, **change)


def test_a_kernel_is_never_replaced(small):
    wide = small.replace(model={"hidden_size": 256}, data={"sequence_length": 128})
    config = wide.replace(numerics={"attention": "cudnn", "attention_scaling": "delayed"}, **KERNEL)
    with pytest.raises(ConfigError, match=r"'kernel' needs an NVIDIA GPU; jax runs on cpu. Set parallel.attention to tiles"):
        loop.trainer("jax", config)
    with pytest.raises(
        ConfigError, match=r"no FP8 kernel of variant 'cudnn' with gradients.*Set parallel.attention to tiles, or train in JAX"
    ):
        loop.trainer("torch", config)
    with pytest.raises(
        ValueError, match=r"without numerics.accumulate and statistics.every, which look into the tiles; got 1 devices, 'hopper'"
    ):
        config.replace(numerics={"accumulate": "hopper"})


@pytest.mark.parametrize("backend", loop.BACKENDS)
def test_tiles_may_be_named(backend, config):
    assert loop.trainer(backend, config.replace(parallel={"attention": "tiles"})).config.parallel.attention == "tiles"


def test_two_choices_of_attention_are_refused(config):
    with pytest.raises(ValueError, match=r"numerics.attention 'cudnn' is none of them; got 'chunked'"):
        config.replace(parallel={"attention": "chunked"})


def test_a_compiler_that_writes_out_every_addition_is_refused(config):
    stated = config.replace(numerics={"attention_arithmetic": "stated"})
    with pytest.raises(ValueError, match=r"every addition of numerics.attention_arithmetic 'stated'.*; got parallel.compile 'block'"):
        stated.replace(parallel={"compile": "block"})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")  # inductor and dynamo
def test_a_compiled_block_trains(config):  # A-18, B-9
    """The loss is eager's, but for roundings of norms and activations that inductor keeps in float32: 2^-8 each, averaged over tokens."""
    tokens = loader.open_batches(config).step(0)
    eager, compiled = (loop.trainer("torch", config.replace(parallel={"compile": how})) for how in ("none", "block"))
    assert compiled.evaluate(tokens) == pytest.approx(eager.evaluate(tokens), rel=2**-10)
    losses = [[trainer.step(tokens)["loss"] for _ in range(3)] for trainer in (eager, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=2**-8)
    assert losses[1][2] < losses[1][0]


@pytest.mark.parametrize("backend", loop.BACKENDS)
def test_the_stated_arithmetic_is_a_choice_by_name(backend, config, monkeypatch):
    module, name = (attention_jax, "apply_with_stats") if backend == "jax" else (attention_torch, "apply")
    asked, apply = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *a, **k: asked.append(k["arithmetic"]) or apply(*a, **k))
    tokens = loader.open_batches(config).step(0)
    found = [loop.trainer(backend, config.replace(numerics={"attention_arithmetic": how})).evaluate(tokens) for how in ("fast", "stated")]
    assert set(asked[: len(asked) // 2]) == {"fast"}
    assert set(asked[len(asked) // 2 :]) == {"stated"}
    assert found[0] == pytest.approx(found[1], rel=2**-10)  # a code in a thousand is a neighbor, averaged over tokens


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_simulated_hardware_multiplies_its_products(backend, config):  # G-19, B-12, B-15
    """The simulator has the logits of the same plan, but for roundings of norms and rotations: more than of exact sums."""
    config = config.replace(model={"num_key_value_heads": 1}, numerics={"attention_arithmetic": "stated", "accumulate": "hopper"})
    weights = {name: 4 * w for name, w in llama.initial_weights(config.model, seed=0).items()}
    trainer, tokens = loop.trainer(backend, config, weights), loader.open_batches(config).step(0)
    found = trainer.logits(tokens[:, :-1])
    equal = [
        float((simulated.forward(tokens[:, :-1], weights, config.model, {}, attention="cudnn", multiply=plan) == found).mean())
        for plan in (hardware.of(config), None)
    ]
    assert equal[0] > 0.95
    assert equal[1] < equal[0] - 0.02
    proven = trainer.prove(tokens)
    assert {(gemm["plan"], gemm["accumulate"]) for gemm in proven["attention"]["gemms"]} == {("hopper", "slow")}
    assert len(proven["attention"]["gemms"]) == 6
    assert proven["missing"] == []
