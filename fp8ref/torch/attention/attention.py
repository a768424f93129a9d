"""Attention in FP8 (spec A): softmax(q k^T scale) v, by a variant of ``spec.attention.variants``.

    o = attention.apply(q, k, v, variant="cudnn", mask=Mask(causal=True))    # differentiable
    # with codes, scales and amaxes
    result = attention.forward(q, k, v, variant="cudnn")
    gradients = attention.backward(do, q, k, v, result, variant="cudnn")

``variant`` is a name, a Variant, or a Call with all else that is static, such as a softcap.
Tensors are [batch, heads, tokens, features]. Tiles, roundings, scales and their order are the
variant's; what sums products is the library:

    FP8 codes       torch._scaled_mm, for each sequence and head of keys, with the query heads of
                    that head as rows; fast accumulation under the plan ``hopper_fast``. Within
                    ``hardware.simulating``, its plan. On a CPU the fast form has one float32 GEMM
                    of dequantized codes for all sequences and heads.
    MX blocks       a float32 GEMM of dequantized codes (G-16)
    bfloat16        a GEMM with a float32 result
    ``exact``       float64

Between the products are torch's own sums and functions, within a bound (A-18), or under
``arithmetic="stated"`` the specification's operations in their order.

A GEMM begins at +0, so probabilities times values are promoted after each tile: ``fa3``, whose
``promotion`` is None, is computed as ``fa3_promoted``, and ``fa4`` likewise.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fp8ref.spec import support
from fp8ref.spec.attention import variants as data
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import Mask, Variant
from fp8ref.torch.attention import function as attention_function
from fp8ref.torch.attention import output, real
from fp8ref.torch.attention.fast import output as fast_output
from fp8ref.torch.attention.gradients import gradients as attention_gradients
from fp8ref.torch.attention.gradients.gradients import Gradients
from fp8ref.torch.attention.gradients.parts import Saved
from fp8ref.torch.attention.operands import inputs
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.heads import DTYPES
from fp8ref.torch.attention.operands.inputs import Pair
from fp8ref.torch.attention.operands.problem import Problem, RankCall
from fp8ref.torch.attention.output import Result
from fp8ref.torch.quantize.scales import Scales
from fp8ref.torch.tensors import linear_input

__all__ = ["RankCall", "RoleScales", "apply", "backward", "forward"]


class RoleScales(NamedTuple):
    """Delayed scaling of a differentiable call, by role (A-12, A-19).

    scales   as in ``forward``; and of roles do, ds, dq, dk, dv, for the backward pass.
    seen     observations, ``delayed.RoleState.seen`` of roles whose scale is one number: the passes
             merge their amaxes into these (H-4), the forward pass those of q, k, v, s and o.
    """

    scales: Mapping[str, Tensor]
    seen: Mapping[str, Tensor]


def apply(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    variant: str | Variant | Call,
    mask: Mask | None = None,
    documents: Pair = None,
    scales: Mapping[str, Tensor] | RoleScales | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T scale) v by a variant, differentiable in q, k, v and sinks.

    variant   as in ``forward``; or a RankCall, of tensors that are parts of larger ones.
    scales    as in ``forward``, and for the backward pass; or RoleScales, with observations.
    sinks     [H], as in ``forward``; their gradient is that of this rank's rows.
    Shapes:   as in ``forward``; o of q's shape and dtype.
    Order:    as in ``forward``; of the backward pass A-14 to A-16. o and gradients are rounded to
              the variant's format, then to q's, k's and v's dtypes.
    State:    q, k and v are kept for the backward pass as codes, beside o and the log-sum-exp;
              probabilities are computed again. ``exact`` and MX keep q, k and v themselves.
    Gradient: once; a backward pass with create_graph=True is refused.
    Specials: as in ``forward``.
    Raises:   ValueError: as ``forward``; what is no tensor; a variant without a backward pass, for
              tensors that require gradients; a Call that keeps matrices; within torch.compile, a
              Variant or Call that is made inside.
    Source:   spec A.
    """
    inputs.check_given(q, k, v, sinks)
    layout = variant.layout if isinstance(variant, Call) else "bhtd"
    q, k, v = data.heads_first(layout, q, k, v)
    differentiable = any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    if differentiable and torch.is_grad_enabled():
        _check_gradients(variant.variant if isinstance(variant, Call) else variant)
    linear_input.check_transforms(
        "attention", q, k, v, otherwise="call torch's scaled_dot_product_attention"
    )
    role_scales, seen = scales if isinstance(scales, RoleScales) else (scales or {}, {})
    function = attention_function.function(
        variant,
        attention_function.values(variant),
        None if mask is None else attention_function.values(mask),
        (tuple(role_scales), tuple(seen)),
    )
    tensors = q, k, v, *inputs.pair_of(documents), sinks
    o = function.apply(*tensors, *role_scales.values(), *seen.values())
    return data.in_layout(layout, o)


def _check_gradients(variant: str | Variant) -> None:
    """ValueError: a variant without a backward pass."""
    support.require("gradients of attention", "torch", data.by_name(variant))


