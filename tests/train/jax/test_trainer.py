import types

import numpy as np
import pytest

from fp8ref.recipe import SHARED_RECIPES
from fp8ref.shared.errors import ConfigError
from fp8ref.train.data import loader
from fp8ref.train.jax import mesh
from fp8ref.train.jax.mesh import Layout
from fp8ref.train.jax.step import Step
from fp8ref.train.jax.trainer import Trainer


@pytest.mark.parametrize("recipe", SHARED_RECIPES)
def test_the_training_step_holds_one_float8_dot_for_each_planned_gemm(recipe, small):
    trainer = Trainer(small.replace(numerics={"recipe": recipe}))
    tokens = loader.open_batches(small).step(0)
    hlo = trainer.lowered(tokens).as_text()
    dots = [line for line in hlo.splitlines() if "dot_general" in line and line.count("xf8E") == 2]
    assert len(dots) == sum(spec.fp8 for d in trainer.decisions for spec in d.recipe.gemms.values())


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_triton_kernels_train_as_plain_operations_do(recipe, small):  # M-11
    """exp and rsqrt may round to a neighbor: a norm of weights' changes in less than 2^-7."""
    pytest.importorskip("triton")
    weights = {}
    for kernels in ("plain", "triton"):
        config = small.replace(
            numerics={"recipe": recipe, "kernels": kernels},
            model={"num_hidden_layers": 1},
            data={"batch_size": 1},
        )
        trainer, batches = Trainer(config), loader.open_batches(config)
        assert [ran.triton for ran in trainer.kernels.values()] == [kernels == "triton"]
        trainer.step(batches.step(0))
        weights[kernels] = trainer.weights()
    for name, weight in weights["triton"].items():
        np.testing.assert_allclose(weight, weights["plain"][name], atol=2e-5, rtol=0)


def test_what_casts_is_recorded_by_device(small):
    (device, ran), *more = Trainer(small).kernels.items()
    assert (device[:3], ran.text, more) == ("cpu", "plain operations (on a CPU)", [])


def test_a_process_checks_kernels_on_a_device_of_its_own(small, monkeypatch):
    """A device of another process runs nothing here: its check would fail, and the processes of a
    step would compile different programs."""
    layout, asked = Layout(small), []
    layout.devices = [types.SimpleNamespace(process_index=i) for i in (1, 0)]
    monkeypatch.setattr(
        mesh.kernel_choice, "explain", lambda choice, device, **_: asked.append(device)
    )
    layout.kernels("auto")
    assert [device.process_index for device in asked] == [0]


def test_plain_kernels_are_the_optimizers_too(small):
    config = small.replace(
        numerics={"kernels": "plain"}, optimizer={"kind": "adamw_states", "learning_rate": 1e-3}
    )
    optimizer = Step(config, Layout(config), None).optimizer
    assert optimizer._adamw(1e-3).kernels == "plain"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"numerics": {"recipe": "rowwise"}}, "got recipe rowwise"),
        ({"parallel": {"data": 2, "through": "jit"}}, "XLA partitions the program"),
    ],
    ids=["recipe", "mesh"],
)
def test_kernels_that_cannot_cast_are_refused(keys, said, small):
    pytest.importorskip("triton")
    config = small.replace(numerics={"kernels": "triton"}).replace(**keys)
    with pytest.raises(ConfigError, match=f"numerics.kernels: kernels 'triton' .*{said}"):
        Trainer(config)


def test_products_of_pytorch_are_refused(small):  # G-26
    config = small.replace(
        numerics={"recipe": "mxfp8", "products": "scaled_mm"},
        model={"hidden_size": 64, "intermediate_size": 64},
    )
    with pytest.raises(ConfigError, match=r"^numerics\.products is one of auto, emulated; got"):
        Trainer(config)
