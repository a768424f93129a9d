import pytest
import torch
from helpers.models.own_configurations import of, transformers

from fp8ref.shared.errors import ConfigError
from fp8ref.train.config.sections import ArchitectureConfig
from fp8ref.train.torch.custom import build as custom_build


def test_parameters_that_are_shared_are_counted_once():
    found = custom_build.shapes(of("Tied"), 256, 8)
    assert found.parameters == {
        "embed.weight": (256, 32),
        "up.weight": (64, 32),
        "up.bias": (64,),
        "down.weight": (32, 64),
    }
    assert found.linears == {"up": (64, 32), "down": (32, 64), "head": (256, 32)}
    assert found.heads == ("head",)
    assert found.kind == "helpers.models.own_torch_models.Tied"


def test_the_seed_makes_the_weights_and_torch_s_own_generator_stays():
    before = torch.get_rng_state()
    first, again, other = (custom_build.build(of("Tied"), 256, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.up.weight, again.up.weight)
    assert not torch.equal(first.up.weight, other.up.weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_causal_model_of_transformers_is_built_from_its_configuration(tmp_path):
    found = custom_build.shapes(transformers(tmp_path), 256, 8)
    assert found.kind.endswith("Qwen3ForCausalLM")
    assert "lm_head.weight" not in found.parameters
    assert found.heads == ("lm_head",)
    assert len(found.linears) == 8


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Dropping", r"has dropout \(drop, 0\.1\)"),
        ("Lazy", r"has a lazy module \(up\.weight\), .* Give it its input's features"),
        ("Grouped", r"has a GroupedLinear \(experts\)"),
        ("nothing", "makes a torch.nn.Module; got str"),
        ("broken", "cannot be made: KeyError: 'width'"),
    ],
)
def test_what_a_step_has_no_place_for_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        custom_build.build(of(name), 256, seed=0)


def test_a_configuration_is_checked(tmp_path):
    with pytest.raises(ConfigError, match=r"has a vocabulary of 512; model.vocab_size is 256"):
        custom_build.build(transformers(tmp_path, vocab_size=512), 256, seed=0)
    with pytest.raises(ConfigError, match=r"has attention_dropout = 0\.1"):
        custom_build.build(transformers(tmp_path, attention_dropout=0.1), 256, seed=0)
    with pytest.raises(ConfigError, match="is no configuration of transformers"):
        custom_build.build(transformers(tmp_path, model_type="no such"), 256, seed=0)
    with pytest.raises(ConfigError, match="is no configuration of transformers"):
        custom_build.build(
            ArchitectureConfig(kind="transformers", source=str(tmp_path / "absent")), 256, seed=0
        )
