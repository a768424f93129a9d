import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import sizes

from fp8ref.recipe import RECIPES
from fp8ref.shared.errors import ConfigError
from fp8ref.train.jax.llama import shared_inputs
from fp8ref.train.jax.trainer import Trainer

LAYER = {
    f"model.layers.0.{name}": RECIPES["delayed"]
    for name in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
}


def first(linears):
    """By names alone."""
    return {
        name.split(".")[-1]: other.split(".")[-1]
        for name, other in shared_inputs.first_readers(linears).items()
    }


def test_who_reads_an_input_first():
    """Of one recipe, which keeps a state of it."""
    assert first(LAYER) == {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
    assert first(dict.fromkeys(LAYER, RECIPES["tensorwise"])) == {}
    assert first(LAYER | {"model.layers.0.mlp.gate_proj": RECIPES["bf16"]}) == {
        "k_proj": "q_proj",
        "v_proj": "q_proj",
    }
    assert first({name: recipe for name, recipe in LAYER.items() if "q_proj" not in name}) == {
        "up_proj": "gate_proj"
    }
    assert first({name.replace(".0.", ".*."): recipe for name, recipe in LAYER.items()}) == first(
        LAYER
    )


def trained():
    # one layer: XLA compiles each anew
    config = sizes.config("delayed").replace(model={"num_hidden_layers": 1})
    trainer, draw = Trainer(config), np.random.default_rng(0).integers
    batches = draw(0, 256, (3, 8, 33))
    losses = [trainer.step(tokens)["loss"] for tokens in batches]
    return losses, trainer.weights(), trainer.fp8_states(), trainer


@pytest.fixture(scope="module")
def shared():
    return trained()


def test_one_state_for_all_readers_changes_no_bit(shared, monkeypatch):  # H-9
    monkeypatch.setattr(shared_inputs, "first_readers", lambda linears: {})
    losses, weights, states, _ = trained()
    assert losses == shared[0]
    assert all(np.array_equal(value, shared[1][name]) for name, value in weights.items())
    assert states.keys() == shared[2].keys()
    assert all(
        np.array_equal(a, b)
        for name, of in states.items()
        for a, b in zip(of, shared[2][name], strict=True)
    )


def test_the_first_readers_state_casts_for_all(shared):
    """Of the input of gate and up: the loss depends on gate's scale, and not on up's, so that XLA
    sees one cast.
    """
    trainer = shared[-1]
    tokens = trainer._parts(np.random.default_rng(1).integers(0, 256, (8, 33)))

    def loss(linear):
        states = dict(trainer._state.fp8)
        if linear:
            name = f"model.layers.0.mlp.{linear}"
            state = states[name]["input"]
            states[name] = {**states[name], "input": state._replace(stored=state.stored * 0.3)}
        read = trainer._read._replace(states=states)
        return float(trainer._loss(trainer._params, read, tokens))

    assert loss("up_proj") == loss(None) != loss("gate_proj")


def test_states_that_differ_are_refused(shared):
    trainer = shared[-1]
    state = trainer._step.tensors(trainer._state)
    name = "model.layers.0.mlp.up_proj"
    state["fp8"][name]["input"]["amax_history"] = (
        jnp.asarray(state["fp8"][name]["input"]["amax_history"]) * 2
    )
    with pytest.raises(
        ConfigError,
        match=r"layers\.0\.mlp\.up_proj and model\.layers\.0\.mlp\.gate_proj read one tensor",
    ):
        trainer._step.restored(trainer._state, state)
