"""The training step in JAX (SEMANTICS T): float32 masters, bfloat16 compute, optax's AdamW."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from fp8ref import llama
from fp8ref.jax import linear
from fp8ref.jax.model import Llama
from fp8ref.run.config import Config

EMBEDDING = "model.embed_tokens.weight"
# XLA may otherwise leave out a rounding to bfloat16 between fused operations (SEMANTICS M-3 states where they are).
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


class Trainer:
    """One model being trained. ``step`` and ``evaluate`` take tokens [B, T + 1], integers: inputs and the targets after them."""

    backend = "jax"

    def __init__(self, config: Config, weights: dict[str, np.ndarray] | None = None) -> None:
        """weights: float32 arrays by name, by default ``llama.initial_weights`` of run.seed."""
        self.config = config
        self.decisions = config.decisions()
        weights = llama.initial_weights(config.model, seed=config.run.seed) if weights is None else weights
        llama.check_weights(weights, config.model)
        model = Llama(config.model, weights, {d.path: d.recipe for d in self.decisions})
        self._graph, params = nnx.split(model, nnx.Param)
        self._params = nnx.to_pure_dict(params)
        optimizer = config.optimizer
        self._update = optax.chain(
            optax.scale_by_adam(b1=optimizer.beta1, b2=optimizer.beta2, eps=optimizer.eps),
            optax.add_decayed_weights(optimizer.weight_decay, mask=lambda p: jax.tree.map(lambda v: v.ndim > 1, p)),
        )
        self._opt_state = self._update.init(self._params)
        self._step = jax.jit(self._train_step, donate_argnums=(0, 1), compiler_options=COMPILER_OPTIONS)
        self._loss = jax.jit(self._loss_of, compiler_options=COMPILER_OPTIONS)
        self._count = 0
        self.device = f"{jax.devices()[0].platform}: {jax.devices()[0].device_kind}"

    def step(self, tokens: np.ndarray) -> dict[str, float]:
        """One optimizer step: {"loss", "grad_norm"} before the update. Where either is not finite nothing changes (T-4)."""
        lr = self.config.optimizer.learning_rate_at(self._count, self.config.run.steps)
        self._params, self._opt_state, loss, norm = self._step(self._params, self._opt_state, self._tokens(tokens), jnp.float32(lr))
        metrics = {"loss": float(loss), "grad_norm": float(norm)}
        self._count += all(map(np.isfinite, metrics.values()))
        return metrics

    def evaluate(self, tokens: np.ndarray) -> float:
        """The loss of a batch."""
        return float(self._loss(self._params, self._tokens(tokens)))

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [B, T, vocab_size] from tokens [B, T]."""
        forward = jax.jit(lambda params, tokens: self._model(params)(tokens), compiler_options=COMPILER_OPTIONS)
        return np.asarray(forward(self._params, self._tokens(tokens)).astype(jnp.float32))

    def gradients(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """float32 gradients of the loss of a batch by parameter, not clipped; nothing is updated."""
        grads = jax.jit(jax.grad(self._loss_of), compiler_options=COMPILER_OPTIONS)(self._params, self._tokens(tokens))
        return {_name(path): np.asarray(value) for path, value in jax.tree_util.tree_leaves_with_path(grads)}

    def weights(self) -> dict[str, np.ndarray]:
        """The float32 masters by name."""
        return {_name(path): np.asarray(value) for path, value in jax.tree_util.tree_leaves_with_path(self._params)}

    def observe(self, tokens: np.ndarray, observer) -> None:
        """A forward and backward pass, no update, in which every FP8 GEMM reports to observer (see ``linear.observing``)."""
        with linear.observing(observer):
            gradients = jax.jit(jax.grad(self._loss_of), compiler_options=COMPILER_OPTIONS)(self._params, self._tokens(tokens))
        jax.block_until_ready(gradients)
        jax.effects_barrier()

    def _tokens(self, tokens: np.ndarray) -> jax.Array:
        llama.check_tokens(tokens, self.config.model)
        return jnp.asarray(tokens, jnp.int32)

    def _model(self, params) -> Llama:
        """The model on parameters rounded to the compute dtype, all but the embedding table (SEMANTICS M-2)."""
        compute = jax.tree_util.tree_map_with_path(
            lambda path, value: value if _name(path) == EMBEDDING else value.astype(jnp.bfloat16), params
        )
        return nnx.merge(self._graph, nnx.State(compute))

    def _loss_of(self, params, tokens: jax.Array) -> jax.Array:
        logits = self._model(params)(tokens[:, :-1]).astype(jnp.float32)  # [B, T, V]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def _train_step(self, params, opt_state, tokens: jax.Array, lr: jax.Array):
        loss, grads = jax.value_and_grad(self._loss_of)(params, tokens)
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, self.config.optimizer.max_norm / norm), grads)
        updates, new_state = self._update.update(grads, opt_state, params)
        new_params = jax.tree.map(lambda p, u: p - lr * u, params, updates)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        keep = functools.partial(jax.tree.map, lambda new, old: jnp.where(finite, new, old))
        return keep(new_params, params), keep(new_state, opt_state), loss, norm


def _name(path) -> str:
    """The Hugging Face name of a leaf of the parameter tree."""
    return ".".join(str(getattr(part, "key", part)) for part in path)
