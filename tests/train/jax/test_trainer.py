import types

import numpy as np
import pytest
from helpers.gemm import scaled_matmul

from fp8ref.recipe import OPERANDS, SHARED_RECIPES
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


@pytest.mark.parametrize("parallel", [{}, {"fsdp": 2, "through": "shard_map"}], ids=str)
def test_products_by_scaled_matmul_train_and_are_proven(parallel, small, monkeypatch):  # B-7, G-26
    """The losses are those of dequantized operands, up to the order of sums."""
    config = small.replace(
        numerics={"recipe": "mxfp8", "products": "scaled_matmul"},
        model={
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_key_value_heads": 2,
            "num_hidden_layers": 1,
        },
        data={"sequence_length": 32},
        parallel=parallel,
    )
    emulated = Trainer(config.replace(numerics={"products": "emulated"}))
    scaled_matmul.install(monkeypatch)
    trainer, tokens = Trainer(config), loader.open_batches(config).step(0)
    proof = trainer.prove(tokens)
    names = [f"{d.path}/{which}" for d in trainer.decisions if d.fp8 for which in OPERANDS]
    assert sorted(g["gemm"] for g in proof["gemms"] if g["fp8"]) == sorted(names)
    assert not proof["on_dequantised_operands"]
    losses = [[t.step(tokens)["loss"] for _ in range(2)] for t in (trainer, emulated)]
    np.testing.assert_allclose(*losses, rtol=2e-3)  # of bfloat16 activations, each within 2^-9


@pytest.mark.parametrize(
    ("numerics", "message"),
    [
        ({"recipe": "mxfp8"}, r".*need an NVIDIA GPU .* 10\.0 or later; got cpu"),
        ({"recipe": "mxfp4"}, "multiply both operands in mxfp8, nvfp4; got e2m1fn x"),
        (
            {"recipe": "mxfp8", "products": "scaled_mm"},
            "is one of auto, emulated, scaled_matmul; got",
        ),
    ],
)
def test_products_that_are_not_there_are_refused(numerics, message, small):  # G-26
    config = small.replace(
        numerics={"products": "scaled_matmul"} | numerics,
        model={"hidden_size": 64, "intermediate_size": 64},
    )
    with pytest.raises(ConfigError, match=rf"^numerics\.products .*{message}"):
        Trainer(config)


def test_products_by_hardware_refuse_plain_jit_on_a_mesh(small, monkeypatch):  # G-26
    scaled_matmul.install(monkeypatch)
    config = small.replace(
        numerics={"recipe": "mxfp8", "products": "scaled_matmul"},
        model={"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1},
        parallel={"fsdp": 2, "through": "jit"},
    )
    with pytest.raises(ValueError, match=r"on a mesh need shard_map \(parallel\.through\)"):
        Trainer(config).prove(loader.open_batches(config).step(0))
