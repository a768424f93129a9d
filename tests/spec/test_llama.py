import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8ref.spec import llama
from fp8ref.spec.llama import LlamaConfig

SMALL = LlamaConfig(
    vocab_size=320,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
)
TIED = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    tie_word_embeddings=True,
)


def transformers_model(config: LlamaConfig):
    """The Hugging Face model of the same keys, without memory for its weights."""
    import torch
    import transformers

    keys = {key: getattr(config, key) for key in LlamaConfig.__dataclass_fields__}
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**keys))


@pytest.mark.parametrize("config", [LlamaConfig(), SMALL, TIED], ids=["default", "small", "tied"])
def test_parameters_are_named_and_shaped_as_in_transformers(config):  # M-1
    theirs = {name: tuple(p.shape) for name, p in transformers_model(config).named_parameters()}
    assert llama.parameter_shapes(config) == theirs


@pytest.mark.parametrize("config", [SMALL, TIED], ids=["small", "tied"])
def test_linears_are_those_of_transformers(config):  # M-1, R-2
    import torch

    model = transformers_model(config)
    theirs = {
        name: tuple(m.weight.shape)
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.Linear)
    }
    if config.tie_word_embeddings:
        assert model.lm_head.weight is model.model.embed_tokens.weight
        del theirs["lm_head"]
    assert llama.linear_shapes(config) == theirs


def test_parameters_are_the_embedding_then_matrices_then_norms():  # M-6
    ranks = [len(shape) for shape in llama.parameter_shapes(SMALL).values()]
    assert next(iter(llama.parameter_shapes(SMALL))) == "model.embed_tokens.weight"
    assert ranks == sorted(ranks, reverse=True)


def test_head_dim_is_that_of_transformers():
    assert SMALL.head_dim == transformers_model(SMALL).model.layers[0].self_attn.head_dim == 8


def test_each_row_of_an_initial_matrix_is_a_stream_of_normals_and_norms_are_one():  # M-6
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    for place, w in enumerate(llama.initial_weights(config, seed=7).values()):
        if w.ndim == 1:
            assert (w == 1).all()
            continue
        for row, found in enumerate(w):
            stream = np.random.Generator(np.random.Philox(counter=[0, 0, row, place], key=7))
            np.testing.assert_array_equal(
                found, stream.normal(0.0, 0.02, w.shape[1]).astype(np.float32)
            )


@given(seed=st.integers(0, 2**64), rows=st.slices(96), columns=st.slices(40))
def test_a_piece_of_an_initial_matrix_has_the_bits_of_the_whole(seed, rows, columns):  # M-6
    weight = llama.InitialWeight((96, 40), 3, seed, 0.02)
    whole = weight[...]
    np.testing.assert_array_equal(weight[rows, columns], whole[rows, columns])
    np.testing.assert_array_equal(weight[rows], whole[rows])


def test_a_matrix_that_threads_draw_has_the_bits_of_its_rows():  # M-6
    weight = llama.InitialWeight((5, 2**22), 0, 0, 1.0)
    whole = weight[...]
    for row in range(5):
        np.testing.assert_array_equal(whole[row], weight[row : row + 1][0])


def test_initial_weights_are_float32_of_the_shapes_in_their_order():  # M-6
    weights = llama.initial_weights(SMALL, seed=0)
    assert list(weights) == list(llama.parameter_shapes(SMALL))
    assert {name: w.shape for name, w in weights.items()} == llama.parameter_shapes(SMALL)
    assert {w.dtype for w in weights.values()} == {np.dtype(np.float32)}


def test_initial_weights_depend_on_the_seed_alone():  # M-6
    first, again, other = (llama.initial_weights(SMALL, seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first["lm_head.weight"], again["lm_head.weight"])
    assert not np.array_equal(first["lm_head.weight"], other["lm_head.weight"])


def test_initializer_range_is_the_standard_deviation():  # M-6
    config = LlamaConfig(vocab_size=4096, initializer_range=0.5)
    embedding = llama.initial_weights(config, seed=0)["model.embed_tokens.weight"]
    # the standard error of a deviation is sigma / sqrt(2 n), and of a mean sigma / sqrt(n); six of
    # each
    assert abs(embedding.std(dtype=np.float64) - 0.5) < 6 * 0.5 / math.sqrt(2 * embedding.size)
    assert abs(embedding.mean(dtype=np.float64)) < 6 * 0.5 / math.sqrt(embedding.size)


def test_rotary_tables_are_cosines_and_sines_rounded_once():  # M-4
    cos, sin = llama.rotary_tables(SMALL, 20)
    for position in range(20):
        for i in range(8):
            angle = position * 500000.0 ** (-2 * (i % 4) / 8)
            assert cos[position, i] == np.float32(math.cos(angle))
            assert sin[position, i] == np.float32(math.sin(angle))


def test_rotary_tables_follow_transformers():  # M-4
    import torch
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    length = 64
    theirs = LlamaRotaryEmbedding(
        transformers.LlamaConfig(
            hidden_size=48, num_attention_heads=6, num_key_value_heads=2, rope_theta=500000.0
        )
    )
    cos, sin = theirs(torch.zeros(1), torch.arange(length)[None])
    # float32 angles: frequency and product each round once or twice, so an angle below 64 errs by
    # at most 4 * 2^-24 * 64
    for mine, other in zip(llama.rotary_tables(SMALL, length), (cos, sin), strict=True):
        np.testing.assert_allclose(mine, other[0].numpy(), rtol=0, atol=4 * 2.0**-24 * length)


def test_rotary_tables_have_one_row_a_position():
    cos, sin = llama.rotary_tables(SMALL, 5)
    assert cos.shape == sin.shape == (5, 8)
    assert cos.dtype == sin.dtype == np.float32
    assert (cos[0] == 1).all()
    assert (sin[0] == 0).all()


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    ],
)
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_are_at_least_one(key, value):
    with pytest.raises(ValueError, match=f"model.{key} is at least 1; got {value}"):
        LlamaConfig(**{key: value})


