import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from fp8ref.crosscheck.mesh_rerun import replay
from fp8ref.jax.sharding import Placement
from fp8ref.recipe import RECIPES
from fp8ref.sim import linear as sim
from fp8ref.sim import scaling


@pytest.mark.parametrize("through", ["shard_map", "jit"])
def test_a_replay_is_the_simulators_linear_on_integers(through, rng):  # P-4, P-9
    shapes = {"input": (32, 64), "weight": (32, 64), "grad_output": (32, 32)}
    tensors = {role: rng.integers(-7, 8, shape).astype(np.float32) for role, shape in shapes.items()}
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    placement, recipe = Placement(m=("fsdp",), n=("tensor",), fsdp=("fsdp",)), RECIPES["tensorwise"]
    found = replay(tensors, recipe=recipe, placement=placement, mesh=mesh, through=through)
    x, w, g = tensors.values()
    expected = dict(zip(found, (sim.forward(x, w, recipe), *sim.backward(g, x, w, recipe)), strict=True))
    for which, (_, (codes, scale), out) in found.items():
        np.testing.assert_array_equal(out, expected[which])
        role = "input" if which == "grad_weight" else "weight"
        q = scaling.quantize(tensors[role], recipe.output.a.fmt)
        np.testing.assert_array_equal(codes, q.codes)
        assert scale == q.scale
