"""The loss over parts of the vocabulary against that of all logits, and against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8ref.shared.errors import ConfigError
from fp8ref.train.config import device_shapes
from fp8ref.train.jax.llama import chunked_loss
from fp8ref.train.jax.llama.cross_entropy import cross_entropy
from fp8ref.train.jax.trainer import Trainer

U = 2.0**-24  # half of float32's relative spacing
M, K, V = 12, 16, 37  # words in parts of 8: four, and 5 that are left


@pytest.fixture
def given(rng):
    h, w = (
        rng.normal(0, 1, (3, 4, K)).astype(np.float32),
        rng.normal(0, 1, (V, K)).astype(np.float32),
    )
    return (
        h,
        w,
        rng.integers(0, V, (3, 4)).astype(np.int32),
        rng.normal(0, 1, (3, 4)).astype(np.float32),
    )


def run(f, h, w, targets, weights):
    """(losses, gradients of h and w) of the weighted sum of losses."""
    return f(h, w, targets), jax.jit(
        jax.grad(lambda h, w: (f(h, w, targets) * weights).sum(), argnums=(0, 1))
    )(h, w)


def in_parts(words):
    return lambda h, w, targets: chunked_loss.losses(h, w, targets, words)


@pytest.mark.parametrize("words", [pytest.param(1, marks=pytest.mark.slow), 8, 64])
def test_losses_and_gradients_are_those_of_float64(given, words):  # P-29, M-5
    h, w, targets, weights = given
    found, (of_h, of_w) = run(in_parts(words), *map(jnp.asarray, given))
    rows, wanted = h.reshape(M, K).astype(np.float64), targets.reshape(M)
    logits = rows @ w.T.astype(np.float64)
    normalizer = np.log(np.exp(logits).sum(-1, keepdims=True))
    exact = normalizer[:, 0] - logits[np.arange(M), wanted]
    # A logit is a sum of K products, each rounded, in any order. The logarithm of the sum moves as
    # far as the worst of a row's, and by the relative error of V exponentials of differences, their
    # sum, and a rescaling of four roundings by each part; what is added to it is rounded twice.
    of_logits = (K + 1) * U * (np.abs(rows) @ np.abs(w).T)
    spread = (logits.max(-1) - logits.min(-1)) * U
    of_sum = spread + (V + 4 * -(-V // words) + 8) * U
    bound = 2 * of_logits.max(-1) + of_sum + 4 * U * (np.abs(normalizer[:, 0]) + np.abs(exact))
    assert np.all(np.abs(np.asarray(found).reshape(M) - exact) <= bound)
    # A probability has the relative error of the exponent, then three roundings of it with the
    # weight; the products are sums of V, or of M.
    scale = weights.reshape(M, 1)
    hot = np.eye(V)[wanted]
    exact_logits = (np.exp(logits - normalizer) - hot) * scale
    error = (
        np.exp(logits - normalizer)
        * np.abs(scale)
        * (of_logits + bound[:, None] + 8 * U * (1 + np.abs(logits - normalizer)))
    )
    error += 4 * U * np.abs(exact_logits)
    for mine, theirs, worst in (
        (
            of_h,
            exact_logits @ w,
            error @ np.abs(w) + (V + 4) * U * (np.abs(exact_logits) @ np.abs(w)),
        ),
        (
            of_w,
            exact_logits.T @ rows,
            error.T @ np.abs(rows) + (M + 4) * U * (np.abs(exact_logits).T @ np.abs(rows)),
        ),
    ):
        # second-order terms: below a hundredth
        assert np.all(
            np.abs(np.asarray(mine, np.float64).reshape(theirs.shape) - theirs) <= 1.01 * worst
        )


def test_exact_logits_in_bfloat16_give_the_loss_of_all_of_them(rng):
    """Sums of small integers have the same bits in any order, in bfloat16 too: only float32 sums of
    exponentials differ.
    """
    h, w = (jnp.asarray(rng.integers(-2, 3, shape), jnp.bfloat16) for shape in ((3, 4, K), (V, K)))
    targets = jnp.asarray(rng.integers(0, V, (3, 4)), jnp.int32)

    def whole(h, w, targets):
        return cross_entropy(jnp.einsum("btk,vk->btv", h, w), targets)

    (mine, (of_h, of_w)), (theirs, (expected_h, expected_w)) = (
        run(f, h, w, targets, 1.0) for f in (in_parts(8), whole)
    )
    # logits are at most 64: their differences, exponentials, sums and rescalings
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=(2 * V + 4 * 5 + 16 + 128) * U)
    assert (of_h.dtype, of_w.dtype) == (jnp.bfloat16, jnp.bfloat16)
    # A probability near the middle of two bfloat16 numbers may be rounded to the other: 2^-8 of
    # each term, and as much of the result.
    terms = np.exp(np.asarray(jnp.einsum("btk,vk->btv", h, w), np.float32) - 0.0)
    terms = np.abs(terms / terms.sum(-1, keepdims=True) - np.eye(V)[np.asarray(targets)])
    for found, expected, worst in (
        (of_h, expected_h, np.einsum("btv,vk->btk", terms, np.abs(np.asarray(w, np.float32)))),
        (of_w, expected_w, np.einsum("btv,btk->vk", terms, np.abs(np.asarray(h, np.float32)))),
    ):
        assert np.all(
            np.abs(np.asarray(found, np.float32) - np.asarray(expected, np.float32))
            <= 2.0**-7 * worst
        )


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("word", [0, V - 1])
def test_a_logit_that_is_not_finite_gives_what_all_of_them_give(given, value, word):  # M-7
    h, w, targets, _ = given
    h, w = np.abs(h), w.copy()
    w[word] = value  # an infinite logit, or NaN
    mine = chunked_loss.losses(jnp.asarray(h), jnp.asarray(w), jnp.asarray(targets), 8)
    theirs = cross_entropy(jnp.asarray(h) @ jnp.asarray(w).T, jnp.asarray(targets))
    np.testing.assert_array_equal(np.isfinite(mine), np.isfinite(theirs))


def test_targets_outside_the_vocabulary_give_what_all_logits_give(rng):
    """From the end of the vocabulary, or NaN.

    Sums of small integers: both have the same logits, of at most 64.
    """
    targets = jnp.asarray([0, V - 1, V, V + 3, -1, -V, -V - 1], jnp.int32)
    h, w = (
        jnp.asarray(rng.integers(-2, 3, shape), jnp.float32)
        for shape in ((len(targets), K), (V, K))
    )
    (mine, (of_h, _)), (theirs, (expected, _)) = (
        run(f, h, w, targets, 1.0)
        for f in (in_parts(8), lambda h, w, targets: cross_entropy(h @ w.T, targets))
    )
    np.testing.assert_array_equal(np.isnan(mine), [False, False, True, True, False, False, True])
    bound = (2 * V + 4 * 5 + 16 + 128) * U  # as above, of logits in bfloat16
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=bound)
    # probabilities less a target are 2 in all, and weights at most 2: the relative error of each,
    # and of a sum of V
    np.testing.assert_allclose(of_h, expected, rtol=0, atol=2 * 2 * (bound + (V + 4) * U))


def test_no_logits_are_whole_in_either_pass(given):
    h, w, targets, weights = map(jnp.asarray, given)

    def largest(f):
        shapes = str(jax.make_jaxpr(jax.grad(lambda h: (f(h, w, targets) * weights).sum()))(h))
        return f"{M},{V}]" in shapes or f"3,4,{V}]" in shapes

    assert largest(lambda h, w, targets: cross_entropy(h @ w.T, targets))
    assert not largest(in_parts(8))


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        pytest.param({"fsdp": 2, "tensor": 2, "sequence": True}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "fsdp": 2, "reduce_dtype": "bfloat16"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_step_is_that_of_the_whole_loss(small, parallel, tied, monkeypatch):  # P-29, P-9
    """Gradients of all parameters in bfloat16: those of h are rounded once more or less, and every
    layer below rounds a few times.
    """
    monkeypatch.setattr(chunked_loss, "WORDS", 100)  # of 256, so that some are left
    small = small.replace(
        model={"tie_word_embeddings": tied, "num_key_value_heads": 2},
        numerics={"recipe": "bf16"},
        parallel=parallel,
    )
    tokens = np.random.default_rng(0).integers(0, small.model.vocab_size, (4, 17)).astype(np.int32)
    whole, parts = (
        Trainer(small.replace(parallel=parallel | {"loss": kind})) for kind in ("whole", "chunked")
    )
    # logits, rounded to bfloat16, may be a neighbour where a sum is: 2^-8 of a logit below 2
    assert parts.evaluate(tokens) == pytest.approx(whole.evaluate(tokens), abs=2.0**-7)
    of_parts = parts.gradients(tokens)
    for name, value in whole.gradients(tokens).items():
        # relative to the norm: one rounding of each gradient that enters a layer, 2^-8, through two
        # layers and the last linear
        assert np.linalg.norm(of_parts[name] - value) <= 4 * 2.0**-8 * np.linalg.norm(value), name


def test_what_it_does_not_take_is_refused_by_name(small):
    with pytest.raises(
        ValueError,
        match=r"parallel\.loss 'chunked' sums the last linear's rounded gradient by itself",
    ):
        small.replace(parallel={"loss": "chunked", "through": "jit"})
    with pytest.raises(ValueError, match=r"parallel\.loss 'chunked' .* reduce 'accumulators'"):
        small.replace(parallel={"loss": "chunked", "reduce": "accumulators"})
    head = small.replace(
        numerics={"recipe": "tensorwise", "fp8_fqns": ("lm_head",)}, parallel={"loss": "chunked"}
    )
    with pytest.raises(ConfigError, match="takes a last linear in bfloat16; lm_head is in FP8"):
        device_shapes.check(head, "jax")
    with pytest.raises(ConfigError, match=r"parallel\.loss is not a key of --backend torch"):
        device_shapes.check(small.replace(parallel={"loss": "chunked"}), "torch")
