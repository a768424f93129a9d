"""Properties of scales, quantizers, merges and histories under any policy (S-18, S-19, H-14, P-28).

invariant   what an invariant is, ``broken`` and ``require_invariants``
scales      of a function of amaxes
quantizers  of a function of a tensor
merges      of a maximum of two amaxes
histories   of a delayed scaling state
"""

from fp8ref.conformance.invariants.histories import HISTORIES as HISTORIES
from fp8ref.conformance.invariants.invariant import broken as broken
from fp8ref.conformance.invariants.invariant import require_invariants as require_invariants
from fp8ref.conformance.invariants.merges import MERGES as MERGES
from fp8ref.conformance.invariants.quantizers import QUANTIZERS as QUANTIZERS
from fp8ref.conformance.invariants.scales import SCALES as SCALES

__all__ = ["MERGES", "SCALES", "broken"]
