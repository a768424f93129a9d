"""GEMMs of MX and NVFP4 by jax.nn.scaled_matmul: cuDNN's, from capability 10.0 on (spec G-26)."""

import jax
import jax.numpy as jnp
from jax import lax

from fp8ref.formats import E2M1FN, E4M3FN
from fp8ref.jax.distributed import sharding
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.spec import products
from fp8ref.spec.granularity import by_name
from fp8ref.spec.products import Kind, Products

_chosen = jax.make_user_context(default_value="auto")


def multiplying(by: Products, device: jax.Device | None = None):
    """In this context, what is traced multiplies operands in blocks of linears by these products
    (G-26), or refuses them. device: that is compiled for; None: jax's first."""
    device = device or jax.devices()[0]
    products.check(by, "jax", capability(device), device.device_kind)
    return _chosen(by)


def active() -> Products:
    """The products of the innermost context; ``auto`` outside all contexts."""
    return _chosen.value


def capability(device: jax.Device) -> tuple[int, int] | None:
    """An NVIDIA GPU's compute capability."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def multiply(a: Quantized, b: Quantized, axes: tuple[int, int], out_dtype) -> jax.Array:
    """[..., M, K] x [..., N, K] -> [..., M, N] of out_dtype, reduced along axes, -1 or -2 each."""
    kind = products.kind(a, b, "scaled_matmul")
    left, scale_a = _stored(kind, a, axes[0])
    right, scale_b = _stored(kind, b, axes[1])
    out = jax.nn.scaled_matmul(left, right, scale_a, scale_b, preferred_element_type=out_dtype)
    out = sharding.varying_as(out, left, right, scale_a, scale_b)
    return out.reshape(*a.codes.shape[:-2], *out.shape[1:])


def _stored(kind: Kind, q: Quantized, axis: int) -> tuple[jax.Array, jax.Array]:
    """Codes [B, M, K], zeros after the last, and scales of each row's blocks, also of squares."""
    codes, scale = (x if axis == -1 else jnp.swapaxes(x, -1, -2) for x in (q.codes, q.scale_inv))
    if scale.shape[-2] < codes.shape[-2]:
        rows = by_name(kind.square).reduced or 1  # a square has as many
        scale = jnp.repeat(scale, rows, axis=-2)[..., : codes.shape[-2], :]
    missing = -codes.shape[-1] % (by_name(kind.line).reduced or 1)
    codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    if kind.fmt == E2M1FN:
        codes = codes.astype(jnp.float4_e2m1fn)
    if kind.scales == E4M3FN:
        scale = scale.astype(jnp.float8_e4m3fn)
    else:  # the exponent's bits; 2^-127, which is subnormal, has 0
        exponents = lax.bitcast_convert_type(scale, jnp.uint32) >> 23
        scale = lax.bitcast_convert_type(exponents.astype(jnp.uint8), jnp.float8_e8m0fnu)
    return codes.reshape(-1, *codes.shape[-2:]), scale.reshape(-1, *scale.shape[-2:])
