"""Linears that are compared in JAX: fp8ref's by each recipe (bfloat16 one of them), Flax's
Fp8DirectDotGeneralOp, a minimal tensorwise one, and qwix's where it is installed.

Each is a ``Pass`` through fp8ref's own layers, which ask it for their linears; what a kind of
linear keeps between steps is its state. All compile with the options of the trainer's step, except
those whose name says otherwise. A step hands on the amaxes of its new weights, as the trainer's.
"""

import importlib.util
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fp8ref import recipe as recipes
from fp8ref.jax import delayed
from fp8ref.jax.kernels import choice
from fp8ref.recipe import RECIPES
from fp8ref.train.jax.llama import shared_inputs, weight_scales
from fp8ref.train.jax.llama.forward_pass import Pass
from fp8ref.train.jax.parameter_trees import named
from fp8ref.train.jax.step import EVERY_ROUNDING
from reporting.report import OURS

FLAX, MINIMAL, EXACT = "flax Fp8DirectDotGeneralOp", "minimal tensorwise", "bf16, every rounding"
QWIX = "qwix tensorwise"
PLAIN = ", plain"  # ends the name of a variant whose casts are XLA's
WITH_TRITON = ", Triton GEMMs"
"""Ends the name of a variant under XLA's own options, which allow GEMMs in Triton."""

BY_TRITON = tuple(f"{name}{WITH_TRITON}" for name in ("bf16", FLAX))
OTHERS = (FLAX, MINIMAL, *([QWIX] if importlib.util.find_spec("qwix") else []))
ALL = ("bf16", "bf16 again", *(f"fp8ref {recipe}" for recipe in OURS), *OTHERS)
AMAXES = "amaxes of weights"  # among what linears keep
# Flax's collection of scales and histories, whose gradients are their new values
KEPT = "_overwrite_with_gradient"
ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))


@dataclass
class FlaxPass(Pass):
    """By linears as nn.Dense has them: weights are [K, N]."""

    # of each linear, by its name without dots
    given: Mapping[str, Mapping] = field(default_factory=dict)

    def linear(self, x: jax.Array, w: jax.Array, recipe, name: str) -> jax.Array:
        rows = x.reshape(-1, x.shape[-1])
        y = nn.Fp8DirectDotGeneralOp().apply({KEPT: self.given[name]}, rows, w, ROWS_BY_COLUMNS)
        return y.reshape(*x.shape[:-1], -1)


@dataclass
class MinimalPass(Pass):
    def linear(self, x: jax.Array, w: jax.Array, recipe, name: str) -> jax.Array:
        return minimal(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], -1)


@dataclass
class QwixPass(Pass):
    def linear(self, x: jax.Array, w: jax.Array, recipe, name: str) -> jax.Array:
        return qwix(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], -1)


PASSES = {MINIMAL: MinimalPass, QWIX: QwixPass}


