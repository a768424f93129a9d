"""The differentiable function of attention, one for each call (spec A).

``attention.apply`` calls it. A compiled graph calls it with tensors only; AOTAutograd traces it.
"""

import dataclasses
import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.products import along_tokens, first_uses
from fp8ref.spec.attention.variants import Mask, Variant
from fp8ref.torch import delayed
from fp8ref.torch.attention import observer, output, real, statistics
from fp8ref.torch.attention.fast import output as fast_output
from fp8ref.torch.attention.gradients import mx
from fp8ref.torch.attention.gradients.gradients import Gradients, gradients, in_bf16
from fp8ref.torch.attention.gradients.parts import Saved
from fp8ref.torch.attention.operands import context as attention_context
from fp8ref.torch.attention.operands import inputs
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.heads import DTYPES, Heads
from fp8ref.torch.attention.operands.problem import Documents, Problem, RankCall, Report
from fp8ref.torch.attention.output import Result
from fp8ref.torch.model import checkpointing
from fp8ref.torch.quantize.scales import Scales
from fp8ref.torch.tensors import linear_input

_PLAIN = tuple(
    f.name
    for f in dataclasses.fields(Variant)
    if f.name not in ("tiles", "fmt", "out", "gradient_fmt", "source")
)
_CALL = tuple(f.name for f in dataclasses.fields(RankCall) if f.name not in ("variant", "mask"))

Roles = tuple[tuple[str, ...], tuple[str, ...]]
"""The roles of given scales, and those of observations."""


def values(x: object) -> tuple:
    """The fields of a Mask, Variant or Call, as numbers and strings.

    Of one that is made where dynamo traces, dynamo hands on another of the same class, without its
    values (torch 2.13). What it reads of the fields is right.
    """
    if isinstance(x, Mask):
        return x.causal, x.window, x.alignment
    if isinstance(x, Call):
        parts = getattr(x, "variant", None), getattr(x, "mask", None)
        plain = [getattr(x, name, None) for name in _CALL]
        return *values(parts[0]), *values(parts[1]), *plain
    if not isinstance(x, Variant):
        return ()
    numbers = [(tiles.features, tiles.full, tiles.causal, tiles.local) for tiles in x.tiles]
    formats = [None if fmt is None else fmt.name for fmt in (x.fmt, x.out, x.gradient_fmt)]
    return *numbers, *formats, *[getattr(x, name, None) for name in _PLAIN]


@torch._dynamo.assume_constant_result
def function(
    variant: str | Variant | Call, variant_values: tuple, mask_values: tuple | None, roles: Roles
) -> type[torch.autograd.Function]:
    """The differentiable function of a call, which a compiler does not trace.

    mask_values   of a Mask beside the variant; None: there is none.
    Raises:   ValueError: a Variant or Call without its ``values``; no Mask; what ``RankCall``
              refuses; matrices to keep.
    """
    if values(variant) != variant_values:
        raise ValueError(
            f"a {type(variant).__name__} is made outside of compiled code; got {variant_values}. "
            "Make it once, before."
        )
    mask = None
    if mask_values is not None:
        if not mask_values:
            raise ValueError(
                "mask is a Mask of fp8ref.spec.attention.variants, not a tensor. Use "
                "Mask(causal=True), a window, or documents."
            )
        causal, window, alignment = mask_values
        mask = Mask(causal=causal, window=window, alignment=alignment)
    call = RankCall.resolve(variant, mask)
    call.check_nothing_kept()
    return _bind(call, roles)


