import adamw
import jax
import jax.numpy as jnp
import microbatches
import numpy as np
import pytest

from fp8ref.train.jax import llama, step
from fp8ref.train.jax.trainer import Trainer


def test_optimizer_is_clipped_adamw_as_specified(small, monkeypatch):  # T-1, T-2, T-3
    slope = adamw.slopes(small)

    def loss(self, params, seen, state, tokens):
        return sum((value * slope[name]).sum() for name, value in step.named(params).items()), seen

    monkeypatch.setattr(step.Step, "_loss_of", loss)
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
    assert sum(dot["fp8"] for dot in proof["gemms"]) == sum(spec.fp8 for d in trainer.decisions for spec in d.recipe.gemms.values())
    seen = []
    trainer.observe(tokens, lambda layer, which, a, b, out: seen.append((layer, which, a[0], b[0])))
    whole = Trainer(microbatches.without_parts(config))
    compiled = jax.jit(whole._step.gradients, compiler_options=step.compiler_options("cpu"))

    def gradients(part):
        """whole.gradients, compiled once for all parts."""
        found = compiled(whole._params, whole._fp8_state, whole._parts(part))[1]
        return {name: np.asarray(value) for name, value in step.named(found).items()}

    microbatches.check_bits(trainer, whole, gradients)
    expected = microbatches.delayed_states(seen, config)
    found = {(layer, role): state for layer, roles in trainer._fp8_state.items() for role, state in roles.items()}
    assert found.keys() == expected.keys()
    for key, state in found.items():
        for mine, theirs in zip(state, expected[key], strict=True):
            np.testing.assert_array_equal(mine, theirs, err_msg=str(key))
    # T-4: one part that is not finite, here by its tokens' row of the embedding table, stops the step
    trainer._params["model"]["embed_tokens"]["weight"] = trainer._params["model"]["embed_tokens"]["weight"].at[tokens[-1, 0]].set(np.inf)
    before = trainer.weights()
    assert not np.isfinite(trainer.step(tokens)["grad_norm"])
    assert all(np.array_equal(value, before[name]) for name, value in trainer.weights().items())


def test_options_keep_every_rounding_on_a_cpu_and_cublaslts_gemms_on_a_gpu():  # G-22, M-3
    assert step.compiler_options("cpu") == {"xla_allow_excess_precision": False}
    assert all(step.compiler_options(platform) == {"xla_gpu_enable_triton_gemm": False} for platform in ("gpu", "cuda"))


def test_the_models_roundings_hold_where_xla_drops_conversions():  # M-3
    """XLA removes a conversion to bfloat16 and back between fused operations, unless it is told to keep it; never reduce_precision."""
    x = jnp.linspace(1, 2, 64, dtype=jnp.float32)
    kept = jax.jit(lambda x: llama.rounded(x, jnp.bfloat16).astype(jnp.float32), compiler_options={"xla_allow_excess_precision": True})(x)
    np.testing.assert_array_equal(np.asarray(kept), np.asarray(x.astype(jnp.bfloat16).astype(jnp.float32)))
