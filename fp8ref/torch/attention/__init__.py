"""Attention by a variant, a tile of keys at a time, differentiable (spec A).

attention   apply; forward and backward for the cross-check
function    the autograd function: casts, then ``fast`` or the stated arithmetic
operands    which elements share a scale; checks, codes, context parallelism
output      the forward pass in the stated arithmetic; ``softmax``, ``sinks`` its parts
fast        the forward pass in fast arithmetic, the default
gradients   the backward pass: fast, stated, of MX blocks, in bfloat16
kernel      FlashAttention-3's FP8 kernel in place of tiles
real        real arithmetic, rounded once, to compare with
delayed     the states of delayed scaling
observer, statistics
            what a run sees of its operands
"""

from fp8ref.torch.attention.attention import RankCall, RoleScales, apply, backward, forward

__all__ = ["RankCall", "RoleScales", "apply", "backward", "forward"]
