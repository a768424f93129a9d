"""Attention by a variant, forward and backward, over tiles of keys (spec A).

attention   the forward pass, which every other module serves
operands    which elements of q, k and v share a scale; codes, and their checks
softmax     the online softmax of a tile; ``exponentials`` its functions, ``sinks`` their logits
probability_value
            probabilities times values
gradients   the backward pass: in FP8, of MX blocks, in bfloat16
"""

from fp8ref.sim.attention.attention import Result, forward
from fp8ref.sim.attention.gradients.gradients import Gradients, backward
from fp8ref.sim.attention.plain import attention_plain

__all__ = ["Gradients", "Result", "attention_plain", "backward", "forward"]
