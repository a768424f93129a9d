"""Norms, SwiGLU and rotary embeddings with their casts, each one operator of PyTorch (M-11).

Inputs and outputs are those of the functions of ``fp8ref.kernels.norms``, ``swiglu`` and
``rotary``. Their plain forms are ``fp8ref.torch.blocks.operations``, and casts of their results.
Codes are in both orders, partial amaxes of lines are of rows and of columns, and blocks are of
1 x 128 and of 128 x 1. SwiGLU's gradients are gate's and then up's.
"""

from fp8ref.torch.kernels.launch import operator

norm_statistics = operator("norms", "statistics")  # each row's factor, and the amax of its norm
sum_and_statistics = operator("norms", "statistics", called="sum_and_statistics", residual=True)
"""The sum with a residual, and ``norm_statistics`` of it."""
norm_cast = operator("norms", "cast")  # codes by one scale
norm_amax_lines = operator("norms", "amax_lines")  # partial amaxes of lines
norm_cast_lines = operator("norms", "cast_lines")  # codes by scales of lines
norm_lines = operator("norms", "lines")  # codes and scales by blocks

swiglu_amax = operator("swiglu", "amax")  # partial amaxes of the whole
swiglu_cast = operator("swiglu", "cast")  # codes by one scale
swiglu_amax_lines = operator("swiglu", "amax_lines")  # partial amaxes of lines
swiglu_cast_lines = operator("swiglu", "cast_lines")  # codes by scales of lines
swiglu_lines = operator("swiglu", "lines")  # codes and scales by blocks

swiglu_gradient_amaxes = operator("swiglu", "gradient_amaxes")  # partial amaxes of the whole
swiglu_gradient_cast = operator("swiglu", "cast_gradients")  # codes by one scale
swiglu_gradient_amax_lines = operator("swiglu", "gradient_amax_lines")  # partial amaxes of lines
swiglu_gradient_cast_lines = operator("swiglu", "cast_gradient_lines")  # codes by scales of lines
swiglu_gradient_lines = operator("swiglu", "gradient_lines")  # codes and scales by blocks

rotate = operator("rotary", "rotate")  # heads, rotated
rotary_gradient_amax = operator("rotary", "amax")  # partial amaxes of the whole
rotary_gradient_cast = operator("rotary", "cast")  # codes by one scale
rotary_gradient_amax_lines = operator("rotary", "amax_lines")  # partial amaxes of lines
rotary_gradient_cast_lines = operator("rotary", "cast_lines")  # codes by scales of lines
rotary_gradient_lines = operator("rotary", "lines")  # codes and scales by blocks
