"""A Flax model under delayed scaling that is evaluated before any update."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp8ref.jax import flax as fp8
from fp8ref.selection.rules import Rule

X = jax.random.normal(jax.random.key(1), (24, 32))


class Model(nnx.Module):
    def __init__(self) -> None:
        rngs, small = nnx.Rngs(0), nnx.initializers.normal(2.0**-10)
        self.up, self.down = (
            nnx.Linear(32, 64, kernel_init=small, rngs=rngs),
            nnx.Linear(64, 16, kernel_init=small, rngs=rngs),
        )

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class Net(nn.Module):
    hook: object = None

    @nn.compact
    def __call__(self, x):
        more = {} if self.hook is None else {"dot_general_cls": self.hook}
        small = nn.initializers.normal(2.0**-10)
        return nn.Dense(16, kernel_init=small, **more)(
            nn.gelu(nn.Dense(64, kernel_init=small, **more)(x))
        )


def close(y, expected):
    """Two casts of e4m3, each within 2^-4 of its number, in each of two linears."""
    return jnp.linalg.norm(y - expected) < 4 * 2.0**-4 * jnp.linalg.norm(expected)


@pytest.mark.parametrize("batches", [[X], [(X[:8],), (X[8:],)], [{"x": X}]])
def test_calibration_sets_the_scales_of_an_nnx_evaluation(batches):  # TransformerEngine#982
    expected, model = Model()(X), fp8.convert(Model(), "delayed")
    with pytest.warns(
        UserWarning,
        match=r"^up scales by earlier steps .* Call fp8ref\.jax\.flax\.calibrate\(model, batches\)",
    ):
        assert not close(model(X), expected)
    fp8.calibrate(model, batches)
    states = model.up.dot_general.state.get_value()
    for role, tensor in (("input", X), ("weight", model.up.kernel.get_value())):
        np.testing.assert_array_equal(states[role].amax_history[0], jnp.abs(tensor).max())
        assert states[role].step == 1
    assert (states["grad_output"].step, states["grad_output"].stored) == (0, 1)
    assert model.up.dot_general.seen is None
    assert close(model(X), expected)


def test_calibration_sets_the_scales_of_a_linen_evaluation():
    net = Net(fp8.linen_dot_general("delayed"))
    variables = net.init(jax.random.key(0), X)
    expected = Net().apply({"params": jax.tree.map(lambda p: p, variables["params"])}, X)
    with pytest.warns(UserWarning, match="^Dense_1 scales by earlier steps"):
        before = net.apply(variables, X)
    after = fp8.calibrate(variables, [X[:8], X[8:]], apply=net.apply)
    assert not close(before, expected)
    assert close(net.apply(after, X), expected)


@pytest.mark.parametrize("transformed", [nnx.jit, nnx.remat])
def test_a_cached_trace_is_of_its_own_mode(transformed):
    """A jit or a checkpoint inside a model: training after a calibration is in FP8, and a
    calibration after training is not.
    """

    @transformed
    def body(model, x):
        return Model.__call__(model, x)

    class Cached(Model):
        def __call__(self, x):
            return body(self, x)

    def loss_fn(model, x):
        return (model(x) ** 2).mean()

    expected, model = fp8.convert(Model(), "delayed"), fp8.convert(Cached(), "delayed")
    fp8.calibrate(expected, [X])
    fp8.calibrate(model, [X])
    step = fp8.value_and_grad(loss_fn)
    assert nnx.jit(step)(model, X)[0] == nnx.jit(step)(expected, X)[0]
    trained = fp8.convert(Cached(), "delayed")
    nnx.jit(step)(trained, X)
    fp8.calibrate(trained, [X])
    for one in (model, trained):
        got, wanted = (
            m.down.dot_general.state.get_value()["input"].amax_history[0] for m in (one, expected)
        )
        # XLA fuses what it compiles, so that sums differ in order
        np.testing.assert_array_max_ulp(got, wanted, 2)


def test_hooks_without_states_multiply_in_high_precision():
    """What comes behind them observes what no cast has changed; under jit they are in FP8 again."""

    @nnx.jit
    def up(model, x):
        return model.up(x)

    class Mixed(Model):
        def __call__(self, x):
            return self.down(up(self, x))

    plain, model = (
        Mixed(),
        fp8.convert(Mixed(), "delayed", rules=(Rule(layers=("up",), recipe="rowwise"),)),
    )
    fp8.calibrate(model, [X])
    assert model.up.dot_general.state is None
    np.testing.assert_array_equal(
        model.down.dot_general.state.get_value()["input"].amax_history[0],
        jnp.abs(up(plain, X)).max(),
    )
    assert not (up(model, X) == up(plain, X)).all()

    class Hooks(nn.Module):
        first: object = None
        second: object = None

        @nn.compact
        def __call__(self, x):
            return nn.Dense(16, name="down", dot_general_cls=self.second)(
                nn.Dense(64, name="up", dot_general_cls=self.first)(x)
            )

    net = Hooks(fp8.linen_dot_general("rowwise"), fp8.linen_dot_general("delayed"))
    variables = net.init(jax.random.key(0), X)
    _, between = Hooks().apply({"params": variables["params"]}, X, capture_intermediates=True)
    state = fp8.calibrate(variables, [X], apply=net.apply)["fp8_state"]["down"]["Fp8DotGeneral_0"][
        "state"
    ].roles["input"]
    np.testing.assert_array_equal(
        state.amax_history[0], jnp.abs(between["intermediates"]["up"]["__call__"][0]).max()
    )


def test_calibration_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"the model has none\. Convert it"):
        fp8.calibrate(Model(), [X])
    with pytest.raises(ValueError, match=r"at least one batch.*got none"):
        fp8.calibrate(fp8.convert(Model(), "delayed"), [])
    net = Net(fp8.linen_dot_general("delayed"))
    with pytest.raises(ValueError, match=r"Pass apply=net\.apply"):
        fp8.calibrate(net.init(jax.random.key(0), X), [X])