def test_a_damaged_number_of_layers_is_refused_before_names_are_made():
    with pytest.raises(ValueError, match=r"at most 131,072; got 1,000,000,000\. Set fewer"):
        LlamaConfig(num_hidden_layers=10**9)
    with pytest.raises(ValueError, match="at most 131,072; got 262,144"):
        LlamaConfig(num_hidden_layers=64, num_experts=4096, num_experts_per_tok=1)


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "initializer_range"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_constants_are_positive(key, value):
    with pytest.raises(ValueError, match=f"model.{key} is positive and finite; got {value}"):
        LlamaConfig(**{key: value})


@pytest.mark.parametrize(("hidden", "heads"), [(36, 4), (20, 4), (4, 4)])
def test_heads_are_of_rotary_pairs(hidden, heads):
    with pytest.raises(
        ValueError, match=rf"multiple of 2 \* num_attention_heads.*got {hidden} and {heads}"
    ):
        LlamaConfig(hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=1)


def test_query_heads_are_a_multiple_of_key_value_heads():
    with pytest.raises(ValueError, match="num_key_value_heads; got 4 and 3"):
        LlamaConfig(num_attention_heads=4, num_key_value_heads=3)


def test_check_weights_accepts_initial_weights():
    llama.check_weights(llama.initial_weights(SMALL, seed=0), SMALL)


def test_check_weights_names_what_is_missing_and_unknown():
    weights = llama.initial_weights(SMALL, seed=0)
    weights["lm_head"] = weights.pop("lm_head.weight")
    with pytest.raises(ValueError, match=r"missing \['lm_head.weight'\], unknown \['lm_head'\]"):
        llama.check_weights(weights, SMALL)


def test_check_weights_refuses_the_head_of_a_tied_model():  # M-1
    weights = llama.initial_weights(TIED, seed=0)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    with pytest.raises(ValueError, match=r"unknown \['lm_head.weight'\]"):
        llama.check_weights(weights, TIED)


@pytest.mark.parametrize(
    "value",
    [
        np.ones((48, 320), np.float32),
        np.ones((320, 48), np.float64),
        np.ones((320, 48), np.float16),
    ],
)
def test_check_weights_names_shape_and_dtype(value):  # M-2
    weights = llama.initial_weights(SMALL, seed=0) | {"lm_head.weight": value}
    with pytest.raises(
        ValueError,
        match=rf"lm_head.weight is float32 \[320, 48\]; got {value.dtype} \[{value.shape[0]}, "
        rf"{value.shape[1]}\]",
    ):
        llama.check_weights(weights, SMALL)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_check_weights_points_at_the_first_non_finite_value(value):
    weights = llama.initial_weights(SMALL, seed=0)
    weights["lm_head.weight"][[3, 200], [5, 0]] = value
    with pytest.raises(ValueError, match=rf"lm_head.weight holds {value} at \[3, 5\]"):
        llama.check_weights(weights, SMALL)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.uint16])
def test_check_tokens_accepts_integers_of_the_vocabulary(dtype):
    llama.check_tokens(np.array([[0, 1, 255]], dtype), SMALL)


def test_check_tokens_accepts_the_last_of_the_vocabulary_only():
    llama.check_tokens(np.array([[319]]), SMALL)
    with pytest.raises(ValueError, match=r"in \[0, 320\); got 7 to 320"):
        llama.check_tokens(np.array([[7, 320]]), SMALL)


def test_check_tokens_refuses_negative_ones():
    with pytest.raises(ValueError, match="got -1 to 7"):
        llama.check_tokens(np.array([[-1, 7]]), SMALL)


@pytest.mark.parametrize(
    "tokens", [np.zeros((2, 3)), np.zeros((2, 3), bool), np.zeros(3, int), np.zeros((1, 2, 3), int)]
)
def test_check_tokens_refuses_other_dtypes_and_ranks(tokens):
    with pytest.raises(ValueError, match=r"integers \[B, T\]"):
        llama.check_tokens(tokens, SMALL)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_check_tokens_refuses_an_empty_batch(shape):
    with pytest.raises(ValueError, match="got none"):
        llama.check_tokens(np.zeros(shape, int), SMALL)
