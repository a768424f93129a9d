"""Matrix multiplication of FP8 operands (SEMANTICS G): one dot on float8 arrays, float32 out, the scales after it."""

import jax
import jax.numpy as jnp
from jax import lax

from fp8ref.jax.scaling import Quantized
from fp8ref.recipe import GemmSpec

# Explicit on every dot: with None, jax.default_matmul_precision would decide (SEMANTICS G-7).
PRECISION = {"fast": lax.Precision.DEFAULT, "slow": lax.Precision.HIGHEST}


def matmul(a: Quantized, b: Quantized, *, accumulate: str, epilogue: str = "scale_then_round", out_dtype=jnp.float32) -> jax.Array:
    """Contract a and b along their reduced axes: [M, K] x [N, K] -> [M, N].

    Shapes:   a.codes and b.codes 2-d; each is reduced along its ``axis``, so [K, M] with axis 0 serves as [M, K].
    Order:    dot in float32; then the epilogue, G-4 or G-5; then round to out_dtype.
    Raises:   ValueError: operands not 2-d, reduced lengths that differ, unknown names.
    Source:   SEMANTICS G-1, G-4, G-5, G-7.
    """
    if a.codes.ndim != 2 or b.codes.ndim != 2 or a.codes.shape[a.axis] != b.codes.shape[b.axis]:
        raise ValueError(
            f"a GEMM reduces 2-d operands of one length; got {a.codes.shape} along {a.axis} and {b.codes.shape} along {b.axis}."
        )
    if accumulate not in PRECISION:
        raise ValueError(f"accumulate is 'fast' or 'slow'; got {accumulate!r}.")
    acc = _dot(a.codes, b.codes, (a.axis, b.axis), PRECISION[accumulate])
    scale_a = a.scale_inv.reshape(-1, 1)  # [1, 1] or [M, 1]
    scale_b = b.scale_inv.reshape(1, -1)  # [1, 1] or [1, N]
    if epilogue == "scale_then_round":
        return ((acc * scale_a) * scale_b).astype(out_dtype)
    if epilogue == "unit_round_scale_round":
        info = jnp.finfo(out_dtype)
        rounded = lax.reduce_precision(acc, info.nexp, info.nmant)
        return (rounded * (scale_a * scale_b)).astype(out_dtype)
    raise ValueError(f"epilogue is 'scale_then_round' or 'unit_round_scale_round'; got {epilogue!r}.")


def matmul_hp(a: jax.Array, b: jax.Array, *, axes: tuple[int, int], out_dtype) -> jax.Array:
    """A GEMM in high precision: float32 accumulation, one rounding to out_dtype (SEMANTICS G-9). a and b are reduced along axes."""
    return _dot(a, b, axes, lax.Precision.DEFAULT).astype(out_dtype)


def output_dtype(spec: GemmSpec, dtype):
    """The dtype a GEMM rounds to before its result is widened to dtype (SEMANTICS G-8)."""
    return jnp.bfloat16 if spec.rowwise else dtype


def _dot(a: jax.Array, b: jax.Array, axes: tuple[int, int], precision: lax.Precision) -> jax.Array:
    axis_a, axis_b = axes[0] % 2, axes[1] % 2
    # Without a preferred type, e4m3 x e5m2 would demote the e4m3 operand to e5m2.
    return lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