class Variant:
    """How one kind of linear is run, differentiated and advanced, and by which attention. state:
    {linear: what it keeps}. fp8ref's linears are cast by the kernels that the trainer takes.
    """

    def __init__(self, name: str, attention: Literal["xla", "cudnn"] = "xla") -> None:
        self.name, self.attention, device = name, attention, jax.devices()[0]
        self.linears = name.removesuffix(WITH_TRITON)
        kind, _, recipe = name.removesuffix(PLAIN).partition(" ")
        ours = kind == "fp8ref" and not name.endswith(PLAIN)
        auto = choice.explain("auto" if ours else "plain", device)
        self.kernels = choice.kernels(auto, device)
        self.recipe = RECIPES[recipe] if kind == "fp8ref" else RECIPES["bf16"]
        self.turned = self.linears == FLAX  # weights are [K, N]
        # None: those that fp8ref's trainer compiles with
        self.options = (
            EVERY_ROUNDING if name == EXACT else {} if name.endswith(WITH_TRITON) else None
        )

    def initial(self, linears: list[str]) -> dict:
        if self.linears == FLAX:
            return {linear: _flax_state() for linear in linears}
        return {
            linear: delayed.init(self.recipe)
            for linear in linears
            if delayed.keeps_state(self.recipe)
        }

    def weighed(self, params) -> dict:
        """What a recipe keeps of the weights of blocks: the amaxes that the next step scales by."""
        if not recipes.casts_weight_once(self.recipe):
            return {}
        return {AMAXES: weight_scales.amaxes(_matrices(params))}

    def gradients(self, function: Callable, params, x: jax.Array, g: jax.Array, state: dict):
        """(y, gradient by params, gradient by x, state after the step) of function(params, x, pass)
        -> y, given the gradient by y.
        """
        if self.linears == FLAX:

            def of_flax(params, x, state):
                return function(params, x, FlaxPass(given=state, attention=self.attention))

            y, pull = jax.vjp(of_flax, params, x, state)
            by_params, by_x, after = pull(g)
            return y, by_params, by_x, after

        # as the trainer's model does
        prepared, state = {}, dict(state)
        if AMAXES in state:
            leading = dict.fromkeys(_matrices(params), ())
            scaled = dict.fromkeys(leading, self.recipe)
            prepared = weight_scales.of(state.pop(AMAXES), leading, scaled)
        first = shared_inputs.first_readers(dict.fromkeys(state, self.recipe))
        shared = shared_inputs.states(state, first)

        def of(params, x, seen):
            kind = PASSES.get(self.linears, Pass)
            run = kind(
                shared,
                dict(seen),
                attention=self.attention,
                kernels=self.kernels,
                prepared=prepared,
            )
            return function(params, x, run), run.seen

        unseen = {linear: delayed.unseen(self.recipe) for linear in state}
        y, pull, forward = jax.vjp(of, params, x, unseen, has_aux=True)
        by_params, by_x, backward = pull(g)
        seen = {linear: delayed.merge(forward[linear], backward[linear]) for linear in state}
        return (
            y,
            by_params,
            by_x,
            {
                linear: delayed.update(state[linear], seen[linear], recipe=self.recipe)
                for linear in state
            },
        )


def _matrices(params) -> dict[str, jax.Array]:
    """The weights of blocks by linear."""
    arrays = named(nnx.to_pure_dict(params)).items()
    return {f"model.layers.{name.removesuffix('.weight')}": w for name, w in arrays if w.ndim == 2}


def _flax_state() -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = jnp.ones((16, 16), jnp.bfloat16)
        return nn.Fp8DirectDotGeneralOp().init(jax.random.key(0), one, one, ROWS_BY_COLUMNS)[KEPT]


def quantized(x: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """Codes by the amax of the whole tensor, and what multiplies out of them."""
    limit = float(jnp.finfo(dtype).max)
    scale = limit / jnp.maximum(jnp.max(jnp.abs(x)).astype(jnp.float32), 1e-12)
    return jnp.clip(x.astype(jnp.float32) * scale, -limit, limit).astype(dtype), 1 / scale


@jax.custom_vjp
def minimal(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [M, K] by w [N, K] -> [M, N], as written by hand: a scale for each tensor, fast
    accumulation forward and slow backward.
    """
    return _forward(x, w)[0]


def _forward(x: jax.Array, w: jax.Array):
    (x8, sx), (w8, sw) = quantized(x, jnp.float8_e4m3fn), quantized(w, jnp.float8_e4m3fn)
    return (_dot(x8, w8, 1, 1, lax.Precision.DEFAULT) * (sx * sw)).astype(x.dtype), (x8, sx, w8, sw)


def _backward(kept, g: jax.Array):
    x8, sx, w8, sw = kept
    g8, sg = quantized(g, jnp.float8_e5m2)
    by_x = (_dot(g8, w8, 1, 0, lax.Precision.HIGHEST) * (sg * sw)).astype(g.dtype)
    return by_x, (_dot(g8, x8, 0, 0, lax.Precision.HIGHEST) * (sg * sx)).astype(g.dtype)


def _dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int, precision) -> jax.Array:
    return lax.dot_general(
        a,
        b,
        (((axis_a,), (axis_b,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


minimal.defvjp(_forward, _backward)


def qwix(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [M, K] by w [N, K] -> [M, N] as qwix's provider for training does, a scale for each
    tensor.
    """
    from qwix._src.core import dot_general_qt

    e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
    config = dot_general_qt.DotGeneralQtConfig(
        lhs_qtype=e4m3,
        rhs_qtype=e4m3,
        dlhs_grad_qtype=e5m2,
        drhs_grad_qtype=e5m2,
        lhs_disable_channelwise_axes=True,
        rhs_disable_channelwise_axes=True,
        dlhs_grad_disable_channelwise_axes=True,
        drhs_grad_disable_channelwise_axes=True,
    )
    return dot_general_qt.dot_general_qt(x, w, (((1,), (1,)), ((), ())), config)
