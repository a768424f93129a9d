"""The model in transformers' terms: names of weights, config.json, and the same logits."""

import json

import numpy as np
import pytest
import torch
import transformers

from fp8ref.shared.errors import ConfigError
from fp8ref.spec import llama
from fp8ref.spec.llama import LlamaConfig
from fp8ref.train.config.config import Config
from fp8ref.train.models import export, hugging_face
from fp8ref.train.torch.llama.llama import Llama

EXPERTS = LlamaConfig(
    hidden_size=32,
    intermediate_size=16,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_size=32,
    qk_norm=True,
    num_experts=4,
    num_experts_per_tok=2,
)
GRANITE = LlamaConfig(
    **{
        **vars(EXPERTS),
        "qk_norm": False,
        "shared_expert_intermediate_size": 24,
        "rms_norm_eps": 1e-6,
    }
)
MODELS = {"qwen3_moe": EXPERTS, "granitemoeshared": GRANITE}
DENSE = LlamaConfig(
    hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1, qk_norm=True
)


def _written(path, model):
    """A directory as export writes it, and the weights in it: norms are random too."""
    rng = np.random.default_rng(0)
    weights = {
        name: (1 + rng.standard_normal(w.shape) / 8).astype(np.float32) if w.ndim == 1 else w * 5
        for name, w in llama.initial_weights(model, seed=3).items()
    }
    path.mkdir()
    export._write(
        path,
        Config(model=model),
        hugging_face.apart(iter(weights.items()), hugging_face.kind(model)),
    )
    return weights


def _logits(weights, model, tokens):
    """Those of the trainer's model in float32."""
    own = Llama(model)
    own.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()})
    with torch.no_grad():
        return own(tokens)


@pytest.mark.parametrize(
    "model",
    [
        EXPERTS,
        DENSE,
        GRANITE,
        LlamaConfig(
            **{**vars(GRANITE), "shared_expert_intermediate_size": 0, "tie_word_embeddings": True}
        ),
    ],
    ids=["qwen3_moe", "qwen3", "shared", "granite"],
)
def test_transformers_reads_it_and_has_the_same_logits(model, tmp_path):  # K-7, M-10
    weights = _written(tmp_path / "hf", model)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert type(theirs).__name__ == hugging_face.KINDS[hugging_face.kind(model)]
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (2, 24)))
    with torch.no_grad():
        found = theirs(tokens).logits
    expected = _logits(weights, model, tokens)
    # Some 200 roundings of float32 in a row, by 2^-24 of numbers no larger than ten times a logit;
    # a wrong name, expert, norm or factor changes a logit by a tenth of it and more.
    torch.testing.assert_close(
        found, expected, rtol=0, atol=2000 * 2**-24 * expected.abs().max().item()
    )


@pytest.mark.parametrize("kind", MODELS)
def test_what_transformers_saves_is_read_bit_for_bit(kind, tmp_path):  # K-7, M-10
    weights = _written(tmp_path / "hf", MODELS[kind])
    transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32
    ).save_pretrained(tmp_path / "theirs")
    for path in (tmp_path / "hf", tmp_path / "theirs"):
        found = export.read(path, MODELS[kind])
        assert found.keys() == weights.keys()
        for name, expected in weights.items():
            np.testing.assert_array_equal(found[name][...], expected, err_msg=name)
    for key in ("gate", "up"):
        name = f"model.layers.1.mlp.experts.{key}_proj.weight"
        np.testing.assert_array_equal(found[name][1:3, 4:, :8], weights[name][1:3, 4:, :8])


def test_another_number_of_experts_or_a_missing_one_is_an_error(tmp_path):
    _written(tmp_path / "hf", EXPERTS)
    with pytest.raises(
        ConfigError, match=r"num_experts_per_tok 2; model\.num_experts_per_tok is 1"
    ):
        export.read(tmp_path / "hf", LlamaConfig(**{**vars(EXPERTS), "num_experts_per_tok": 1}))
    weights = {
        "model.layers.0.mlp.experts.0.up_proj.weight": np.zeros((2, 3)),
        "model.layers.0.mlp.experts.2.up_proj.weight": np.zeros((2, 3)),
    }
    with pytest.raises(ValueError, match=r"experts 0 to 1 of one shape; found \[0, 2\]"):
        hugging_face.together(weights)


def test_gate_and_up_in_one_tensor_are_two_halves():  # M-10
    name = "model.layers.0.block_sparse_moe.input_linear.weight"
    with pytest.raises(
        ValueError,
        match=rf"{name} has gate and up in two halves of its output features; got \[4, 33, 32\]",
    ):
        hugging_face.together({name: np.zeros((4, 33, 32), np.float32)})
    halves = hugging_face.together({name: np.zeros((4, 34, 32), np.float32)})
    assert [w.shape for w in halves.values()] == [(4, 17, 32)] * 2


