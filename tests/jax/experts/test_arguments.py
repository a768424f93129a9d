import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fp8ref.jax.experts import grouped
from fp8ref.jax.gemm import hardware
from fp8ref.sim.gemm import hardware as sim_hardware

SIZES = jnp.array([7, 0, 13])


def test_simulated_hardware_multiplies_no_groups():  # G-19
    x, w = jnp.ones((24, 32), jnp.bfloat16), jnp.ones((3, 32, 16), jnp.bfloat16)
    with (
        hardware.simulating(sim_hardware.by_name("hopper")),
        pytest.raises(
            ValueError, match=r"grouped: .* got grouped GEMMs\. Leave hardware\.simulating"
        ),
    ):
        grouped.apply(x, w, SIZES, recipe="rowwise")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"x": jnp.zeros((2, 12, 32))},
            r"experts: a grouped linear takes x \[M, K\], w \[E, K, N\]",
        ),
        ({"x": jnp.zeros((24, 32))}, "have one dtype"),
        ({"group_sizes": jnp.zeros(2, int)}, r"experts: group_sizes are integers \[3\]"),
        ({"group_sizes": jnp.zeros(3)}, r"experts: group_sizes are integers \[3\]"),
        (
            {"group_sizes": [7, 0, 13]},
            "experts: a grouped linear takes arrays; got group_sizes, list. Use jnp.asarray",
        ),
        (
            {"group_sizes": jnp.array([7, 7, 20])},
            r"at most M=24; got \[7, 7, 20\]. From ends use jnp.diff",
        ),
        ({"group_sizes": np.array([7, -1, 13])}, r"non-negative .* got \[7, -1, 13\]"),
        (
            {"w": jnp.zeros((3, 32, 24), jnp.bfloat16)},
            "experts: FP8 needs K and N in multiples of 16",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change, message):
    given = {
        "x": jnp.ones((24, 32), jnp.bfloat16),
        "w": jnp.ones((3, 32, 16), jnp.bfloat16),
        "group_sizes": SIZES,
    } | change
    with pytest.raises(ValueError, match=message):
        grouped.apply(**given, recipe="rowwise", name="experts")


def test_axes_along_which_nothing_varies_are_refused():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))

    def run(x, w):
        return grouped.apply(x, w, SIZES, recipe="rowwise", over=("data", "fsdp"), name="experts")[
            0
        ]

    with pytest.raises(ValueError, match=r"experts: over has axes .* got fsdp, along which"):
        jax.shard_map(run, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))(
            jnp.ones((24, 32), jnp.bfloat16), jnp.ones((3, 32, 16), jnp.bfloat16)
        )


def test_arrays_that_explicit_axes_cut_are_refused():
    """Whole ones on such a mesh are taken."""
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        x, w = jnp.ones((20, 32), jnp.bfloat16), jnp.ones((3, 32, 16), jnp.bfloat16)
        assert jax.eval_shape(
            lambda w: grouped.apply(x, w, SIZES, recipe="rowwise")[0], jax.device_put(w, P())
        ).shape == (20, 16)
        with pytest.raises(
            ValueError,
            match=r"experts: .*got w cut along the Explicit axes data. Use jax.shard_map",
        ):
            grouped.apply(
                x, jax.device_put(w, P(None, "data")), SIZES, recipe="rowwise", name="experts"
            )
