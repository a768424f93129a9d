"""A training step of blocks of Llama in JAX, without embedding and head: forward, backward and
AdamW, one compiled program.

Parameters, gradients and moments are bfloat16, as in the PyTorch benchmark. Blocks are fp8ref's
own; what a variant changes is their linears.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from fp8ref.spec import llama
from fp8ref.spec.llama import LlamaConfig
from fp8ref.train.jax.llama.llama import Layer
from measuring import rounding, timing
from on_jax.bench import Bench
from on_jax.linears import differences
from on_jax.variants import Variant

SETS = 3  # of inputs that are rotated
MOST = 50  # steps of a row
# steps on the same inputs, after which scales of past amaxes are of them; the last is compared with
# bfloat16's
WARM = 3


class Blocks:
    """One variant: its compiled step, and the state that it changes."""

    def __init__(self, bench: Bench, name: str, config: LlamaConfig, sets: list) -> None:
        self.variant, self.sets = Variant(name, bench.attention), sets
        linears = [linear for linear in llama.linear_shapes(config) if linear != "lm_head"]
        # the same weights in every variant
        keys = dict(zip(linears, jax.random.split(jax.random.key(1), len(linears)), strict=True))
        weights = {
            f"{linear}.weight": _weight(
                keys[linear], llama.linear_shapes(config)[linear], config.initializer_range
            )
            for linear in linears
        }
        norms = [name for name, shape in llama.parameter_shapes(config).items() if len(shape) == 1]
        weights |= {norm: jnp.ones(config.hidden_size, jnp.bfloat16) for norm in norms}
        if self.variant.turned:
            weights = {key: value.T if value.ndim == 2 else value for key, value in weights.items()}
        recipes = dict.fromkeys(linears, self.variant.recipe)
        layers = nnx.List(
            [
                Layer(f"model.layers.{i}", config, weights, recipes)
                for i in range(config.num_hidden_layers)
            ]
        )
        self.graph, params = nnx.split(layers)
        self.optimizer = optax.adamw(1e-6)
        self.tables = [
            jnp.asarray(table) for table in llama.rotary_tables(config, sets[0][0].shape[1])
        ]
        kept = self.variant.initial(linears) | self.variant.weighed(params)
        self.state = params, self.optimizer.init(params), kept
        self.compiled = bench.compiled(
            self._step, self.state, *sets[0], options=self.variant.options, donate=(0,)
        )

    def step(self, i: int) -> list[jax.Array]:
        """[output, the input's gradient], which an embedding would ask for."""
        self.state, *found = self.compiled(self.state, *self.sets[i % SETS])
        return found

    def compared(self) -> list[jax.Array]:
        """What blocks add to their input, and to its gradient, after WARM steps: without the
        residual, which no linear touches.
        """
        for _ in range(WARM):
            y, by_x = self.step(0)
        return [_minus(y, self.sets[0][0]), _minus(by_x, self.sets[0][1])]

    def _forward(self, params, x: jax.Array, run) -> jax.Array:
        for layer in nnx.merge(self.graph, params):
            x = layer(x, *self.tables, run)
        return x

    def _step(self, state, x: jax.Array, g: jax.Array):
        params, opt_state, kept = state
        y, by_params, by_x, kept = self.variant.gradients(self._forward, params, x, g, kept)
        updates, opt_state = self.optimizer.update(by_params, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state, kept | self.variant.weighed(params)), y, by_x


@jax.jit
def _minus(a: jax.Array, b: jax.Array) -> jax.Array:
    return a.astype(jnp.float32) - b.astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _weight(key: jax.Array, shape: tuple[int, int], scale: float) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.float32) * scale).astype(jnp.bfloat16)


def inputs(bench: Bench, config: LlamaConfig, shape: tuple[int, int]) -> list:
    """Inputs of blocks and gradients of their outputs, [sequences, tokens, hidden], to be
    rotated.
    """
    whole = *shape, config.hidden_size
    return [(bench.random(*whole), bench.random(*whole, scale=1e-3)) for _ in range(SETS)]


def run(bench: Bench, config: LlamaConfig, shape: tuple[int, int], variants: Sequence[str]) -> dict:
    """Rows of steps, ``speedup`` over bfloat16. shape: sequences, and tokens of each."""
    sets = inputs(bench, config, shape)
    models: dict[str, Blocks] = {}
    errors: dict[str, str] = {}
    memory: dict[str, int | None] = {}
    accuracy: dict[str, list[float]] = {}
    expected: list[jax.Array] | None = None
    for name in variants:
        try:
            made = Blocks(bench, name, config, sets)
            found = made.compared()
            expected = expected or found
            accuracy[name] = rounding.check(differences(found, expected), rounding.BLOCKS)
            models[name] = made
            memory[name] = getattr(made.compiled.memory_analysis(), "temp_size_in_bytes", None)
        except Exception as error:  # the others are still to be measured
            errors[name] = timing.message(error)
    measured = bench.timed(
        {name: model.step for name, model in models.items()}, most=MOST, row_seconds=0.2
    )
    measured.errors.update(errors)
    return {
        "sequences": shape[0],
        "tokens": shape[1],
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "parameters": "bfloat16",
        "attention": bench.attention,
        "rows": timing.rows(measured, "bf16"),
        "temporary_bytes": memory,
        "relative_errors": accuracy,
    }
