"""The backward pass in bfloat16 of an attention whose forward pass is in FP8 (spec A-25).

It is that of the variant ``bf16``, of q, k and v themselves, with o and the log-sum-exp of the FP8
pass.
"""

import numpy as np

from fp8ref.formats import BFLOAT16
from fp8ref.sim.attention.attention import Result
from fp8ref.sim.attention.operands import operands as operands
from fp8ref.sim.attention.operands.inputs import Problem
from fp8ref.sim.quantize import cast

_ONE = np.float32(1)


def saved(problem: Problem, result: Result) -> tuple[Problem, Result]:
    """The problem for the variant ``bf16``, and what its pass takes of an FP8 forward pass: q, k, v
    and o rounded to bfloat16, and the log-sum-exp."""
    wide = problem._replace(call=problem.call.in_bf16())
    return wide, result._replace(
        tensors=operands.quantize(wide, {}),
        o=cast.round_to(result.o, BFLOAT16),
        scale_p=_ONE,
        scale_inv_p=_ONE,
    )
