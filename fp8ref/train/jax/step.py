"""The training step in JAX (SEMANTICS T): float32 masters, bfloat16 compute, AdamW.

AdamW is optax's, or that of ``fp8ref.jax.states`` under T-6's ``adamw_states``; clipping is in ``train``.
Masters that a layout keeps narrower than float32 (O-14) are the state's parameters as they are stored;
each program reads weights and FP8 copies from them (``Step.computed``).

Pure functions of the state, which ``trainer.Trainer`` compiles.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import Sharding

from fp8ref import llama
from fp8ref.hardware import Multiply
from fp8ref.jax import delayed, health, states, stats
from fp8ref.jax.scaling import Quantized
from fp8ref.recipe import Role
from fp8ref.train import device_shapes, train_state
from fp8ref.train.config import Config
from fp8ref.train.jax.cross_entropy import cross_entropy
from fp8ref.train.jax.gradient_sums import GradientSums
from fp8ref.train.jax.llama import Llama, Pass
from fp8ref.train.jax.mesh import AXES, Layout
from fp8ref.train.jax.parameter_names import is_stored, name_of, named

EVERY_ROUNDING = {"xla_allow_excess_precision": False}
"""XLA's option under which it leaves out no rounding to bfloat16 between fused operations."""


def compiler_options(platform: str) -> dict[str, bool]:
    """XLA's options for the step on a platform, such as "cpu": ``EVERY_ROUNDING`` there.

    On a GPU XLA would round the scales of cuBLASLt's GEMMs under that option, and Triton's GEMMs
    would multiply dequantized operands, so both are off (SEMANTICS G-22). The model's own roundings
    (M-3) hold under either (``train.jax.llama.rounded``).
    """
    return EVERY_ROUNDING if platform == "cpu" else {"xla_gpu_enable_triton_gemm": False}


class State(NamedTuple):
    """All that a step changes.

    params     the model's masters, a tree: of float32 arrays, or of ``MomentState`` where a layout stores them.
    optimizer  the optimizer's state: both of Adam's moments, and the steps counted; no masters.
    fp8        delayed-scaling states by linear.
    """

    params: Any
    optimizer: optax.OptState
    fp8: dict[str, dict[Role, delayed.DelayedState | delayed.FlaxState]]


