import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.states import adamw
from helpers.training import microbatches

from fp8ref.shared.errors import ConfigError
from fp8ref.sim.distributed import gradient_reduction
from fp8ref.sim.quantize import scaling
from fp8ref.spec import llama as llama_data
from fp8ref.spec.llama import InitialWeight
from fp8ref.train.jax import parameter_trees, step
from fp8ref.train.jax.llama.model import LlamaModel
from fp8ref.train.jax.trainer import Trainer


def test_optimizer_is_clipped_adamw_as_specified(small, monkeypatch):  # T-1, T-2, T-3
    slope = adamw.slopes(small)

    def loss(self, params, seen, mu, inputs, tokens):
        return sum(
            (value * slope[name]).sum() for name, value in parameter_trees.named(params).items()
        ), seen

    monkeypatch.setattr(LlamaModel, "_observed_loss", loss)
    adamw.check(Trainer, small, slope)


@pytest.mark.slow
def test_a_batch_in_parts_is_the_batch_but_for_rounding(small):  # T-7
    microbatches.check_whole(Trainer, microbatches.config_of(small, "bf16"))


@pytest.mark.slow
def test_gradients_of_parts_are_summed_and_observations_merged_as_by_hand(small):  # T-7, H-4, B-7
    """And the parts are one loop of the program, in which each GEMM is once."""
    config = microbatches.config_of(small, "delayed")
    trainer, tokens = Trainer(config), microbatches.tokens_of(config)
    proof = trainer.prove(tokens)
    assert proof["missing"] == []
    assert sum(dot["fp8"] for dot in proof["gemms"]) == sum(
        spec.fp8 for d in trainer.decisions for spec in d.recipe.gemms.values()
    )
    seen = []
    trainer.observe(tokens, lambda layer, which, a, b, out: seen.append((layer, which, a[0], b[0])))
    whole = Trainer(microbatches.without_parts(config))
    microbatches.check_bits(trainer, whole, whole.gradients)
    expected = microbatches.delayed_states(seen, config)
    found = {
        (layer, role): state
        for layer, roles in trainer._state.fp8.items()
        for role, state in roles.items()
    }
    assert found.keys() == expected.keys()
    for key, state in found.items():
        for mine, theirs in zip(state, expected[key], strict=True):
            np.testing.assert_array_equal(mine, theirs, err_msg=str(key))
    # T-4: one part that is not finite, here by its tokens' row of the embedding table, stops the
    # step
    trainer._params["model"]["embed_tokens"]["weight"] = (
        trainer._params["model"]["embed_tokens"]["weight"].at[tokens[-1, 0]].set(np.inf)
    )
    before = trainer.weights()
    assert not np.isfinite(trainer.step(tokens)["grad_norm"])
    assert all(np.array_equal(value, before[name]) for name, value in trainer.weights().items())


@pytest.mark.slow
def test_gradients_of_parts_are_summed_in_the_dtype_that_is_asked_for(small):  # T-7
    config = microbatches.config_of(small, "bf16", accumulate_dtype="bfloat16")
    whole = Trainer(
        microbatches.without_parts(config.replace(parallel={"accumulate_dtype": "float32"}))
    )
    trainer, tokens = Trainer(config), microbatches.tokens_of(config)
    total = {
        name: np.zeros(shape, jnp.bfloat16)
        for name, shape in llama_data.parameter_shapes(config.model).items()
    }
    for part in np.split(tokens, config.data.microbatches):
        for name, value in whole.gradients(part).items():
            total[name] = (total[name].astype(np.float32) + value).astype(jnp.bfloat16)
    for name, value in trainer.gradients(tokens).items():
        np.testing.assert_array_equal(
            value, total[name].astype(np.float32) * np.float32(1 / 3), err_msg=name
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [{}, {"fsdp": 2, "tensor": 2, "amax_scope": "local"}, {"scan": True, "fsdp": 2}],
    ids=str,
)
def test_gradients_of_parts_are_summed_in_fp8_as_the_simulator_does(small, parallel):  # T-7, P-24
    """Weights of linears, by one scale for a weight however a mesh cuts it, and whatever a scan
    keeps as one; all else in float32.
    """
    model = {"num_key_value_heads": 2, "num_hidden_layers": 2 if parallel.get("scan") else 1}
    config = microbatches.config_of(
        small, "bf16", accumulate_dtype="float8_e4m3fn", **parallel
    ).replace(model=model)
    whole = Trainer(
        microbatches.without_parts(config.replace(parallel={"accumulate_dtype": "float32"}))
    )
    trainer, tokens, totals = Trainer(config), microbatches.tokens_of(config), {}
    linears = {f"{name}.weight" for name in llama_data.linear_shapes(config.model)}
    for part in np.split(tokens, config.data.microbatches):
        for name, value in whole.gradients(part).items():
            if name in linears:
                totals[name] = gradient_reduction.accumulate(totals.get(name), value)
            else:
                totals[name] = totals.get(name, np.float32(0)) + value
    for name, value in trainer.gradients(tokens).items():
        total = totals[name]
        if name in linears:
            total = scaling.dequantize(
                total._replace(scale_inv=total.scale_inv * np.float32(1 / 3))
            )
            np.testing.assert_array_equal(value, total, err_msg=name)
        else:
            np.testing.assert_array_equal(value, total * np.float32(1 / 3), err_msg=name)


