"""The trainer on eight devices against one: gradients, states, what is compiled, what is
refused.
"""

import jax
import numpy as np
import pytest
from helpers.training import microbatches, persistent_caches

from fp8ref.jax import proof
from fp8ref.jax.gemm import gemm
from fp8ref.jax.proof import verdict
from fp8ref.jax.quantize import scaling
from fp8ref.shared.errors import ConfigError
from fp8ref.spec.llama import LlamaConfig
from fp8ref.train import loop
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import DataConfig, RunConfig
from fp8ref.train.jax.mesh import Layout
from fp8ref.train.jax.trainer import Trainer
from fp8ref.train.run import log

CONFIG = Config(
    model=LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    ),
    data=DataConfig(sequence_length=32, batch_size=8),
    run=RunConfig(steps=3, eval_every=3, eval_batches=1),
)
TOKENS = np.random.default_rng(0).integers(0, 256, (3, 8, 33))
ALONE = {"data": 1, "fsdp": 1, "tensor": 1, "sequence": False, "through": "shard_map"}
# Accumulators differ from one device's by the order of their sum alone. Parts that are rounded
# first are held bit for bit in tests/jax.
SEQUENCE = {"data": 2, "fsdp": 2, "tensor": 2, "sequence": True, "reduce": "accumulators"}
CASES = [
    pytest.param("bf16", SEQUENCE, marks=pytest.mark.slow),
    ("tensorwise", {"fsdp": 8}),
    pytest.param("tensorwise", {**SEQUENCE, "through": "jit"}, marks=pytest.mark.slow),
    pytest.param("delayed", SEQUENCE, marks=pytest.mark.slow),
    pytest.param("rowwise", {"fsdp": 2, "tensor": 4, "through": "jit"}, marks=pytest.mark.slow),
]


def trainer(recipe, parallel, **more):
    return Trainer(CONFIG.replace(numerics={"recipe": recipe}, parallel=parallel, **more))


@pytest.mark.parametrize(("recipe", "parallel"), CASES, ids=str)
def test_a_mesh_trains_as_one_device_does(recipe, parallel):  # P-9, P-10
    """Codes and scales are one device's where operands are; an operand rounded otherwise to
    bfloat16, 2^-9 of it, is what the order of a sum can change, and passes some 20 roundings here:
    2^-6 of a gradient's norm. A gradient summed twice is wrong by all of it."""
    one, many = trainer(recipe, {}), trainer(recipe, parallel)
    ours, theirs = many.gradients(TOKENS[0]), one.gradients(TOKENS[0])
    for name, value in theirs.items():
        assert np.linalg.norm(ours[name] - value) <= 2.0**-6 * np.linalg.norm(value), name
    proof = many.prove(TOKENS[0])
    assert proof["missing"] == []
    assert sum(dot["fp8"] for dot in proof["gemms"]) == sum(
        s.fp8 for d in many.decisions for s in d.recipe.gemms.values()
    )
    for tokens in TOKENS:
        mine, other = many.step(tokens), one.step(tokens)
        assert mine["loss"] == pytest.approx(other["loss"], rel=2.0**-9)
    assert (many._train._cache_size(), one._train._cache_size()) == (1, 1)  # nothing compiled twice
    assert jax.tree.structure(many._state.fp8) == jax.tree.structure(one._state.fp8)
    for mine, other in zip(
        jax.tree.leaves(many._state.fp8), jax.tree.leaves(one._state.fp8), strict=True
    ):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(other), rtol=2.0**-6)
    assert many.evaluate(TOKENS[0]) == pytest.approx(one.evaluate(TOKENS[0]), rel=2.0**-9)
    assert many.logits(TOKENS[0][:, :-1]).shape == (8, 32, 256)


