"""Grade a GEMM: right, imprecise or wrong, with the magnitude and the causes (spec B-1, B-14).

``grade_gemm`` returns a ``Grade``; ``require_gemm`` raises an AssertionError unless it is right.
``grade_grouped`` and ``require_grouped`` take several products in one call; ``grade_offsets`` and
``require_offsets`` ask a grouped GEMM what its offsets make hard.
"""

from fp8ref.conformance.gemm.grade.grading import grade_gemm as grade_gemm
from fp8ref.conformance.gemm.grade.grading import require_gemm as require_gemm
from fp8ref.conformance.gemm.grade.groups import grade_grouped as grade_grouped
from fp8ref.conformance.gemm.grade.groups import require_grouped as require_grouped
from fp8ref.conformance.gemm.grade.offsets import grade_offsets as grade_offsets
from fp8ref.conformance.gemm.grade.offsets import require_offsets as require_offsets
from fp8ref.conformance.gemm.grade.verdict import Grade as Grade
