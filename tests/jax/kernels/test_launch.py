"""Launches of Triton's kernels from JAX programs: on a mesh, and as they are compiled for a GPU."""

import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("triton")

from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.kernels import TritonKernels, casting, launch
from fp8ref.jax.linear import linear

KERNELS = TritonKernels(capability=90)


def loss(x, w, placement=None):
    y, _ = linear.apply(x, w, recipe="tensorwise", placement=placement)
    return (y.astype(jnp.float32) ** 2).sum()


def tensors(rng):
    return [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((64, 32), (32, 32))]


@pytest.mark.parametrize(
    ("placement", "in_specs", "launches"),
    [
        (Placement(m=("a",)), (P("a"), P()), 3),
        (Placement(n=("a",)), (P(), P("a")), 3),
        # codes of a weight that are gathered are XLA's
        (Placement(m=("a",), fsdp=("a",)), (P("a"), P("a")), 2),
    ],
    ids=["tokens", "features", "fsdp"],
)
def test_each_device_casts_its_pieces(placement, in_specs, launches, rng):  # P-2, P-6
    mesh = jax.make_mesh((2,), ("a",), (AxisType.Auto,))

    def gradients(x, w):
        return jax.grad(loss, argnums=(0, 1))(x, w, placement)

    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=in_specs, out_specs=in_specs)
    with casting(KERNELS):
        text = jax.jit(mapped).lower(*tensors(rng)).as_text()
    assert text.count("@xla_ffi_python_cpu_callback") == launches


def test_outside_of_a_program_a_launch_is_compiled_once(rng):
    compiled = []
    with casting(TritonKernels()):
        for _ in range(2):
            linear.apply(*tensors(rng), recipe="tensorwise")
            compiled.append(launch._eager._cache_size())
    assert compiled[0] == compiled[1] > 0


def test_devices_of_a_cpu_that_would_deadlock_are_refused(rng, monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    mesh = jax.make_mesh((2,), ("a",), (AxisType.Auto,))
    mapped = jax.shard_map(
        lambda x, w: loss(x, w, Placement(m=("a",)))[None],
        mesh=mesh,
        in_specs=(P("a"), P()),
        out_specs=P("a"),
    )
    with casting(TritonKernels()), pytest.raises(ValueError, match="or they deadlock"):
        mapped(*tensors(rng))


def test_a_mesh_that_inputs_bring_is_refused(rng):
    mesh = jax.make_mesh((2,), ("a",), (AxisType.Auto,))
    x, w = tensors(rng)
    x = jax.device_put(x, NamedSharding(mesh, P("a")))
    with casting(KERNELS), pytest.raises(ValueError, match=r"Set parallel\.through"):
        jax.jit(lambda x, w: loss(x, w))(x, w)


def test_a_gpu_runs_what_jax_triton_compiles(monkeypatch, rng):
    """Without contraction of products and sums, for the capability that was chosen."""
    calls = []

    def triton_call(*arrays, out_shape, **options):
        calls.append(options)
        return [jnp.zeros(out.shape, out.dtype) for out in out_shape]

    fake = types.ModuleType("jax_triton")
    fake.triton_call = triton_call
    monkeypatch.setitem(sys.modules, "jax_triton", fake)
    with casting(KERNELS):
        traced = jax.jit(lambda x, w: jax.grad(loss, argnums=(0, 1))(x, w)).trace(*tensors(rng))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "callback" not in text
    assert len(calls) == 3
    for options in calls:
        assert options["compute_capability"] == 90
        assert options["enable_fp_fusion"] is False
        assert {"M", "N", "BM", "BN"} <= set(options)
