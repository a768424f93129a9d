"""FP8 attention for JAX (spec A): softmax(q k^T scale) v, by tiles of keys, in one custom_vjp.

    o = attention.apply(q, k, v, variant="cudnn", mask=Mask(causal=True))

Read it from top to bottom. ``apply`` is the layer; ``forward`` and ``backward`` also give codes,
scales and amaxes, for a comparison with ``fp8ref.sim.attention``. ``operands`` quantizes and cuts
into blocks and tiles, ``output`` is the pass over them, ``gradients`` the backward pass, ``real``
real arithmetic.

The products of codes are XLA's dots of FP8 operands, as those of ``linear``. They accumulate as the
library does (G-7), so that a variant's ``plan`` only says whether fast accumulation is asked for;
inside ``hardware.simulating`` as simulated hardware does (G-19). A
tile's product with v is a GEMM of its own, whose sum is added in float32: a variant whose
``promotion`` is None is run with 1.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8ref.formats import BFLOAT16
from fp8ref.jax import delayed
from fp8ref.jax.attention import observer, output, statistics
from fp8ref.jax.attention import real as real
from fp8ref.jax.attention.gradients import gradients as gradients
from fp8ref.jax.attention.gradients import mx as gradients_mx
from fp8ref.jax.attention.gradients.gradients import Gradients
from fp8ref.jax.attention.operands import context, heads
from fp8ref.jax.attention.operands import inputs as inputs
from fp8ref.jax.attention.operands.inputs import DeviceCall, Inputs
from fp8ref.jax.attention.output import Result
from fp8ref.jax.distributed import sharding
from fp8ref.jax.transforms import derivatives
from fp8ref.jax.transforms.eager import as_one_program
from fp8ref.spec import support
from fp8ref.spec.attention import variants as data
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import Mask, Variant

__all__ = ["Carried", "DeviceCall", "apply", "apply_with_stats", "backward", "forward"]


class Carried(NamedTuple):
    """What a layer's attention carries from pass to pass of a step.

    scales  {role: scale} of earlier steps, of roles q, k, v, s, o, do, ds, dq, dk, dv: float32 of
            the shapes of ``operands.heads.Heads`` (A-12). Other roles' come from the tensors
            themselves; that of s from the amax 1.
    seen    observations by role, ``delayed.unseen`` of ``attention.delayed.casts``; None: amaxes
            are not observed.
    tap     float32 zeros [len(attention_products.RECORDED), stats.LENGTH]; inside shard_map varying
            along all axes of its mesh; None: operands are not measured.
    """

    scales: Mapping | None = None
    seen: delayed.Seen | None = None
    tap: Array | None = None


def apply(
    q: Array,
    k: Array,
    v: Array,
    *,
    variant: str | Variant | Call,
    mask: Mask | None = None,
    documents=None,
    scales: Mapping | None = None,
    sinks: Array | None = None,
) -> Array:
    """softmax(q k^T scale) v by a variant, with its gradients.

    Works under jit, grad, vmap and shard_map. Memory is linear in the lengths: the backward pass
    saves codes, o and the log-sum-exp, and makes probabilities again, a tile at a time.

    variant      a name or a Variant; or a Call, which also has the softmax scale, a softcap, the
                 layout and the arithmetic; or a ``DeviceCall``, which has mesh axes too.
    documents    integers [B, T], or a pair of them for queries and keys: a query sees its own
                 document. A token whose document is negative is padding: it is not read, and its
                 output and gradients are 0.
    scales       delayed scaling: those of ``Carried``.
    sinks        [H] of float32, float16 or bfloat16: a logit of each query head, which joins the
                 sum of a row and has no value.
    Shapes:   q [B, H, Tq, D], k and v [B, Hkv, Tk, D], Hkv dividing H; of one dtype, float32,
              float16 or bfloat16. The output has q's shape and dtype.
    Order:    as ``forward``; of gradients A-14 to A-16.
    Specials: a row that sees no key is 0, and so are its gradients of q, k and v. NaN or infinities
              in q, k or v make NaN of the outputs that their scale reaches.
    Gradient: by q, k, v and sinks, in reverse mode, once; scales are constants.
    Raises:   ValueError: as ``forward``; a Call that keeps matrices; where gradients are taken, a
              variant without a backward pass, forward mode, a second derivative, shard_map without
              check_vma.
    """
    carried = Carried(scales)
    return apply_with_stats(
        q, k, v, variant=variant, mask=mask, documents=documents, sinks=sinks, carried=carried
    )[0]


def apply_with_stats(
    q: Array,
    k: Array,
    v: Array,
    *,
    variant: str | Variant | Call,
    mask: Mask | None = None,
    documents=None,
    sinks: Array | None = None,
    carried: Carried,
) -> tuple[Array, Carried]:
    """``apply``, and with a tap the quantization statistics of its operands (spec Q-13), with seen
    the amaxes that delayed scales come from (A-12). Raises as apply.

    Returns:  (output, carried). seen is merged with observations of q, k, v, s and o, and the
              gradient by seen with those of the backward pass (H-4). The tap, of a variant in FP8,
              holds measurements of this device's part of q, k and v; the gradient by it those of
              the backward pass. Equal codes of several products are measured once, in the first. P
              and dS are counted.
    """
    call = DeviceCall.resolve(variant, mask)
    call.check_nothing_kept()
    qkv = inputs.prepare(q, k, v, call, documents, sinks)
    fp8 = call.variant.fmt.bits == 8
    if carried.tap is not None and not fp8:
        raise ValueError(
            f"statistics need FP8 operands; got variant {call.variant.name!r}. Leave the tap out."
        )
    watcher = observer.watcher()
    measures = fp8 and (carried.tap is not None or watcher is not None)
    call = dataclasses.replace(call, measures=measures, watcher=watcher)
    if call.tokens:
        context.check(call, qkv)
    scales = data.check_scales(carried.scales, call.variant, call.variant.roles)
    scales = {role: lax.stop_gradient(jnp.asarray(x)) for role, x in scales.items()}
    seen = None if carried.seen is None else dict(carried.seen)
    inputs.check_seen(seen or {}, call.variant)
    o, *later = _attention(
        _ruled(qkv, call, derivatives.reverse_only), Carried(scales, seen, carried.tap), call
    )
    return data.in_layout(call.layout, o), Carried(carried.scales, *later)


def forward(
    q,
    k,
    v,
    *,
    variant: str | Variant | Call,
    mask: Mask | None = None,
    documents=None,
    scales=None,
    sinks=None,
) -> Result:
    """softmax(q k^T scale) v by a variant, with all that was quantized on the way. Not
    differentiable. Arguments are those of ``apply``; scales of roles q, k, v, s, o.

    Shapes:   as ``apply``; see ``Result``.
    Order:    stated: the tiles' own (A-6); in a tile A-4 to A-9; at the end A-10 and A-11. fast:
              A-18.
    Specials: as ``apply``.
    Raises:   ValueError: an unknown variant, or one that this backend does not run; shapes, dtypes
              or documents that do not fit; scales for roles without one; features that the variant
              does not take; inside shard_map, a scale of a whole tensor without ``over``; a mesh of
              Explicit axes; what a ``DeviceCall`` refuses; inside ``hardware.simulating`` MX
              blocks, and a mesh outside shard_map.
    Source:   spec A-1 to A-13, A-22, A-23.
    """
    call = DeviceCall.resolve(variant, mask)
    qkv = inputs.prepare(q, k, v, call, documents, sinks)
    by_role = data.check_scales(scales, call.variant, data.ROLES)
    result = output.run(qkv, by_role, call, observe=True)
    o = data.in_layout(call.layout, result.o)
    return result._replace(o=o, documents=qkv.documents, sinks=qkv.sinks)


def backward(
    do,
    q,
    k,
    v,
    result: Result,
    *,
    variant: str | Variant | Call,
    mask: Mask | None = None,
    scales=None,
) -> Gradients:
    """The gradients of q, k and v, given that of o, with all that was quantized on the way.

    result       of ``forward``, with the same other arguments; it has the documents and the sinks.
    variant      as in ``forward``; of a Call with ``keep_ds``, the matrices of the pass are
                 returned, which are not linear in the lengths (``Gradients.matrices``).
    scales       {role: scale} of roles do, ds, dq, dk, dv, and s.
    Shapes:   do [B, H, Tq, D], as o; q, k, v as in forward; see ``Gradients``.
    Order:    stated: A-14 to A-16, A-25; a sum over keys or queries is one of float32 sums of tiles
              or blocks. fast: A-18.
    Specials: a row that sees no key has no gradient.
    Raises:   ValueError: a variant without a backward pass; what forward refuses; a do or a result
              of another shape.
    Source:   spec A-14 to A-16.
    """
    call = DeviceCall.resolve(variant, mask)
    support.require("gradients of attention", "jax", call.variant)
    if not isinstance(result, Result):
        raise ValueError(f"result is what forward returned; got {type(result).__name__}.")
    result = result._replace(o=data.in_layout(call.layout, result.o))
    qkv = inputs.prepare(q, k, v, call, result.documents, result.sinks)
    do = inputs.checked("do", data.in_layout(call.layout, do))
    for name, x in (("result", result.o), ("do", do)):
        if jnp.shape(x) != qkv.q.shape:
            raise ValueError(f"{name} has the shape of o, {qkv.q.shape}; got {jnp.shape(x)}.")
    data.check_result(call.variant, result.tensors)
    do = do if qkv.documents is None else inputs.without_padding(do, qkv.documents[0])
    roles = ("s", *call.variant.roles[len(data.ROLES) :])
    by_role = data.check_scales(scales, call.variant, roles)
    grads = _backward(inputs.like(do, qkv.q), qkv, result, by_role, call)
    dq, dk, dv = (data.in_layout(call.layout, x) for x in grads[:3])
    return grads._replace(dq=dq, dk=dk, dv=dv)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attention(qkv: Inputs, carried: Carried, call: DeviceCall):
    """(o in q's dtype, seen, tap); differentiated by ``_saved`` and ``_gradients``."""
    return _passed(qkv, carried, call)[1]


def _passed(qkv: Inputs, carried: Carried, call: DeviceCall):
    """(result, the layer's outputs: o in q's dtype, seen, tap)."""
    scales = _select_roles(carried, data.ROLES)
    result = _watched(qkv, scales, call, observe=carried.seen is not None)
    tap = carried.tap
    if tap is not None:
        tap = tap + statistics.rows(statistics.measure_forward(qkv, result, call))
    seen = observed(carried.seen, result.amaxes, carried.seen)
    return result, (result.o.astype(qkv.q.dtype), seen, tap)


def observed(
    seen: delayed.Seen | None, amaxes: Mapping[str, Array], own_seen: delayed.Seen | None
) -> delayed.Seen | None:
    """Observations merged with the amaxes of a pass (H-4); over a vmapped axis that ``own_seen``,
    the layer's seen, lacks, the largest.
    """
    if seen is None or own_seen is None:
        return None
    return delayed.merged(seen, amaxes, own_seen)  # type: ignore[arg-type]


def _saved(qkv: Inputs, carried: Carried, call: DeviceCall):
    """The layer's outputs and residuals: codes, o, LSE; q, k, v if needed (A-14, A-16)."""
    support.require("gradients of attention", "jax", call.variant)
    if jax.typeof(qkv.q).sharding.mesh.manual_axes and not sharding.checks_variance(qkv.q):
        raise ValueError(
            f"{call.name}: gradients inside shard_map need check_vma=True, which sums those of "
            "shared k and v. Use jax.shard_map(..., check_vma=True)."
        )
    qkv = _ruled(qkv, call, derivatives.not_again)
    result, out = _passed(qkv, carried, call)
    variant = call.variant
    whole: tuple[Array, ...] = qkv[:3]
    kept = result._replace(o=out[0], amaxes={}, counts=None)
    if variant.real:
        pass
    elif variant.backward == "bf16":
        kept = kept._replace(tensors={}, o=heads.to_hp(result.o, BFLOAT16))
        whole = tuple(heads.to_hp(x, BFLOAT16) for x in qkv[:3])
    else:
        # An output in FP8 is among the tensors. In bfloat16 it is o itself, if q is.
        fp8 = variant.out.bits == 8
        o = jnp.zeros((), jnp.float32) if fp8 else heads.to_hp(result.o, variant.out)
        kept = kept._replace(o=o)
        if variant.granularity == "mx_1x32":
            kept = kept._replace(tensors={"v": result.tensors["v"]})
        else:
            whole = ()
    return out, derivatives.saved(
        (whole, qkv.documents, qkv.sinks, kept, carried._replace(tap=None))
    )


def _gradients(call: DeviceCall, saved, cotangents):
    """Gradients in the order of ``_attention``'s arguments. The cotangents of seen and tap carry
    the observations and measurements of later uses."""
    do, later, tap = cotangents
    whole, documents, sinks, result, carried = saved
    # Where codes are all that is needed, they also tell the shapes.
    q, k, v = whole or (result.tensors[role].codes for role in ("q", "k", "v"))
    do = derivatives.not_again(do, call.name, "attention")
    scales = _select_roles(carried, ("s", *data.GRADIENT_ROLES))
    qkv = Inputs(q, k, v, documents, sinks)
    do = do if documents is None else inputs.without_padding(do, documents[0])
    watched = call.watcher is not None
    grads = _backward(do, qkv, result, scales, dataclasses.replace(call, keep_ds=watched))
    if watched:
        shown = observer.backward_arrays(do, grads, _scale_of_p(result, call))
        observer.show(call, "backward", shown)
    if tap is not None and call.variant.backward == "cast":
        tap = tap + statistics.rows(statistics.measure_backward(do, qkv, grads, call))
    dsinks = None if sinks is None or grads.dsinks is None else grads.dsinks.astype(sinks.dtype)
    dq, dk, dv = (x.astype(do.dtype) for x in grads[:3])
    seen = observed(later, grads.amaxes, carried.seen)
    constants = jax.tree.map(jnp.zeros_like, carried.scales)
    return Inputs(dq, dk, dv, None, dsinks), Carried(constants, seen, tap)


derivatives.defvjp(_attention, _saved, _gradients)


def _scale_of_p(result: Result, call: DeviceCall) -> Array:
    """The factor of probabilities in the backward pass."""
    if call.variant.backward == "bf16":
        return jnp.ones((), jnp.float32)
    if call.variant.granularity == "mx_1x32":
        return jnp.float32(gradients_mx.P_SCALE)
    return result.scale_p


def _ruled(qkv: Inputs, call: DeviceCall, rule: Callable) -> Inputs:
    """The inputs; those with a gradient get a rule of ``derivatives``."""
    q, k, v = (rule(x, call.name, "attention") for x in qkv[:3])
    sinks = None if qkv.sinks is None else rule(qkv.sinks, call.name, "attention")
    return Inputs(q, k, v, qkv.documents, sinks)


def _select_roles(carried: Carried, roles: tuple[str, ...]) -> dict[str, Array]:
    return {role: x for role, x in (carried.scales or {}).items() if role in roles}


def _watched(qkv: Inputs, scales: dict, call: DeviceCall, *, observe: bool) -> Result:
    """The forward pass, reported to observers; drops matrices kept for them alone."""
    observe |= call.measures
    if call.watcher is None:
        return output.run(qkv, scales, call, observe=observe)
    fp8, real = call.variant.fmt.bits == 8, call.variant.real
    keeping = dataclasses.replace(call, keep_p=fp8, keep_s=not real)
    result = output.run(qkv, scales, keeping, observe=observe)
    observer.show(call, "forward", observer.forward_arrays(qkv, result, call))
    return result._replace(p_codes=None, scores=None)


@as_one_program("call", unnamed={"call": DeviceCall.unnamed})
def _backward(do: Array, qkv: Inputs, result: Result, scales: dict, call: DeviceCall) -> Gradients:
    if call.variant.backward == "exact":
        return real.backward(do, qkv, call)
    if call.variant.backward == "bf16":
        return gradients.backward_in_bf16(do, qkv, result, call)
    if call.variant.granularity == "mx_1x32":
        return gradients_mx.backward(do, qkv, result, call)
    return gradients.backward(do, qkv, result, scales, call)
