"""A user's Flax NNX model in one recipe, as a step has it (spec T-10)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fp8ref.jax import delayed
from fp8ref.jax import flax as fj
from fp8ref.jax.flax import nnx as nnx_hooks
from fp8ref.jax.gemm import blackwell
from fp8ref.jax.kernels import casting, choice
from fp8ref.jax.linear import rounding
from fp8ref.selection.report import quiet
from fp8ref.shared.errors import ConfigError
from fp8ref.spec import llama
from fp8ref.spec.hardware import Multiply
from fp8ref.train.config.config import Config
from fp8ref.train.jax.custom import probe
from fp8ref.train.jax.custom.build import build, parameters
from fp8ref.train.jax.llama.cross_entropy import cross_entropy
from fp8ref.train.jax.mesh import Layout
from fp8ref.train.jax.model import Gradients, Inputs, Model
from fp8ref.train.jax.parameter_trees import LayerStacks


class CustomModel(Model):
    """A user's model on one device: ``params`` are {dotted name: shape}, and hooks read states of
    delayed scaling by the names of their linears."""

    def __init__(self, config: Config, layout: Layout, multiply: Multiply | None) -> None:
        """config: in one recipe, ``config.under`` that of a phase."""
        self._config, self.stacks = config, LayerStacks(0, layout)
        ran, self._device = layout.kernels(config.numerics.kernels), layout.own_device
        self._kernels = choice.kernels(ran, self._device)
        model = self._built()
        self.linears = {d.path: d.recipe for d in config.decisions() if d.fp8}
        self.keepers = self.linears
        if self.linears:
            with quiet():
                fj.convert(
                    model,
                    config.numerics.recipe,
                    filter_fqns=config.filter_fqns,
                    fp8_fqns=config.numerics.fp8_fqns,
                    rules=config.numerics.rules or (),
                    multiply=multiply,
                )
        self._hooks = {
            path: hook.name
            for path, hook in nnx_hooks.hooks(model).items()
            if hook.state is not None
        }
        self._graph, params, self._states, self._rest = nnx.split(
            model, nnx.Param, fj.Fp8State, ...
        )
        self._tree = jax.tree.structure(params)
        self.params = {
            name: jax.ShapeDtypeStruct(value.shape, value.dtype)  # not the arrays
            for name, value in parameters(params).items()
        }

    def initial(self, weights: Mapping[str, llama.Weight] | None) -> Mapping[str, llama.Weight]:
        """As ``Model.initial``. Raises:   ConfigError: weights of other names or shapes."""
        if weights is None:
            return parameters(nnx.state(self._built(), nnx.Param))
        mine, given = (
            {name: tuple(value.shape) for name, value in of.items()}
            for of in (self.params, weights)
        )
        wrong = sorted(n for n in mine.keys() | given.keys() if mine.get(n) != given.get(n))
        if wrong:
            raise ConfigError(
                f"weights have the names and shapes of the model's parameters; {wrong[0]} does not."
            )
        return {name: np.asarray(weights[name][...], np.float32) for name in mine}

    def states(self) -> dict[str, Any]:
        """As ``Model.states``."""
        return self._by_linear(self._states)

    def unseen(self) -> dict[str, delayed.Seen]:
        """As ``Model.unseen``."""
        seen = fj.unseen(self._copy(list(self.params.values()), self._states))
        return {self._hooks[path]: value for path, value in seen.layers.items()}

    def differentiate(self, weights, inputs: Inputs, tokens: jax.Array) -> Gradients:
        """As ``Model.differentiate``: gradients of the rounded parameters, widened."""
        model = self._merged(weights, inputs)
        with rounding.seeded(inputs.seed(self._config.run.seed)):
            loss, grads, seen = fj.value_and_grad(self._loss)(model, tokens)
        wide = {name: g.astype(jnp.float32) for name, g in parameters(grads).items()}
        observed = {self._hooks[path]: value for path, value in seen.layers.items()}
        return Gradients(loss, wide, observed, {})

    def loss(self, weights, inputs: Inputs, tokens: jax.Array) -> jax.Array:
        """As ``Model.loss``."""
        with rounding.seeded(inputs.seed(self._config.run.seed)):
            return self._loss(self._merged(weights, inputs), tokens)

    def logits(self, weights, inputs: Inputs, tokens: jax.Array) -> jax.Array:
        """As ``Model.logits``."""
        with rounding.seeded(inputs.seed(self._config.run.seed)):
            return self._logits(self._merged(weights, inputs), tokens).astype(jnp.float32)

    def _built(self) -> nnx.Module:
        """The user's model, with its own initial weights."""
        keys = self._config
        return build(keys.architecture, keys.model.vocab_size, seed=keys.run.seed)

    def _copy(self, values: list, states: nnx.State) -> nnx.Module:
        """The model on other parameters, or shapes, and states; an update of it changes none."""
        params = jax.tree.unflatten(self._tree, values)
        return nnx.merge(self._graph, params, states, self._rest, copy=True)

    def _merged(self, weights: Mapping[str, jax.Array], inputs: Inputs) -> nnx.Module:
        """The model on parameters rounded to bfloat16, whose hooks have the states of a pass."""
        leaves = [
            x
            for name in self._by_linear(self._states)
            for x in jax.tree.leaves(inputs.states[name])
        ]
        states = jax.tree.unflatten(jax.tree.structure(self._states), leaves)
        return self._copy([weights[name].astype(jnp.bfloat16) for name in self.params], states)

    def _by_linear(self, states: nnx.State) -> dict[str, Any]:
        """{linear: {role: state}}, in the order of the leaves."""
        return {
            self._hooks[".".join(map(str, path[:-1]))]: variable.get_value()
            for path, variable in nnx.to_flat_state(states)
        }

    def _loss(self, model: nnx.Module, tokens: jax.Array) -> jax.Array:
        return cross_entropy(self._logits(model, tokens[:, :-1]), tokens[:, 1:]).mean()

    def _logits(self, model: nnx.Module, tokens: jax.Array) -> jax.Array:
        by = blackwell.multiplying(self._config.numerics.products, self._device)
        with casting(self._kernels), by:
            return probe.logits_of(model(tokens), tokens, self._config.model.vocab_size)
