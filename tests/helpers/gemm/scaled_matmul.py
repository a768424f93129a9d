"""A stand-in for jax.nn.scaled_matmul on a GPU of capability 10.0, which cuDNN's kernels serve."""

import jax
import jax.numpy as jnp
from jax import lax

from fp8ref.jax.gemm import blackwell

TAKEN = {
    (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e8m0fnu), 32),
    (jnp.dtype(jnp.float4_e2m1fn), jnp.dtype(jnp.float8_e4m3fn), 16),
}
"""Codes, scales and the length of a block of mxfp8 and nvfp4, as the docstring of jax 0.10.2 has
them. XLA dequantizes others."""


class ScaledMatmul:
    """Products of dequantized operands, summed in float32."""

    def __init__(self) -> None:
        self.calls = []

    def __call__(self, lhs, rhs, lhs_scales, rhs_scales, preferred_element_type):
        for codes, scales in ((lhs, lhs_scales), (rhs, rhs_scales)):
            assert codes.ndim == scales.ndim == 3
            assert codes.shape[:2] == scales.shape[:2]
            block, rest = divmod(codes.shape[2], scales.shape[2])
            assert (rest, (codes.dtype, scales.dtype, block) in TAKEN) == (0, True)
        self.calls.append((lhs.shape, rhs.shape, jnp.dtype(preferred_element_type).name))
        return _scaled_matmul(lhs, rhs, lhs_scales, rhs_scales).astype(preferred_element_type)


@jax.jit  # under the name that it has in jax
def _scaled_matmul(lhs, rhs, lhs_scales, rhs_scales):
    left, right = (
        codes.astype(jnp.float32)
        * jnp.repeat(scales.astype(jnp.float32), codes.shape[2] // scales.shape[2], axis=2)
        for codes, scales in ((lhs, lhs_scales), (rhs, rhs_scales))
    )
    return jnp.einsum("bmk,bnk->bmn", left, right, precision=lax.Precision.HIGHEST)


def install(monkeypatch, capability=(10, 0)) -> ScaledMatmul:
    """scaled_matmul for this test, on a device of this compute capability."""
    kernel = ScaledMatmul()
    monkeypatch.setattr(jax.nn, "scaled_matmul", kernel)
    monkeypatch.setattr(blackwell, "capability", lambda device: capability)
    return kernel
