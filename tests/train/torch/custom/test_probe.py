import random

import numpy as np
import pytest
import torch
from helpers.models.own_configurations import of, transformers

from fp8ref.shared.errors import ConfigError
from fp8ref.train.torch.custom import build as custom_build
from fp8ref.train.torch.custom import probe as custom_probe


def probed(keys) -> None:
    custom_probe.check(custom_build.build(keys, 256, seed=0), "mine", 256, 8)


@pytest.mark.parametrize(
    ("name", "heads"), [("Tied", ("head",)), ("HeadFirst", ("head",)), ("Headless", ())]
)
def test_the_head_is_what_makes_the_logits(name, heads):  # T-10
    assert custom_build.shapes(of(name), 256, 8).heads == heads


@pytest.mark.parametrize("name", ["Averaging", "Replacing", "Renorming"])
def test_what_a_pass_changes_is_refused(name):  # T-10
    model = custom_build.build(of(name), 256, seed=0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(
        ConfigError,
        match=f"mine changes {'embed.weight' if name == 'Renorming' else 'average'} in its "
        "forward pass",
    ):
        custom_probe.check(model, "mine", 256, 8)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize("name", ["DroppingInPlace", "Rolling"])
def test_random_numbers_of_a_pass_are_refused(name):  # T-10
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002  # what a model may draw from
    with pytest.raises(ConfigError, match="mine draws random numbers in its forward pass"):
        probed(of(name))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # noqa: NPY002  # what a model may draw from


class OwnNoise(torch.nn.Module):
    """Draws from a generator that it holds itself."""

    def __init__(self, drawn: float) -> None:
        super().__init__()
        self.embed, self.drawn, self.generator = (
            torch.nn.Embedding(256, 256),
            drawn,
            torch.Generator().manual_seed(0),
        )

    def forward(self, tokens):
        out = self.embed(tokens)
        noise = (
            torch.randn(out.shape, generator=self.generator, dtype=out.dtype) if self.drawn else 0
        )
        return out + self.drawn * noise


def test_random_numbers_of_a_models_own_generator_are_refused():  # T-10
    model = OwnNoise(0.1)
    before = model.generator.get_state()
    with pytest.raises(ConfigError, match="mine draws random numbers in its forward pass"):
        custom_probe.check(model, "mine", 256, 8)
    assert torch.equal(model.generator.get_state(), before)
    custom_probe.check(OwnNoise(0), "mine", 256, 8)


def test_jitter_of_a_router_is_refused(tmp_path):  # T-10
    keys = {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    }
    probed(transformers(tmp_path, **keys))
    with pytest.raises(ConfigError, match="mine draws random numbers"):
        probed(transformers(tmp_path, **keys, router_jitter_noise=0.3))


def test_a_float32_buffer_among_activations_is_explained():
    with pytest.raises(
        ConfigError,
        match=r"mine fails on tokens \[1, 8\]: RuntimeError: .*dtype.*by \.to\(x\.dtype\)",
    ):
        probed(of("Widening"))


def test_logits_are_a_tensor_or_what_has_them():
    tokens, logits = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, 5)
    assert custom_probe.logits_of(logits, tokens, 5) is logits
    assert custom_probe.logits_of(type("Out", (), {"logits": logits}), tokens, 5) is logits
    for other in (logits[:, :2], None):
        with pytest.raises(ConfigError, match="returns logits"):
            custom_probe.logits_of(other, tokens, 5)
