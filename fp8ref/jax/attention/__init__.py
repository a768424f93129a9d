"""Attention by a variant, a tile of keys at a time, differentiable (spec A).

attention   apply; forward and backward for the cross-check
operands    which elements share a scale; checks, codes, context parallelism
output      the forward pass of a head; ``softmax``, ``sinks``, ``probability_value`` its parts
gradients   the backward pass: in FP8, of MX blocks, in bfloat16
kernel      cuDNN's FP8 attention in place of tiles
real        real arithmetic, rounded once, to compare with
observer, statistics, counts
            what a run sees of its operands
"""

from fp8ref.jax.attention.attention import (
    Carried,
    DeviceCall,
    apply,
    apply_with_stats,
    backward,
    forward,
)

__all__ = ["Carried", "DeviceCall", "apply", "apply_with_stats", "backward", "forward"]
