import numpy as np
import pytest
from helpers.models.own_configurations import nnx as of

from fp8ref.shared.errors import ConfigError
from fp8ref.train.jax.custom import build as custom_build


def test_parameters_and_linears_are_named_by_their_paths():
    found = custom_build.shapes(of("Plain"), 256, 8)
    assert found.parameters == {
        "down.kernel": (64, 32),
        "embed.embedding": (256, 32),
        "head.kernel": (32, 256),
        "up.bias": (64,),
        "up.kernel": (32, 64),
    }
    assert found.linears == {"up": (64, 32), "down": (32, 64), "head": (256, 32)}
    assert (found.heads, found.kind) == (("head",), "helpers.models.own_nnx_models.Plain")


def test_the_seed_makes_the_weights():
    first, again, other = (
        np.asarray(custom_build.build(of("Plain"), 256, seed=seed).up.kernel[...])
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (of("Dropping"), r"has drop\.rngs\..* of type Rng"),
        (of("Grouped"), r"has a GroupedLinear \(experts\)"),
        (of("nothing", "helpers.models.own_torch_models"), "cannot be made: TypeError"),
        (of("Absent"), "cannot be imported"),
    ],
)
def test_what_a_step_has_no_place_for_is_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        custom_build.build(keys, 256, seed=0)
