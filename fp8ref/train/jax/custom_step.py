"""The training step of a user's Flax NNX model (spec T-10, T): float32 masters, bfloat16 compute, AdamW."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fp8ref import llama
from fp8ref.errors import ConfigError
from fp8ref.hardware import Multiply
from fp8ref.jax import flax as fj
from fp8ref.jax.flax import nnx as nnx_hooks
from fp8ref.jax.flax.amax_observations import Observed, merge
from fp8ref.train import train_state
from fp8ref.train.config import Config
from fp8ref.train.jax import custom_model, custom_probe
from fp8ref.train.jax.cross_entropy import cross_entropy
from fp8ref.train.jax.layer_stacks import LayerStacks
from fp8ref.train.jax.mesh import Layout
from fp8ref.train.jax.optimizer import Optimizer, new_if
from fp8ref.train.jax.step import State


class CustomStep:
    """The functions of a step, of a batch's parts [microbatches, B, T + 1].

    ``State.params`` is {dotted name: float32 array}, and ``State.fp8`` the hooks' states of delayed scaling.
    """

    def __init__(self, config: Config, layout: Layout, multiply: Multiply | None) -> None:
        """config: in one recipe, ``config.under`` that of a phase."""
        self.config, self.decisions = config, config.decisions()
        model = custom_model.build(config.architecture, config.model.vocab_size, seed=config.run.seed)
        self.linears = {d.path: d.recipe for d in self.decisions if d.fp8}
        if self.linears:
            keys = config.numerics
            how: dict = {"filter_fqns": config.filter_fqns, "fp8_fqns": keys.fp8_fqns, "rules": keys.rules or ()}
            fj.convert(model, keys.recipe, **how, multiply=multiply)
        self._graph, params, fp8, self._rest = nnx.split(model, nnx.Param, fj.Fp8State, ...)
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(params)
        self._names = [_name(path) for path, _ in leaves]
        self._begin = {name: value for name, (_, value) in zip(self._names, leaves, strict=True)}, fp8
        shapes = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in self._begin[0].items()}
        self.optimizer = Optimizer(config.optimizer, layout, LayerStacks(0, layout), shapes)

    def begin(self, weights: Mapping[str, llama.Weight] | None) -> State:
        """The state before the first step. weights: float32 by name; None: the model's own.

        Raises:   ConfigError: weights of other names or shapes.
        """
        params, fp8 = self._begin
        if weights is not None:
            mine, given = ({name: tuple(value.shape) for name, value in of.items()} for of in (params, weights))
            if mine != given:
                wrong = sorted(name for name in mine.keys() | given.keys() if mine.get(name) != given.get(name))
                raise ConfigError(f"weights have the names and shapes of the model's parameters; {wrong[0]} does not.")
            params = {name: jnp.asarray(np.asarray(weights[name][...], np.float32)) for name in params}
        masters, optimizer = self.optimizer.begin(params.items())
        return State(masters, optimizer, fp8, {})

    def train(self, state: State, parts: jax.Array, lr: jax.Array) -> tuple[State, jax.Array, jax.Array]:
        """One step at this learning rate: the new state, the loss, and the norm of the gradients; where either is
        not finite, the state is the old one (T-4)."""
        loss, grads, seen = self._differentiated(state.params, state.fp8, parts)
        params, optimizer, norm, finite = self.optimizer.update(state.params, state.optimizer, grads, loss, lr)
        after = self.merged(state.params, state.fp8)
        fj.update(after, seen)
        return State(params, optimizer, new_if(finite, nnx.state(after, fj.Fp8State), state.fp8), {}), loss, norm

    def gradients(self, params, fp8, parts: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(loss, float32 gradients by name) of a batch's parts."""
        return self._differentiated(params, fp8, parts)[:2]

    def mean_loss(self, params, fp8, parts: jax.Array) -> jax.Array:
        """The loss of a batch's parts."""
        model = self.merged(params, fp8)
        return jnp.stack([self._loss(model, part) for part in parts]).mean()

    def logits(self, params, fp8, tokens: jax.Array) -> jax.Array:
        """float32 [B, T, V]."""
        return self._logits(self.merged(params, fp8), tokens).astype(jnp.float32)

    def merged(self, params: Mapping[str, jax.Array], fp8) -> nnx.Module:
        """The model on parameters rounded to bfloat16, with the hooks' states."""
        rounded = [params[name].astype(jnp.bfloat16) for name in self._names]
        return self._copy_of(rounded, fp8)

    def states(self, fp8) -> dict[str, dict[str, Any]]:
        """{linear: {role: its state of delayed scaling}}."""
        model = self._copy_of(list(self._begin[0].values()), fp8)
        return {hook.name: hook.state.get_value() for hook in nnx_hooks.hooks(model).values() if hook.state is not None}

    def tensors(self, state: State) -> dict[str, Any]:
        """The arrays of a state by the names of ``train_state``, nested."""
        found = self.optimizer.tensors(state.params, state.optimizer)
        if states := self.states(state.fp8):
            found[train_state.FP8] = {name: {role: one._asdict() for role, one in roles.items()} for name, roles in states.items()}
        return found

    def restored(self, state: State, tensors: dict[str, Any]) -> State:
        """A state of the structure of this one, of arrays named as ``tensors`` names them."""
        model = self._copy_of(list(self._begin[0].values()), state.fp8)
        for hook in nnx_hooks.hooks(model).values():
            if hook.state is not None:
                saved = tensors[train_state.FP8][hook.name]
                hook.state.set_value({role: type(one)(**saved[role]) for role, one in hook.state.get_value().items()})
        return State(*self.optimizer.restored(state.params, state.optimizer, tensors), nnx.state(model, fj.Fp8State), {})

    def _copy_of(self, values: list[jax.Array], fp8) -> nnx.Module:
        """The model on other parameters and states, none of which an update of the model changes."""
        return nnx.merge(self._graph, jax.tree.unflatten(self._tree, values), fp8, self._rest, copy=True)

    def _differentiated(self, params, fp8, parts: jax.Array) -> tuple[jax.Array, dict[str, jax.Array], Observed]:
        """(loss, gradients, observations) of a batch's parts; gradients are summed in float32 (T-7)."""
        model = self.merged(params, fp8)
        total: tuple | None = None
        for part in parts:
            loss, grads, seen = fj.value_and_grad(self._loss)(model, part)
            wide = {_name(path): g.astype(jnp.float32) for path, g in jax.tree_util.tree_leaves_with_path(grads)}
            before = total
            total = (
                (loss, wide, seen) if before is None else (before[0] + loss, jax.tree.map(jnp.add, before[1], wide), merge(before[2], seen))
            )
        assert total is not None
        share = np.float32(1 / len(parts))
        return total[0] * share, {name: g * share for name, g in total[1].items()}, total[2]

    def _loss(self, model: nnx.Module, tokens: jax.Array) -> jax.Array:
        return cross_entropy(self._logits(model, tokens[:, :-1]), tokens[:, 1:]).mean()

    def _logits(self, model: nnx.Module, tokens: jax.Array) -> jax.Array:
        return custom_probe.logits_of(model(tokens), tokens, self.config.model.vocab_size)


def _name(path) -> str:
    """The dotted name of a parameter, from its path in a state: without what a Variable adds to it."""
    return ".".join(str(part.key) for part in path if hasattr(part, "key"))