class Step:
    """The functions of a training step. ``begin`` makes the state; batches are tokens [B, T + 1].

    A batch that is trained in parts is [microbatches, B, T + 1] (SEMANTICS T-7).

    multiply  the simulated hardware that FP8 GEMMs are multiplied by (SEMANTICS G-19), or None.
    recipe    the one of the config's recipes that the functions compute in, by default the first. All
              recipes have one state (T-9).
    """

    def __init__(self, config: Config, layout: Layout, multiply: Multiply | None, recipe: str | None = None) -> None:
        self.config, self.layout, self._multiply = config, layout, multiply
        own = config.under(recipe or config.numerics.recipe)
        self.decisions = own.decisions()
        self.linears = own.program_linears()
        self._moments = config.optimizer.moment_layout
        self._optimizer = self._optimizer_at(0.0) if self._moments else self._adam()
        shapes = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in self._shapes().items()}
        self._graph, self._params = jax.eval_shape(self._split, shapes)
        self._specs = jax.tree_util.tree_map_with_path(lambda path, value: layout.parameter(name_of(path), value.shape), self._params)
        self._keeps_masters = config.optimizer.keeps_masters
        self._copied = device_shapes.copied(own, "jax")

    def begin(self, weights: Mapping[str, llama.Weight] | None) -> tuple[State, State]:
        """The state before the first step, on the layout's devices, and the PartitionSpec of each
        of its arrays.

        Where the layout is abstract, the state holds shapes instead of arrays.

        weights: float32 by name, by default ``llama.lazy_initial_weights`` of run.seed.
        """
        config, layout = self.config, self.layout
        params = self._params
        if weights is None:
            weights = llama.lazy_initial_weights(config.model, seed=config.run.seed)
        llama.check_weights(weights, config.model)
        planned = (item for recipe in config.recipes for item in config.under(recipe).program_linears().items())
        fp8 = {name: delayed.init(recipe, self._stack(name)) for name, recipe in planned if delayed.keeps_state(recipe)}
        specs = State(*self._specs_of_states(params), jax.tree.map(lambda _: P(), fp8))
        if layout.abstract:
            state = State(*self._apart_from_masters(params, jax.eval_shape(self._optimizer.init, params)), fp8)
            return jax.tree.map(layout.put, state, specs), specs
        # One after the other: a host holds its shards of one weight
        placed = ((name, layout.put(value, layout.parameter(name, value.shape))) for name, value in weights.items())
        params, optimizer = self._stored_masters(placed, specs) if self._keeps_masters else self._float32_masters(placed, specs)
        return State(params, optimizer, jax.tree.map(layout.put, fp8, specs.fp8)), specs

    def _float32_masters(self, placed: Iterable[tuple[str, jax.Array]], specs: State) -> tuple[Any, optax.OptState]:
        """(masters, the optimizer's state before the first step) of weights by name."""
        params = self._tree(self._params, dict(placed))
        return params, jax.jit(self._optimizer.init, out_shardings=self._on_mesh(specs.optimizer))(params)

    def _stored_masters(self, placed: Iterable[tuple[str, jax.Array]], specs: State) -> tuple[Any, optax.OptState]:
        """The same of masters that a layout stores. Each float32 weight is dropped once its master is made."""
        of_each = [named(tree, stored=True) for tree in (specs.optimizer.m, specs.optimizer.v, specs.params)]

        def begun(name: str, weight: jax.Array) -> states.AdamWState:
            own = states.AdamWState(P(), *(of[name] for of in of_each))  # type: ignore[arg-type]  # specs in place of arrays
            return jax.jit(self._optimizer.init, out_shardings=self._on_mesh(own))(weight)

        each = {name: begun(name, weight) for name, weight in placed}
        m, v, masters = (self._tree(self._params, {name: getattr(one, key) for name, one in each.items()}) for key in ("m", "v", "master"))
        return masters, states.AdamWState(next(iter(each.values())).count, m, v)

    def _on_mesh(self, specs):
        """Shardings of PartitionSpecs. On one device nothing is committed to it, before the first step as after it."""
        return None if self.layout.mesh is None else jax.tree.map(self.layout.sharding, specs)

    def train(self, state: State, tokens: jax.Array, lr: jax.Array) -> tuple[State, jax.Array, jax.Array]:
        """One step at this learning rate: the new state, the loss, and the norm of the gradients.

        Where loss or norm is not finite, the state is the old one (T-4).
        """
        loss, grads, seen = self.gradients(state.params, state.fp8, tokens)
        norm, factor = self._clipping(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)

        def kept(new, old):
            # Selected by element, so that the decision stays on the device
            return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)

        # States of a recipe that this step does not use stay as they are (T-9).
        fp8 = state.fp8 | {name: delayed.update(state.fp8[name], found, recipe=self.linears[name]) for name, found in seen.items()}
        if self._moments:
            how = {**self._adamw(), "learning_rate": lr, "factor": factor, "finite": finite}
            before = self._with_masters(state) if self._keeps_masters else state.optimizer
            made = self._apart_from_masters(*states.step(self.computed(state.params)[0], grads, before, **how))
            return State(*made, kept(fp8, state.fp8)), loss, norm
        updates, optimizer = self._optimizer.update(_times(grads, factor), state.optimizer, state.params)
        params = jax.tree.map(lambda p, u: p - lr * u, state.params, updates)
        return kept(State(params, optimizer, fp8), state), loss, norm

    def _clipping(self, grads) -> tuple[jax.Array, jax.Array]:
        """The norm of the gradients, and what clips them to the largest that it may be (T-2)."""
        norm = optax.tree.norm(grads)
        return norm, jnp.minimum(1.0, self.config.optimizer.max_norm / norm)

    def health(self, grads, state: State) -> health.Measured:
        """What storing the moments of a step would cost, of gradients before clipping: of all parameters, in the order
        of ``named`` (SEMANTICS O-12)."""
        assert self._moments is not None
        keys, grads = self.config.optimizer, _times(grads, self._clipping(grads)[1])
        before = self._with_masters(state) if self._keeps_masters else state.optimizer
        _, after = self._optimizer_at(0.0).update(grads, before, self.computed(state.params)[0])
        g, before, made = (
            self.named(grads),
            *(states.AdamWState(x.count, self._stored_by_name(x.m), self._stored_by_name(x.v)) for x in (state.optimizer, after)),
        )
        found = health.measure(g, before, made, b1=keys.beta1, b2=keys.beta2, eps=keys.eps, layout=self._moments)
        return health.Measured(*(jnp.stack(of_each) for of_each in zip(*(found[name] for name in g), strict=True)))

    def moments(self, state: State) -> dict[str, dict[str, Any]]:
        """Both moments in float32, as the next step reads them, by the names of ``train_state``."""
        adam = state.optimizer[0] if self._moments is None else state.optimizer
        both = (adam.mu, adam.nu) if self._moments is None else states.decode(adam, self._moments)
        return {key: self.named(moment) for key, moment in zip(train_state.MOMENTS, both, strict=True)}

    def tensors(self, state: State) -> dict[str, Any]:
        """The arrays of a state by the names of ``train_state``, nested."""
        found: dict[str, Any] = {train_state.MASTERS: self._fields(state.params) if self._keeps_masters else self.named(state.params)}
        if self._moments is None:
            adam = state.optimizer[0]
            found |= {"exp_avg": self.named(adam.mu), "exp_avg_sq": self.named(adam.nu)}
        else:
            adam = state.optimizer
            found |= {"exp_avg": self._fields(adam.m), "exp_avg_sq": self._fields(adam.v)}
        found[train_state.COUNT] = adam.count
        if state.fp8:
            found[train_state.FP8] = {
                name: {role: one._asdict() for role, one in roles.items()} for name, roles in self.unstacked(state.fp8).items()
            }
        return found

    def restored(self, state: State, tensors: dict[str, Any]) -> State:
        """A state of the structure of this one, of arrays named as ``tensors`` names them."""

        count = tensors[train_state.COUNT]
        if self._moments is None:
            adam = state.optimizer[0]
            mu, nu = self._tree(adam.mu, tensors["exp_avg"]), self._tree(adam.nu, tensors["exp_avg_sq"])
            optimizer = optax.tree_utils.tree_set(state.optimizer, mu=mu, nu=nu, count=count)
        else:
            before = state.optimizer
            both = ((before.m, tensors["exp_avg"]), (before.v, tensors["exp_avg_sq"]))
            optimizer = states.AdamWState(count, *(self._of_fields(like, found) for like, found in both))
        saved = tensors.get(train_state.FP8, {})
        fp8 = {
            name: {
                role: type(one)(**self._stacked(name, {n: v[role] for n, v in saved.items() if role in v})) for role, one in roles.items()
            }
            for name, roles in state.fp8.items()
        }
        masters = tensors[train_state.MASTERS]
        params = self._of_fields(state.params, masters) if self._keeps_masters else self._tree(state.params, masters)
        return State(params, optimizer, fp8)

    def computed(self, params) -> tuple[Any, dict[str, Quantized]]:
        """What passes compute with, of ``State.params``: weights, and the FP8 copies that linears take in place of a cast.

        Of float32 masters these are the masters themselves, which the model rounds, and no copies. Of masters that a layout
        stores, weights in bfloat16 (O-14), and copies for recipes that cast a weight once (O-16).
        """
        if not self._keeps_masters:
            return params, {}
        assert self._moments is not None
        by_name = named(params, stored=True)
        copies = {
            name: states.copies(_holding(by_name[f"{name}.weight"]), self._moments, recipe, jnp.bfloat16)
            for name, recipe in self._copied.items()
        }
        return states.weights(_holding(params), self._moments, jnp.bfloat16), copies

    def weights(self, params) -> dict[str, Any]:
        """The float32 numbers of masters by parameter name, stacks taken apart."""
        if self._keeps_masters:
            assert self._moments is not None
            params = states.weights(_holding(params), self._moments, jnp.float32)
        return self.named(params)

    def _with_masters(self, state: State) -> states.AdamWState:
        """The optimizer's state as ``fp8ref.jax.states`` has it, with the masters that it keeps."""
        return state.optimizer._replace(master=state.params)

    def _apart_from_masters(self, params, optimizer) -> tuple[Any, Any]:
        """(params, optimizer) of ``State``, where the optimizer's state may hold the masters."""
        return (optimizer.master, optimizer._replace(master=None)) if self._keeps_masters else (params, optimizer)

    def _adam(self) -> optax.GradientTransformation:
        keys = self.config.optimizer
        return optax.chain(
            optax.scale_by_adam(b1=keys.beta1, b2=keys.beta2, eps=keys.eps),
            optax.add_decayed_weights(keys.weight_decay, mask=_matrices),
        )

    def _optimizer_at(self, lr) -> optax.GradientTransformation:
        """The optimizer of a layout at a learning rate, which its updates contain."""
        return states.adamw(lambda _: lr, **self._adamw())

    def _adamw(self) -> dict[str, Any]:
        """What ``states.adamw`` and ``states.step`` take but for the learning rate."""
        keys, layout = self.config.optimizer, self._moments or "float32"
        numbers = {"b1": keys.beta1, "b2": keys.beta2, "eps": keys.eps, "weight_decay": keys.weight_decay}
        return {**numbers, "layout": layout, "mask": _matrices}

    def _specs_of_states(self, params) -> tuple[Any, Any]:
        """PartitionSpecs of ``State``'s params and optimizer. Stored masters and moments lie on the mesh as their parameters
        do; the count and scales are whole on every device."""
        shapes = jax.eval_shape(self._optimizer.init, params)
        if self._moments is None:
            return self._specs, optax.tree_utils.tree_map_params(
                self._optimizer, lambda _, spec: spec, shapes, self._specs, transform_non_params=lambda _: P()
            )

        def of(tree):
            return jax.tree.map(
                lambda one, spec: jax.tree.map(lambda _: P(), one)._replace(codes=spec), tree, self._specs, is_leaf=is_stored
            )

        found = states.AdamWState(P(), of(shapes.m), of(shapes.v))  # type: ignore[arg-type]  # specs in place of arrays
        return of(shapes.master) if self._keeps_masters else self._specs, found

    def _stored_by_name(self, moments) -> dict[str, states.MomentState]:
        """Stored moments by parameter name."""
        leaves = jax.tree_util.tree_leaves_with_path(moments, is_leaf=is_stored)
        return self.unstacked({name_of(path): one for path, one in leaves})

    def _fields(self, moments) -> dict[str, jax.Array]:
        """The fields of stored moments by parameter name and field; FP8 codes as uint8."""
        each = self._stored_by_name(moments).items()
        found = {f"{name}.{field}": x for name, one in each for field, x in one._asdict().items() if x is not None}
        return {name: lax.bitcast_convert_type(x, jnp.uint8) if x.dtype.itemsize == 1 else x for name, x in found.items()}

    def _of_fields(self, like, found: Mapping[str, jax.Array]):
        """Stored moments of the structure of ``like``, of arrays that ``_fields`` names."""

        def of(path, one: states.MomentState) -> states.MomentState:
            fields = {field: x for field, x in one._asdict().items() if x is not None}
            saved = {field: self._stacked(name_of(path), _without(f".{field}", found)) for field in fields}
            if fields["codes"].dtype.itemsize == 1:
                saved["codes"] = lax.bitcast_convert_type(saved["codes"], fields["codes"].dtype)
            return one._replace(**saved)

        return jax.tree_util.tree_map_with_path(of, like, is_leaf=is_stored)

    def named(self, tree) -> dict[str, Any]:
        """{parameter name: leaf} of a tree of parameters, stacks taken apart."""
        return self.unstacked(named(tree))

    def unstacked(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """The same by the names of the layers: the i-th of a stack is layer i's."""
        layers = range(self.config.model.num_hidden_layers)
        apart: dict[str, Any] = {}
        for name, value in found.items():
            if "*" in name:
                leaves, tree = jax.tree.flatten(value)
                of_layers = zip(*map(self._apart, leaves), strict=True)
                apart |= {name.replace("*", str(i)): jax.tree.unflatten(tree, of_one) for i, of_one in zip(layers, of_layers, strict=True)}
            else:
                apart[name] = value
        return apart

    def gradients(self, params, fp8_state, tokens: jax.Array):
        """(loss, gradients, amax observations of both passes) of a batch, or of its parts."""
        params, copies = self.computed(params)

        def differentiate(params, copies, fp8_state, tokens):
            # Forward observations come out as aux. grad_output is known in the backward pass alone:
            # its observations come out as the gradient by ``seen`` (fp8ref.jax.delayed).
            gradient = jax.value_and_grad(self._loss_of, argnums=(0, 1), has_aux=True)
            # The model rounds what is widened here, exactly, so that gradients are float32 (M-2).
            wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
            (loss, forward), (grads, backward) = gradient(wide, self._unseen(), copies, fp8_state, tokens)
            return loss, grads, {name: delayed.merge(forward[name], backward[name]) for name in forward}

        sums = GradientSums(self.config.parallel.accumulate_dtype, self.linears, self._specs if self.layout.mapped else None)

        def accumulate(params, copies, fp8_state, parts):
            def add(before, tokens):
                (loss, grads, seen), found = before, differentiate(params, copies, fp8_state, tokens)
                return (
                    loss + found[0],
                    sums.add(grads, found[1]),
                    {name: delayed.merge(seen[name], found[2][name]) for name in seen},
                ), None

            # A scan keeps one microbatch's activations at a time, and compiles the passes once.
            (loss, grads, seen), _ = lax.scan(add, (jnp.float32(0), sums.zeros(params), self._unseen()), parts)
            share = np.float32(1 / len(parts))
            return loss.astype(jnp.float32) * share, sums.scaled(grads, share), seen

        f = accumulate if tokens.ndim == 3 else differentiate
        specs = (self._specs, self._specs_of(copies), P(), self._cut(tokens))
        return self.layout.map(f, specs, (P(), self._specs, P()))(params, copies, fp8_state, tokens)

    def mean_loss(self, params, fp8_state, tokens: jax.Array) -> jax.Array:
        """The loss of a batch, or of its parts."""

        params, copies = self.computed(params)

        def loss_of(params, copies, fp8_state, tokens):
            if tokens.ndim == 3:
                return lax.map(lambda part: loss_of(params, copies, fp8_state, part), tokens).mean()
            return self._loss_of(params, self._unseen(), copies, fp8_state, tokens)[0]

        specs = (self._specs, self._specs_of(copies), P(), self._cut(tokens))
        return self.layout.map(loss_of, specs, P())(params, copies, fp8_state, tokens)

    def statistics(self, params, fp8_state, tokens: jax.Array) -> jax.Array:
        """Statistics float32 [devices, layers, 6, stats.LENGTH].

        Each device measures its own shards of the operands.

        Without shard_map there is one row, of the whole operands.
        """

        params, copies = self.computed(params)

        def loss(taps, params, copies, fp8_state, tokens):
            run = self._pass(fp8_state, self._unseen(), copies, dict(taps))
            return self._loss_in(run, params, tokens), run.taps

        def measure(params, copies, fp8_state, tokens):
            taps = {
                name: self.layout.apart(jnp.zeros((*self._stack(name), len(stats.ROWS), stats.LENGTH)))
                for name, recipe in self.linears.items()
                if recipe.fp8
            }
            (_, forward), backward = jax.value_and_grad(loss, has_aux=True)(taps, params, copies, fp8_state, tokens)
            # taps collect as the observations do: forward as aux, backward as a gradient
            found = self.unstacked({name: forward[name] + backward[name] for name in taps})
            return jnp.stack([found[layer] for layer in self.measured_layers])[None]

        specs = (self._specs, self._specs_of(copies), P(), self.layout.tokens)
        return self.layout.map(measure, specs, P(AXES))(params, copies, fp8_state, tokens)

    def forward(self, f: Callable[[Llama, jax.Array, Pass], jax.Array], params, fp8_state, tokens: jax.Array) -> jax.Array:
        """f(model, tokens [B, T], run) -> float32 [B, T, ...], inside shard_map if the layout is
        mapped."""
        params, copies = self.computed(params)
        cut = P(self.layout.tokens[0], "tensor" if self.config.parallel.sequence else None)

        def mapped(params, copies, fp8_state, tokens):
            return f(self._model(params), tokens, self._pass(fp8_state, self._unseen(), copies)).astype(jnp.float32)

        specs = (self._specs, self._specs_of(copies), P(), self.layout.tokens)
        return self.layout.map(mapped, specs, cut)(params, copies, fp8_state, tokens)

    @property
    def measured_layers(self) -> list[str]:
        """The names of the linears in FP8, in the order of the statistics."""
        return [d.path for d in self.decisions if d.fp8]

    def _split(self, weights: dict) -> tuple[Any, dict]:
        """The model's graph and its parameters, a tree."""
        graph, params = nnx.split(Llama(self.config.model, weights, self.linears), nnx.Param)
        return graph, nnx.to_pure_dict(params)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter of the tree; of the layers together under parallel.scan."""
        shapes = llama.parameter_shapes(self.config.model)
        if not self.config.parallel.scan:
            return shapes
        return {stack: (*self._stack(stack), *shape) for name, shape in shapes.items() if (stack := llama.stack_of(name))}

    def _stack(self, name: str) -> tuple[int, ...]:
        """The leading dims of what belongs to a name: the layers, if it names all of them."""
        return (self.config.model.num_hidden_layers,) if "*" in name else ()

    def _tree(self, like, found: Mapping[str, jax.Array]):
        """The tree of parameters ``like``, of arrays by parameter name."""
        return jax.tree_util.tree_map_with_path(lambda path, _: self._stacked(name_of(path), found), like)

    def _stacked(self, name: str, found: Mapping[str, Any]):
        """What is found by a name; by the name of a stack, the layers' together."""
        if "*" not in name:
            return found[name]
        parts = [found[name.replace("*", str(i))] for i in range(self.config.model.num_hidden_layers)]

        def stack(*of: jax.Array) -> jax.Array:
            spec = getattr(of[0].sharding, "spec", None)  # of an array on a mesh
            return _stack(None if spec is None else self.layout.sharding(P(None, *spec)), *of)

        return jax.tree.map(stack, *parts)

    def _apart(self, stack: jax.Array) -> list[jax.Array]:
        """The arrays of a stack, each placed as its layer's own would be."""
        spec = None if isinstance(stack, jax.core.Tracer) else getattr(stack.sharding, "spec", None)
        return _apart(None if spec is None else self.layout.sharding(P(*spec[1:])), stack)

    def _specs_of(self, copies: Mapping[str, Quantized]) -> dict[str, Any]:
        """PartitionSpecs of copies: codes lie on the mesh as their weight does, scales are whole (O-16)."""
        of_weights = named(self._specs)

        def of(name: str, copy: Quantized) -> Quantized:  # specs in place of arrays
            return dataclasses.replace(copy, codes=of_weights[f"{name}.weight"], scale=P(), scale_inv=P())  # type: ignore[arg-type]

        return {name: of(name, copy) for name, copy in copies.items()}

    def _pass(
        self, fp8_state, seen: dict[str, delayed.Seen], copies: Mapping[str, Quantized], taps: dict[str, jax.Array] | None = None
    ) -> Pass:
        keys = self.config.parallel
        return Pass(
            {name: fp8_state[name] for name in seen},
            seen,
            self.layout,
            taps or {},
            attention=keys.attention,
            checkpointing=keys.checkpointing,
            multiply=self._multiply,
            copies=copies,
        )

    def _unseen(self) -> dict[str, delayed.Seen]:
        return {name: delayed.unseen(recipe, self._stack(name)) for name, recipe in self.linears.items() if delayed.keeps_state(recipe)}

    def _model(self, params) -> Llama:
        """The model on parameters rounded to bfloat16, except the embedding table (SEMANTICS M-2)."""
        compute = jax.tree_util.tree_map_with_path(
            lambda path, value: value if name_of(path) == llama.EMBEDDING else value.astype(jnp.bfloat16), params
        )
        return nnx.merge(self._graph, nnx.State(compute))

    def _loss_of(self, params, seen, copies, fp8_state, tokens: jax.Array) -> tuple[jax.Array, dict[str, delayed.Seen]]:
        """(mean loss of the whole batch, amax observations of this device's forward pass)."""
        run = self._pass(fp8_state, dict(seen), copies)
        return self._loss_in(run, params, tokens), run.seen

    def _loss_in(self, run: Pass, params, tokens: jax.Array) -> jax.Array:
        logits = self._model(params)(tokens[:, :-1], run)  # [B, T, V]
        targets = self.layout.own_sequence(tokens[:, 1:])
        return self.layout.mean(cross_entropy(logits, targets))

    def _cut(self, tokens: jax.Array) -> P:
        return self.layout.parts if tokens.ndim == 3 else self.layout.tokens


def _without(suffix: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """What is found under names that end in a suffix, by the names without it."""
    return {name.removesuffix(suffix): value for name, value in found.items() if name.endswith(suffix)}


def _times(grads, factor: jax.Array):
    return jax.tree.map(lambda g: g * factor, grads)


def _holding(masters) -> states.AdamWState:
    """Masters as the part of an optimizer's state that ``states.weights`` and ``copies`` read."""
    return states.AdamWState(jnp.int32(0), None, None, masters)


def _matrices(params):
    """True for each parameter that is a matrix, or a stack of them: weight decay is of these."""
    return jax.tree_util.tree_map_with_path(lambda path, value: value.ndim - ("*" in name_of(path)) > 1, params)


@functools.partial(jax.jit, static_argnums=0)
def _stack(placed: Sharding | None, *arrays: jax.Array) -> jax.Array:
    stack = jnp.stack(arrays)
    return stack if placed is None else lax.with_sharding_constraint(stack, placed)


@functools.partial(jax.jit, static_argnums=0)
def _apart(placed: Sharding | None, stack: jax.Array) -> list[jax.Array]:
    arrays = list(stack)
    return arrays if placed is None else [lax.with_sharding_constraint(array, placed) for array in arrays]
