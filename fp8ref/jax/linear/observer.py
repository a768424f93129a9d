"""Observe the FP8 GEMMs of a program while it runs: operands, scales and result of each."""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax

from fp8ref.jax.linear import operands
from fp8ref.jax.linear.operands import Use
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.recipe import OPERANDS, Gemm, Role

_observer: ContextVar[Callable | None] = ContextVar("fp8ref_jax_observer", default=None)


@contextmanager
def observing(observer: Callable):
    """While a function is traced in this context, every FP8 GEMM reports its operands and result,
    from inside the compiled program.

    observer(name, gemm, a, b, out) is called with NumPy values when it runs: a and b as (hp, codes
    uint8, scale), hp and codes in the tensors' own layout (spec L-2's input [M, K], weight [N,
    K], grad_output [M, N]; Flax's weights [K, N]).
    """
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def current() -> Callable | None:
    """The observer of the context in which a linear is traced, for its ``Use``."""
    return _observer.get()


def report(
    which: Gemm,
    tensors: Mapping[Role, jax.Array],
    own: Sequence[Quantized],
    used: Sequence[Quantized],
    out: jax.Array,
    use: Use,
):
    """Call the observer of ``use``, if it has one, when the program runs.

    own   both operands as this device quantized them: codes.
    used  both as the GEMM took them, gathered: scales.
    """
    if use.observer is None:
        return
    reported = [
        (
            operands.flat(tensors[role], role, use),
            operands.flat(lax.bitcast_convert_type(q.codes, jnp.uint8), role, use),
            gathered.scale,
        )
        for role, q, gathered in zip(OPERANDS[which], own, used, strict=True)
    ]
    jax.debug.callback(functools.partial(use.observer, use.name, which), *reported, out)
