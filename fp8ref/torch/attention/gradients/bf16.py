"""The backward pass in bfloat16 of an attention whose forward pass is in FP8 (spec A-25).

It is that of the variant ``bf16``, of q, k and v themselves, with o and the log-sum-exp of the FP8
pass.
"""

import dataclasses
from collections.abc import Collection

import torch
from torch import Tensor

from fp8ref.spec.attention.variants import VARIANTS
from fp8ref.torch.attention.gradients import fast
from fp8ref.torch.attention.gradients import gradients as attention_gradients
from fp8ref.torch.attention.gradients.gradients import Gradients, Saved
from fp8ref.torch.attention.operands import context
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.inputs import Report, Shape, Spec
from fp8ref.torch.attention.operands.kept import Matrix
from fp8ref.torch.attention.output import Documents


def rounded(x: Tensor) -> Tensor:
    """x as the backward pass takes it; the same tensor if it is in bfloat16."""
    return x.to(torch.bfloat16)


def gradients(
    do: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor],
    o: Tensor,
    lse: Tensor,
    spec: Spec,
    shape: Shape,
    documents: Documents,
    *,
    report: Report,
    keep: Collection[Matrix] = (),
    sinks: Tensor | None = None,
) -> Gradients:
    """The gradients of q, k and v.

    tensors   q, k and v of the forward pass, before its casts.
    o, lse    of the forward pass.
    """
    wide = dataclasses.replace(spec, variant=VARIANTS["bf16"], seed=0)
    unit = torch.ones((), device=do.device, dtype=torch.float32)
    quantized = context.gathered(operands.quantize(*tensors, wide, {}, report="nothing"), wide)
    saved = Saved(quantized, rounded(o), None, lse, unit, unit)
    pass_module = fast if spec.arithmetic == "fast" else attention_gradients
    return pass_module.gradients(
        do, saved, wide, shape, documents, {}, report=report, keep=keep, sinks=sinks
    )
