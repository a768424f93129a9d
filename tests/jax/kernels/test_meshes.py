"""Casts of Triton's kernels, interpreted on two devices of a CPU, against XLA's: the same bits.

The devices need threads that JAX counts as it starts, so that they run in a process of their own.
AdamW's kernel in blocks has no such test: what XLA partitions by hand loses the host's function that
interprets it.
"""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

pytest.importorskip("triton")

from fp8ref.jax import delayed
from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.kernels import TritonKernels, casting
from fp8ref.jax.linear import linear

CASES = {
    "tokens": ("tensorwise", Placement(m=("a",)), (P("a"), P())),
    "features": ("delayed", Placement(n=("a",)), (P(), P("a"))),
    "fsdp": ("tensorwise", Placement(m=("a",), fsdp=("a",)), (P("a"), P("a"))),
}


def differing(case: str) -> int:
    """Gradients and observations that differ between kernels and XLA, on two devices."""
    recipe, placement, specs = CASES[case]
    draw = np.random.default_rng(0).normal
    x, w = (jnp.asarray(draw(size=shape), jnp.bfloat16) for shape in ((64, 32), (32, 32)))
    state, seen = delayed.init(recipe) or None, delayed.unseen(recipe) or None

    def loss(x, w, seen):
        y, after = linear.apply(x, w, recipe=recipe, state=state, seen=seen, placement=placement)
        return (y.astype(jnp.float32) ** 2).sum(), after

    def gradients(x, w, seen):
        return jax.grad(loss, argnums=(0, 1, 2) if seen else (0, 1), has_aux=True)(x, w, seen)

    mesh = jax.make_mesh((2,), ("a",), (AxisType.Auto,))
    grads = (*specs, P()) if seen else specs
    mapped = jax.shard_map(
        gradients, mesh=mesh, in_specs=(*specs, P()), out_specs=(grads, P() if seen else None)
    )
    by_xla = jax.jit(mapped)(x, w, seen)
    with casting(TritonKernels()):
        assert "fp8ref_kernel" in str(jax.make_jaxpr(mapped)(x, w, seen))
        by_kernels = jax.block_until_ready(jax.jit(mapped)(x, w, seen))
    pairs = zip(jax.tree.leaves(by_kernels), jax.tree.leaves(by_xla), strict=True)
    return sum(int((np.asarray(a) != np.asarray(b)).sum()) for a, b in pairs)


def test_kernels_of_two_devices_change_no_bit():  # P-2, P-6, M-11
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "NPROC": "8"}
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    counts = dict(line.split() for line in done.stdout.splitlines())
    assert counts == dict.fromkeys(CASES, "0")


if __name__ == "__main__":
    for case in CASES:
        print(case, differing(case))
