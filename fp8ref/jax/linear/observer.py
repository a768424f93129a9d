"""Observe the FP8 GEMMs of a program while it runs: operands, scales and result of each."""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar

import jax
from jax import Array

from fp8ref.jax.linear import operands
from fp8ref.jax.linear.carried import Layer, Operand
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.recipe import OPERANDS, Gemm, Role
from fp8ref.shared import contexts

_observer: ContextVar[Callable | None] = ContextVar("fp8ref_jax_observer", default=None)


def observing(observer: Callable) -> AbstractContextManager[None]:
    """While a function is traced in this context, every FP8 GEMM reports its operands and result,
    from inside the compiled program.

    observer(name, gemm, a, b, out) is called with NumPy values when it runs: a and b as (hp, codes
    uint8, scale), hp and codes in the tensors' own layout (spec L-2's input [M, K], weight [N,
    K], grad_output [M, N]; Flax's weights [K, N]).
    """
    return contexts.setting(_observer, observer)


def current() -> Callable | None:
    """The observer of the context in which a linear is traced, for its ``Layer``."""
    return _observer.get()


def report(
    which: Gemm,
    roles: Mapping[Role, Operand],
    own: Sequence[Quantized],
    whole: Sequence[Quantized],
    out: Array,
    layer: Layer,
):
    """Call the observer of the layer, if it has one, when the program runs.

    own    both operands as this device quantized them: codes.
    whole  both as the GEMM took them, gathered: scales.
    """
    if layer.observer is None:
        return
    reported = []
    for role, q, gathered in zip(OPERANDS[which], own, whole, strict=True):
        tensor = roles[role].tensor
        assert tensor is not None, "a layer that is observed saves tensors"
        flat = (operands.flat(v, role, layer) for v in (tensor, q.code_bits))
        reported.append((*flat, gathered.scale))
    jax.debug.callback(functools.partial(layer.observer, layer.name, which), *reported, out)