@pytest.mark.parametrize(
    ("parallel", "cached"),
    [({"fsdp": 2, "scan": True}, False), ({"fsdp": 2}, True), ({"scan": True}, True)],
    ids=str,
)
def test_a_loop_that_gathers_is_compiled_in_every_process(parallel, cached, tmp_path):
    """XLA's CPU runtime would run a cached copy out of order."""
    evaluated = trainer("bf16", parallel)
    with persistent_caches.in_directory(tmp_path):
        evaluated.evaluate(TOKENS[0])
        assert ("mean_loss" in persistent_caches.functions(tmp_path)) == cached


def test_every_linear_gathers_its_own_codes_beside_attention_by_a_variant():  # B-7, B-15
    """Read before XLA partitions anything: behind that pass q, k and v, of one input, have one
    gather.
    """
    parallel = {"fsdp": 2, "tensor": 2, "sequence": True}
    numerics = {"recipe": "rowwise", "attention": "cudnn"}
    proof = Trainer(
        CONFIG.replace(numerics=numerics, parallel=parallel, data={"batch_size": 2})
    ).prove(TOKENS[0, :2])
    assert (proof["read_from"], proof["missing"]) == ("stablehlo", [])
    # each weight for two GEMMs, and the input of a column-parallel linear; of a row-parallel one
    # grad_output's codes, with bits (P-6)
    assert proof["gathers"]["f8e4m3fn"] == 7 * 2 + 5 * 2 + 2


@pytest.mark.slow
def test_states_of_delayed_scaling_are_no_parameters_and_change_once_a_step():
    one = trainer("delayed", {})
    assert set(one._state.fp8) == {d.path for d in one.decisions if d.fp8}
    before = jax.tree.map(np.asarray, one._state.fp8)
    one.evaluate(TOKENS[0]), one.gradients(TOKENS[0]), one.logits(TOKENS[0])
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((np.asarray(a) == b).all()), one._state.fp8, before)
    )
    one.step(TOKENS[0])
    for state in one._state.fp8.values():
        assert all(
            int(of_role.step) == 1 and float(of_role.amax_history[0]) > 0
            for of_role in state.values()
        )
    assert {name.split(".")[-1] for name in one.weights()} == {"weight"}


@pytest.mark.slow
# B-7
def test_the_manifest_keeps_the_proof_and_a_fallback_stops_the_run(tmp_path, text, monkeypatch):
    config = CONFIG.replace(
        data={"source": str(text), "sequence_length": 16},
        numerics={"recipe": "tensorwise"},
        run={"steps": 1, "eval_every": 1},
    )
    loop.train(config, "jax", tmp_path / "run")
    proof = log.read_manifest(tmp_path / "run")["proof"]
    assert (proof["read_from"], proof["missing"], len(proof["gemms"])) == ("stablehlo", [], 21)

    def fallback(a, b, *, out_dtype, **how):
        return gemm.matmul_hp(
            scaling.dequantize(a), scaling.dequantize(b), axes=(a.axis, b.axis), out_dtype=out_dtype
        )

    monkeypatch.setattr(gemm, "matmul", fallback)
    with pytest.raises(
        ConfigError,
        match=r"lacks planned GEMMs or gathers:\n.*q_proj/output: planned f8e4m3fn x f8e4m3fn, "
        r"fast; f32 x f32",
    ):
        loop.train(config, "jax", tmp_path / "stopped")
    assert not (tmp_path / "stopped").exists()
    loop.train(config.replace(run={"allow_fallback": True}), "jax", tmp_path / "allowed")
    assert len(log.read_manifest(tmp_path / "allowed")["proof"]["missing"]) == 21


def test_on_a_gpu_the_compiled_step_is_read_too(monkeypatch):  # B-7
    """A CPU compiles FP8 dots to wider ones, which is what a GPU must not do."""
    monkeypatch.setattr(Layout, "on_gpu", True)
    with pytest.raises(
        ConfigError, match=r"q_proj/output: f8e4m3fn x f8e4m3fn, fast, is compiled to"
    ):
        trainer("tensorwise", {}).prove(TOKENS[0])
    proof = trainer("tensorwise", {}, run={"steps": 3, "allow_fallback": True}).prove(TOKENS[0])
    assert len(proof["missing"]) == 21
    assert sum(proof["compiled"]["kernels"].values()) >= 21


