"""Float32 operations of attention that are rounded once, whatever compiles them (spec A).

inductor's kernels on a GPU contract a product and the sum after it to one rounding, and divide by
an approximation. Products and quotients of float32 numbers go through float64 there: a float64 has
more than 2 x 24 + 2 bits, so that rounding its result to float32 is the one rounding asked for.

A sum of a product and a third number has no such bound. ``multiply_add`` rounds twice where its
float64 falls on a midpoint of float32 numbers: of 2^29 random ones, about one does. "stated"
exponentials have the same fault: their float64 is off by under 2^-52, and one of 2^28 is that near.

Python numbers that are passed are float32 numbers.
"""

from typing import Literal

import torch
from torch import Tensor

from fp8ref.spec.attention.variants import Arithmetic


def exponential(x: Tensor, base: Literal["2", "e"], arithmetic: Arithmetic) -> Tensor:
    """base^x of float32 numbers; 0 of -infinity.

    arithmetic
              ``fast``, torch's float32 function, within 2 units in the last place (A-5);
              ``stated``, in float64 and rounded.
    """
    wide = x.double() if arithmetic == "stated" else x
    return (wide.exp2() if base == "2" else wide.exp()).float()


def tanh(x: Tensor, arithmetic: Arithmetic) -> Tensor:
    """The hyperbolic tangent of float32 numbers.

    arithmetic
              ``fast``, torch's float32 function, within 2 units in the last place; ``stated``, in
              float64 and rounded (A-22).
    """
    return x.double().tanh().float() if arithmetic == "stated" else x.tanh()


def log(x: Tensor, base: Literal["2", "e"]) -> Tensor:
    """The logarithm of float32 numbers, in float64, rounded."""
    return (x.double().log2() if base == "2" else x.double().log()).float()


def multiply_add(x: Tensor, y: Tensor | float, z: Tensor | float) -> Tensor:
    """x * y + z of float32 numbers, rounded once."""
    return (x.double() * _wide(y) + _wide(z)).float()


def times(x: Tensor, y: Tensor | float) -> Tensor:
    """RN32(x * y), which no compiler contracts with a sum."""
    return (x.double() * _wide(y)).float() if compiled_for_gpu(x) else x * y


def divide(x: Tensor, y: Tensor) -> Tensor:
    """RN32(x / y)."""
    return (x.double() / y.double()).float() if compiled_for_gpu(x) else x / y


def compiled_for_gpu(x: Tensor) -> bool:
    """Whether a compiler makes GPU kernels of what is done to x."""
    return torch.compiler.is_compiling() and x.is_cuda


def _wide(x: Tensor | float) -> Tensor | float:
    return x.double() if isinstance(x, Tensor) else x
