"""Norms, SwiGLU and rotary embeddings with their casts, each one operator of PyTorch (M-11).

Inputs and outputs are those of the functions of ``fp8ref.kernels.norms``, ``swiglu`` and
``rotary``. Their plain forms are ``fp8ref.torch.blocks.operations``, and casts of their results.

    statistics          each row's factor, and the amax of its norm
    amax, amaxes        partial amaxes of the whole
    amax_lines          partial amaxes of rows and of columns
    cast                codes by one scale, in both orders
    cast_lines          codes by scales of rows and of columns
    lines               codes by blocks of 1 x 128 and of 128 x 1
"""

from fp8ref.torch.kernels.launch import operator

norm_statistics = operator("norms", "statistics")
sum_and_statistics = operator("norms", "statistics", called="sum_and_statistics", residual=True)
norm_cast = operator("norms", "cast")
norm_amax_lines = operator("norms", "amax_lines")
norm_cast_lines = operator("norms", "cast_lines")
norm_lines = operator("norms", "lines")

swiglu_amax = operator("swiglu", "amax")
swiglu_cast = operator("swiglu", "cast")
swiglu_amax_lines = operator("swiglu", "amax_lines")
swiglu_cast_lines = operator("swiglu", "cast_lines")
swiglu_lines = operator("swiglu", "lines")
# of gate's gradient, and then of up's
swiglu_gradient_amaxes = operator("swiglu", "gradient_amaxes")
swiglu_gradient_cast = operator("swiglu", "cast_gradients")
swiglu_gradient_amax_lines = operator("swiglu", "gradient_amax_lines")
swiglu_gradient_cast_lines = operator("swiglu", "cast_gradient_lines")
swiglu_gradient_lines = operator("swiglu", "gradient_lines")

rotate = operator("rotary", "rotate")
rotary_gradient_amax = operator("rotary", "amax")
rotary_gradient_cast = operator("rotary", "cast")
rotary_gradient_amax_lines = operator("rotary", "amax_lines")
rotary_gradient_cast_lines = operator("rotary", "cast_lines")
rotary_gradient_lines = operator("rotary", "lines")
