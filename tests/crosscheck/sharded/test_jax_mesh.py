import dataclasses
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
import tomli_w
from jax.sharding import AxisType

from fp8ref import cli
from fp8ref.crosscheck.sharded import jax_mesh as sharded_jax
from fp8ref.jax.distributed.sharding import Placement, Reduction
from fp8ref.recipe import RECIPES, REDUCED_AXES
from fp8ref.shared.errors import ConfigError
from fp8ref.sim import linear as sim
from fp8ref.sim.quantize import scaling
from fp8ref.train.config import config as configs


@pytest.fixture
def small(small):
    """Two key-value heads, and an inner dim whose halves are multiples of 16."""
    return dataclasses.replace(
        small, model=dataclasses.replace(small.model, num_key_value_heads=2, intermediate_size=64)
    )


@pytest.mark.slow
def test_every_mesh_of_two_holds_to_the_simulator(small, tmp_path):  # P-4, P-9, B-7
    """By the command, which makes two devices of a CPU."""
    config, result = tmp_path / "config.toml", tmp_path / "check.json"
    config.write_text(tomli_w.dumps(configs.to_dict(small)))
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [
        sys.executable,
        "-m",
        "fp8ref",
        "crosscheck",
        config,
        "--backend",
        "jax",
        "--sharded",
        "2",
        "--json",
        result,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "left out" not in done.stdout
    checks = {check["name"]: check for check in json.loads(result.read_text())["checks"]}
    backends = {name.rsplit("/", 1)[1] for name in checks}
    assert len(backends) == 8  # data, fsdp, tensor, and tensor with sequences, each both ways
    for backend in backends:
        for name in (
            "input/codes",
            "input/scale",
            "weight/codes",
            "grad_output/scale",
            "output/value",
            "grad_weight/value",
        ):
            assert checks[f"model.layers.0.mlp.down_proj/{name}/{backend}"]["compared"] > 0
        assert (
            checks[f"model/first_input/value/{backend}"]["equal"]
            == checks[f"model/first_input/value/{backend}"]["compared"]
            > 0
        )


@pytest.mark.slow
def test_rows_scaled_as_another_devices_fail_and_name_the_mesh(small, monkeypatch):
    """After a reduce-scatter every device takes the first rows' scales."""
    monkeypatch.setattr(
        Reduction,
        "own_rows",
        lambda self, scale: (
            scale[: scale.shape[0] // 2] if self.scatter and scale.size > 1 else scale
        ),
    )
    monkeypatch.setattr(sharded_jax, "THROUGH", ("shard_map",))
    monkeypatch.setattr(sharded_jax, "_factors", lambda devices: [((1, 1, devices), True)])
    report, _ = sharded_jax.crosscheck(
        small.replace(numerics={"recipe": "rowwise"}, parallel={"reduce": "accumulators"}), 2
    )
    failed = {name for name, check in report.checks.items() if not check.ok}
    assert "model.layers.0.mlp.down_proj/output/value/jax 1x1x2 sequence shard_map" in failed
    assert all("/value/" in name for name in failed)


@pytest.mark.slow
def test_meshes_that_do_not_fit_are_named(small, monkeypatch):
    odd = dataclasses.replace(small, model=dataclasses.replace(small.model, num_key_value_heads=1))
    monkeypatch.setattr(sharded_jax, "THROUGH", ("shard_map",))
    monkeypatch.setattr(
        sharded_jax,
        "_factors",
        lambda devices: [
            ((1, devices, 1), False),
            ((1, 1, devices), False),
            ((1, 1, devices), True),
        ],
    )
    report, unfit = sharded_jax.crosscheck(odd, 2)
    assert report.ok
    assert set(unfit) == {"1x1x2 shard_map", "1x1x2 sequence shard_map"}
    assert all("num_key_value_heads" in why for why in unfit.values())
    monkeypatch.setattr(sharded_jax, "_factors", lambda devices: [((1, 1, devices), False)])
    with pytest.raises(
        ConfigError,
        match=r"no mesh of 2 devices fits this model: 1x1x2 shard_map: .*num_key_value_heads",
    ):
        sharded_jax.crosscheck(odd, 2)


def test_errors(small, tmp_path, capsys):
    with pytest.raises(ConfigError, match="got 'bf16'"):
        sharded_jax.crosscheck(small.replace(numerics={"recipe": "bf16"}), 2)
    with pytest.raises(ConfigError, match="bounds sums of gradients that were not cast"):  # P-25
        sharded_jax.crosscheck(
            small.replace(parallel={"fsdp": 2, "reduce_dtype": "float8_e4m3fn"}), 2
        )
    with pytest.raises(ConfigError, match="needs as many devices; jax has 8"):
        sharded_jax.crosscheck(small, 16)
    assert cli.main(["crosscheck", "tiny", "--sharded", "8"]) == 2
    assert "--backend jax" in capsys.readouterr().err


@pytest.mark.parametrize("through", ["shard_map", "jit"])
def test_a_linear_on_a_mesh_is_the_simulators_on_integers(through, rng):  # P-4, P-9
    shapes = {"input": (32, 64), "weight": (32, 64), "grad_output": (32, 32)}
    tensors = {
        role: rng.integers(-7, 8, shape).astype(np.float32) for role, shape in shapes.items()
    }
    mesh = jax.make_mesh(
        (2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    whole = {"reduce_grads": "accumulators", "reduce_outputs": "accumulators"}  # one device's bits
    placement, recipe = (
        Placement(m=("fsdp",), n=("tensor",), fsdp=("fsdp",), **whole),
        RECIPES["tensorwise"],
    )
    found = sharded_jax.rerun_linear(
        tensors, recipe=recipe, placement=placement, mesh=mesh, through=through
    )
    x, w, g = tensors.values()
    expected = dict(
        zip(found, (sim.forward(x, w, recipe), *sim.backward(g, x, w, recipe)), strict=True)
    )
    for which, (_, (codes, scale), out) in found.items():
        np.testing.assert_array_equal(out, expected[which])
        role = "input" if which == "grad_weight" else "weight"
        q = scaling.quantize(tensors[role], recipe.output.a.fmt)
        np.testing.assert_array_equal(codes, q.codes)
        assert scale == q.scale


@pytest.mark.parametrize("through", ["shard_map", "jit"])
def test_a_linear_in_nvfp4_draws_on_a_mesh_as_on_one_device(through, rng):  # S-24, P-4
    shapes = {"input": (64, 64), "weight": (64, 64), "grad_output": (64, 64)}
    tensors = {
        role: rng.integers(-7, 8, shape).astype(np.float32) / 8 for role, shape in shapes.items()
    }
    mesh = jax.make_mesh(
        (2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    placement = Placement(m=("fsdp",), n=("tensor",), fsdp=("fsdp",))
    about = {"recipe": RECIPES["nvfp4"], "placement": placement, "mesh": mesh, "through": through}
    found = sharded_jax.rerun_linear(tensors, **about, seed=2**40 + 3)
    for which, (*operands, _) in found.items():
        expected = sim.quantize_operands(which, tensors, RECIPES["nvfp4"], seed=2**40 + 3)
        for (codes, scale), q, axis in zip(operands, expected, REDUCED_AXES[which], strict=True):
            np.testing.assert_array_equal(codes, q.codes if axis else q.codes.T, err_msg=which)
            np.testing.assert_array_equal(scale, q.scale if axis else q.scale.T, err_msg=which)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
def test_recipes_in_blocks_on_two_devices(recipe, small, monkeypatch):  # P-5, S-22, S-24
    monkeypatch.setattr(sharded_jax, "THROUGH", ("shard_map",))
    monkeypatch.setattr(sharded_jax, "_factors", lambda devices: [((1, devices, 1), False)])
    blocks = small.replace(numerics={"recipe": recipe}, data={"batch_size": 4})
    report, unfit = sharded_jax.crosscheck(blocks, 2)
    assert report.ok, [check.detail for check in report.failures]
    assert not unfit
