"""What XLA compiles attention in FP8 to for an H200: part ``attention`` of aot.py.

Which library multiplies, and how much temporary memory.
"""

import collections
import re

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from fp8ref.jax.attention import DeviceCall, attention
from fp8ref.jax.attention import kernel as attention_kernel
from fp8ref.spec.attention import delayed as attention_delayed
from fp8ref.spec.attention.variants import VARIANTS, Mask

SHAPE = {"sequences": 1, "heads": 8, "heads_of_keys": 2, "tokens": 2048, "features": 128}
"""Of q; k and v have as many tokens."""

CASES = [("kernel",), ("cudnn",), ("mxfp8",), ("fa3",), ("bf16",), ("jax cudnn bf16",)]
"""By cuDNN's FP8 kernel; variants by tiles; and the framework's own attention in bfloat16 by
cuDNN.
"""

CUDNN = 91000
"""The version that JAX is told, where no cuDNN is installed: it asks for one to refuse GPUs, and
compiles without any.
"""


def of_attention(name: str, target: str) -> dict:
    """Calls of libraries and temporary memory of attention: forward and backward, or forward alone
    of a variant without gradients.
    """
    cudnn.check_cudnn_version = lambda: CUDNN
    cudnn.check_compute_capability = lambda capability: True
    [h200] = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", topology="1x1x1", target_config=target
    ).devices
    placed = SingleDeviceSharding(h200)
    b, h, n, t, d = SHAPE.values()

    def shape(*size: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, dtype, sharding=placed)

    q, k, v = shape(b, h, t, d), shape(b, n, t, d), shape(b, n, t, d)
    scales = {role: shape(dtype=jnp.float32) for role in attention_delayed.roles(VARIANTS["cudnn"])}
    mask = Mask(causal=True)

    def attend(scales, q, k, v):
        if name == "kernel":
            return attention_kernel.apply(
                q, k, v, scales=scales, mask=mask, platform="cuda", name="layer"
            )[0]
        if name == "jax cudnn bf16":
            heads = (x.swapaxes(1, 2) for x in (q, k, v))
            return jax.nn.dot_product_attention(
                *heads, is_causal=True, implementation="cudnn"
            ).swapaxes(1, 2)
        return attention.apply(q, k, v, variant=DeviceCall(variant=name, mask=mask, layer="layer"))

    def step(scales, q, k, v):
        if name in VARIANTS and VARIANTS[name].backward is None:
            return attend(scales, q, k, v)
        o, vjp = jax.vjp(lambda *x: attend(scales, *x), q, k, v)
        return o, vjp(o)

    compiled = (
        jax.jit(step, compiler_options={"xla_gpu_enable_triton_gemm": False})
        .lower(scales, q, k, v)
        .compile()
    )
    targets = collections.Counter(
        re.findall(r'custom_call_target="([^"]*(?:cudnn|cublas)[^"]*)"', compiled.as_text())
    )
    return {
        "of": name,
        "calls": dict(targets),
        "temporary_mib": round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1),
    }


def markdown(rows: list[dict]) -> str:
    """The table of the part."""
    b, h, n, t, d = SHAPE.values()
    lines = [
        f"\nAttention of {b} sequence, {h} heads of {d} features, {n} of keys, {t:,} tokens, "
        "causal, forward and backward (fa3 forward alone):\n",
        "| by | calls of libraries | temporary, MiB |",
        "|---|---|---|",
    ]
    for row in rows:
        calls = (
            ", ".join(f"{count} `{call}`" for call, count in sorted(row["calls"].items())) or "none"
        )
        lines.append(f"| {row['of']} | {calls} | {row['temporary_mib']} |")
    return "\n".join(lines) + "\n"