@pytest.mark.parametrize("parallel", [{}, SEQUENCE], ids=str)
def test_a_step_is_lowered_from_shapes_as_it_is_from_arrays(parallel):
    config = CONFIG.replace(numerics={"recipe": "delayed"}, parallel=parallel)
    abstract = Trainer(config, devices=jax.devices())
    assert {type(leaf) for leaf in jax.tree.leaves(abstract._params)} == {jax.ShapeDtypeStruct}
    assert proof.read(abstract.lowered(TOKENS[0])) == proof.read(Trainer(config).lowered(TOKENS[0]))


@pytest.mark.parametrize(("recipe", "scan"), [("mxfp8", False), ("mxfp4", True)])
def test_dequantized_operands_are_called_that(recipe, scan):  # B-7, R-9
    config = CONFIG.replace(
        model={"hidden_size": 128, "intermediate_size": 128},
        numerics={"recipe": recipe},
        parallel={"scan": scan},
        run={"steps": 1},
    )
    proof = Trainer(config).prove(TOKENS[0])
    dequantized = proof["on_dequantised_operands"]
    assert len(dequantized) == 21
    assert proof.get("emulated", []) == (dequantized if recipe == "mxfp4" else [])
    assert not any(dot["fp8"] for dot in proof["gemms"])
    assert {(dot["a"], dot["b"]) for dot in proof["gemms"]} == {("bf16", "bf16")}


def test_attention_is_by_the_implementation_that_is_asked_for(monkeypatch):
    asked, own = [], jax.nn.dot_product_attention

    def recorded(*arguments, implementation, **options):
        asked.append(implementation)
        return own(*arguments, **options)

    with monkeypatch.context() as as_if:
        as_if.setattr(Layout, "on_gpu", True)
        trainers = (
            trainer("tensorwise", {}),
            trainer("tensorwise", {"attention": "cudnn", "data": 2}),
        )
    monkeypatch.setattr(jax.nn, "dot_product_attention", recorded)
    for one in trainers:
        one.evaluate(TOKENS[0])
    assert asked == ["xla", "cudnn"]


@pytest.mark.gpu
@pytest.mark.parametrize("parallel", [{}, {"through": "jit"}], ids=str)
def test_cudnn_attention_gives_the_loss_of_xlas(parallel):
    losses = [
        trainer("tensorwise", {"attention": one} | parallel).evaluate(TOKENS[0])
        for one in ("xla", "cudnn")
    ]
    # both round probabilities and outputs to bfloat16, at other places: a few of 2^-8 in logits,
    # whose mean over tokens is the loss
    assert abs(losses[0] - losses[1]) <= 2**-7 * losses[0]


@pytest.mark.parametrize(
    ("parallel", "more", "message"),
    [
        (
            {"attention": "cudnn"},
            {},
            "'cudnn' needs an NVIDIA GPU; jax runs on cpu. Set parallel.attention to xla",
        ),
        (
            {"attention": "cudnn"},
            {"model": {"num_attention_heads": 16}},
            "'cudnn' takes heads of a multiple of 8 up to 256; got 4. Set it to xla",
        ),
        (
            {"attention": "cudnn"},
            {"model": {"hidden_size": 1280}},
            "'cudnn' takes heads of a multiple of 8 up to 256; got 320",
        ),
        ({"data": 16}, {}, r"16 devices \({'data': 16, 'fsdp': 1, 'tensor': 1}\); jax has 8"),
        (
            {"data": 8},
            {"data": {"batch_size": 12}},
            "batch_size is divisible by data x fsdp = 8 devices; got 12",
        ),
        (
            {"data": 4},
            {"data": {"microbatches": 4}},
            "divisible by data x fsdp = 4 devices times data.microbatches = 4; got 8",
        ),
        ({"tensor": 8}, {}, "num_attention_heads is divisible by parallel.tensor = 8; got 4"),
        (
            {"tensor": 2, "sequence": True},
            {"data": {"sequence_length": 33}},
            "sequence_length is divisible by tensor = 2; got 33",
        ),
        ({"fsdp": 8}, {"model": {"intermediate_size": 100}}, "gate_proj: N is divisible .*N=100"),
    ],
)
# P-1
def test_what_the_mesh_does_not_cut_into_equal_pieces_is_refused_by_name(parallel, more, message):
    with pytest.raises(ConfigError, match=message):
        trainer("tensorwise", parallel, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "parallel"),
    [("delayed", SEQUENCE), ("tensorwise", {"fsdp": 2, "through": "jit"})],
    ids=str,
)
def test_a_mesh_trains_a_batch_in_parts(recipe, parallel):  # T-7
    """The bound is that of the test of whole batches."""
    config = microbatches.config_of(CONFIG, recipe, **parallel)
    many, one, tokens = (
        Trainer(config),
        Trainer(config.replace(parallel=ALONE)),
        microbatches.tokens_of(config),
    )
    ours, theirs = many.gradients(tokens), one.gradients(tokens)
    for name, value in theirs.items():
        assert np.linalg.norm(ours[name] - value) <= 2.0**-6 * np.linalg.norm(value), name
    assert many.prove(tokens)["missing"] == []


