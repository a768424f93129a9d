"""The training step in JAX (SEMANTICS T): float32 masters, bfloat16 compute, AdamW.

Adam's moments and the weight decay are optax's; clipping and the learning rate are in ``train``.

Pure functions of the state, which ``trainer.Trainer`` compiles.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from fp8ref import llama
from fp8ref.hardware import Multiply
from fp8ref.jax import delayed, stats
from fp8ref.recipe import Role
from fp8ref.train import train_state
from fp8ref.train.config import Config
from fp8ref.train.jax.llama import Llama, Pass
from fp8ref.train.jax.mesh import AXES, Layout

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

    params     the model's float32 masters, a tree.
    optimizer  optax's state: both of Adam's moments, float32, and the steps counted.
    fp8        delayed-scaling states by linear.
    """

    params: Any
    optimizer: optax.OptState
    fp8: dict[str, dict[Role, delayed.DelayedState | delayed.FlaxState]]


class Step:
    """The functions of a training step. ``begin`` makes the state; batches are tokens [B, T + 1].

    A batch that is trained in parts is [microbatches, B, T + 1] (SEMANTICS T-7).

    multiply  the simulated hardware that FP8 GEMMs are multiplied by (SEMANTICS G-19), or None.
    """

    def __init__(self, config: Config, layout: Layout, multiply: Multiply | None) -> None:
        self.config, self.layout, self._multiply = config, layout, multiply
        self.decisions = config.decisions()
        optimizer = config.optimizer
        self._optimizer = optax.chain(
            optax.scale_by_adam(b1=optimizer.beta1, b2=optimizer.beta2, eps=optimizer.eps),
            optax.add_decayed_weights(optimizer.weight_decay, mask=lambda p: jax.tree.map(lambda v: v.ndim > 1, p)),
        )

    def begin(self, weights: dict[str, np.ndarray] | None) -> tuple[State, State]:
        """The state before the first step, on the layout's devices, and the PartitionSpec of each
        of its arrays.

        Where the layout is abstract, the state holds shapes instead of arrays.

        weights: float32 arrays by name, by default ``llama.initial_weights`` of run.seed.
        """
        config = self.config
        if self.layout.abstract:
            shapes = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in llama.parameter_shapes(config.model).items()}
            self._graph, state = jax.eval_shape(self._initial, shapes)
        else:
            weights = llama.initial_weights(config.model, seed=config.run.seed) if weights is None else weights
            llama.check_weights(weights, config.model)
            self._graph, state = self._initial(weights)
        self._specs = jax.tree_util.tree_map_with_path(lambda path, value: self.layout.parameter(name_of(path), value.shape), state.params)
        # Adam's moments lie on the mesh as their parameters do; its count is whole on every device
        of_optimizer = optax.tree_utils.tree_map_params(
            self._optimizer, lambda _, spec: spec, state.optimizer, self._specs, transform_non_params=lambda _: P()
        )
        specs = State(self._specs, of_optimizer, jax.tree.map(lambda _: P(), state.fp8))
        return jax.tree.map(self.layout.put, state, specs), specs

    def train(self, state: State, tokens: jax.Array, lr: jax.Array) -> tuple[State, jax.Array, jax.Array]:
        """One step at this learning rate: the new state, the loss, and the norm of the gradients.

        Where loss or norm is not finite, the state is the old one (T-4).
        """
        loss, grads, seen = self.gradients(state.params, state.fp8, tokens)
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, self.config.optimizer.max_norm / norm), grads)
        updates, optimizer = self._optimizer.update(grads, state.optimizer, state.params)
        params = jax.tree.map(lambda p, u: p - lr * u, state.params, updates)
        recipes = {d.path: d.recipe for d in self.decisions}
        fp8 = {name: delayed.update(state.fp8[name], seen[name], recipe=recipes[name]) for name in state.fp8}
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        # Selected by element, so that the decision stays on the device
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), State(params, optimizer, fp8), state), loss, norm

    def tensors(self, state: State) -> dict[str, Any]:
        """The arrays of a state by the names of ``train_state``, nested."""
        adam = state.optimizer[0]
        found: dict[str, Any] = {
            train_state.MASTERS: named(state.params),
            "exp_avg": named(adam.mu),
            "exp_avg_sq": named(adam.nu),
            train_state.COUNT: adam.count,
        }
        if state.fp8:
            found[train_state.FP8] = {name: {role: one._asdict() for role, one in roles.items()} for name, roles in state.fp8.items()}
        return found

    def restored(self, state: State, tensors: dict[str, Any]) -> State:
        """A state of the structure of this one, of arrays named as ``tensors`` names them."""

        def tree(like, key: str):
            return jax.tree_util.tree_map_with_path(lambda path, _: tensors[key][name_of(path)], like)

        adam = state.optimizer[0]
        optimizer = optax.tree_utils.tree_set(
            state.optimizer, mu=tree(adam.mu, "exp_avg"), nu=tree(adam.nu, "exp_avg_sq"), count=tensors[train_state.COUNT]
        )
        saved = tensors.get(train_state.FP8, {})
        fp8 = {name: {role: type(one)(**saved[name][role]) for role, one in roles.items()} for name, roles in state.fp8.items()}
        return State(tree(state.params, train_state.MASTERS), optimizer, fp8)

    def gradients(self, params, fp8_state, tokens: jax.Array):
        """(loss, gradients, amax observations of both passes) of a batch, or of its parts."""

        def differentiate(params, fp8_state, tokens):
            # Forward observations come out as aux. grad_output is known in the backward pass alone:
            # its observations come out as the gradient by ``seen`` (fp8ref.jax.delayed).
            gradient = jax.value_and_grad(self._loss_of, argnums=(0, 1), has_aux=True)
            (loss, forward), (grads, backward) = gradient(params, self._unseen(), fp8_state, tokens)
            return loss, grads, {name: delayed.merge(forward[name], backward[name]) for name in forward}

        def accumulate(params, fp8_state, parts):
            def add(before, tokens):
                (loss, grads, seen), found = before, differentiate(params, fp8_state, tokens)
                total = jax.tree.map(jnp.add, (loss, grads), found[:2])
                return (*total, {name: delayed.merge(seen[name], found[2][name]) for name in seen}), None

            # A scan keeps one microbatch's activations at a time, and compiles the passes once.
            nothing = jnp.float32(0), jax.tree.map(jnp.zeros_like, params), self._unseen()
            (loss, grads, seen), _ = lax.scan(add, nothing, parts)
            return *jax.tree.map(lambda total: total * np.float32(1 / len(parts)), (loss, grads)), seen

        f = accumulate if tokens.ndim == 3 else differentiate
        return self.layout.map(f, (self._specs, P(), self._cut(tokens)), (P(), self._specs, P()))(params, fp8_state, tokens)

    def mean_loss(self, params, fp8_state, tokens: jax.Array) -> jax.Array:
        """The loss of a batch, or of its parts."""

        def loss_of(params, fp8_state, tokens):
            if tokens.ndim == 3:
                return lax.map(lambda part: loss_of(params, fp8_state, part), tokens).mean()
            return self._loss_of(params, self._unseen(), fp8_state, tokens)[0]

        return self.layout.map(loss_of, (self._specs, P(), self._cut(tokens)), P())(params, fp8_state, tokens)

    def statistics(self, params, fp8_state, tokens: jax.Array) -> jax.Array:
        """Statistics float32 [devices, layers, 6, stats.LENGTH].

        Each device measures its own shards of the operands.

        Without shard_map there is one row, of the whole operands.
        """

        def loss(taps, params, fp8_state, tokens):
            run = self._pass(fp8_state, self._unseen(), dict(taps))
            return self._loss_in(run, params, tokens), run.taps

        def measure(params, fp8_state, tokens):
            taps = {layer: self.layout.apart(jnp.zeros((len(stats.ROWS), stats.LENGTH))) for layer in self.measured_layers}
            (_, forward), backward = jax.value_and_grad(loss, has_aux=True)(taps, params, fp8_state, tokens)
            # taps collect as the observations do: forward as aux, backward as a gradient
            return jnp.stack([forward[layer] + backward[layer] for layer in taps])[None]

        return self.layout.map(measure, (self._specs, P(), self.layout.tokens), P(AXES))(params, fp8_state, tokens)

    def forward(self, f: Callable[[Llama, jax.Array, Pass], jax.Array], params, fp8_state, tokens: jax.Array) -> jax.Array:
        """f(model, tokens [B, T], run) -> float32 [B, T, ...], inside shard_map if the layout is
        mapped."""
        cut = P(self.layout.tokens[0], "tensor" if self.config.parallel.sequence else None)

        def mapped(params, fp8_state, tokens):
            return f(self._model(params), tokens, self._pass(fp8_state, self._unseen())).astype(jnp.float32)

        return self.layout.map(mapped, (self._specs, P(), self.layout.tokens), cut)(params, fp8_state, tokens)

    @property
    def measured_layers(self) -> list[str]:
        """The names of the linears in FP8, in the order of the statistics."""
        return [d.path for d in self.decisions if d.fp8]

    def _initial(self, weights: dict) -> tuple[Any, State]:
        """The model's graph, and the state before the first step."""
        graph, params = nnx.split(Llama(self.config.model, weights, {d.path: d.recipe for d in self.decisions}), nnx.Param)
        params = nnx.to_pure_dict(params)
        fp8_state = {d.path: delayed.init(d.recipe) for d in self.decisions if delayed.keeps_state(d.recipe)}
        return graph, State(params, self._optimizer.init(params), fp8_state)

    def _pass(self, fp8_state, seen: dict[str, delayed.Seen], taps: dict[str, jax.Array] | None = None) -> Pass:
        return Pass(fp8_state, seen, self.layout, taps or {}, self.config.parallel.attention, self._multiply)

    def _unseen(self) -> dict[str, delayed.Seen]:
        return {d.path: delayed.unseen(d.recipe) for d in self.decisions if delayed.keeps_state(d.recipe)}

    def _model(self, params) -> Llama:
        """The model on parameters rounded to bfloat16, except the embedding table (SEMANTICS M-2)."""
        compute = jax.tree_util.tree_map_with_path(
            lambda path, value: value if name_of(path) == llama.EMBEDDING else value.astype(jnp.bfloat16), params
        )
        return nnx.merge(self._graph, nnx.State(compute))

    def _loss_of(self, params, seen, fp8_state, tokens: jax.Array) -> tuple[jax.Array, dict[str, delayed.Seen]]:
        """(mean loss of the whole batch, amax observations of this device's forward pass)."""
        run = self._pass(fp8_state, dict(seen))
        return self._loss_in(run, params, tokens), run.seen

    def _loss_in(self, run: Pass, params, tokens: jax.Array) -> jax.Array:
        logits = self._model(params)(tokens[:, :-1], run).astype(jnp.float32)  # [B, T, V]
        targets = self.layout.own_sequence(tokens[:, 1:])
        return self.layout.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))

    def _cut(self, tokens: jax.Array) -> P:
        return self.layout.parts if tokens.ndim == 3 else self.layout.tokens


def name_of(path) -> str:
    """The Hugging Face name of a parameter, from its path in the tree."""
    return ".".join(str(getattr(part, "key", part)) for part in path)


def named(tree) -> dict:
    """{parameter name: leaf} of a tree of parameters."""
    return {name_of(path): value for path, value in jax.tree_util.tree_leaves_with_path(tree)}
