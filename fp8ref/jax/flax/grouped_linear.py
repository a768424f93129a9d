"""A projection of experts in Flax NNX: ``GroupedLinear``, as nnx.Linear is of a linear (spec X).

    up = fj.flax.GroupedLinear(8, 128, 384, rngs=rngs)     # 8 experts, kernel [8, 128, 384]
    y = up(rows, group_sizes)                              # [M, 128] -> [M, 384], by lax.ragged_dot
    fj.flax.convert(model, "rowwise")                      # in FP8, as the model's linears

``convert`` puts a hook into it by the grouped recipe that goes with the linears' (X-8), and
``deconvert`` takes it out: lax.ragged_dot is back.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.experts import arguments as grouped_arguments
from fp8ref.jax.experts import grouped
from fp8ref.jax.flax.nnx import Hook
from fp8ref.recipe import Recipe
from fp8ref.spec.hardware import Multiply

_INIT = nnx.initializers.lecun_normal(batch_axis=(0,))


class GroupedLinear(nnx.Module):
    """Each group's rows times the kernel of its expert; without bias.

    Shapes:   kernel [E, K, N]; rows [M, K] and integer group_sizes [E] -> [M, N].
    dtype     of the product; None: rows and kernel are promoted to one.
    ragged_dot
              what multiplies: lax.ragged_dot, or a hook of ``convert``.
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        *,
        rngs: nnx.Rngs,
        dtype=None,
        param_dtype=jnp.float32,
        kernel_init: Callable = _INIT,
    ) -> None:
        self.experts = experts
        self.in_features = in_features
        self.out_features = out_features
        self.kernel = nnx.Param(
            kernel_init(rngs.params(), (experts, in_features, out_features), param_dtype)
        )
        self.dtype = dtype
        self.ragged_dot = lax.ragged_dot

    def __call__(self, rows: Array, group_sizes: Array) -> Array:
        """rows [M, K] in groups of these sizes -> [M, N]; FP8: 0 without a group (X-5)."""
        rows, kernel = nnx.nn.dtypes.promote_dtype(
            (rows, self.kernel.get_value()), dtype=self.dtype
        )
        return self.ragged_dot(rows, kernel, group_sizes)  # [M, K] x [E, K, N] -> [M, N]


class RaggedDot(Hook):
    """``grouped.apply`` by a recipe, as a hook of one GroupedLinear."""

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        stack: tuple[int, ...] = (),
        multiply: Multiply | None = None,
        placement: Placement | None = None,
    ) -> None:
        """Raises:   ValueError: as ``check_recipe``; simulated hardware; a placement."""
        self.of_groups = grouped_arguments.check_recipe(recipe, name)
        if multiply is not None or placement is not None:
            option = "simulated hardware" if multiply is not None else "a placement"
            raise ValueError(
                f"{name}: grouped GEMMs take no hook with {option}. Name it in filter_fqns."
            )
        super().__init__(self.of_groups.recipe, name, stack)

    def __call__(self, rows: Array, kernel: Array, group_sizes: Array) -> Array:
        """rows [M, K] x kernel [E, K, N] -> [M, N]."""
        return self._contract(functools.partial(self._apply, rows, kernel, group_sizes), None, None)

    def _in_high_precision(self, use: Callable) -> Array:
        assert isinstance(use, functools.partial)
        return lax.ragged_dot(*use.args)

    def _apply(
        self,
        rows: Array,
        kernel: Array,
        group_sizes: Array,
        *,
        name: str,
        state=None,
        seen=None,
        **_,
    ):
        """``grouped.apply`` for ``_contract``; experts' hooks use name and state alone."""
        return grouped.apply(
            rows, kernel, group_sizes, recipe=self.of_groups, state=state, seen=seen, name=name
        )
