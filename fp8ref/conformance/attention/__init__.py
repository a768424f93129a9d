"""Identify an attention function: its decisions, and the variant that explains its bits (spec A).

subjects       somebody's function, called with arrays of its framework
scores         questions with chosen scores
visibility     which keys each query sees, and which head of keys it uses
operands       the formats of q, k, v and o, and what shares a scale
tiles          the order and the length of tiles
probabilities  their scale, threshold, range and denominator
accumulation   chains of P v, and the width of accumulators
decisions      all of these
descales       what the scales of codes multiply
comparison     random inputs, against the simulator
arguments      the same under each argument
identify       which variant it is, or where the nearest departs
"""

from fp8ref.conformance.attention.decisions import probe as probe
from fp8ref.conformance.attention.identify import identify_attention as identify_attention
from fp8ref.conformance.attention.identify import require_attention as require_attention
from fp8ref.conformance.attention.subjects import wrap as wrap

__all__ = ["identify_attention", "probe", "require_attention", "wrap"]
