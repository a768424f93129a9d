"""Norms, SwiGLU and rotary embeddings with their casts, each one operator of PyTorch (M-11).

Inputs and outputs are those of the functions of ``fp8ref.kernels.norms``, ``swiglu`` and
``rotary``. Their plain forms are ``fp8ref.torch.blocks.operations``, and casts of their results.
"""

from fp8ref.torch.kernels.launch import operator

__all__ = [
    "norm_amax_lines",
    "norm_cast",
    "norm_cast_lines",
    "norm_lines",
    "norm_statistics",
    "rotary_gradient_amax",
    "rotary_gradient_amax_lines",
    "rotary_gradient_cast",
    "rotary_gradient_cast_lines",
    "rotary_gradient_lines",
    "rotate",
    "sum_and_statistics",
    "swiglu_amax",
    "swiglu_amax_lines",
    "swiglu_cast",
    "swiglu_cast_lines",
    "swiglu_gradient_amax_lines",
    "swiglu_gradient_amaxes",
    "swiglu_gradient_cast",
    "swiglu_gradient_cast_lines",
    "swiglu_gradient_lines",
    "swiglu_lines",
]

norm_statistics = operator("norms", "statistics", called="norm_statistics")
"""h and weight -> each row's factor, and the amax of its norm."""
sum_and_statistics = operator("norms", "statistics", called="sum_and_statistics", residual=True)
"""h, residual and weight -> their sum, and ``norm_statistics`` of it."""
norm_cast = operator("norms", "cast", called="norm_cast")
"""Codes of the norm by one scale, in both orders."""
norm_amax_lines = operator("norms", "amax_lines", called="norm_amax_lines")
"""Partial amaxes of rows and columns of the norm."""
norm_cast_lines = operator("norms", "cast_lines", called="norm_cast_lines")
"""Codes of the norm by scales of rows and of columns."""
norm_lines = operator("norms", "lines", called="norm_lines")
"""Codes of the norm by blocks of 1 x 128 and of 128 x 1."""
swiglu_amax = operator("swiglu", "amax", called="swiglu_amax")
"""Partial amaxes of the product."""
swiglu_cast = operator("swiglu", "cast", called="swiglu_cast")
"""Codes of the product by one scale, in both orders."""
swiglu_gradient_amaxes = operator("swiglu", "gradient_amaxes", called="swiglu_gradient_amaxes")
"""Partial amaxes of gate's gradient and up's."""
swiglu_gradient_cast = operator("swiglu", "cast_gradients", called="swiglu_gradient_cast")
"""Codes of gate's gradient and up's by one scale, in both orders."""
swiglu_lines = operator("swiglu", "lines", called="swiglu_lines")
"""Codes of the product by blocks of 1 x 128 and of 128 x 1."""
swiglu_gradient_lines = operator("swiglu", "gradient_lines", called="swiglu_gradient_lines")
"""Codes of gate's gradient and up's by blocks of 1 x 128 and of 128 x 1."""
swiglu_amax_lines = operator("swiglu", "amax_lines", called="swiglu_amax_lines")
"""Partial amaxes of rows and columns of the product."""
swiglu_cast_lines = operator("swiglu", "cast_lines", called="swiglu_cast_lines")
"""Codes of the product by scales of rows and of columns."""
swiglu_gradient_amax_lines = operator(
    "swiglu", "gradient_amax_lines", called="swiglu_gradient_amax_lines"
)
"""Partial amaxes of rows and columns of gate's gradient and up's."""
swiglu_gradient_cast_lines = operator(
    "swiglu", "cast_gradient_lines", called="swiglu_gradient_cast_lines"
)
"""Codes of gate's gradient and up's by scales of rows and of columns."""
rotate = operator("rotary", "rotate")
"""x, cos and sin -> x rotated."""
rotary_gradient_amax = operator("rotary", "amax", called="rotary_gradient_amax")
"""Partial amaxes of the gradient."""
rotary_gradient_cast = operator("rotary", "cast", called="rotary_gradient_cast")
"""Codes of the gradient by one scale, in both orders."""
rotary_gradient_amax_lines = operator("rotary", "amax_lines", called="rotary_gradient_amax_lines")
"""Partial amaxes of rows and columns of the gradient."""
rotary_gradient_cast_lines = operator("rotary", "cast_lines", called="rotary_gradient_cast_lines")
"""Codes of the gradient by scales of rows and of columns."""
rotary_gradient_lines = operator("rotary", "lines", called="rotary_gradient_lines")
"""Codes of the gradient by blocks of 1 x 128 and of 128 x 1."""
