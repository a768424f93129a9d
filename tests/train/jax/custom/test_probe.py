import jax
import jax.numpy as jnp
import pytest
from helpers.models.own_configurations import nnx as of

from fp8ref.shared.errors import ConfigError
from fp8ref.train.jax.custom import build as custom_build
from fp8ref.train.jax.custom import probe as custom_probe


@pytest.mark.parametrize(
    ("name", "heads"),
    [("Plain", ("head",)), ("HeadFirst", ("head",)), ("Headless", ()), ("Constant", ("head",))],
)
def test_the_head_is_what_makes_the_logits(name, heads):  # T-10
    assert custom_build.shapes(of(name), 256, 8).heads == heads


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Counting", "changes count in its forward pass"),
        ("Failing", r"fails on tokens \[1, 8\], int32: TypeError"),
    ],
)
def test_what_a_step_has_no_place_for_is_refused(name, message):  # T-10
    with pytest.raises(ConfigError, match=message):
        custom_build.shapes(of(name), 256, 8)


def test_logits_have_a_shape():
    tokens = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    assert custom_probe.logits_of(jnp.zeros((2, 3, 5)), tokens, 5).shape == (2, 3, 5)
    for other in (jnp.zeros((2, 5)), None):
        with pytest.raises(ConfigError, match="returns logits"):
            custom_probe.logits_of(other, tokens, 5)
