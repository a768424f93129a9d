"""A state that is saved and read again is the state, in either backend."""

import numpy as np
import pytest

from fp8ref.recipe import RECIPES
from fp8ref.shared.errors import ConfigError
from fp8ref.train import loop
from fp8ref.train.data import loader

# minutes of XLA's compiler, and the same code but for the states of delayed scaling
QUICK = {("jax", "delayed"), *(("torch", recipe) for recipe in RECIPES)}
CASES = [
    pytest.param(backend, recipe, marks=[] if (backend, recipe) in QUICK else pytest.mark.slow)
    for backend in loop.BACKENDS
    for recipe in RECIPES
]


@pytest.fixture
def batches(small):
    opened = loader.open_batches(small)
    return [opened.step(k) for k in range(5)]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "recipe"), CASES)
def test_resuming_is_as_if_nothing_had_happened(backend, recipe, small, tmp_path):  # K-2
    """Losses, norms and weights, bit for bit; what is written is the state when ``save`` was
    called, though training went on.
    """
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    blocks = RECIPES[recipe].in_blocks
    config = small.replace(
        numerics={"recipe": recipe},
        model=sizes if blocks else {},
        data={"sequence_length": 32} if blocks else {},
    )
    opened = loader.open_batches(config)
    batches = [opened.step(k) for k in range(5)]
    whole, resumed = loop.trainer(backend, config), loop.trainer(backend, config)
    for tokens in batches[:2]:
        whole.step(tokens)
    written = whole.save(tmp_path / "state")
    later = [whole.step(tokens) for tokens in batches[2:]]
    written()
    resumed.load(tmp_path / "state", 2)
    assert [resumed.step(tokens) for tokens in batches[2:]] == later
    for name, value in whole.weights().items():
        np.testing.assert_array_equal(resumed.weights()[name], value, err_msg=name)


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_state_before_the_first_step_is_one_too(backend, small, batches, tmp_path):
    whole, resumed = (
        loop.trainer(backend, small),
        loop.trainer(backend, small.replace(run={"seed": 1})),
    )
    whole.save(tmp_path / "state")()
    resumed.load(tmp_path / "state", 0)
    assert resumed.step(batches[0]) == whole.step(batches[0])


@pytest.mark.parametrize("backend", loop.BACKENDS)
@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"numerics": {"recipe": "delayed"}}, r"fp8.*is not in the checkpoint"),
        ({"model": {"num_hidden_layers": 2}}, r"model\.layers\.1.*is not in the checkpoint"),
        (
            {"model": {"tie_word_embeddings": True}},
            r"lm_head\.weight is in the checkpoint, and not in this model",
        ),
        (
            {"model": {"intermediate_size": 64}},
            r"\.mlp\..*weight is \[(64, 32|32, 64)\] here and \[(48, 32|32, 48)\] in the "
            r"checkpoint",
        ),
    ],
    ids=["recipe", "layers", "tied", "shape"],
)
def test_another_models_state_is_refused_by_name(backend, sections, said, small, batches, tmp_path):
    loop.trainer(backend, small).save(tmp_path / "state")()
    other = loop.trainer(backend, small.replace(**sections))
    before = other.weights()
    with pytest.raises(ConfigError, match=said):
        other.load(tmp_path / "state", 1)
    for name, value in before.items():
        np.testing.assert_array_equal(other.weights()[name], value)
