"""What every section of the JAX benchmark is given: sizes, a clock, random data, how to compile."""

import gc
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp

from fp8ref.jax.kernels import choice
from fp8ref.train.jax.step import compiler_options
from measuring import timing
from measuring.sizes import Sizes
from measuring.timing import Budget, Call, Clock, Rounds


@dataclass(frozen=True, kw_only=True)
class Bench:
    """attention: the one that every variant runs, as parallel.attention."""

    dry: bool
    clock: Clock
    sizes: Sizes
    budget: Budget
    attention: Literal["xla", "cudnn"]
    keys: itertools.count = field(default_factory=itertools.count)

    @property
    def casts(self) -> str:
        """What casts tensors of fp8ref's variants, and why."""
        return choice.explain("auto", jax.devices()[0]).text

    def timed(
        self, variants: dict[str, Call], *, most: int = 20, row_seconds: float | None = None
    ) -> Rounds:
        return timing.interleaved(
            variants,
            self.clock,
            row_seconds=row_seconds or self.sizes.row_seconds,
            most=1 if self.dry else most,
            queued=True,
            rounds=self.sizes.rounds,
            budget=self.budget,
        )

    def random(self, *shape: int, scale: float = 1.0) -> jax.Array:
        """bfloat16, normal, never zeros: zeros multiply faster."""
        return _normal(jax.random.key(next(self.keys)), shape, scale)

    def codes(self, *shape: int, dtype) -> jax.Array:
        """FP8 codes of normal values that fill the format's range, as a scale of their amax would
        have them do.
        """
        return _codes(jax.random.key(next(self.keys)), shape, dtype)

    def compiled(
        self,
        function: Callable,
        *arguments,
        options: Mapping | None = None,
        donate: tuple[int, ...] = (),
    ) -> Callable:
        """Compiled with XLA's options, by default those of the trainer's step."""
        options = compiler_options(jax.default_backend()) if options is None else options
        return (
            jax.jit(function, donate_argnums=donate)
            .lower(*arguments)
            .compile(compiler_options=dict(options) or None)
        )

    def free(self) -> None:
        """Give back what a section held."""
        jax.clear_caches()
        gc.collect()


def _draw(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.float32) * scale).astype(jnp.bfloat16)


def _fill(key: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
    x = jax.random.normal(key, shape, jnp.float32)
    return (x * (float(jnp.finfo(dtype).max) / jnp.max(jnp.abs(x)))).astype(dtype)


_normal, _codes = jax.jit(_draw, static_argnums=(1, 2)), jax.jit(_fill, static_argnums=(1, 2))
