import json
import os
import pickle
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from fp8ref.shared.errors import ConfigError
from fp8ref.train.config.config import Config
from fp8ref.train.jax import checkpoint
from fp8ref.train.jax.trainer import Trainer
from fp8ref.train.run import train_state

MODEL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BATCHES = np.random.default_rng(0).integers(0, 256, (4, 8, 33))


def trainer(recipe="delayed", **parallel) -> Trainer:
    sections = {"model": MODEL, "data": {"batch_size": 8, "sequence_length": 32}}
    return Trainer(Config().replace(**sections, numerics={"recipe": recipe}, parallel=parallel))


def equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where two devices saved a state, its weights, and the losses of the steps after it."""
    folder, model = tmp_path_factory.mktemp("two") / "state", trainer(fsdp=2)
    for tokens in BATCHES[:2]:
        model.step(tokens)
    weights = model.weights()
    written = model.save(folder)
    losses = [model.step(tokens)["loss"] for tokens in BATCHES[2:]]
    written()
    return folder, weights, losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        {"fsdp": 2},
        *(
            pytest.param(mesh, marks=pytest.mark.slow)
            for mesh in ({}, {"fsdp": 4}, {"fsdp": 2, "tensor": 2})
        ),
    ],
    ids=str,
)
def test_a_state_is_read_by_any_mesh(saved, mesh):  # K-2
    """Exactly; on the mesh that wrote it training goes on bit for bit, on another as between
    meshes: 2^-9 of a loss (P-1).
    """
    folder, weights, losses = saved
    model = trainer(**mesh)
    model.load(folder, 2)
    assert equal(model.weights(), weights)
    found = [model.step(tokens)["loss"] for tokens in BATCHES[2:]]
    assert found == pytest.approx(losses, rel=2.0**-9)
    assert mesh != {"fsdp": 2} or found == losses


@pytest.mark.slow
def test_weights_alone(saved, monkeypatch):
    """One after the other, each read when it is asked for; what they are is read once."""
    folder, weights, _ = saved
    opened, metadata, watches = [], [], [True]
    honest = tensorstore.open
    monkeypatch.setattr(
        tensorstore, "open", lambda spec, **keys: opened.append(spec) or honest(spec, **keys)
    )
    sys.addaudithook(
        lambda event, args: (
            watches
            and event == "open"
            and str(args[0]).endswith("_METADATA")
            and metadata.append(args)
        )
    )
    found = {}
    for name, value in checkpoint.weights(
        folder, {name: value.shape for name, value in weights.items()}
    ):
        found[name] = value
        assert len(opened) == len(found)
    watches.clear()
    assert equal(found, weights)
    assert all(value.dtype == np.float32 for value in found.values())
    assert len(metadata) == 1


@pytest.mark.parametrize(
    ("name", "shape"), [("model.norm.weight", (63,)), ("model.norm.bias", (64,))]
)
def test_another_models_weights_are_refused(saved, name, shape):
    with pytest.raises(ConfigError, match=rf"{name} is .* Load a state of the same model"):
        dict(checkpoint.weights(saved[0], {name: shape}))


def test_an_array_whose_data_is_gone_is_an_error(saved, tmp_path):
    """And no array of zeros."""
    folder, weights, _ = saved
    shutil.copytree(folder, tmp_path / "state")
    store = tensorstore.KvStore.open(
        {"driver": "ocdbt", "base": {"driver": "file", "path": f"{tmp_path}/state/"}}
    ).result()
    for key in store.list().result():
        if key.startswith(b"model.model.norm.weight/") and not key.endswith(b".zarray"):
            store.delete_range(tensorstore.KvStore.KeyRange(key, key + b"\0")).result()
    with pytest.raises(ValueError, match="missing"):
        dict(
            checkpoint.weights(
                tmp_path / "state", {"model.norm.weight": weights["model.norm.weight"].shape}
            )
        )


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_planted_pickle_is_never_read(saved, tmp_path):  # K-5
    folder, weights, _ = saved
    for name in (".metadata", "state.pkl"):
        (folder / name).write_bytes(pickle.dumps(Evil(tmp_path / "read")))
    dict(checkpoint.weights(folder, {name: value.shape for name, value in weights.items()}))
    model = trainer(fsdp=2)
    model.load(folder, 2)
    for name in (".metadata", "state.pkl"):
        (folder / name).unlink()
    assert not (tmp_path / "read").exists()
    assert equal(model.weights(), weights)


@pytest.mark.parametrize(
    "raised",
    [KeyError("param_name"), json.JSONDecodeError("two\nlines", "x", 0), TypeError("x")],
    ids=repr,
)
def test_what_orbax_raises_of_metadata_is_an_error_of_the_project(tmp_path, monkeypatch, raised):
    store, tree = (
        checkpoint.Store(),
        {train_state.COUNT: jnp.int32(3), train_state.MASTERS: {"a": jnp.ones(4)}},
    )
    store.save(tmp_path / "state", tree)()
    assert store.load(tmp_path / "state", tree)[train_state.COUNT] == 3

    def restore(*_, **__):
        raise raised

    monkeypatch.setattr(store._writer, "restore", restore)
    with pytest.raises(
        ConfigError, match=r"state cannot be read \(.*\)\. Put its files back"
    ) as error:
        store.load(tmp_path / "state", tree)
    assert "\n" not in str(error.value)


def test_a_full_device_is_no_damage_to_files(tmp_path, monkeypatch):
    store, tree = checkpoint.Store(), {train_state.COUNT: jnp.int32(3)}
    store.save(tmp_path / "state", tree)()

    def restore(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(store._writer, "restore", restore)
    with pytest.raises(jax.errors.JaxRuntimeError):
        store.load(tmp_path / "state", tree)