@pytest.mark.slow
def test_the_proof_of_a_batch_in_parts_wants_every_gather(monkeypatch):  # B-7, T-7
    config = microbatches.config_of(CONFIG, "delayed", **SEQUENCE)
    trainer, tokens = Trainer(config), microbatches.tokens_of(config)
    program = proof.read(trainer.lowered(tokens))  # compiled for it, so once
    monkeypatch.setattr(proof, "read", lambda lowered: program)
    found = trainer.prove(tokens)
    assert found["missing"] == []
    assert sum(dot["fp8"] for dot in found["gemms"]) == sum(
        s.fp8 for d in trainer.decisions for s in d.recipe.gemms.values()
    )
    # neither GEMM of the backward pass gathers grad_output
    honest = verdict.collectives
    monkeypatch.setattr(
        verdict, "collectives", lambda program: [c for c in honest(program) if c.dtype != "f8e5m2"]
    )
    with pytest.raises(
        ConfigError,
        match=r"o_proj/grad_input: planned 2 gathers in FP8, .*found 1(?s:.*)o_proj/grad_weight: "
        r".*found 0",
    ):
        trainer.prove(tokens)


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({}, ("float32", "result")),
        ({"reduce_dtype": "bfloat16"}, ("result", "result")),
        ({"tensor_reduce_dtype": "float32"}, ("float32", "float32")),
        ({"tensor_reduce_dtype": "bfloat16"}, ("float32", "result")),
        ({"reduce": "accumulators"}, ("accumulators", "accumulators")),
        ({"reduce_dtype": "float8_e4m3fn"}, ("float8_e4m3fn", "result")),
    ],
    ids=str,
)
def test_what_linears_sum_over_devices_is_as_the_config_says(keys, parts):  # P-9
    layout = Layout(CONFIG.replace(parallel={"fsdp": 2, "tensor": 2} | keys))
    for name in ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "lm_head"):
        placement = layout.placement(name)
        assert (placement.reduce_grads, placement.reduce_outputs) == parts


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"reduce": "accumulators", "reduce_dtype": "bfloat16"},
            "'accumulators' sums float32; got bfloat16",
        ),
        (
            {"reduce": "accumulators", "tensor_reduce_dtype": "bfloat16"},
            "'accumulators' sums float32; got bfloat16",
        ),
        (
            {"reduce": "accumulators", "amax_scope": "local"},
            "sums under one scale; got amax_scope 'local'",
        ),
        (
            {"reduce": "accumulators", "reduce_dtype": "float8_e4m3fn"},
            "'float8_e4m3fn' casts rounded gradients",
        ),
        (
            {"accumulate_dtype": "bfloat16"},
            "accumulate_dtype is of the gradients of data.microbatches, of which there is 1",
        ),
    ],
)
def test_sums_that_contradict_each_other_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        CONFIG.replace(parallel=keys)
