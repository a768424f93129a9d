"""FP8 attention by cuDNN's own kernel (spec A-20): one custom call a pass, on an NVIDIA GPU.

    o, seen = attention_kernel.apply(q, k, v, scales=scales, mask=Mask(causal=True))

q, k, v and do are quantized here, with the bits of A-2; the kernel, which is closed, does all else.
It takes the scales of everything that it casts, and returns amaxes: scales are delayed (A-19).
``attention`` computes the same variant from tiles, whose sums are known.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8ref.formats import E4M3FN
from fp8ref.jax import delayed
from fp8ref.jax.attention.attention import observed
from fp8ref.jax.attention.operands import heads
from fp8ref.jax.attention.operands import inputs as inputs
from fp8ref.jax.attention.operands import operands as operands
from fp8ref.jax.attention.operands.inputs import DeviceCall, Inputs
from fp8ref.jax.distributed import one_device
from fp8ref.jax.gemm import hardware
from fp8ref.jax.quantize import cast, scales
from fp8ref.jax.states import moments
from fp8ref.jax.transforms import derivatives
from fp8ref.spec.attention import variants as data
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import Mask, Variant

CALLS = {"forward": "__cudnn$fmhaSoftmaxF8", "backward": "__cudnn$fmhaSoftmaxBackwardF8"}
"""XLA's names of the kernel's two passes in a compiled program."""

_AMAXES = {"dq": "amax_dQ", "dk": "amax_dK", "dv": "amax_dV", "ds": "amax_dP"}
"""{role: cuDNN's name of its amax}: its amax_dP, as its scale_dP, is that of dS (A-15)."""

FEATURES, TOKENS = 128, 128
"""The features of a head, and what divides both lengths, that cuDNN takes with gradients."""


def apply(
    q: Array,
    k: Array,
    v: Array,
    *,
    scales: Mapping,
    variant: str | Variant | Call = "cudnn",
    mask: Mask | None = None,
    seen: delayed.Seen | None = None,
    platform: str | None = None,
) -> tuple[Array, delayed.Seen | None]:
    """softmax(q k^T scale) v by cuDNN's FP8 kernel, with its gradients, on one device.

    Of a program for several, jax partitions the kernel's call and merges none of its amaxes.
    Tensors that visibly lie on several are refused; under a jit without a mesh of its own they are
    not seen.

    scales    delayed ones of roles s, o, do, ds, dq, dk and dv, and optionally of q, k and v,
              float32 ().
    variant   or a ``DeviceCall``, with a softmax scale, a layout and a layer's name.
    seen      observations by role (``attention.Carried``); they are merged with the kernel's
              amaxes.
    platform  what the program is compiled for; None: that of jax's own devices.
    Shapes:   q [B, H, T, 128], k and v [B, Hkv, S, 128], 128 dividing T and S; one dtype of high
              precision.
    Order:    of q, k, v, do and the outputs' scales A-2 and A-12; of all else the kernel's.
    Returns:  (o in q's dtype, seen); the gradient by seen has the observations of the backward
              pass.
    Raises:   ValueError: another variant than one with the granularity ``tensor`` in e4m3fn; a
              Call with what the kernel does not do; shapes, masks or a platform that it does not
              take; a role without a scale; shard_map, or tensors on several devices;
              ``hardware.simulating``.
    Source:   jax 0.10.2, jax/_src/cudnn/fused_attention_stablehlo.py; spec A-20.
    """
    _check_alone(q, k, v)
    call = DeviceCall.resolve(variant, mask)
    hardware.refuse(
        call.name,
        "multiplies FP8 codes that it is given; got cuDNN's kernel, which is closed",
        ", or use fp8ref.jax.attention, whose tiles take it",
    )
    call.check_nothing_kept()
    qkv = inputs.prepare(q, k, v, call, None, None)
    check(call, qkv.q.shape, qkv.k.shape, platform or jax.default_backend())
    by_role = data.check_scales(scales, call.variant, (*data.ROLES, *data.GRADIENT_ROLES))
    if missing := [role for role in ("s", "o", *data.GRADIENT_ROLES) if role not in by_role]:
        raise ValueError(
            f"cuDNN's kernel needs scales; {', '.join(missing)} have none. Use delayed scaling "
            "(fp8ref.spec.attention.delayed), or fp8ref.jax.attention."
        )
    by_role = {role: lax.stop_gradient(jnp.asarray(x, jnp.float32)) for role, x in by_role.items()}
    inputs.check_seen(seen or {}, call.variant)
    tensors = tuple(derivatives.reverse_only(x, call.name, "attention") for x in qkv[:3])
    o, seen = _attention(tensors, by_role, None if seen is None else dict(seen), call)
    return data.in_layout(call.layout, o), seen


def check(call: Call, q: tuple[int, ...], k: tuple[int, ...], platform: str) -> None:
    """ValueError, with what to use instead, for what cuDNN's kernel does not take.

    q, k     shapes [B, heads, T, D].
    platform ``gpu`` or ``cuda``.
    """
    instead = (
        "Use fp8ref.jax.attention, whose tiles take it (in the trainer, parallel.attention "
        "'tiles')."
    )
    if platform not in ("gpu", "cuda"):
        raise ValueError(
            f"cuDNN's FP8 attention needs an NVIDIA GPU; this program is for {platform}. {instead}"
        )
    variant, mask = call.variant, call.mask
    plain = DeviceCall(variant=variant, mask=mask, scale=call.scale, layout=call.layout)
    if isinstance(call, DeviceCall) and call.unnamed() != plain:
        raise ValueError(
            f"cuDNN's FP8 attention takes variant, mask, scale and layout; got {call}. {instead}"
        )
    kinds = variant.granularity, variant.p_scale, variant.backward, variant.rotated
    whole = kinds == ("tensor", "state", "cast", False)
    if not whole or {variant.fmt, variant.out, variant.format_of("ds")} != {E4M3FN}:
        raise ValueError(
            "cuDNN's FP8 attention needs one scale per tensor and everything in e4m3fn, as "
            f"variant 'cudnn'; got {variant.name!r}. {instead}"
        )
    if q[3] != FEATURES or q[2] % TOKENS or k[2] % TOKENS:
        raise ValueError(
            f"cuDNN's FP8 attention with gradients takes {FEATURES} features and tokens in "
            f"multiples of {TOKENS}; got q {q}, k {k}. {instead}"
        )
    if mask.window is not None or (mask.causal and q[2] != k[2] and mask.alignment != "start"):
        raise ValueError(
            f"cuDNN's FP8 attention takes no mask, or a causal one from the start; got {mask}. "
            f"{instead}"
        )


_SEVERAL = (
    "cuDNN FP8 attention supports one device only: amaxes are not reduced across devices; "
    "got {role} on {devices}. Use fp8ref.jax.attention."
)


def _check_alone(q, k, v) -> None:
    """ValueError inside shard_map and for tensors on several devices: jax's partitioning of the
    kernel merges no amaxes. ``_forward`` refuses a mesh known only when lowered."""
    for role, x in zip("qkv", (q, k, v), strict=True):
        mesh = jax.typeof(x).sharding.mesh
        if axes := tuple(getattr(mesh, "manual_axes", ())):
            raise ValueError(
                "cuDNN FP8 attention supports one device only, not inside shard_map; got "
                f"{role} along {', '.join(axes)}. Use fp8ref.jax.attention with over={axes}."
            )
        devices = max(mesh.size, jax.sharding.get_abstract_mesh().size)
        if isinstance(x, Array) and not isinstance(x, jax.core.Tracer):
            devices = len(x.sharding.device_set)
        if devices > 1:
            raise ValueError(_SEVERAL.format(role=role, devices=devices))


QKV = tuple[Array, ...]
"""q, k and v."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attention(qkv: QKV, scales_: dict, seen: delayed.Seen | None, call: DeviceCall):
    return _forward(qkv, scales_, seen, call)[:2]


def _saved(qkv: QKV, scales_: dict, seen: delayed.Seen | None, call: DeviceCall):
    qkv = tuple(derivatives.not_again(x, call.name, "attention") for x in qkv)
    o, merged, pullback = _forward(qkv, scales_, seen, call)
    return (o, merged), derivatives.saved((pullback, scales_, seen))


def _gradients(call: DeviceCall, saved, cotangents):
    (pullback, scales_, seen), (do, later) = saved, cotangents
    do = derivatives.not_again(do, call.name, "attention")
    scale, policy = scales_["do"], call.variant.policy
    do_heads = heads.quantize(do, E4M3FN, "tensor", policy, heads=1, scale=scale)
    with call.scope("kernel_backward"):
        *codes, amaxes = pullback(do_heads.codes)
    grads = tuple(
        _values(x, scales_[role]).astype(do.dtype)
        for role, x in zip(("dq", "dk", "dv"), codes, strict=True)
    )
    by_role = {"do": do_heads.amax} | {role: amaxes[key] for role, key in _AMAXES.items()}
    return grads, jax.tree.map(jnp.zeros_like, scales_), observed(later, by_role, seen)


derivatives.defvjp(_attention, _saved, _gradients)


def _forward(
    qkv: QKV, scales_: dict, seen: delayed.Seen | None, call: DeviceCall
) -> tuple[Array, delayed.Seen | None, Any]:
    """(o, observations, pullback of codes of o)."""
    q, k, v = qkv
    q = one_device.check(q, _SEVERAL.replace("{role}", "the program"))
    tensors = operands.quantize(Inputs(q, k, v, None), call, scales_)
    tensor_scales = {role: scales.Scales(x.scale, x.scale_inv) for role, x in tensors.items()}
    parameters = _parameters(tensor_scales, scales_)

    def products(q8, k8, v8, amaxes: dict):
        outputs = dot_product_attention(q8, k8, v8, call, parameters | amaxes)
        return outputs[0], outputs[1:]

    empty = dict.fromkeys(_AMAXES.values(), jnp.zeros((1, 1, 1, 1), jnp.float32))
    codes = (tensors[role].codes for role in ("q", "k", "v"))
    with call.scope("kernel_forward"):
        o8, pullback, (amax_s, amax_o) = jax.vjp(products, *codes, empty, has_aux=True)
    by_role = {role: x.amax for role, x in tensors.items()} | {"s": amax_s, "o": amax_o}
    return _values(o8, scales_["o"]).astype(q.dtype), observed(seen, by_role, seen), pullback


def dot_product_attention(
    q: Array, k: Array, v: Array, call: DeviceCall, parameters: dict[str, Array]
) -> tuple:
    """JAX's cuDNN call of codes: (codes of o, amax of P, amax of o). The gradients of parameters'
    amaxes are those of the backward pass."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    mask = cudnn.MaskType.CAUSAL if call.mask.causal else cudnn.MaskType.NO_MASK
    fp8_parameters: Any = parameters
    return cudnn.dot_product_attention(
        q,
        k,
        v,
        scale=float(call.softmax_scale(q.shape[3])),
        mask_type=mask,
        qkv_layout="BNTH",
        fp8_params=fp8_parameters,
        use_fp8=True,
    )


def _parameters(tensor_scales: dict[str, scales.Scales], scales_: dict) -> dict[str, Array]:
    """cuDNN's scales by its names, float32 [1, 1, 1, 1]: scale in, descale out."""
    pairs = tensor_scales | {
        role: scales.with_inverse(scales_[role]) for role in ("s", "o", *data.GRADIENT_ROLES)
    }
    descaled = {"q": "q", "k": "k", "v": "v", "s": "s", "o": "o", "dO": "do", "dP": "ds"}
    scaled = {"s": "s", "o": "o", "dQ": "dq", "dK": "dk", "dV": "dv", "dP": "ds"}
    parameters = {f"descale_{key}": pairs[role].scale_inv for key, role in descaled.items()}
    parameters |= {f"scale_{key}": pairs[role].scale for key, role in scaled.items()}
    return {key: x.reshape(1, 1, 1, 1) for key, x in parameters.items()}


def _values(codes: Array, scale: Array) -> Array:
    return moments.product(cast.decode(codes, E4M3FN), scales.with_inverse(scale).scale_inv)
