import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from fp8ref.jax import flax as fp8


def linen_model():
    model, x = nn.Dense(16, dot_general_cls=fp8.linen_dot_general("delayed")), jnp.ones((16, 16))
    return model, model.init(jax.random.key(0), x), x


def test_unseen_is_what_merges_into_anything_and_updates_nothing():  # H-4, H-5
    model, variables, x = linen_model()

    def loss_fn(variables, x):
        y, updated = model.apply(variables, x, mutable=[fp8.SEEN])
        return (y**2).mean(), updated

    _, _, seen = fp8.value_and_grad(loss_fn)(variables, x)
    both = fp8.merge(fp8.unseen(variables), seen)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), both, seen))
    after = fp8.update(variables, fp8.unseen(variables))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), after[fp8.STATE], variables[fp8.STATE]))


def test_an_update_rolls_the_state_once():  # H-3
    model = nnx.Linear(16, 16, dot_general=fp8.nnx_dot_general("delayed"), rngs=nnx.Rngs(0))
    _, _, seen = fp8.value_and_grad(lambda model, x: (model(x) ** 2).mean())(model, jnp.full((16, 16), 3.0))
    fp8.update(model, seen)
    state = model.dot_general.state.get_value()["input"]
    assert (int(state.step), float(state.amax_history[0]), float(state.stored)) == (1, 3.0, float(jnp.float32(448) / 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fp8.value_and_grad(lambda m, x: m(x).sum())(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), jnp.ones((16, 16))), "Linear without"),
        (lambda: fp8.value_and_grad(lambda v, x: 0.0, wrt=nnx.BatchStat)(linen_model()[1], 1), "wrt filters"),
        (lambda: fp8.value_and_grad(lambda v, x: 0.0)({"parameters": 1}, 1), "got collections parameters"),
        (lambda: fp8.update(linen_model()[1], {"fc": 1}), "observations of fj.flax.value_and_grad"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
