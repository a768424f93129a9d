"""Identify and test implementations of casts, quantizers, GEMMs, optimizers and attention against
the specification.

``identify_cast`` and ``identify_quantizer`` identify a function of one array,
``gemm.identify_gemm`` a GEMM, ``identify_optimizer`` an optimizer of torch, of optax or of your
own, ``identify_attention`` attention, ``delayed.identify_delayed`` a delayed scaling state.
``gemm.grade_gemm`` calls a GEMM right, imprecise or wrong. ``delayed.require_delayed``,
``sharded.require_sharded`` and ``invariants`` test scaling over steps and over ranks.
``strategies``, ``parameters`` and ``require`` are for the tests of any library. ``vectors`` judges
programs in any language. ``certify`` compares the libraries installed here.
"""

from fp8ref.conformance.attention.identify import identify_attention as identify_attention
from fp8ref.conformance.cast.identify import identify_cast as identify_cast
from fp8ref.conformance.optimizer.identify import identify_optimizer as identify_optimizer
from fp8ref.conformance.quantizer.identify import identify_quantizer as identify_quantizer

__all__ = ["identify_cast", "identify_quantizer"]
