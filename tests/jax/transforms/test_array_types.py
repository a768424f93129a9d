"""Types of arrays on a mesh. One device has them too."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fp8ref.jax.transforms import array_types


def spec(x) -> tuple:
    return tuple(jax.typeof(x).sharding.spec)


def test_arrays_on_no_mesh_and_on_auto_axes_stay_as_they_are():
    x = jnp.ones((4, 4))
    cut = jax.device_put(
        x, jax.NamedSharding(jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,)), P("x"))
    )
    for y in (x, cut):
        assert array_types.whole(y) is y
        assert array_types.like(y, cut) is y
        assert not array_types.on_a_mesh(y)


@pytest.mark.parametrize("of", [P("x"), P(None, "x"), P(("x", "y"), None)])
def test_explicit_axes_are_in_types(of):
    with jax.set_mesh(jax.make_mesh((1, 1), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)):
        x = jax.device_put(jnp.ones((4, 4)), of)
        assert array_types.on_a_mesh(x)
        assert spec(array_types.whole(x)) == (None, None)
        assert spec(array_types.like(jnp.zeros((4, 4)), x)) == spec(x)


def test_inside_shard_map_what_varies_has_its_axes():
    mesh, found = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,)), []

    def body(x, y):
        found.extend(map(array_types.on_a_mesh, (x, y)))
        return x

    jax.shard_map(body, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))(
        jnp.ones(4), jnp.ones(4)
    )
    assert found == [True, False]
