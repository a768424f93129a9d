"""Attention of Flax NNX models is recorded where it calls jax.nn.dot_product_attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp8ref import study
from fp8ref.study import flax_attention
from fp8ref.study.recording import Recording

X = np.random.default_rng(0).standard_normal((2, 20, 32)).astype(np.float32)


class Block(nnx.Module):
    """One of nnx's layers with a mask, and a call of jax.nn's function."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        self.proj = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.first(x, mask=nnx.make_causal_mask(x[..., 0]))
        q = self.proj(x).reshape(*x.shape[:2], 4, 8)
        return jax.nn.dot_product_attention(q, q[:, :, :2], q[:, :, 2:], is_causal=True)


def test_a_step_is_recorded_with_masks_gradients_and_some_heads():
    model = Block(nnx.Rngs(0))
    before = jax.nn.dot_product_attention

    @nnx.jit
    def step(model):
        return nnx.value_and_grad(lambda m: m(jnp.asarray(X)).sum())(model)

    plain, _ = step(model)
    with study.record(model, heads=2, tokens=16) as recording:
        loss, _ = step(model)
    assert loss == plain
    assert jax.nn.dot_product_attention is before
    assert list(recording.attention) == ["first", "Block"]
    first, second = recording.attention.values()
    assert (first.causal, second.causal) == (True, True)
    assert [x.shape for x in (second.q, second.k, second.v, second.do)] == [
        (1, 2, 16, 8),
        (1, 1, 16, 8),
        (1, 1, 16, 8),
        (1, 2, 16, 8),
    ]
    np.testing.assert_array_equal(second.do, np.ones_like(second.do))
    rows = study.judge_attention(recording, ["cudnn", "bf16"]).rows
    assert [row.layer for row in rows] == ["first", "first", "Block", "Block"]
    assert all(0 < row.error < 0.2 and 0 < row.gradients < 0.3 for row in rows)


@pytest.mark.parametrize(
    "how", [{"local_window_size": 3}, {"mask": np.eye(20, dtype=bool)[None, None]}]
)
def test_what_a_study_does_not_take_is_said(how):
    class Windowed(nnx.Module):
        def __call__(self, x):
            q = x.reshape(*x.shape[:2], 4, 8)
            return jax.nn.dot_product_attention(q, q, q, **how)

    found = study.attention(Windowed(), lambda m: m(jnp.asarray(X)), ["bf16"])
    assert not found.rows
    assert "causal or full attention" in found.refused["Windowed"]


def test_a_compiled_model_is_recorded_again():
    class Attention(nnx.Module):
        def __call__(self, x):
            q = x.reshape(*x.shape[:2], 4, 8)
            return jax.nn.dot_product_attention(q, q, q, is_causal=True)

    model, run = Attention(), nnx.jit(lambda m, x: m(x))
    for factor in (1, 2):
        recording = Recording(framework="flax")
        with flax_attention.record(model, recording, heads=1, tokens=20):
            run(model, factor * jnp.asarray(X))
        np.testing.assert_array_equal(
            recording.attention["Attention"].q[0, 0], factor * X[0, :, :8]
        )


def test_a_layer_s_first_call_decides():
    class Twice(nnx.Module):
        def __init__(self, *windows):
            self.windows = nnx.static(windows)

        def __call__(self, x):
            q = x.reshape(*x.shape[:2], 4, 8)
            for window in self.windows:
                q = jax.nn.dot_product_attention(q, q, q, local_window_size=window, is_causal=True)
            return q

    run = nnx.jit(lambda m: m(jnp.asarray(X)))
    first, second = (
        study.attention(Twice(*windows), run, ["bf16"]) for windows in ((None, 3), (3, None))
    )
    assert ([row.layer for row in first.rows], list(first.refused)) == (["Twice"], [])
    assert ([row.layer for row in second.rows], list(second.refused)) == ([], ["Twice"])
