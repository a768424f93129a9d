"""Sums of gradients over microbatches in JAX (spec T-7)."""

import dataclasses
import functools
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from fp8ref.formats import E4M3FN
from fp8ref.jax.distributed import gradient_reduction
from fp8ref.jax.quantize import scaling
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.jax.states import parameter_stacks
from fp8ref.train.jax.parameter_trees import name_of, named


class GradientSums:
    """Sums of gradients over microbatches: float32, bfloat16, or of linears' weights in FP8 (T-7).
    Of a stack each layer has its own scale.

    dtype     ``parallel.accumulate_dtype``.
    linears   the names of the linears.
    specs     how shard_map cuts the parameters; None outside it.
    """

    def __init__(self, dtype: str, linears: Collection[str], specs) -> None:
        narrow = dtype == "float8_e4m3fn"
        self._narrow = {f"{name}.weight" for name in linears if narrow}
        self._dtype = jnp.dtype("float32" if self._narrow else dtype)
        self._axes = {name: _axes_of(spec) for name, spec in named(specs).items()}

    def zeros(self, params):
        """The sums before the first microbatch, placed as the parameters."""

        def zero(path, p):
            if name_of(path) not in self._narrow:
                return jnp.zeros_like(p, self._dtype)
            codes = jnp.zeros_like(p, jnp.float8_e4m3fn)
            ones = jnp.ones(p.shape[: "*" in name_of(path)], jnp.float32)
            return Quantized(
                codes=codes,
                scale=ones,
                scale_inv=ones,
                fmt=E4M3FN,
                granularity="tensorwise",
                axis=-1,
            )

        return jax.tree_util.tree_map_with_path(zero, params)

    def add(self, sums, grads):
        """The sums with one more microbatch's gradients."""

        def added(path, total, g):
            if isinstance(total, Quantized):
                accumulate = functools.partial(
                    gradient_reduction.accumulate, over=self._axes.get(name_of(path), ())
                )
                return parameter_stacks.each(accumulate, "*" in name_of(path))(total, g)
            return (total.astype(jnp.float32) + g).astype(self._dtype)

        return jax.tree_util.tree_map_with_path(added, sums, grads, is_leaf=_quantized)

    def scaled(self, sums, share: np.float32):
        """float32 sums times a number."""

        def times(path, total):
            if isinstance(total, Quantized):
                shared = dataclasses.replace(total, scale_inv=total.scale_inv * share)
                return parameter_stacks.each(scaling.dequantize, "*" in name_of(path))(shared)
            return total.astype(jnp.float32) * share

        return jax.tree_util.tree_map_with_path(times, sums, is_leaf=_quantized)


def _quantized(node) -> bool:
    return isinstance(node, Quantized)


def _axes_of(spec: P) -> tuple[str, ...]:
    """The mesh axes that cut a parameter."""
    return tuple(
        name for names in spec for name in ((names,) if isinstance(names, str) else names or ())
    )
