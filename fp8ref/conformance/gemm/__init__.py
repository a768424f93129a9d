"""Identify a scaled GEMM's arithmetic from results of chosen operands (G-18), and grade it (B-14).

``identify_gemm`` names the accumulation plan and the epilogue of a ``ScaledGemm``; ``named`` gives
those of PyTorch and JAX. ``grade_gemm`` and ``require_gemm`` say of any GEMM whether it is right,
imprecise or wrong, and why; ``grade_offsets`` asks a grouped GEMM. ``recording`` keeps results bit
for bit; ``instruction`` identifies one tensor-core instruction.
"""

from fp8ref.conformance.gemm.adapters import wrap as wrap
from fp8ref.conformance.gemm.grade import Grade as Grade
from fp8ref.conformance.gemm.grade import grade_gemm as grade_gemm
from fp8ref.conformance.gemm.grade import grade_grouped as grade_grouped
from fp8ref.conformance.gemm.grade import grade_offsets as grade_offsets
from fp8ref.conformance.gemm.grade import require_gemm as require_gemm
from fp8ref.conformance.gemm.grade import require_grouped as require_grouped
from fp8ref.conformance.gemm.grade import require_offsets as require_offsets
from fp8ref.conformance.gemm.identify import identify as identify_gemm
from fp8ref.conformance.gemm.library_gemms import named as named
from fp8ref.conformance.gemm.scaled_gemm import ScaledGemm as ScaledGemm

__all__ = [
    "Grade",
    "ScaledGemm",
    "grade_gemm",
    "grade_grouped",
    "grade_offsets",
    "identify_gemm",
    "named",
    "require_gemm",
    "require_grouped",
    "require_offsets",
    "wrap",
]
