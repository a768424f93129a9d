"""Attention in FP8 (spec A): softmax(q k^T scale) v, a tile of keys after another, joined to JAX's
autodiff by one custom_vjp.

    o = attention.apply(q, k, v, variant="cudnn", mask=Mask(causal=True))

Read it from top to bottom. ``apply`` is the layer; ``forward`` and ``backward`` also give codes,
scales and amaxes, for a comparison with ``fp8ref.sim.attention``. ``operands`` quantizes and cuts
into blocks and tiles, ``output`` is the pass over them, ``gradients`` the backward pass, ``real``
real arithmetic.

The products of codes are XLA's dots of FP8 operands, as those of ``linear``. They accumulate as the
library does (G-7), so that a variant's ``plan`` only says whether fast accumulation is asked for. A
tile's product with v is a GEMM of its own, whose sum is added in float32: a variant whose
``promotion`` is None is run with 1.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from fp8ref.formats import BFLOAT16
from fp8ref.jax import delayed
from fp8ref.jax.attention import observer, output, statistics
from fp8ref.jax.attention import real as real
from fp8ref.jax.attention.gradients import bf16 as gradients_bf16
from fp8ref.jax.attention.gradients import gradients as gradients
from fp8ref.jax.attention.gradients import mx as gradients_mx
from fp8ref.jax.attention.gradients.gradients import Gradients
from fp8ref.jax.attention.operands import context, heads
from fp8ref.jax.attention.operands import inputs as inputs
from fp8ref.jax.attention.operands.inputs import Inputs, Use
from fp8ref.jax.attention.output import Result
from fp8ref.jax.distributed import sharding
from fp8ref.jax.gemm import hardware
from fp8ref.jax.transforms import derivatives
from fp8ref.jax.transforms.eager import as_one_program
from fp8ref.spec.attention import variants as data
from fp8ref.spec.attention.variants import FULL, Arithmetic, Layout, Mask, Variant
from fp8ref.spec.hardware import Multiply


def apply(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    variant: str | Variant,
    mask: Mask = FULL,
    scale: float | None = None,
    documents=None,
    scales=None,
    seed: int = 0,
    arithmetic: Arithmetic = "fast",
    over: tuple[str, ...] = (),
    name: str = "",
    multiply: Multiply | None = None,
    tokens: str = "",
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    layout: Layout = "bhtd",
) -> jax.Array:
    """softmax(q k^T scale) v by a variant, with its gradients.

    Works under jit, grad, vmap and shard_map. Memory is linear in the lengths: the backward pass
    saves codes, o and the log-sum-exp, and makes probabilities again, a tile at a time.

    scale        of scores, a number, rounded to float32; None: 1 / sqrt(D).
    documents    integers [B, T], or a pair of them for queries and keys: a query sees its own
                 document. A token whose document is negative is padding: it is not read, and its
                 output and gradients are 0.
    scales       {role: scale} of roles q, k, v, s, o, do, ds, dq, dk, dv: float32 of the shapes of
                 ``operands.heads.Heads``: delayed scaling. The others come from the tensors
                 themselves; that of s from the amax 1.
    seed         of a rotated variant's signs.
    arithmetic   ``fast``, XLA's own sums and functions, within a bound of the specification (A-18);
                 ``stated``, every operation in its order, exponentials in float64, rounded, as
                 ``exponentials`` says.
    over         mesh axes, inside shard_map, that cut batch and heads: amaxes of whole tensors are
                 taken along them too.
    name         of the layer, by which ``proof`` knows its products.
    multiply     simulated hardware, which multiplies codes in place of XLA's dots (spec G-19).
    tokens       the mesh axis, inside shard_map and among ``over``, that cuts the tokens of q, k
                 and v: codes of k and v are gathered (spec A-21).
    softcap      scores become softcap tanh(score / softcap), before the mask; a number, rounded to
                 float32.
    sinks        [H] of float32, float16 or bfloat16: a logit of each query head, which joins the
                 sum of a row and has no value.
    layout       of q, k, v, o and their gradients: ``bhtd``, or ``bthd``, tokens before heads, as
                 jax.nn.dot_product_attention.
    Shapes:   q [B, H, Tq, D], k and v [B, Hkv, Tk, D], Hkv dividing H; of one dtype, float32,
              float16 or bfloat16. The output has q's shape and dtype.
    Order:    as ``forward``; of gradients A-14 to A-16.
    Specials: a row that sees no key is 0, and so are its gradients of q, k and v. NaN or infinities
    in q, k or v make NaN
              of the outputs that their scale reaches.
    Gradient: by q, k, v and sinks, in reverse mode, once; scales are constants.
    Raises:   ValueError: as ``forward``; where gradients are taken, a variant without a backward
              pass, forward mode, a second derivative, shard_map without check_vma; a name with '/',
              '(' or ')'.
    """
    options: dict = {
        "variant": variant,
        "mask": mask,
        "scale": scale,
        "documents": documents,
        "scales": scales,
        "seed": seed,
    }
    options |= {
        "arithmetic": arithmetic,
        "over": over,
        "name": name,
        "multiply": multiply,
        "tokens": tokens,
        "softcap": softcap,
    }
    return apply_with_stats(q, k, v, **options, sinks=sinks, tap=None, layout=layout)[0]


def apply_with_stats(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    variant: str | Variant,
    mask: Mask = FULL,
    scale: float | None = None,
    documents=None,
    scales=None,
    seed: int = 0,
    arithmetic: Arithmetic = "fast",
    over: tuple[str, ...] = (),
    name: str = "",
    tap: jax.Array | None,
    multiply: Multiply | None = None,
    tokens: str = "",
    seen: delayed.Seen | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    layout: Layout = "bhtd",
) -> tuple[jax.Array, delayed.Seen | None, jax.Array | None]:
    """``apply``, and with a tap the quantization statistics of its operands (spec Q-13), with seen
    the amaxes that delayed scales come from (A-12). Raises as apply.

    tap       float32 zeros [len(attention_products.RECORDED), stats.LENGTH]; inside shard_map
              varying along all axes of its mesh. The variant is in FP8.
    seen      observations by role, ``delayed.unseen`` of ``attention.delayed.casts``.
    Returns:  (output, seen, tap). seen is merged with observations of q, k, v, s and o, and the
              gradient by seen with those of the backward pass (H-4). The tap holds measurements of
              this device's part of q, k and v; the gradient by it those of the backward pass. Equal
              codes of several products are measured once, in the first. P and dS are counted.
    """
    q, k, v = data.heads_first(layout, q, k, v)
    use, qkv = inputs.prepare(
        q,
        k,
        v,
        variant,
        mask,
        scale,
        documents,
        seed,
        arithmetic,
        over,
        softcap=softcap,
        sinks=sinks,
    )
    if any(sign in name for sign in "/()"):
        raise ValueError(
            "attention's name has no '/', '(' or ')', which part the names of scopes; got "
            f"{name!r}. Write dots."
        )
    if tap is not None and use.variant.fmt.bits != 8:
        raise ValueError(
            f"statistics are of FP8 operands; variant {use.variant.name!r} has "
            f"{use.variant.fmt}. Give no tap."
        )
    watcher = observer.watcher()
    measures = tap is not None or (watcher is not None and use.variant.fmt.bits == 8)
    use = dataclasses.replace(
        use, layer=name, measures=measures, watcher=watcher, multiply=multiply
    )
    if multiply is not None:
        _check_simulated(use, qkv)
    if tokens:
        use = dataclasses.replace(use, tokens=tokens)
        context.check(use, qkv)
    by_role = inputs.check_scales(scales, use.variant, use.variant.roles)
    by_role = {role: lax.stop_gradient(jnp.asarray(x)) for role, x in by_role.items()}
    tensors = [
        None if x is None else derivatives.reverse_only(x, use.name, "attention")
        for x in (*qkv[:3], qkv.sinks)
    ]
    if seen is not None:
        inputs.check_seen(seen, use.variant)
    o, seen, tap = _attention(
        *tensors, qkv.documents, by_role, None if seen is None else dict(seen), tap, use
    )
    return data.in_layout(layout, o), seen, tap


def forward(
    q,
    k,
    v,
    *,
    variant: str | Variant,
    mask: Mask = FULL,
    scale: float | None = None,
    documents=None,
    scales=None,
    seed: int = 0,
    keep_p: bool = False,
    keep_s: bool = False,
    arithmetic: Arithmetic = "fast",
    over: tuple[str, ...] = (),
    softcap: float | None = None,
    sinks=None,
    layout: Layout = "bhtd",
) -> Result:
    """softmax(q k^T scale) v by a variant, with all that was quantized on the way. Not
    differentiable.

    keep_p       return the codes of the probabilities, which are not linear in the lengths. Other
                 arguments are those of ``apply``; scales of roles q, k, v, s, o.
    keep_s       return the scores, likewise.
    layout       of q, k, v and o, as ``apply``; all else in the result has heads before tokens.
    Shapes:   as ``apply``; see ``Result``.
    Order:    stated: the tiles' own (A-6); in a tile A-4 to A-9; at the end A-10 and A-11. fast:
              A-18.
    Specials: as ``apply``.
    Raises:   ValueError: an unknown variant, or one that this backend does not run; shapes, dtypes
              or documents that do not fit; scales for roles without one; features that the variant
              does not take; inside shard_map, a scale of a whole tensor without ``over``; a mesh of
              Explicit axes.
    Source:   spec A-1 to A-13, A-22, A-23.
    """
    q, k, v = data.heads_first(layout, q, k, v)
    use, qkv = inputs.prepare(
        q,
        k,
        v,
        variant,
        mask,
        scale,
        documents,
        seed,
        arithmetic,
        over,
        softcap=softcap,
        sinks=sinks,
    )
    by_role = inputs.check_scales(scales, use.variant, data.ROLES)
    use = dataclasses.replace(use, keep_p=keep_p, keep_s=keep_s)
    result = output.run(qkv, by_role, use, observe=True)
    return result._replace(o=data.in_layout(layout, result.o))


def backward(
    do,
    q,
    k,
    v,
    result: Result,
    *,
    variant: str | Variant,
    mask: Mask = FULL,
    scale: float | None = None,
    documents=None,
    scales=None,
    arithmetic: Arithmetic = "fast",
    over: tuple[str, ...] = (),
    softcap: float | None = None,
    sinks=None,
    keep: bool = False,
    layout: Layout = "bhtd",
) -> Gradients:
    """The gradients of q, k and v, given that of o, with all that was quantized on the way.

    result       of ``forward``, with the same other arguments.
    scales       {role: scale} of roles do, ds, dq, dk, dv, and s.
    keep         return the matrices of the pass, which are not linear in the lengths
                 (``Gradients.matrices``).
    layout       of do, q, k, v, the result's o and the gradients.
    Shapes:   do [B, H, Tq, D], as o; q, k, v as in forward; see ``Gradients``.
    Order:    stated: A-14 to A-16, A-25; a sum over keys or queries is one of float32 sums of tiles
              or blocks. fast: A-18.
    Specials: a row that sees no key has no gradient.
    Raises:   ValueError: a variant without a backward pass; what forward refuses; a do or a result
              of another shape.
    Source:   spec A-14 to A-16.
    """
    q, k, v, do = data.heads_first(layout, q, k, v, do)
    result = (
        result._replace(o=data.in_layout(layout, result.o))
        if isinstance(result, Result)
        else result
    )
    use, qkv = inputs.prepare(
        q, k, v, variant, mask, scale, documents, 0, arithmetic, over, softcap=softcap, sinks=sinks
    )
    _check_differentiable(use)
    if not isinstance(result, Result) or jnp.shape(result.o) != qkv.q.shape:
        raise ValueError(
            f"result is what forward gave for q {qkv.q.shape}; got {type(result).__name__}."
        )
    data.check_result(use.variant, result.tensors)
    do = inputs.checked("do", do)
    if do.shape != qkv.q.shape:
        raise ValueError(f"do has the shape of o, {qkv.q.shape}; got {do.shape}.")
    do = do if qkv.documents is None else inputs.without_padding(do, qkv.documents[0])
    by_role = inputs.check_scales(scales, use.variant, ("s", *use.variant.roles[len(data.ROLES) :]))
    grads = _backward(inputs.like(do, qkv.q), qkv, result, by_role, use, keep=keep)
    return grads._replace(
        **{role: data.in_layout(layout, getattr(grads, role)) for role in ("dq", "dk", "dv")}
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(8,))
def _attention(
    q,
    k,
    v,
    sinks: jax.Array | None,
    documents,
    scales: dict,
    seen: dict | None,
    tap: jax.Array | None,
    use: Use,
):
    """(o in q's dtype, seen, tap); differentiable by ``_saved`` and ``_gradients``."""
    qkv = Inputs(q, k, v, documents, sinks)
    result = _watched(qkv, _select_roles(scales, data.ROLES), use, observe=seen is not None)
    return (
        result.o.astype(q.dtype),
        _merged(seen, result.amaxes, seen),
        _measured(tap, qkv, result, use),
    )


def _merged(seen: dict | None, amaxes: dict, own_seen: dict | None) -> dict | None:
    """Observations merged with the amaxes of a pass (H-4); over a vmapped axis that ``own_seen``,
    the layer's seen, lacks, the largest.
    """
    if seen is None or own_seen is None:
        return None
    return delayed.merged(seen, {role: amaxes[role] for role in seen if role in amaxes}, own_seen)


def _measured(tap: jax.Array | None, qkv: Inputs, result: Result, use: Use) -> jax.Array | None:
    """The tap with measurements of q, k and v."""
    return (
        None if tap is None else tap + statistics.rows(statistics.measure_forward(qkv, result, use))
    )


def _saved(
    q,
    k,
    v,
    sinks: jax.Array | None,
    documents,
    scales: dict,
    seen: dict | None,
    tap: jax.Array | None,
    use: Use,
):
    """o, and what the backward pass needs: codes, o and the log-sum-exp. q, k and v themselves
    where it quantizes them along other axes (A-16), or not at all (A-14)."""
    _check_differentiable(use)
    if jax.typeof(q).sharding.mesh.manual_axes and not sharding.checks_variance(q):
        raise ValueError(
            f"{use.name}: gradients inside shard_map need check_vma=True; without it, those of "
            "k and v that several devices share would not be summed. Use jax.shard_map(..., "
            "check_vma=True)."
        )
    q, k, v = (derivatives.not_again(x, use.name, "attention") for x in (q, k, v))
    sinks = None if sinks is None else derivatives.not_again(sinks, use.name, "attention")
    qkv = Inputs(q, k, v, documents, sinks)
    result = _watched(qkv, _select_roles(scales, data.ROLES), use, observe=seen is not None)
    o = result.o.astype(q.dtype)
    # An output in FP8 is among the tensors. In bfloat16 it is o itself, if q is.
    variant, kept = use.variant, result._replace(o=o)
    if not variant.real:
        kept = result._replace(
            o=jnp.zeros((), jnp.float32)
            if variant.out.bits == 8
            else heads.to_hp(result.o, variant.out)
        )
    if variant.backward == "bf16":
        kept = kept._replace(tensors={}, o=heads.to_hp(result.o, BFLOAT16))
        q, k, v = (heads.to_hp(x, BFLOAT16) for x in (q, k, v))
    elif variant.granularity == "mx_1x32":
        kept = kept._replace(tensors={"v": result.tensors["v"]})
    keeps = variant.real or variant.backward == "bf16" or variant.granularity == "mx_1x32"
    whole = (q, k, v) if keeps else None
    out = o, _merged(seen, result.amaxes, seen), _measured(tap, qkv, result, use)
    return out, derivatives.saved(
        (whole, documents, sinks, kept._replace(amaxes={}, counts=None), scales, seen)
    )


def _gradients(use: Use, saved, cotangents):
    """The gradients of q, k and v, in the order of ``_attention``'s arguments. The cotangents of
    seen and of the tap carry observations and measurements, of the uses after this one."""
    do, later, tap = cotangents
    whole, documents, sinks, result, scales, seen = saved
    # Where codes are all that is needed, they also tell the shapes.
    q, k, v = whole or (result.tensors[role].codes for role in ("q", "k", "v"))
    do = derivatives.not_again(do, use.name, "attention")
    by_role = _select_roles(scales, ("s", *data.GRADIENT_ROLES))
    qkv = Inputs(q, k, v, documents, sinks)
    do = do if documents is None else inputs.without_padding(do, documents[0])
    grads = _backward(do, qkv, result, by_role, use, keep=use.watcher is not None)
    if use.watcher is not None:
        observer.show(
            use, "backward", observer.backward_arrays(do, grads, _scale_of_p(result, use))
        )
    if tap is not None and use.variant.backward == "cast":
        tap = tap + statistics.rows(statistics.measure_backward(do, qkv, grads, use))
    dsinks = None if sinks is None or grads.dsinks is None else grads.dsinks.astype(sinks.dtype)
    return (
        *(x.astype(do.dtype) for x in grads[:3]),
        dsinks,
        None,
        jax.tree.map(jnp.zeros_like, scales),
        _merged(later, grads.amaxes, seen),
        tap,
    )


derivatives.defvjp(_attention, _saved, _gradients)


def _check_simulated(use: Use, qkv: Inputs) -> None:
    """ValueError where simulated hardware cannot multiply: MX blocks, numbers above 8 bits, devices
    other than CPUs.
    """
    if use.variant.fmt.bits != 8 or use.variant.granularity == "mx_1x32":
        raise ValueError(
            f"{use.name}: simulated hardware multiplies FP8 codes, and MX blocks are multiplied "
            "dequantized. Use variant 'cudnn', or leave multiply out."
        )
    mesh = jax.typeof(qkv.q).sharding.mesh
    hardware.check_devices(
        mesh.size or 1,
        mapped=bool(getattr(mesh, "manual_axes", ())),
        platform=jax.default_backend(),
    )


def _scale_of_p(result: Result, use: Use) -> jax.Array:
    """What the backward pass multiplies probabilities by."""
    if use.variant.backward == "bf16":
        return jnp.ones((), jnp.float32)
    return (
        jnp.float32(gradients_mx.P_SCALE)
        if use.variant.granularity == "mx_1x32"
        else result.scale_p
    )


def _select_roles(scales: dict, roles: tuple[str, ...]) -> dict:
    return {role: x for role, x in scales.items() if role in roles}


def _check_differentiable(use: Use) -> None:
    if use.variant.backward is None:
        names = ", ".join(
            name for name, variant in data.VARIANTS.items() if variant.backward is not None
        )
        raise ValueError(
            f"variant {use.variant.name!r} has no backward pass (A-1). Use one of {names}, or "
            "attention.differentiated(variant, 'bf16') of fp8ref."
        )


def _watched(qkv: Inputs, scales: dict, use: Use, *, observe: bool) -> Result:
    """The forward pass, shown to whoever watches; without the matrices that are shown alone."""
    observe |= use.measures
    if use.watcher is None:
        return output.run(qkv, scales, use, observe=observe)
    result = output.run(
        qkv,
        scales,
        dataclasses.replace(use, keep_p=use.variant.fmt.bits == 8, keep_s=not use.variant.real),
        observe=observe,
    )
    observer.show(use, "forward", observer.forward_arrays(qkv, result, use))
    return result._replace(p_codes=None, scores=None)


@as_one_program("use", "keep", unnamed={"use": Use.unnamed})
def _backward(
    do: jax.Array, qkv: Inputs, result: Result, scales: dict, use: Use, *, keep: bool = False
) -> Gradients:
    if use.variant.backward == "exact":
        return real.backward(do, qkv, use)
    if use.variant.backward == "bf16":
        return gradients_bf16.backward(do, qkv, result, use, keep=keep)
    if use.variant.granularity == "mx_1x32":
        return gradients_mx.backward(do, qkv, result, use, keep=keep)
    return gradients.backward(do, qkv, result, scales, use, keep=keep)
