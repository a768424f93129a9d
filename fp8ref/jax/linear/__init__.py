"""One linear layer, forward and backward (spec L).

linear        apply: three GEMMs under one custom_vjp; ``arguments`` checks what it is given
carried       what a linear carries, each thing with one name and one life
three_gemms   one of them: quantize, gather, multiply, sum over devices
operands      quantizes and gathers; ``paired_codes`` moves two sets of codes at once
contraction   dot_general and einsum by a recipe
observer      shows the GEMMs of a program that runs
"""

from fp8ref.jax.linear.carried import Observations
from fp8ref.jax.linear.linear import apply

__all__ = ["Observations", "apply"]
