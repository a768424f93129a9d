"""Refuse the derivatives that a linear does not have, by the name of the layer (SEMANTICS L-8).

A linear has first derivatives in reverse mode. Both functions here return their argument.
``reverse_only`` raises where a tangent is computed forward: by jax.jvp, jacfwd, linearize.
``not_again`` raises where what it returns is differentiated: inside a custom_vjp rule, that is a
second derivative.
"""

import functools
from typing import NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def reverse_only(x: jax.Array, name: str) -> jax.Array:
    """x; ValueError, naming the layer, where its tangent is evaluated and not transposed."""
    return x


@reverse_only.defjvp
def _tangent(name: str, primals: tuple, tangents: tuple) -> tuple:
    return *primals, _unevaluated.bind(*tangents, name=name)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def not_again(x: jax.Array, name: str) -> jax.Array:
    """x; ValueError, naming the layer, where it is differentiated."""
    return x


@not_again.defjvp
def _second(name: str, primals: tuple, tangents: tuple) -> NoReturn:
    raise ValueError(
        f"{name}: the gradients of a linear are not differentiated again (L-8), because codes have no derivative; got a second derivative, "
        "such as jax.hessian or a grad of a grad. Leave the layer out of FP8 (filter_fqns) where one is taken."
    )


def _refuse(*_, name: str, **__) -> NoReturn:
    raise ValueError(
        f"{name}: a linear has derivatives in reverse mode only (L-8), jax.grad and jax.vjp; got forward mode: jax.jvp, jacfwd or linearize. "
        "Leave the layer out of FP8 (filter_fqns) where it is taken."
    )


# A linear function that can be transposed and not evaluated: reverse mode transposes it.
_unevaluated = Primitive("fp8ref_reverse_only")
_unevaluated.def_impl(_refuse)
_unevaluated.def_abstract_eval(lambda tangent, *, name: tangent)
ad.deflinear2(_unevaluated, lambda cotangent, tangent, *, name: [cotangent])
batching.defvectorized(_unevaluated)
mlir.register_lowering(_unevaluated, lambda ctx, *_, name: _refuse(name=name))
