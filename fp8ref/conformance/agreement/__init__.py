"""Whether two sides quantize weights to the same bytes, where they differ first, and why.

A side is a rule by name, a quantizer, or a checkpoint.
"""

from fp8ref.conformance.agreement.agree import agree as agree

__all__ = ["agree"]
