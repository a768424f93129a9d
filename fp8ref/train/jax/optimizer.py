"""AdamW for JAX: optax's, or ``fp8ref.jax.states`` under a layout (T-1, T-2, T-4, T-6)."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.jax.states import health, states
from fp8ref.jax.states import state as adamw_state
from fp8ref.jax.states.moments import MomentState
from fp8ref.jax.states.state import AdamWState
from fp8ref.recipe import Recipe
from fp8ref.train.config.config import Config
from fp8ref.train.jax.mesh import Layout
from fp8ref.train.jax.parameter_trees import LayerStacks, is_stored, name_of, named
from fp8ref.train.run import train_state


class OptimizerState(NamedTuple):
    """What a step changes beside the masters.

    count      int32, steps taken.
    kept       trees of the parameters' structure by the names of ``train_state``: the moments,
               float32 or ``MomentState``.
    decisions  those of the moments' layout (O-17), or None.
    """

    count: Any
    kept: dict[str, Any]
    decisions: Any


class Optimizer:
    """What a step does to masters and moments. ``params``, in all methods, are the masters of
    ``step.State``, and ``state`` is its ``optimizer``.

    params           the shapes of the parameters, a tree.
    parameter_specs  the PartitionSpec of each parameter.
    specs            PartitionSpecs of masters and state.
    """

    def __init__(self, config: Config, layout: Layout, stacks: LayerStacks, params) -> None:
        keys = self._keys = config.optimizer
        self._layout, self._stacks, self._params = layout, stacks, params
        self._kernels = config.numerics.kernels
        self._moments = keys.moment_layout
        self._keeps_masters = keys.keeps_masters
        adam = optax.scale_by_adam(b1=keys.beta1, b2=keys.beta2, eps=keys.eps)
        self._transformation = self._at(0.0) if self._moments else adam
        self.parameter_specs = jax.tree_util.tree_map_with_path(
            lambda path, p: layout.parameter(name_of(path), p.shape), params
        )
        self.specs = self._specs()

    def shapes(self) -> tuple[Any, OptimizerState]:
        """The shapes of masters and state."""
        return jax.eval_shape(self._begun, self._params)

    def begin(self, weights: Iterable[tuple[str, jax.Array]]) -> tuple[Any, OptimizerState]:
        """(masters, state before the first step) of float32 weights by name, placed on the devices.

        Of masters that a layout stores, each float32 weight is dropped once its master is made.
        """
        masters, state = self.specs
        if not self._keeps_masters:
            params = self._stacks.tree(self._params, dict(weights))
            return params, jax.jit(
                lambda params: self._begun(params)[1], out_shardings=self._on_mesh(state)
            )(params)
        master_specs, *kept_specs = (
            self._stacks.specs(named(tree, stored=True)) for tree in (masters, *state.kept.values())
        )

        def begun(name: str, weight: jax.Array) -> tuple[Any, OptimizerState]:
            kept = dict(zip(state.kept, (of[name] for of in kept_specs), strict=True))
            placed = self._on_mesh((master_specs[name], state._replace(kept=kept)))
            return jax.jit(self._begun, out_shardings=placed)(weight)

        each = {name: begun(name, weight) for name, weight in weights}
        kept = {
            key: self._stacks.tree(
                self._params, {name: new_state.kept[key] for name, (_, new_state) in each.items()}
            )
            for key in state.kept
        }
        masters = self._stacks.tree(
            self._params, {name: master for name, (master, _) in each.items()}
        )
        return masters, next(iter(each.values()))[1]._replace(kept=kept)

    def update(
        self, params, state, grads, loss: jax.Array, lr: jax.Array
    ) -> tuple[Any, OptimizerState, jax.Array, jax.Array]:
        """(masters, state, norm of the gradients, whether loss and norm are finite) after a step at
        this learning rate. Where they are not, masters and state are the old ones (T-4)."""
        norm, factor = self._clipping(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        if self._moments:
            before, optimizer = self._adamw_state(params, state), self._adamw(lr)
            weights = self.weights(params)
            weights, after = states.step(
                weights, grads, before, optimizer, factor=factor, finite=finite
            )
            masters, new = self._apart(weights, after)
        else:
            before = optax.ScaleByAdamState(
                state.count, *(state.kept[key] for key in train_state.MOMENTS)
            )
            updates, adam = self._transformation.update(_times(grads, factor), before)
            decay = optax.add_decayed_weights(self._keys.weight_decay, mask=_matrices)
            updates, _ = decay.update(updates, decay.init(params), params)
            stepped = jax.tree.map(lambda p, u: p - lr * u, params, updates)
            masters, new = self._apart(*new_if(finite, (stepped, adam), (params, before)))
        return masters, new, norm, finite

    def health(self, grads, params, state) -> health.Measured:
        """What storing the moments of a step would cost, of gradients before clipping: of all
        parameters, in the order of ``LayerStacks.named`` (spec O-12)."""
        assert self._moments is not None
        keys, grads = self._keys, _times(grads, self._clipping(grads)[1])
        _, adam = self._at(0.0).update(
            grads, self._adamw_state(params, state), self.weights(params)
        )
        g, after = self._stacks.named(grads), self._apart(params, adam)[1]
        each = [
            x._replace(kept={key: self._by_name(tree) for key, tree in x.kept.items()})
            for x in (state, after)
        ]
        both = [self._adamw_state(None, x) for x in each]
        measured = health.measure(
            g, *both, b1=keys.beta1, b2=keys.beta2, eps=keys.eps, layout=self._moments
        )
        fields = zip(*(measured[name] for name in g), strict=True)
        return health.Measured(*map(jnp.stack, fields))

    def moments(self, state) -> dict[str, dict[str, Any]]:
        """Both moments in float32, as the next step reads them, by the names of ``train_state``."""
        if self._moments is None:
            both = tuple(state.kept[key] for key in train_state.MOMENTS)
        else:
            both = states.decode(self._adamw_state((), state), self._moments, stacked=_stacks)
        return {
            key: self._stacks.named(moment)
            for key, moment in zip(train_state.MOMENTS, both, strict=True)
        }

    def weights(self, params, dtype=jnp.bfloat16):
        """The weights that passes compute with: float32 masters themselves, which the model rounds;
        of masters that a layout stores, bfloat16 or another dtype (O-14)."""
        if not self._keeps_masters:
            return params
        assert self._moments is not None
        return states.weights(self._holding(params), self._moments, dtype, stacked=_stacks)

    def copies(self, params, recipes: Mapping[str, Recipe]) -> dict[str, Quantized]:
        """FP8 copies of weights by linear, for recipes that cast a weight once (O-16): of stored
        masters alone. By the name of a stack, those of all layers."""
        if not self._keeps_masters:
            return {}
        assert self._moments is not None
        masters = named(params, stored=True)
        return {
            name: states.copies(
                self._holding(masters[f"{name}.weight"]),
                self._moments,
                recipe,
                jnp.bfloat16,
                stacked="*" in name,
            )
            for name, recipe in recipes.items()
        }

    def float32_masters(self, params) -> dict[str, Any]:
        """The float32 numbers of masters by parameter name, stacks taken apart."""
        return self._stacks.named(self.weights(params, jnp.float32))

    def tensors(self, params, state: OptimizerState) -> dict[str, Any]:
        """The arrays of masters and state by the names of ``train_state``, nested."""
        trees = {train_state.MASTERS: params, **state.kept}
        return {key: self._fields(tree) for key, tree in trees.items()} | {
            train_state.COUNT: state.count
        }

    def restored(
        self, params, state: OptimizerState, tensors: Mapping[str, Any]
    ) -> tuple[Any, OptimizerState]:
        """Masters and state of the structure of these, of arrays by the names of ``tensors``."""
        kept = {key: self._from_fields(like, tensors[key]) for key, like in state.kept.items()}
        return self._from_fields(params, tensors[train_state.MASTERS]), state._replace(
            count=tensors[train_state.COUNT], kept=kept
        )

    def _begun(self, params) -> tuple[Any, OptimizerState]:
        """(masters, state) before the first step of parameters, a tree or one."""
        masters, state = self._apart(params, self._transformation.init(params))
        return masters, state

    def _specs(self) -> tuple[Any, OptimizerState]:
        """What is kept of a parameter is placed as it is; count and scales are replicated."""

        def of(tree):
            return jax.tree.map(
                lambda leaf, spec: (
                    jax.tree.map(lambda _: P(), leaf)._replace(codes=spec)
                    if is_stored(leaf)
                    else spec
                ),
                tree,
                self.parameter_specs,
                is_leaf=is_stored,
            )

        masters, state = self.shapes()
        decisions = jax.tree.map(lambda _: P(), state.decisions)
        return of(masters), OptimizerState(
            P(), {key: of(tree) for key, tree in state.kept.items()}, decisions
        )

    def _on_mesh(self, specs):
        """Shardings of PartitionSpecs; on one device None, which commits nothing to it."""
        if self._layout.mesh is None:
            return None
        return jax.tree.map(self._layout.sharding, specs)

    def _clipping(self, grads) -> tuple[jax.Array, jax.Array]:
        """The norm of the gradients, and what clips them to the largest that it may be (T-2)."""
        norm = optax.tree.norm(grads)
        return norm, jnp.minimum(1.0, self._keys.max_norm / norm)

    def _holding(self, masters) -> AdamWState:
        """Masters as the part of AdamW's state that ``states.weights`` and ``copies`` read."""
        assert self._moments is not None
        decisions = adamw_state.decisions(self._moments)
        return AdamWState(jnp.int32(0), None, None, self._by_field(masters, 2), decisions)

    def _adamw_state(self, params, state: OptimizerState) -> AdamWState:
        """The state as ``fp8ref.jax.states`` has it, with the masters of ``params``, if any."""
        m, v = (self._by_field(state.kept[key], i) for i, key in enumerate(train_state.MOMENTS))
        master = None
        if self._keeps_masters and params is not None:
            master = self._by_field(params, 2)
        return AdamWState(state.count, m, v, master, state.decisions)

    def _by_field(self, tree, which: int) -> MomentState:
        """What is stored of parameters, as ``fp8ref.jax.states`` has it: a tree of each field."""
        assert self._moments is not None
        each, structure = jax.tree.flatten(tree, is_leaf=is_stored)
        codes = jax.tree.unflatten(structure, [leaf.codes for leaf in each])
        stacks = jax.tree.leaves(_stacks(codes))
        return adamw_state.by_field(each, structure, self._moments.kept[which], stacks)

    def _by_parameter(self, trees: MomentState, which: int):
        """The tree of ``MomentState`` that ``_by_field`` takes."""
        assert self._moments is not None
        codes, structure = jax.tree.flatten(trees.codes)
        sizes = [
            math.prod(x.shape[s:])
            for x, s in zip(codes, jax.tree.leaves(_stacks(trees.codes)), strict=True)
        ]
        owns = [self._moments.of(size).kept[which] for size in sizes]
        each = adamw_state.by_parameter(trees, structure, self._moments.kept[which], owns)
        return jax.tree.unflatten(structure, each)

    def _apart(
        self, params, adam: optax.ScaleByAdamState | AdamWState
    ) -> tuple[Any, OptimizerState]:
        """(masters, state) of parameters and either AdamW's state, which may hold the masters."""
        count, *both = adam[:3]
        decisions = None
        if isinstance(adam, AdamWState):
            both = [self._by_parameter(trees, i) for i, trees in enumerate(both)]
            decisions = adam.decisions
            params = params if adam.master is None else self._by_parameter(adam.master, 2)
        return params, OptimizerState(
            count, dict(zip(train_state.MOMENTS, both, strict=True)), decisions
        )

    def _at(self, lr) -> optax.GradientTransformation:
        """The optimizer of a layout at a learning rate, which its updates contain."""
        return self._adamw(lambda _: lr).transformation()

    def _adamw(self, learning_rate) -> states.AdamW:
        keys = self._keys
        return states.AdamW(
            learning_rate=learning_rate,
            b1=keys.beta1,
            b2=keys.beta2,
            eps=keys.eps,
            weight_decay=keys.weight_decay,
            layout=self._moments or "float32",
            parameters=states.Parameters(mask=_matrices, stacked=_stacks),
            kernels=self._kernels,
        )

    def _by_name(self, tree) -> dict[str, Any]:
        """What is kept of each parameter by its name: an array, or a ``MomentState``."""
        return self._stacks.apart(named(tree, stored=True))

    def _fields(self, tree) -> dict[str, jax.Array]:
        """A tree's arrays by parameter name, or name.field of a stored one; FP8 codes as uint8."""
        arrays: dict[str, jax.Array] = {}
        for name, leaf in self._by_name(tree).items():
            if not is_stored(leaf):
                arrays[name] = leaf
                continue
            fields = leaf._asdict().items()
            arrays |= {f"{name}.{field}": x for field, x in fields if x is not None}
        return {
            name: lax.bitcast_convert_type(x, jnp.uint8) if x.dtype.itemsize == 1 else x
            for name, x in arrays.items()
        }

    def _from_fields(self, like, arrays: Mapping[str, jax.Array]):
        """A tree of the structure of ``like``, of arrays that ``_fields`` names."""

        def of(path, leaf):
            if not is_stored(leaf):
                return self._stacks.together(name_of(path), arrays)
            fields = {field: x for field, x in leaf._asdict().items() if x is not None}
            own = {field: _without(f".{field}", arrays) for field in fields}
            name = name_of(path)
            saved = {field: self._stacks.together(name, of) for field, of in own.items()}
            codes, dtype = saved.pop("codes"), fields["codes"].dtype
            if dtype.itemsize == 1:
                codes = lax.bitcast_convert_type(codes, dtype)
            return MomentState(codes, *(saved.get(key) for key in MomentState._fields[1:]))

        return jax.tree_util.tree_map_with_path(of, like, is_leaf=is_stored)


def new_if(condition: jax.Array, new, old):
    """The new tree or the old one, selected by element: the decision stays on the device."""
    return jax.tree.map(lambda new, old: jnp.where(condition, new, old), new, old)


def _times(grads, factor: jax.Array):
    return jax.tree.map(lambda g: g * factor, grads)


def _without(suffix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """What is found under names that end in a suffix, by the names without it."""
    return {
        name.removesuffix(suffix): value for name, value in arrays.items() if name.endswith(suffix)
    }


def _stacks(params):
    """True for each parameter that is a stack of layers (``layer_stacks``)."""
    return jax.tree_util.tree_map_with_path(lambda path, _: "*" in name_of(path), params)


def _matrices(params):
    """True for each parameter that is a matrix, or a stack of them: weight decay is of these."""
    return jax.tree_util.tree_map_with_path(
        lambda path, value: value.ndim - ("*" in name_of(path)) > 1, params
    )