@pytest.mark.parametrize(
    "dropped", ["num_local_experts", "num_experts_per_tok", "shared_intermediate_size"]
)
def test_defaults_of_transformers_stand_for_keys_that_a_file_lacks(dropped):  # M-10
    """As its own class reads such a file, for every size that has a default there."""
    found = {key: value for key, value in hugging_face.described(GRANITE).items() if key != dropped}
    theirs = transformers.GraniteMoeSharedConfig(**found)
    model = hugging_face.model_of(found)
    sizes = {
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.num_experts_per_tok,
        "shared_intermediate_size": model.shared_expert_intermediate_size,
    }
    assert sizes == {key: getattr(theirs, key) for key in sizes}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"shared_expert_intermediate_size": 16}, "qk_norm and shared_expert_intermediate_size 16"),
        ({"qk_norm": False, "norm_topk_prob": False}, "neither qk_norm nor norm_topk_prob"),
    ],
)
def test_a_model_that_transformers_has_not_is_refused_by_name(changed, said):  # M-10
    with pytest.raises(
        ConfigError, match=f"Qwen3-MoE's, and with.*GraniteMoeShared's.*the model has {said}"
    ):
        hugging_face.kind(LlamaConfig(**{**vars(EXPERTS), **changed}))


@pytest.mark.parametrize("kind", MODELS)
def test_the_load_balancing_loss_is_that_of_transformers(kind, tmp_path):
    weights, model = _written(tmp_path / "hf", MODELS[kind]), MODELS[kind]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokens = torch.from_numpy(np.random.default_rng(2).integers(0, 256, (2, 24)))
    own = Llama(model)
    own.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()})
    with torch.no_grad():
        own(tokens)
        expected = theirs(tokens, output_router_logits=True).aux_loss
        # Sums of 48 probabilities a layer, in float32.
        torch.testing.assert_close(own.balancing_loss(), expected, rtol=1e-5, atol=0)
    assert (
        json.loads((tmp_path / "hf" / "config.json").read_text())["router_aux_loss_coef"] == 0.001
    )


@pytest.mark.parametrize(
    "index",
    [
        slice(1, 3),
        (slice(1, 3), slice(1, 2)),
        (..., slice(0, 2)),
        (slice(2, 4), ..., slice(1, 3)),
        ...,
    ],
)
def test_a_weight_of_experts_is_sliced_as_an_array(index):
    whole = np.random.default_rng(0).standard_normal((4, 2, 3)).astype(np.float32)
    np.testing.assert_array_equal(hugging_face.ExpertsWeight(tuple(whole))[index], whole[index])


@pytest.mark.parametrize(
    "index",
    [
        slice(1, 3),
        (..., slice(0, 2), slice(None)),
        (slice(1, 2), slice(1, 2)),
        (slice(None), slice(2, 9)),
        ...,
    ],
)
def test_half_a_weight_is_sliced_as_an_array(index):
    whole = np.random.default_rng(0).standard_normal((4, 6, 3)).astype(np.float32)
    for first in (0, 3):
        half = hugging_face.HalfWeight(whole, first, 3)
        assert half.shape == (4, 3, 3)
        np.testing.assert_array_equal(half[index], whole[:, first : first + 3][index])


@pytest.mark.parametrize("name", hugging_face.KINDS)
def test_a_missing_key_is_what_transformers_takes(name):
    found = {"hidden_size": 96, "num_attention_heads": 3}
    theirs = transformers.AutoConfig.for_model(name, **found)
    theta = theirs.rope_parameters["rope_theta"]
    expected = {
        key: theta if key == "rope_theta" else getattr(theirs, key, 32)
        for key in hugging_face.missing(name, found)
    }
    assert hugging_face.missing(name, found) == expected


@pytest.mark.parametrize(
    ("left_out", "more", "said"),
    [
        (
            "norm_topk_prob",
            {},
            r"no norm_topk_prob, which is False in transformers; model\.norm_topk_prob is True",
        ),
        ("num_experts_per_tok", {}, r"no num_experts_per_tok, which is 8"),
        (None, {"use_sliding_window": True, "sliding_window": 4}, "sliding windows"),
        (None, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding windows"),
    ],
)
# K-7
def test_what_config_json_does_not_say_is_not_taken_for_equal(tmp_path, left_out, more, said):
    keys = hugging_face.described(EXPERTS) | more
    keys.pop(left_out, None)
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with pytest.raises(ConfigError, match=said):
        export._check_config(tmp_path, EXPERTS)


@pytest.mark.parametrize(
    "model",
    [
        LlamaConfig(),
        LlamaConfig(qk_norm=True, head_size=64, tie_word_embeddings=True),
        EXPERTS,
        GRANITE,
    ],
    ids=["llama", "qwen3", "qwen3_moe", "granite"],
)
def test_a_config_json_gives_the_model_back(model):
    assert hugging_face.model_of(hugging_face.described(model)) == model


def test_a_config_json_of_another_model_gives_none():
    with pytest.raises(
        ValueError, match="is of model_type llama, qwen3, qwen3_moe, granitemoeshared; got 'gpt2'"
    ):
        hugging_face.model_of({"model_type": "gpt2"})
    with pytest.raises(ValueError, match="lacks 'vocab_size'"):
        hugging_face.model_of(hugging_face.described(LlamaConfig()) | {"vocab_size": None})
