"""One linear layer, forward and backward (spec L).

linear        apply: three GEMMs under one custom_vjp; ``arguments`` checks what it is given
three_gemms   one of them: quantize, gather, multiply, sum over devices
operands      quantizes and gathers; ``paired_codes`` moves two sets of codes at once
contraction   dot_general and einsum by a recipe
observer      shows the GEMMs of a program that runs
"""

from fp8ref.jax.linear.linear import apply, apply_with_stats

__all__ = ["apply", "apply_with_stats"]
