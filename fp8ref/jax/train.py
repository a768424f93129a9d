"""The training step in JAX (SEMANTICS T): float32 masters, bfloat16 compute, optax's AdamW; on one device or a mesh."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from fp8ref import llama
from fp8ref.jax import delayed, linear, proof, simulated, stats
from fp8ref.jax.checkpoint import Store
from fp8ref.jax.model import Llama, Pass
from fp8ref.jax.parallel import AXES, Layout
from fp8ref.multiply import Multiply
from fp8ref.run.config import Config, ConfigError
from fp8ref.statistics import merged, planned

# XLA may otherwise leave out a rounding to bfloat16 between fused operations (SEMANTICS M-3 states where they are).
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
TREES = ("model", "exp_avg", "exp_avg_sq")  # what a checkpoint calls the weights and Adam's two moments, in either backend


class Trainer:
    """One model being trained. ``step`` and ``evaluate`` take tokens [B, T + 1], integers: inputs and the targets after them."""

    backend = "jax"

    def __init__(
        self,
        config: Config,
        weights: dict[str, np.ndarray] | None = None,
        *,
        devices: Sequence[jax.Device] | None = None,
        multiply: Multiply | None = None,
    ) -> None:
        """weights: float32 arrays by name, by default ``llama.initial_weights`` of run.seed.

        devices   of a topology: the step is lowered for them, from shapes alone, and cannot run. By default those that jax has.
        multiply  the hardware that numerics.accumulate names, simulated: what FP8 GEMMs are multiplied by (SEMANTICS G-19).
        Raises:   ConfigError: as ``Layout``; numerics.accumulate without multiply, or on devices that cannot run under it.
        """
        self.config = config
        self.decisions = config.decisions()
        self._layout = Layout(config, devices)
        self._multiply = multiply
        config.numerics.check_multiply(multiply)
        if multiply is not None:
            try:
                simulated.check_devices(config.parallel.devices, mapped=self._layout.mapped, platform=self._layout.devices[0].platform)
            except ValueError as error:
                raise ConfigError(f"numerics.accumulate {config.numerics.accumulate!r}: {error}") from error
        optimizer = config.optimizer
        self._update = optax.chain(
            optax.scale_by_adam(b1=optimizer.beta1, b2=optimizer.beta2, eps=optimizer.eps),
            optax.add_decayed_weights(optimizer.weight_decay, mask=lambda p: jax.tree.map(lambda v: v.ndim > 1, p)),
        )
        if devices is None:
            weights = llama.initial_weights(config.model, seed=config.run.seed) if weights is None else weights
            llama.check_weights(weights, config.model)
            self._graph, *state = self._initial(weights)
        else:
            shapes = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in llama.parameter_shapes(config.model).items()}
            self._graph, *state = jax.eval_shape(self._initial, shapes)
        params, opt_state, fp8_state = state
        self._specs = jax.tree_util.tree_map_with_path(lambda path, value: self._layout.parameter(_name(path), value.shape), params)
        of_optimizer = optax.tree_utils.tree_map_params(
            self._update, lambda _, spec: spec, opt_state, self._specs, transform_non_params=lambda _: P()
        )
        specs = (self._specs, of_optimizer, jax.tree.map(lambda _: P(), fp8_state))
        self._params, self._opt_state, self._fp8_state = jax.tree.map(self._layout.put, (params, opt_state, fp8_state), specs)
        # as they came, so that the second step is not compiled again
        placed = None if self._layout.mesh is None else (*jax.tree.map(self._layout.sharding, specs), None, None)
        self._step = jax.jit(self._train_step, donate_argnums=(0, 1, 2), out_shardings=placed, compiler_options=COMPILER_OPTIONS)
        self._loss = jax.jit(self._evaluated, compiler_options=COMPILER_OPTIONS)
        self._measure = jax.jit(self._measured, compiler_options=COMPILER_OPTIONS)
        self._count = 0
        self._store = Store()
        self.device = self._layout.description

    def step(self, tokens: np.ndarray) -> dict[str, float]:
        """One optimizer step: {"loss", "grad_norm"} before the update. Where either is not finite nothing changes (T-4)."""
        *state, loss, norm = self._step(*self._arguments(tokens))
        self._params, self._opt_state, self._fp8_state = state
        metrics = {"loss": float(loss), "grad_norm": float(norm)}
        self._count += all(map(np.isfinite, metrics.values()))
        return metrics

    def evaluate(self, tokens: np.ndarray) -> float:
        """The loss of a batch; no state changes."""
        return float(self._loss(self._params, self._fp8_state, self._parts(tokens)))

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [B, T, vocab_size] from tokens [B, T]."""
        return self._of_model(tokens, lambda model, tokens, run: model(tokens, run))

    def first_input(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [B, T, hidden]: what the first layer's linears are given."""
        return self._of_model(tokens, lambda model, tokens, run: model.model.layers[0].input_layernorm(model.embedded(tokens, run)))

    def gradients(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """float32 gradients of the loss of a batch by parameter, not clipped; nothing is updated."""
        differentiated = jax.jit(self._differentiated, compiler_options=COMPILER_OPTIONS)
        grads = differentiated(self._params, self._fp8_state, self._parts(tokens))[1]
        return {_name(path): self._layout.fetch(value) for path, value in jax.tree_util.tree_leaves_with_path(grads)}

    def weights(self) -> dict[str, np.ndarray]:
        """The float32 masters by name."""
        return {_name(path): self._layout.fetch(value) for path, value in jax.tree_util.tree_leaves_with_path(self._params)}

    def moments(self) -> dict[str, dict[str, np.ndarray]]:
        """Both of Adam's, float32: by which, then by parameter."""
        trees = zip(TREES[1:], (self._adam.mu, self._adam.nu), strict=True)
        return {key: {_name(path): self._layout.fetch(v) for path, v in jax.tree_util.tree_leaves_with_path(tree)} for key, tree in trees}

    def save(self, directory: Path) -> Callable[[], None]:
        """Copy the state to host memory and begin to write it into a directory; the result waits until it is written, by every process."""
        return self._store.save(directory, self._state())

    def load(self, directory: Path, step: int) -> None:
        """Continue from the state of so many steps that ``save`` wrote, on this mesh or another."""
        found, mine = self._store.load(directory, self._state()), (self._params, self._adam.mu, self._adam.nu)
        self._params, mu, nu = (
            jax.tree.unflatten(jax.tree.structure(tree), found[key].values()) for key, tree in zip(TREES, mine, strict=True)
        )
        self._opt_state = optax.tree_utils.tree_set(self._opt_state, mu=mu, nu=nu, count=found["count"])
        for name, roles in found.get("fp8", {}).items():
            self._fp8_state[name] = {role: type(self._fp8_state[name][role])(**fields) for role, fields in roles.items()}
        self._count = step

    def fp8_states(self) -> dict[str, tuple[np.ndarray, ...]]:
        """What linears that scale by their past keep: (stored, amax_history, step) by "<linear>/<role>"."""
        return {f"{name}/{role}": tuple(map(np.asarray, state)) for name, roles in self._fp8_state.items() for role, state in roles.items()}

    def peak_memory(self) -> int | None:
        """Bytes of memory in use at most on any of this process's devices since it began; None where they do not count, as CPUs."""
        peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in self._layout.devices if device in jax.local_devices()]
        return max((peak for peak in peaks if peak is not None), default=None)

    def observe(self, tokens: np.ndarray, observer) -> None:
        """A forward and backward pass, no update, in which every FP8 GEMM reports to observer (see ``linear.observing``), once a part of the
        batch; on one device."""
        if self._layout.mesh is not None:
            raise ConfigError("operands are observed on one device, where a callback cannot wait for another's. Set parallel.* to 1.")
        with linear.observing(observer):
            gradients = self.gradients(tokens)
        jax.block_until_ready(gradients)
        jax.effects_barrier()

    def statistics(self, tokens: np.ndarray) -> dict[str, dict]:
        """What quantising did to every FP8 operand of a step on this batch (SEMANTICS Q-8): a forward and backward pass, no update, compiled apart."""
        operands = planned(self.decisions)
        if not operands:
            return {}
        of_parts = [
            self._layout.fetch(self._measure(self._params, self._fp8_state, self._tokens(part))) for part in self.config.data.parts(tokens)
        ]
        found = stats.parts(np.stack(of_parts))  # [microbatches, devices, layers, rows, fields]
        layers, rows = self._measured_layers, dict(zip(stats.ROWS, range(len(stats.ROWS)), strict=True))
        parts = []
        for operand in operands:
            of_layer = found[:, :, layers.index(operand.layer)]
            row = rows[operand.gemm, operand.role]
            if not of_layer[:, :, row, 0].any():  # the GEMM before has taken the same
                row = next(i for i, (_, role) in enumerate(stats.ROWS) if role == operand.role)
            parts.append(np.concatenate([self._layout.own_parts(p[:, row], operand.layer, operand.role) for p in of_layer]))
        return merged(operands, parts)

    def measured_step(self, tokens: np.ndarray) -> tuple[dict[str, float], dict[str, dict]]:
        """``step`` and ``statistics`` of one batch, each compiled by itself: XLA would round a step that also measures otherwise."""
        found = self.statistics(tokens)
        return self.step(tokens), found

    def prove(self, tokens: np.ndarray) -> dict:
        """What the step multiplies and moves, for the manifest.

        Raises:   ConfigError: an FP8 GEMM or gather that was planned and is not there, on a GPU in the compiled step either, unless run.allow_fallback.
        """
        lowered = self.lowered(tokens)
        program = proof.read(lowered)
        planned = {d.path: d.recipe for d in self.decisions if d.fp8}
        placements = {path: placement for path in planned if (placement := self._layout.placement(path))}
        plan = self._multiply.name if self._multiply else None
        missing = proof.missing(program, planned, placements, plan)
        compiled = proof.read_compiled(lowered.compile()) if self._layout.on_gpu else None
        missing += proof.lost(compiled, program) if compiled else []
        if missing and not self.config.run.allow_fallback:
            raise ConfigError(
                "the compiled step lacks what was planned:\n  " + "\n  ".join(missing) + "\nSet run.allow_fallback to train anyway."
            )
        return proof.manifest(program, planned, missing, compiled, plan)

    def lowered(self, tokens: np.ndarray) -> jax.stages.Lowered:
        """The step as it will be compiled."""
        return self._step.lower(*self._arguments(tokens))

    def _initial(self, weights: dict[str, np.ndarray]) -> tuple:
        """The model's graph; parameters, optimizer's state, and states of linears that scale by past amaxes, which no optimizer sees."""
        graph, params = nnx.split(Llama(self.config.model, weights, {d.path: d.recipe for d in self.decisions}), nnx.Param)
        params = nnx.to_pure_dict(params)
        fp8_state = {d.path: delayed.init(d.recipe) for d in self.decisions if delayed.keeps_state(d.recipe)}
        return graph, params, self._update.init(params), fp8_state

    @property
    def _adam(self) -> optax.ScaleByAdamState:
        return self._opt_state[0]

    def _state(self) -> dict[str, Any]:
        """All that training changes, by name."""
        named = {
            key: {_name(path): value for path, value in jax.tree_util.tree_leaves_with_path(tree)}
            for key, tree in zip(TREES, (self._params, self._adam.mu, self._adam.nu), strict=True)
        }
        fp8 = {name: {role: state._asdict() for role, state in roles.items()} for name, roles in self._fp8_state.items()}
        return named | {"count": self._adam.count} | ({"fp8": fp8} if fp8 else {})

    def _of_model(self, tokens: np.ndarray, f: Callable[[Llama, jax.Array, Pass], jax.Array]) -> np.ndarray:
        """f [B, T, ...] of the model and tokens [B, T], as float32."""
        cut = P(self._layout.tokens[0], "tensor" if self.config.parallel.sequence else None)

        def forward(params, state, tokens):
            return f(self._model(params), tokens, self._pass(state, self._unseen())).astype(jnp.float32)

        mapped = self._layout.map(forward, (self._specs, P(), self._layout.tokens), cut)
        found = jax.jit(mapped, compiler_options=COMPILER_OPTIONS)(self._params, self._fp8_state, self._tokens(tokens))
        return self._layout.fetch(found)

    def _arguments(self, tokens: np.ndarray) -> tuple:
        lr = self.config.optimizer.learning_rate_at(self._count, self.config.run.steps)
        return self._params, self._opt_state, self._fp8_state, self._parts(tokens), np.float32(lr)

    def _tokens(self, tokens: np.ndarray) -> jax.Array:
        llama.check_tokens(tokens, self.config.model)
        return self._layout.put(np.asarray(tokens, np.int32), self._layout.tokens)

    def _parts(self, tokens: np.ndarray) -> jax.Array:
        """A batch [B, T + 1], or its parts [microbatches, B, T + 1] where it is trained in several (SEMANTICS T-7)."""
        if self.config.data.microbatches == 1:
            return self._tokens(tokens)
        llama.check_tokens(tokens, self.config.model)
        return self._layout.put(self.config.data.parts(np.asarray(tokens, np.int32)), self._layout.parts)

    def _pass(self, state, seen: dict[str, delayed.Seen], taps: dict[str, jax.Array] | None = None) -> Pass:
        return Pass(state, seen, self._layout, taps or {}, self.config.parallel.attention, self._multiply)

    def _unseen(self) -> dict[str, delayed.Seen]:
        return {d.path: delayed.unseen(d.recipe) for d in self.decisions if d.path in self._fp8_state}

    def _model(self, params) -> Llama:
        """The model on parameters rounded to the compute dtype, all but the embedding table (SEMANTICS M-2)."""
        compute = jax.tree_util.tree_map_with_path(
            lambda path, value: value if _name(path) == llama.EMBEDDING else value.astype(jnp.bfloat16), params
        )
        return nnx.merge(self._graph, nnx.State(compute))

    def _loss_of(self, params, seen, state, tokens: jax.Array) -> tuple[jax.Array, dict[str, delayed.Seen]]:
        """The loss of a batch, or inside shard_map of all devices' parts of it, and what the linears observed."""
        run = self._pass(state, dict(seen))
        return self._loss_in(run, params, tokens), run.seen

    def _loss_in(self, run: Pass, params, tokens: jax.Array) -> jax.Array:
        logits = self._model(params)(tokens[:, :-1], run).astype(jnp.float32)  # [B, T, V]
        targets = self._layout.own_sequence(tokens[:, 1:])
        return self._layout.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))

    def _evaluated(self, params, state, tokens: jax.Array) -> jax.Array:
        """The loss of a batch, or of parts of one."""

        def loss_of(params, state, tokens):
            if tokens.ndim == 3:
                return lax.map(lambda part: loss_of(params, state, part), tokens).mean()
            return self._loss_of(params, self._unseen(), state, tokens)[0]

        return self._layout.map(loss_of, (self._specs, P(), self._cut(tokens)), P())(params, state, tokens)

    def _differentiated(self, params, state, tokens: jax.Array):
        """(loss, gradients, observations of forward and backward pass) of a batch, or of parts of one."""

        def differentiate(params, state, tokens):
            gradient = jax.value_and_grad(self._loss_of, argnums=(0, 1), has_aux=True)
            (loss, forward), (grads, backward) = gradient(params, self._unseen(), state, tokens)
            return loss, grads, {name: delayed.merge(forward[name], backward[name]) for name in forward}

        def accumulate(params, state, parts):
            def add(before, tokens):
                (loss, grads, seen), found = before, differentiate(params, state, tokens)
                total = jax.tree.map(jnp.add, (loss, grads), found[:2])
                return (*total, {name: delayed.merge(seen[name], found[2][name]) for name in seen}), None

            nothing = jnp.float32(0), jax.tree.map(jnp.zeros_like, params), self._unseen()
            (loss, grads, seen), _ = lax.scan(add, nothing, parts)
            return *jax.tree.map(lambda total: total * np.float32(1 / len(parts)), (loss, grads)), seen

        f = accumulate if tokens.ndim == 3 else differentiate
        return self._layout.map(f, (self._specs, P(), self._cut(tokens)), (P(), self._specs, P()))(params, state, tokens)

    def _cut(self, tokens: jax.Array) -> P:
        return self._layout.parts if tokens.ndim == 3 else self._layout.tokens

    @property
    def _measured_layers(self) -> list[str]:
        return [d.path for d in self.decisions if d.fp8]

    def _measured(self, params, state, tokens: jax.Array) -> jax.Array:
        """float32 [devices, layers, 6, stats.LENGTH]: what every device measured of its parts of the operands; without shard_map of all of them."""

        def loss(taps, params, state, tokens):
            run = self._pass(state, self._unseen(), dict(taps))
            return self._loss_in(run, params, tokens), run.taps

        def measure(params, state, tokens):
            taps = {layer: self._layout.apart(jnp.zeros((len(stats.ROWS), stats.LENGTH))) for layer in self._measured_layers}
            (_, forward), backward = jax.value_and_grad(loss, has_aux=True)(taps, params, state, tokens)
            return jnp.stack([forward[layer] + backward[layer] for layer in taps])[None]

        return self._layout.map(measure, (self._specs, P(), self._layout.tokens), P(AXES))(params, state, tokens)

    def _train_step(self, params, opt_state, fp8_state, tokens: jax.Array, lr: jax.Array):
        loss, grads, seen = self._differentiated(params, fp8_state, tokens)
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, self.config.optimizer.max_norm / norm), grads)
        updates, new_opt_state = self._update.update(grads, opt_state, params)
        new_params = jax.tree.map(lambda p, u: p - lr * u, params, updates)
        recipes = {d.path: d.recipe for d in self.decisions}
        new_fp8_state = {name: delayed.update(fp8_state[name], seen[name], recipe=recipes[name]) for name in fp8_state}
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        keep = functools.partial(jax.tree.map, lambda new, old: jnp.where(finite, new, old))
        return keep(new_params, params), keep(new_opt_state, opt_state), keep(new_fp8_state, fp8_state), loss, norm


def _name(path) -> str:
    """The Hugging Face name of a leaf of the parameter tree."""
    return ".".join(str(getattr(part, "key", part)) for part in path)
