"""Refuse the derivatives that a linear or attention does not have, by the name of the layer (spec
L-8, A-14), and keep codes for those that they have.

Both have first derivatives in reverse mode. All functions here return their argument.
``reverse_only`` raises where a tangent is computed forward: by jax.jvp, jacfwd, linearize.
``not_again`` raises where what it returns is differentiated: inside a custom_vjp rule, that is a
second derivative. ``warned`` warns there. ``saved`` is for what a custom_vjp rule saves, ``defvjp``
gives a function its rules.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

# Under a vmap observations are one output of all examples, with a cotangent of later uses. jax 0.12
# refuses that unless the rules say that they merge what examples give back; an earlier one has no
# such argument.
_SHARED = "generic_batching" in inspect.signature(jax.custom_vjp.defvjp).parameters
defvjp = (
    functools.partial(jax.custom_vjp.defvjp, generic_batching=True)  # type: ignore[call-arg]
    if _SHARED
    else jax.custom_vjp.defvjp
)
"""``jax.custom_vjp.defvjp``, of a function whose outputs ``jax.vmap`` may find shared by the batch.
"""

Kind = Literal["linear", "attention"]
"""What kind of layer is named."""

_SAID = {
    "linear": ("a linear", "L-8", "Leave the layer out of FP8 (filter_fqns)"),
    "attention": ("attention", "A-14", "Use attention in high precision"),
}


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def reverse_only(x: Array, name: str, kind: Kind = "linear") -> Array:
    """x; ValueError, naming the layer, where its tangent is evaluated and not transposed."""
    return x


@reverse_only.defjvp
def _tangent(name: str, kind: Kind, primals: tuple, tangents: tuple) -> tuple:
    return *primals, _unevaluated.bind(*tangents, name=name, kind=kind)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def not_again(x: Array, name: str, kind: Kind = "linear") -> Array:
    """x; ValueError, naming the layer, where it is differentiated."""
    return x


@not_again.defjvp
def _second(name: str, kind: Kind, primals: tuple, tangents: tuple) -> NoReturn:
    layer, clause, remedy = _SAID[kind]
    raise ValueError(
        f"{name}: the gradients of {layer} are not differentiated again ({clause}); got a second "
        f"derivative, such as jax.hessian. {remedy} where one is taken."
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def warned(x: Array, name: str, message: str, evaluated: Callable[[], None] | None) -> Array:
    """x; a UserWarning, naming the layer, where it is differentiated.

    Elsewhere ``evaluated`` is called.
    """
    if evaluated is not None:
        evaluated()
    return x


@warned.defjvp
def _warn(
    name: str, message: str, evaluated: Callable | None, primals: tuple, tangents: tuple
) -> tuple:
    del evaluated
    warnings.warn(f"{name}: {message}", stacklevel=2)
    return *primals, *tangents


def saved(residuals: Any) -> Any:
    """The residuals of a custom_vjp rule, those in FP8 as copies, which cost nothing under jit.

    jax.checkpoint with a policy that keeps a result, such as everything_saveable, rounds it by
    ``lax.reduce_precision`` if the forward pass reads it too (jax 0.10.2,
    ``_insert_reduce_precision`` in ad_checkpoint.py). That takes the bits of e4m3fn for those of an
    IEEE format: 256 to 448 become NaN, and subnormals zero. A copy that only the backward pass
    reads is not rounded.
    """
    return jax.tree.map(
        lambda v: (
            jnp.copy(v) if v.dtype.itemsize == 1 and jnp.issubdtype(v.dtype, jnp.floating) else v
        ),
        residuals,
    )


def _refuse(*_, name: str, kind: Kind, **__) -> NoReturn:
    layer, clause, remedy = _SAID[kind]
    raise ValueError(
        f"{name}: {layer} has derivatives in reverse mode only ({clause}); got jax.jvp, jacfwd or "
        f"linearize. {remedy} where it is taken."
    )


# A linear function that can be transposed and not evaluated: reverse mode transposes it.
_unevaluated = Primitive("fp8ref_reverse_only")
_unevaluated.def_impl(_refuse)
_unevaluated.def_abstract_eval(lambda tangent, *, name, kind: tangent)
ad.deflinear2(_unevaluated, lambda cotangent, tangent, *, name, kind: [cotangent])
batching.defvectorized(_unevaluated)
mlir.register_lowering(_unevaluated, lambda ctx, *_, name, kind: _refuse(name=name, kind=kind))