@torch.no_grad()
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    variant: str | Variant | Call,
    mask: Mask | None = None,
    documents: Pair = None,
    scales: Mapping[str, Tensor] | None = None,
    sinks: Tensor | None = None,
) -> Result:
    """softmax(q k^T scale) v by a variant, with its parts. Not differentiable: ``apply`` is.

    variant       a name or a Variant; or a Call, which has the mask, the softmax scale, a softcap,
                  the layout, the arithmetic and what is returned. A RankCall's amax_group shares
                  the amaxes of whole tensors.
    documents     integers [B, T], or a pair of them for queries and keys: a query sees its own
                  document. A token whose document is negative is padding: it is not read, and its
                  output and gradients are 0.
    scales        {role: scale} of roles q, k, v, s, o: delayed scaling. The others come from the
                  tensors themselves; that of s from the amax 1.
    sinks         [H] of high precision: a logit of each query head, which joins the sum of a row
                  and has no value.
    Shapes:   q [B, H, Tq, D], k and v [B, Hkv, Tk, D], Hkv dividing H; float32, float16 or
              bfloat16, on one device. See ``Result``.
    Order:    stated: the tiles' own (A-6); in a tile A-4 to A-9, with a promotion after each; at
              the end A-10, A-11. fast: A-18.
    Specials: a row that sees no key is 0, its lse -infinity, or its sink. NaN and infinities are
              not refused, since the host would wait for the device: all that shares a scale with
              one becomes NaN.
    Raises:   ValueError: an unknown variant; shapes, dtypes, devices or documents that do not fit;
              scales for roles without one; features that the variant does not take; a policy that
              this backend lacks; a softcap that is not positive; sinks of another shape; a mask
              beside a Call; a context.
    Source:   spec A-1 to A-13, A-22, A-23.
    """
    call = _whole(RankCall.resolve(variant, mask))
    q, k, v = data.heads_first(call.layout, q, k, v)
    problem = inputs.problem(
        q, k, v, call, data.ROLES, documents=documents, scales=scales, sinks=sinks
    )
    q, k, v = problem.without_padding(q, k, v)
    with _full_precision(q):
        if problem.variant.real:
            result = real.result(q, k, v, problem, report="all")
        else:
            keep = ["p_codes"] * call.keep_p + ["scores"] * call.keep_s
            run = fast_output.run if call.arithmetic == "fast" else output.run
            result = run(operands.quantize(q, k, v, problem), problem, report="all", keep=keep)
    o = data.in_layout(call.layout, result.o)
    return result._replace(o=o, documents=problem.documents, sinks=sinks)


@torch.no_grad()
def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Result,
    *,
    variant: str | Variant | Call,
    mask: Mask | None = None,
    scales: Mapping[str, Tensor] | None = None,
) -> Gradients:
    """The gradients of q, k and v, given that of o, with what they are made of.

    result        of ``forward``, with the same other arguments; it has the documents and the sinks.
    variant       as in ``forward``; of a Call with ``keep_ds``, dS and what was cast of P and dS
                  are returned; of MX blocks dS has no one code.
    scales        {role: scale} of roles do, ds, dq, dk, dv, and s: delayed scaling. The others come
                  from the tensors themselves.
    Shapes:   do [B, H, Tq, D], as o; q, k, v as in ``forward``. See ``Gradients``.
    Order:    stated: A-14 to A-16, A-25; sums over keys are added tile by tile, in float32; over
              the heads of a group ascending. fast: A-18.
    Specials: a row that sees no key has no gradient. NaN and infinities as in ``forward``.
    Raises:   ValueError: a variant without a backward pass; what forward refuses; a do or a result
              of another shape; a result of another variant; keep_ds of real numbers.
    Source:   spec A-14 to A-16.
    """
    call = _whole(RankCall.resolve(variant, mask))
    _check_gradients(call.variant)
    q, k, v, do = data.heads_first(call.layout, q, k, v, do)
    roles = ("s", *call.variant.roles[len(data.ROLES) :])
    problem = inputs.problem(q, k, v, call, roles, scales=scales)
    if isinstance(result, Result):
        result = result._replace(o=data.in_layout(call.layout, result.o))
    if not isinstance(result, Result) or result.o.shape != q.shape:
        raise ValueError(
            f"result is what forward returned for q {tuple(q.shape)}; got {type(result).__name__}."
        )
    data.check_result(call.variant, result.tensors)
    inputs.check_tensor("do", do)
    if do.shape != q.shape:
        raise ValueError(f"do has the shape of o, {tuple(q.shape)}; got {tuple(do.shape)}.")
    keep = call.variant.gradient_matrices if call.keep_ds else ()
    if call.keep_ds and not keep:
        raise ValueError(f"variant {call.variant.name!r} keeps nothing; got keep_ds. Leave it out.")
    problem = dataclasses.replace(problem, documents=result.documents, sinks=result.sinks)
    q, k, v = problem.without_padding(q, k, v)
    (do,) = problem.without_padding(do)
    saved = _saved(result, (q, k, v), problem)
    with _full_precision(q):
        grads = attention_gradients.gradients(do, saved, problem, report="all", keep=keep)
    dq, dk, dv = (data.in_layout(call.layout, x) for x in grads[:3])
    return grads._replace(dq=dq, dk=dk, dv=dv)


def _saved(result: Result, qkv: tuple[Tensor, Tensor, Tensor], problem: Problem) -> Saved:
    variant, tensors = problem.variant, result.tensors
    if variant.backward == "bf16":
        return Saved.from_inputs(qkv, result.o, result.lse)
    scale_p = Scales(result.scale_p, result.scale_inv_p)
    if "s" in problem.scales:
        scale_p = operands.probability_scale(problem, result.o.device)
    if variant.out.bits == 8:
        o, o_scale_inv = tensors["o"].codes, tensors["o"].scale_inv
        return Saved(qkv, o, o_scale_inv, result.lse, scale_p, tensors)
    return Saved(qkv, result.o.to(DTYPES[variant.out.name]), None, result.lse, scale_p, tensors)


def _whole(call: RankCall) -> RankCall:
    """The call; ValueError if it has a part of the tokens."""
    if call.context is not None:
        raise ValueError(
            f"forward and backward take whole sequences; got context={call.context!r}. Use apply."
        )
    return call


def _full_precision(x: Tensor) -> contextlib.AbstractContextManager:
    """A context without autocast."""
    if linear_input.autocast_dtype(x):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()
