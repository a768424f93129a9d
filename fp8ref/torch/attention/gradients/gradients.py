"""The backward pass of attention: a variant's own, or in bfloat16 (spec A-14 to A-16, A-25).

real        in float64
stated      every operation in its order
fast        torch's own sums and functions, the default
mx          operands of MX blocks
in bfloat16, of an FP8 forward pass's o and log-sum-exp: the pass of the variant ``bf16``
"""

import dataclasses
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor, distributed

from fp8ref.torch.attention import real as attention_real
from fp8ref.torch.attention import sinks as attention_sinks
from fp8ref.torch.attention.gradients import fast, mx, parts, stated
from fp8ref.torch.attention.gradients.parts import Raw, Saved, Sums
from fp8ref.torch.attention.operands import context
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.heads import Heads
from fp8ref.torch.attention.operands.kept import Matrix
from fp8ref.torch.attention.operands.problem import Problem, RankCall, Report, Shape
from fp8ref.torch.quantize.scales import Scales


class Gradients(NamedTuple):
    """What a backward pass gives. Fields as in ``fp8ref.sim.attention.gradients.gradients``.

    dq, dk, dv   float32 of the shapes of q, k, v: values of the output's format, times their
                 scale_inv in FP8.
    tensors      the quantized do and, where they are in FP8, dq, dk and dv, by role.
    amaxes       of do by its groups; of ds, dq, dk and dv, unrounded.
    saturated    int64 (): elements of P and dS that their casts clipped, on this rank;
                 saturated_ds: those of dS, none under MX.
    lost         int64 (): elements of dS of at least 2^-126 that the cast made 0, on this rank;
                 under MX that along the keys.
    scale_ds     what dS was multiplied by: scale and scale_inv; 1 where it has none, or blocks.
    matrices     codes of P, dS and its codes [B, H, Tq, Tk], by ``Matrix``; {} unless asked for.
    dsinks       float32 [H]: the gradient of sinks, of this rank's rows; None without any.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    tensors: dict[str, Heads]
    amaxes: dict[str, Tensor]
    saturated: Tensor
    scale_ds: Scales
    matrices: dict[str, Tensor] = {}  # noqa: RUF012
    dsinks: Tensor | None = None
    lost: Tensor | None = None
    saturated_ds: Tensor | None = None


def gradients(
    do: Tensor, saved: Saved, problem: Problem, *, report: Report, keep: Collection[Matrix] = ()
) -> Gradients:
    """The gradients of q, k and v, given that of o, of what a forward pass saved."""
    variant = problem.variant
    if variant.real:
        return _real(do, saved, problem, report)
    if variant.backward == "bf16":
        saved, problem = _in_bf16(saved, problem)
    do8 = parts.quantized_do(do, problem, report=report)
    if problem.variant.granularity == "mx_1x32":
        sums = mx.run(do, do8, saved, problem, report=report, keep=keep)
    else:
        run = fast.run if problem.call.arithmetic == "fast" else stated.run
        sums = run(do8, saved, problem, report=report, keep=keep)
    return _finished(sums, do8, saved.lse, problem, report)


def in_bf16(x: Tensor) -> Tensor:
    """x as the backward pass in bfloat16 takes it; the same tensor if it is in bfloat16."""
    return x.to(torch.bfloat16)


def _in_bf16(saved: Saved, problem: Problem) -> tuple[Saved, Problem]:
    """The residuals for variant ``bf16`` (A-25)."""
    assert saved.inputs is not None
    problem = dataclasses.replace(problem, call=problem.call.in_bf16(), scales={})
    tensors = operands.quantize(*saved.inputs, problem, report="nothing")
    unit = torch.ones((), device=saved.o.device, dtype=torch.float32)
    return saved._replace(
        tensors=context.gathered(tensors, problem.call),
        o=in_bf16(saved.o),
        o_scale_inv=None,
        scale_p=Scales(unit, unit),
    ), problem


def _finished(sums: Sums, do8: Heads, lse: Tensor, problem: Problem, report: Report) -> Gradients:
    """The gradients in the output's format, with amaxes."""
    variant, call, ds = problem.variant, problem.call, sums.ds
    low = variant.out.bits == 8
    # unless the scale of dS was made of it
    shared = problem.low and variant.granularity != "mx_1x32" and "ds" not in problem.scales
    if report != "nothing" and not shared:
        (ds.largest,) = operands.share([ds.largest], call)
    raw = _own_keys(sums.raw, call, problem.shape)._asdict()
    amaxes, tensors, values = {"do": do8.amax, "ds": ds.largest}, {"do": do8}, {}
    if report != "nothing" or (low and not problem.scales.keys() >= raw.keys()):
        output_amaxes = operands.share([x.abs().amax() for x in raw.values()], call)
    else:
        output_amaxes = [torch.zeros((), device=lse.device, dtype=torch.float32)] * 3
    for (role, x), amax in zip(raw.items(), output_amaxes, strict=True):
        amaxes[role] = amax
        values[role], quantized = operands.output(role, x, amax, problem)
        if low:
            tensors[role] = quantized
    dsinks = None
    if problem.sinks is not None:
        dsinks = attention_sinks.gradient(sums.d, lse, problem.sinks, call.arithmetic)
    return Gradients(
        values["dq"],
        values["dk"],
        values["dv"],
        tensors,
        amaxes,
        sums.p.saturated + ds.saturated,
        sums.scale_ds,
        sums.kept.whole(problem.shape),
        dsinks,
        ds.lost,
        ds.saturated,
    )


def _own_keys(raw: Raw, call: RankCall, shape: Shape) -> Raw:
    """The gradients of this rank's keys and values: summed in rank order if ranks share queries."""
    if call.context is None:
        return raw
    group = call.ranks
    size = group.size()

    def summed(x: Tensor) -> Tensor:
        pieces = torch.stack(x.split(shape.keys // size, dim=2)).contiguous()  # of each rank's keys
        received = torch.empty_like(pieces)
        distributed.all_to_all_single(received, pieces, group=group)
        total = received[0]
        for piece in received[1:]:
            total = total + piece
        return total

    return Raw(raw.dq, summed(raw.dk), summed(raw.dv))


def _real(do: Tensor, saved: Saved, problem: Problem, report: Report) -> Gradients:
    """The gradients of variant ``exact``."""
    assert saved.inputs is not None
    dq, dk, dv, largest, dsinks = attention_real.backward(do, *saved.inputs, problem)
    amaxes: dict[str, Tensor] = {}
    if report != "nothing":
        amaxes = {"ds": largest}
        for role, x in zip(("do", "dq", "dk", "dv"), (do, dq, dk, dv), strict=True):
            amaxes[role] = x.abs().amax().float()
        shared = operands.share([*amaxes.values()], problem.call)
        amaxes = dict(zip(amaxes, shared, strict=True))
    unit = torch.ones((), device=do.device, dtype=torch.float32)
    none = torch.zeros((), dtype=torch.int64, device=do.device)
    return Gradients(dq, dk, dv, {}, amaxes, none, Scales(unit, unit), dsinks=dsinks)