@functools.lru_cache(maxsize=256)  # a softmax scale, softcap or seed may be another in every call
def _bind(call: RankCall, roles: Roles) -> type[torch.autograd.Function]:
    """q, k, v, documents of both, sinks or None, scales and observations -> o, as an
    autograd.Function. One class per call: a compiled graph passes tensors only."""

    @torch._dynamo.allow_in_graph  # AOTAutograd traces into it
    class AttentionFunction(torch.autograd.Function):
        @staticmethod
        @linear_input.without_autocast
        def forward(ctx, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
            (q_ids, k_ids, sinks), more = others[:3], others[3:]
            scales = dict(zip(roles[0], more, strict=False))
            # An attribute, not a saved tensor: other uses may write it before the backward pass.
            ctx.seen = dict(zip(roles[1], more[len(scales) :], strict=True))
            ids = None if q_ids is None else (q_ids, k_ids)
            accepted = call.variant.roles
            with checkpointing.within_attention():
                problem = inputs.problem(
                    q, k, v, call, accepted, documents=ids, scales=scales, sinks=sinks
                )
                return _forward(ctx, problem, q, k, v)

        @staticmethod
        @linear_input.without_autocast
        def backward(ctx, do: Tensor):
            if torch.is_grad_enabled():  # autograd would follow neither codes nor scales
                raise ValueError(
                    "FP8 attention gradients are not differentiated again; got create_graph=True."
                )
            with observer.inside(ctx.layer):
                *grads, dsinks = _backward(ctx, call, roles[0], do)
                return (*grads, None, None, dsinks, *(None for _ in ctx.needs_input_grad[6:]))

    return AttentionFunction


def _forward(ctx, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    variant, call = problem.variant, problem.call
    inputs.check_seen(ctx.seen, variant, problem.shape)
    problem = attention_context.among_ranks(problem)
    q, k, v = problem.without_padding(q, k, v)
    ctx.shape, ctx.dtypes, ctx.layer = problem.shape, (q.dtype, k.dtype, v.dtype), observer.layer()
    counts = problem.low and observer.counts(ctx.layer) and not observer.again()
    report = _report(ctx, counts)
    if variant.real:
        result, tensors = real.result(q, k, v, problem, report=report), {}
    else:
        tensors = operands.quantize(q, k, v, problem, report=report)
        _report_operands(ctx.layer, (q, k, v), tensors, problem)
        watched = observer.watched(ctx.layer) and not observer.again()
        keep = ["scores"] * watched + ["p_codes"] * (watched and problem.low)
        gathered = attention_context.gathered(tensors, call)
        run = fast_output.run if call.arithmetic == "fast" else output.run
        result = run(gathered, problem, report=report, keep=keep)
    o = result.o.to(q.dtype)
    _show(ctx.layer, problem, result, {"q": q, "k": k, "v": v, "o": o}, counts=counts)
    _observe(ctx.seen, result.amaxes)
    _save(ctx, problem, result, tensors, (q, k, v), o)
    return o


def _report(ctx, counts: bool) -> Report:
    return "all" if counts else "amaxes" if ctx.seen else "nothing"


def _report_operands(
    layer: str | None,
    qkv: tuple[Tensor, Tensor, Tensor],
    tensors: dict[str, Heads],
    problem: Problem,
) -> None:
    """Report q, k and v to the observer."""
    if layer is None or not problem.low or observer.again():
        return
    values = dict(zip(("q", "k", "v"), operands.rotated(*qkv, problem.call), strict=True))
    for product, role in first_uses(problem.variant):
        if product in ("scores", "values"):
            observer.report(layer, product, role, values[role], tensors[role])


def _show(
    layer: str | None, problem: Problem, result: Result, shown: dict[str, Tensor], *, counts: bool
) -> None:
    """Report counts to the observer, and the forward pass's tensors to whoever watches."""
    p_counts = None
    if counts and result.lost is not None:
        p_counts = statistics.counts_of(problem, result.saturated, result.lost)
        observer.count(layer, "values", "p", result.amaxes["s"], p_counts)
    if not observer.watched(layer) or observer.again():
        return
    softcap = None
    if problem.call.softcap is not None:
        softcap = torch.tensor(problem.call.softcap, dtype=torch.float32, device="cpu")
    more = {
        "s/value": result.scores,
        "p/scale": result.scale_p,
        "p/codes": result.p_codes,
        "softcap/value": softcap,
        "sinks/value": problem.sinks,
        "p/amax": None if p_counts is None else result.amaxes["s"],
        "p/counts": p_counts,
    }
    values = {f"{role}/value": x for role, x in shown.items()}
    observer.show(layer, "forward", values | more, result.tensors)


def _save(
    ctx,
    problem: Problem,
    result: Result,
    tensors: dict[str, Heads],
    qkv: tuple[Tensor, Tensor, Tensor],
    o: Tensor,
) -> None:
    """Save the residuals and what ``_load`` rebuilds the problem from."""
    variant, out = problem.variant, problem.variant.out
    given = problem.sinks, *problem.documents, *problem.scales.values()
    if variant.real:
        ctx.save_for_backward(*given, *qkv)
    elif variant.backward == "bf16":
        ctx.save_for_backward(*given, *map(in_bf16, (result.o, *qkv)), result.lse)
    elif variant.backward is not None:
        kept: tuple[Tensor, Tensor | None]
        if out.bits == 8:
            kept = result.tensors["o"].codes, result.tensors["o"].scale_inv
        else:  # o itself, if it holds the output's numbers
            holds = o.dtype in (torch.float32, DTYPES[out.name])
            kept = (o if holds else result.o.to(DTYPES[out.name])), None
        if variant.granularity == "mx_1x32":
            ctx.save_for_backward(*given, kept[0], *qkv, result.lse)
        else:
            coded = [tensors[role] for role in ("q", "k", "v")]
            codes, inverses = [x.codes for x in coded], [x.scale_inv for x in coded]
            scales = result.scale_p, result.scale_inv_p
            ctx.save_for_backward(*given, *kept, result.lse, *scales, *codes, *inverses)


def _load(ctx, call: RankCall, roles: tuple[str, ...]) -> tuple[Problem, Saved]:
    # checkpointing unpacks saved tensors once
    sinks, q_documents, k_documents, *rest = ctx.saved_tensors
    scales, rest = dict(zip(roles, rest, strict=False)), rest[len(roles) :]
    documents = Documents(q_documents, k_documents)
    problem, variant = Problem(call, ctx.shape, documents, scales, sinks), call.variant
    unit = torch.ones((), device=rest[0].device, dtype=torch.float32)
    if variant.real:
        q, k, v = rest
        return problem, Saved.from_inputs((q, k, v), q, unit)
    if variant.backward == "bf16":
        o, q, k, v, lse = rest
        return problem, Saved.from_inputs((q, k, v), o, lse)
    if variant.granularity == "mx_1x32":
        o, q, k, v, lse = rest
        scale_p = torch.full((), mx.P_SCALE, dtype=torch.float32, device="cpu")
        tensors = operands.quantize(q, k, v, problem)
        return problem, Saved((q, k, v), o, None, lse, Scales(scale_p, unit), tensors)
    o, o_scale_inv, lse, scale, scale_inv, *codes = rest
    tensors = {}
    for role, x, inverse in zip(("q", "k", "v"), codes[:3], codes[3:], strict=True):
        tensors[role] = Heads(x, unit, unit, inverse, problem.blocks(role))
    tensors = attention_context.gathered(tensors, call)
    return problem, Saved(None, o, o_scale_inv, lse, Scales(scale, scale_inv), tensors)


def _backward(ctx, call: RankCall, roles: tuple[str, ...], do: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and sinks (None without any), in their dtypes."""
    problem, saved = _load(ctx, call, roles)
    cast = problem.low and call.variant.backward == "cast"
    keep = call.variant.gradient_matrices if observer.watched(ctx.layer) else ()
    counts = cast and observer.counts(ctx.layer)
    (do,) = problem.without_padding(do)
    grads = gradients(do, saved, problem, report=_report(ctx, counts), keep=keep)
    shown: dict[str, Tensor | None] = {"do/value": do, "p/scale": saved.scale_p.scale}
    _show_gradients(ctx.layer, problem, grads, shown, counts=counts)
    _observe(ctx.seen, grads.amaxes)
    if ctx.layer is not None and cast:
        _report_do(ctx.layer, do, saved, grads, problem)
    qkv_grads = (x.to(dtype) for x, dtype in zip(grads[:3], ctx.dtypes, strict=True))
    sinks, dsinks = problem.sinks, grads.dsinks
    return *qkv_grads, None if sinks is None or dsinks is None else dsinks.to(sinks.dtype)


def _show_gradients(
    layer: str | None,
    problem: Problem,
    grads: Gradients,
    shown: dict[str, Tensor | None],
    *,
    counts: bool,
) -> None:
    """Report counts to the observer, and the backward pass's tensors to whoever watches."""
    ds_counts = None
    if counts and grads.saturated_ds is not None and grads.lost is not None:
        ds_counts = statistics.counts_of(problem, grads.saturated_ds, grads.lost)
        observer.count(layer, "grad_q", "ds", grads.amaxes["ds"], ds_counts)
    matrices = grads.matrices
    if not matrices:
        return
    shown |= {
        "p/codes": matrices.get("p_codes"),
        "ds/value": matrices["ds"],
        "ds/codes": matrices.get("ds_codes"),
        "ds/scale": grads.scale_ds.scale if "ds_codes" in matrices else None,
        "ds/amax": None if ds_counts is None else grads.amaxes["ds"],
        "ds/counts": ds_counts,
    }
    shown |= {f"{role}/value": getattr(grads, role) for role in ("dq", "dk", "dv")}
    observer.show(layer, "backward", shown, grads.tensors)


def _report_do(layer: str, do: Tensor, saved: Saved, grads: Gradients, problem: Problem) -> None:
    """Report do to the observer; under MX also what has other codes along tokens."""
    values = dict(zip(("q", "k", "v"), saved.inputs or (), strict=False)) | {"do": do}
    for product, role in first_uses(problem.variant):
        if product in ("scores", "values"):
            continue
        x, tensor = values[role], grads.tensors["do"]
        if problem.variant.granularity == "mx_1x32" and along_tokens(product, role):
            tensor = mx.along_tokens(x, role, problem)
        observer.report(layer, product, role, x, tensor)


def _observe(seen: Mapping[str, Tensor], amaxes: Mapping[str, Tensor]) -> None:
    """Merge a pass's amaxes into the observations of its roles."""
    for role, observation in seen.items():
        if role in amaxes:
            delayed.merge_(observation, amaxes[role])
