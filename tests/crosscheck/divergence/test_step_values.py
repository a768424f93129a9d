import pytest

from fp8ref.crosscheck.divergence.step_values import site_before, unobserved
from fp8ref.train.config.config import Config


@pytest.mark.parametrize(
    ("linear", "made"),
    [
        ("self_attn.k_proj", ("input_layernorm", "output")),
        ("self_attn.o_proj", ("self_attn", "attention output")),
        ("mlp.up_proj", ("post_attention_layernorm", "output")),
        ("mlp.down_proj", ("mlp", "silu(gate) * up")),
    ],
)
def test_the_site_before_a_linear_is_the_simulators(linear, made):
    assert site_before(f"model.layers.3.{linear}") == (f"model.layers.3.{made[0]}", made[1])
    assert site_before("lm_head") == ("model.norm", "output")


def test_linears_in_high_precision_before_a_layer_are_unobserved():
    config = Config().replace(numerics={"filter_fqns": ("layers.0.mlp",)})
    assert unobserved("model.layers.0.self_attn.o_proj", config) == []
    assert unobserved("model.layers.1.self_attn.q_proj", config) == [
        f"model.layers.0.mlp.{p}_proj" for p in ("gate", "up", "down")
    ]
    assert unobserved("lm_head", config)[-1] == "model.layers.0.mlp.down_proj"
