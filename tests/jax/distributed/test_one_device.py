"""A program that is lowered for several devices is refused, and no other."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8ref.jax.distributed import one_device


def double(x):
    return 2 * one_device.check(x, "of one device; got {devices}.")


def test_the_mesh_of_inputs_alone_is_seen():
    x = jnp.arange(8.0)
    assert double(x).sum() == jax.jit(double)(x).sum() == jax.jit(jax.vmap(double))(x).sum() == 56
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match=r"of one device; got 2\."):
        jax.jit(double)(jax.device_put(x, NamedSharding(mesh, P("data"))))
    with pytest.raises(ValueError, match=r"got 2\."):  # before anything runs
        jax.jit(double).lower(
            jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P()))
        )
    on_second = jax.device_put(x, jax.devices()[1])
    assert jax.jit(double)(on_second).sum() == 56


def test_the_check_is_no_operation_of_the_program():
    plain, checked = (jax.jit(f).lower(jnp.ones(8)).as_text() for f in (lambda x: 2 * x, double))
    assert plain.count("stablehlo.") == checked.count("stablehlo.")
