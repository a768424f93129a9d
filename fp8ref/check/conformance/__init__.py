"""What anybody's cast or quantiser is, by the specification's names (``identify_cast``, ``identify_quantizer``), and tests that hold one to it."""

from fp8ref.check.conformance.casts import identify_cast as identify_cast
from fp8ref.check.conformance.quantizers import identify_quantizer as identify_quantizer