def test_options_keep_every_rounding_on_a_cpu_and_cublaslts_gemms_on_a_gpu():  # G-22, M-3
    assert step.compiler_options("cpu") == {"xla_allow_excess_precision": False}
    assert all(
        step.compiler_options(platform) == {"xla_gpu_enable_triton_gemm": False}
        for platform in ("gpu", "cuda")
    )


def trained(config, steps=2):
    trainer = Trainer(config)
    tokens = np.random.default_rng(0).integers(0, 256, (steps, 4, 17))
    return trainer, [trainer.step(batch)["loss"] for batch in tokens], tokens


@pytest.fixture
def deep(small):
    """Three layers."""
    return small.replace(model={"num_hidden_layers": 3})


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"checkpointing": "full"}, marks=pytest.mark.slow),
        pytest.param({"checkpointing": "selective"}, marks=pytest.mark.slow),
        pytest.param({"scan": True}, marks=pytest.mark.slow),
        {"scan": True, "checkpointing": "full"},
        pytest.param({"scan": True, "checkpointing": "selective"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_scan_and_checkpointing_change_no_bit_of_training(deep, parallel):  # T-8
    """On a CPU, where XLA computes each layer alike, and without clipping, as a scan adds up the
    norm in another order.
    """
    config = deep.replace(numerics={"recipe": "delayed"}, optimizer={"max_norm": np.inf})
    (one, losses, tokens), (other, found, _) = (
        trained(config),
        trained(config.replace(parallel=parallel)),
    )
    assert found == losses
    for which in ("weights", "fp8_states"):
        mine, theirs = getattr(other, which)(), getattr(one, which)()
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert np.array_equal(np.asarray(mine[name][0]), np.asarray(value[0])), name
    proof = other.prove(tokens[0])
    assert proof["missing"] == []
    dots = [dot["gemm"] for dot in proof["gemms"]]
    assert set(dots) == {
        f"{d.path}/{which}" for d in other.decisions if d.fp8 for which in d.recipe.gemms
    }
    # Full checkpointing runs the output GEMMs again, but down_proj's, whose output no gradient
    # needs.
    again = 6 * 3 if parallel.get("checkpointing") == "full" else 0
    assert len(dots) == 3 * 7 * 3 + again


@pytest.mark.slow
def test_what_checkpointing_keeps(deep):  # T-8
    """Of the residuals of a layer: its input under full; outputs of linears and of attention too
    under selective.
    """

    def temporary(**parallel):
        trainer = Trainer(deep.replace(data={"sequence_length": 64}, parallel=parallel))
        compiled = trainer.lowered(np.zeros((4, 65), np.int32)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    none, selective, full = (
        temporary(scan=True, checkpointing=how) for how in ("none", "selective", "full")
    )
    assert full < selective < none


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel", [{"scan": True, "checkpointing": "selective"}, {"checkpointing": "full"}], ids=str
)
def test_statistics_and_observed_operands_are_those_of_layers(deep, parallel):  # Q-8, T-8
    config = deep.replace(model={"num_hidden_layers": 2}, numerics={"recipe": "rowwise"})
    tokens = np.random.default_rng(0).integers(0, 256, (4, 17))
    one, other = Trainer(config), Trainer(config.replace(parallel=parallel))
    assert other.statistics(tokens) == one.statistics(tokens)
    seen = {id(trainer): [] for trainer in (one, other)}
    for trainer in (one, other):
        trainer.observe(
            tokens,
            lambda layer, which, a, b, out, t=trainer: seen[id(t)].append(
                (layer, which, a[1].tobytes(), out.tobytes())
            ),
        )
    assert sorted(seen[id(one)]) == sorted(seen[id(other)])
    np.testing.assert_array_equal(
        other.first_input(tokens[:, :-1]), one.first_input(tokens[:, :-1])
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "meshes",
    [({}, {"scan": True}), ({"scan": True, "fsdp": 2}, {"fsdp": 4, "scan": True})],
    ids=str,
)
def test_a_checkpoint_is_read_with_and_without_a_scan(deep, tmp_path, meshes):  # K-2
    config = deep.replace(model={"num_hidden_layers": 2}, numerics={"recipe": "delayed"})
    (one, _, tokens), other = (
        trained(config.replace(parallel=meshes[0])),
        Trainer(config.replace(parallel=meshes[1])),
    )
    one.save(tmp_path / "state")()
    other.load(tmp_path / "state", 2)
    for mine, theirs in (
        (other.weights(), one.weights()),
        (other.moments()["exp_avg"], one.moments()["exp_avg"]),
    ):
        assert all(np.array_equal(mine[name], value) for name, value in theirs.items())
    assert all(
        np.array_equal(a, b)
        for name, of in one.fp8_states().items()
        for a, b in zip(of, other.fp8_states()[name], strict=True)
    )
    # other sums over devices
    assert other.step(tokens[0])["loss"] == pytest.approx(one.step(tokens[0])["loss"], rel=2.0**-8)


def test_a_scan_over_layers_of_different_recipes_is_refused(deep):
    with pytest.raises(
        ConfigError,
        match=r"parallel\.scan .* model\.layers\.1\.mlp\.up_proj has 'bf16', .* 'tensorwise'",
    ):
        Trainer(
            deep.replace(
                numerics={"filter_fqns": ["layers.1.mlp.up_proj"]}, parallel={"scan": True}
            )
        )


@pytest.mark.slow
def test_a_scan_with_checkpointing_on_a_mesh_is_without(deep):  # T-8
    """Tied embeddings, microbatches, all axes of the mesh.

    Without clipping, as a scan adds up the norm in another order.
    """
    mesh = {"data": 2, "fsdp": 2, "tensor": 2, "sequence": True}
    config = deep.replace(
        model={
            "tie_word_embeddings": True,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
        },
        data={"batch_size": 8, "microbatches": 2},
        numerics={"recipe": "delayed"},
        optimizer={"max_norm": 1e9},
        parallel=mesh,
    )
    tokens = np.random.default_rng(0).integers(0, 256, (2, 8, 17))
    keys = {"scan": True, "checkpointing": "full", "attention": "chunked"}
    plain, scanned = (
        [trainer.step(batch)["loss"] for batch in tokens]
        for trainer in map(Trainer, (config, config.replace(parallel=keys)))
    )
    assert scanned == plain


def test_a_step_takes_the_memory_of_the_state_before(small):
    """The state is donated: masters, moments and states of delayed scaling exist once, not once for
    each side of a step.
    """
    trainer = Trainer(small.replace(numerics={"recipe": "delayed"}))
    before = jax.tree.leaves(trainer._state)
    trainer.step(np.zeros((small.data.batch_size, small.data.sequence_length + 1), np.int32))
    assert all(array.is_deleted() for array in before)
    assert not any(array.is_deleted() for array in jax.tree.leaves(trainer._state))


def test_each_shard_of_the_initial_weights_is_read_once(small, monkeypatch):  # M-6
    """No more is read of a weight than its shards, and copies of a shard share one."""
    read, piece = {}, InitialWeight.__getitem__

    def reading(weight, index):
        read.setdefault(weight.place, []).append(piece(weight, index))
        return read[weight.place][-1]

    monkeypatch.setattr(InitialWeight, "__getitem__", reading)
    small = small.replace(
        model={"num_key_value_heads": 2}, parallel={"data": 2, "fsdp": 2, "tensor": 2}
    )
    trainer = Trainer(small)
    monkeypatch.undo()
    shapes = llama_data.parameter_shapes(small.model)
    for place, (name, shape) in enumerate(shapes.items()):
        if len(shape) == 2:
            # not cut by tensor, and cut
            shards = 2 if name in ("model.embed_tokens.weight", "lm_head.weight") else 4
            assert [x.size for x in read[place]] == [math.prod(shape) // shards] * shards, name
    found = trainer.weights()
    for name, value in llama_data.initial_weights(small.model, seed=small.run.seed).items():
        np.testing.assert_array_equal(found[name], value)
