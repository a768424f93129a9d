"""The training step of a user's Flax NNX model (spec T-10, T): float32 masters, bfloat16 compute,
AdamW.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from fp8ref.jax import flax as fj
from fp8ref.jax.flax import nnx as nnx_hooks
from fp8ref.jax.flax.amax_observations import Observed, merge
from fp8ref.shared.errors import ConfigError
from fp8ref.spec import llama
from fp8ref.spec.hardware import Multiply
from fp8ref.train.config.config import Config
from fp8ref.train.jax.custom import model as custom_model
from fp8ref.train.jax.custom import probe
from fp8ref.train.jax.llama.cross_entropy import cross_entropy
from fp8ref.train.jax.llama.layer_stacks import LayerStacks
from fp8ref.train.jax.mesh import Layout
from fp8ref.train.jax.optimizer import Optimizer, new_if
from fp8ref.train.jax.step import State
from fp8ref.train.run import train_state


class CustomStep:
    """The functions of a step, of a batch's parts [microbatches, B, T + 1].

    ``State.params`` is {dotted name: float32 array}, and ``State.fp8`` the hooks' states of delayed
    scaling.

    fp8     these states before the first step.
    """

    def __init__(self, config: Config, layout: Layout, multiply: Multiply | None) -> None:
        """config: in one recipe, ``config.under`` that of a phase."""
        self.config, self.decisions = config, config.decisions()
        model = self._model()
        self.linears = {d.path: d.recipe for d in self.decisions if d.fp8}
        if self.linears:
            keys = config.numerics
            options: dict = {
                "filter_fqns": config.filter_fqns,
                "fp8_fqns": keys.fp8_fqns,
                "rules": keys.rules or (),
            }
            fj.convert(model, keys.recipe, **options, multiply=multiply)
        self._graph, params, self.fp8, self._rest = nnx.split(model, nnx.Param, fj.Fp8State, ...)
        self._tree = jax.tree.structure(params)
        # not the arrays
        self._shapes = {
            name: jax.ShapeDtypeStruct(value.shape, value.dtype)
            for name, value in _named(params).items()
        }
        self.optimizer = Optimizer(config.optimizer, layout, LayerStacks(0, layout), self._shapes)

    def begin(self, weights: Mapping[str, llama.Weight] | None) -> State:
        """The state before the first step. weights: float32 by name; None: the model's own.

        Raises:   ConfigError: weights of other names or shapes.
        """
        if weights is None:
            params = _named(nnx.state(self._model(), nnx.Param))
        else:
            mine, weight_shapes = (
                {name: tuple(value.shape) for name, value in of.items()}
                for of in (self._shapes, weights)
            )
            if mine != weight_shapes:
                wrong = sorted(
                    name
                    for name in mine.keys() | weight_shapes.keys()
                    if mine.get(name) != weight_shapes.get(name)
                )
                raise ConfigError(
                    f"weights have the names and shapes of the model's parameters; {wrong[0]} "
                    "does not."
                )
            params = {
                name: jnp.asarray(np.asarray(weights[name][...], np.float32)) for name in mine
            }
        masters, optimizer = self.optimizer.begin(params.items())
        return State(masters, optimizer, self.fp8, {})

    def train(
        self, state: State, parts: jax.Array, lr: jax.Array
    ) -> tuple[State, jax.Array, jax.Array]:
        """One step at this learning rate: the new state, the loss, and the norm of the gradients;
        where either is not finite, the state is the old one (T-4)."""
        loss, grads, seen = self._differentiated(state.params, state.fp8, parts)
        params, optimizer, norm, finite = self.optimizer.update(
            state.params, state.optimizer, grads, loss, lr
        )
        after = self.merged(state.params, state.fp8)
        fj.update(after, seen)
        return (
            State(params, optimizer, new_if(finite, nnx.state(after, fj.Fp8State), state.fp8), {}),
            loss,
            norm,
        )

    def gradients(self, params, fp8, parts: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(loss, float32 gradients by name) of a batch's parts."""
        return self._differentiated(params, fp8, parts)[:2]

    def mean_loss(self, params, fp8, parts: jax.Array) -> jax.Array:
        """The loss of a batch's parts."""
        model = self.merged(params, fp8)
        if len(parts) == 1:
            return self._loss(model, parts[0])
        return lax.map(lambda part: self._loss(model, part), parts).mean()

    def logits(self, params, fp8, tokens: jax.Array) -> jax.Array:
        """float32 [B, T, V]."""
        return self._logits(self.merged(params, fp8), tokens).astype(jnp.float32)

    def merged(self, params: Mapping[str, jax.Array], fp8) -> nnx.Module:
        """The model on parameters rounded to bfloat16, with the hooks' states."""
        return self._copy_of(self._rounded(params), fp8)

    def states(self, fp8) -> dict[str, dict[str, Any]]:
        """{linear: {role: its state of delayed scaling}}."""
        model = self._copy_of(list(self._shapes.values()), fp8)
        return {
            hook.name: hook.state.get_value()
            for hook in nnx_hooks.hooks(model).values()
            if hook.state is not None
        }

    def tensors(self, state: State) -> dict[str, Any]:
        """The arrays of a state by the names of ``train_state``, nested."""
        tensors = self.optimizer.tensors(state.params, state.optimizer)
        if states := self.states(state.fp8):
            tensors[train_state.FP8] = {
                name: {role: entry._asdict() for role, entry in roles.items()}
                for name, roles in states.items()
            }
        return tensors

    def restored(self, state: State, tensors: dict[str, Any]) -> State:
        """A state of the structure of this one, of arrays named as ``tensors`` names them."""
        model = self._copy_of(list(self._shapes.values()), state.fp8)
        for hook in nnx_hooks.hooks(model).values():
            if hook.state is not None:
                saved = tensors[train_state.FP8][hook.name]
                hook.state.set_value(
                    {
                        role: type(entry)(**saved[role])
                        for role, entry in hook.state.get_value().items()
                    }
                )
        return State(
            *self.optimizer.restored(state.params, state.optimizer, tensors),
            nnx.state(model, fj.Fp8State),
            {},
        )

    def _model(self) -> nnx.Module:
        """The user's model, with its own initial weights."""
        return custom_model.build(
            self.config.architecture, self.config.model.vocab_size, seed=self.config.run.seed
        )

    def _rounded(self, params: Mapping[str, jax.Array]) -> list[jax.Array]:
        return [params[name].astype(jnp.bfloat16) for name in self._shapes]

    def _copy_of(self, values: list, fp8) -> nnx.Module:
        """The model on other parameters, or shapes, and states, none of which an update of the
        model changes.
        """
        return nnx.merge(
            self._graph, jax.tree.unflatten(self._tree, values), fp8, self._rest, copy=True
        )

    def _differentiated(
        self, params, fp8, parts: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array], Observed]:
        """(loss, gradients, observations) of a batch's parts; gradients are summed in float32
        (T-7).
        """
        rounded = self._rounded(params)

        def part_gradients(part: jax.Array) -> tuple:
            loss, grads, seen = fj.value_and_grad(self._loss)(self._copy_of(rounded, fp8), part)
            return loss, {name: g.astype(jnp.float32) for name, g in _named(grads).items()}, seen

        def add(before: tuple, part: jax.Array) -> tuple[tuple, None]:
            (loss, grads, seen), terms = before, part_gradients(part)
            return (
                loss + terms[0],
                jax.tree.map(jnp.add, grads, terms[1]),
                merge(seen, terms[2]),
            ), None

        if len(parts) == 1:
            return part_gradients(parts[0])
        # A scan keeps one microbatch's activations at a time, and compiles the passes once. Sums
        # begin with -0, which leaves a zero's sign.
        zeros = {
            name: jnp.full(shape.shape, -0.0, jnp.float32) for name, shape in self._shapes.items()
        }
        begin = (jnp.float32(-0.0), zeros, fj.unseen(self._copy_of(rounded, fp8)))
        (loss, grads, seen), _ = lax.scan(add, begin, parts)
        share = np.float32(1 / len(parts))
        return loss * share, {name: g * share for name, g in grads.items()}, seen

    def _loss(self, model: nnx.Module, tokens: jax.Array) -> jax.Array:
        return cross_entropy(self._logits(model, tokens[:, :-1]), tokens[:, 1:]).mean()

    def _logits(self, model: nnx.Module, tokens: jax.Array) -> jax.Array:
        return probe.logits_of(model(tokens), tokens, self.config.model.vocab_size)


def _named(params) -> dict[str, jax.Array]:
    """Parameters by dotted name, in the order of their state: the path without what a Variable adds
    to it.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {
        ".".join(str(part.key) for part in path if hasattr(part, "key")): value
        for path, value in leaves
    }
