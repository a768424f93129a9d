"""The schema is what both backends save, and one more entry in it is saved, sized and loaded."""

import json
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sizes
import torch
from safetensors import safe_open

from fp8ref.estimate import memory
from fp8ref.train import loop, train_state
from fp8ref.train.data import loader
from fp8ref.train.jax import step as jax_step
from fp8ref.train.jax import trainer as jax_trainer
from fp8ref.train.torch import step as torch_step
from fp8ref.train.torch import trainer as torch_trainer

DECAY = 0.5


def on_disk(folder, backend) -> dict[str, tuple[int, ...]]:
    """Name -> shape, as the backend's own library reads the files; shapes of JAX's are not in its index."""
    if backend == "jax":
        index = json.loads((folder / "_METADATA").read_text())
        return {".".join(key["key"] for key in one["key_metadata"]): () for one in index["tree_metadata"].values()}
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118, no mapping
    return found


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
@pytest.mark.parametrize("backend", loop.BACKENDS)
def test_the_schema_is_what_is_saved(backend, recipe, small, tmp_path):  # K-2
    config = small.replace(numerics={"recipe": recipe})
    trainer, schema = loop.trainer(backend, config), train_state.schema(config, backend)
    trainer.save(tmp_path / "state")()
    saved = on_disk(tmp_path / "state", backend)
    assert saved.keys() == schema.keys()
    live = train_state.flat(trainer._step.tensors(*([trainer._state] if backend == "jax" else [])))
    for name, tensor in schema.items():
        assert tuple(live[name].shape) == tensor.shape, name
        assert str(live[name].dtype).removeprefix("torch.") == tensor.dtype, name
        assert live[name].nbytes == tensor.nbytes, name
        assert backend == "jax" or saved[name] == tensor.shape, name
    written = sum(path.stat().st_size for path in (tmp_path / "state").rglob("*"))
    assert written <= train_state.disk_bytes(config, backend)


def test_moments_in_fp8_are_named_by_their_rank(small):  # T-6
    assert train_state.logical("exp_avg.model.norm.weight.rank12.codes") == "exp_avg.model.norm.weight"
    assert train_state.logical("exp_avg.model.norm.weight.rank0.scale") == "exp_avg.model.norm.weight"
    assert train_state.logical("fp8.lm_head.states.input.scale") == "fp8.lm_head.states.input.scale"
    assert train_state.disk_bytes(small.replace(optimizer={"kind": "adamw_fp8"}), "torch") == 0


def test_a_state_that_the_schema_does_not_name_is_not_saved(small):
    with pytest.raises(AssertionError, match=r"disagree on \['count', 'exp_avg"):
        train_state.check({"model": {}}, small, "jax")


class Averaged(NamedTuple):
    """JAX's state and a moving average of its weights."""

    params: Any
    optimizer: Any
    fp8: Any
    mu: Any
    ema: Any

    @property
    def inner(self):
        return jax_step.State(self.params, self.optimizer, self.fp8, self.mu)


class JaxAverage(jax_step.Step):
    """A step that keeps one more tensor for each parameter."""

    def begin(self, weights):
        state, specs = super().begin(weights)
        return Averaged(*state, jax.tree.map(jnp.zeros_like, state.params)), Averaged(*specs, specs.params)

    def train(self, state, tokens, lr):
        new, loss, norm = super().train(state.inner, tokens, lr)
        taken = jnp.isfinite(loss) & jnp.isfinite(norm)  # T-4
        ema = jax.tree.map(lambda old, p: jnp.where(taken, DECAY * old + (1 - DECAY) * p, old), state.ema, new.params)
        return Averaged(*new, ema), loss, norm

    def tensors(self, state):
        return super().tensors(state.inner) | {"ema": self.stacks.named(state.ema)}

    def restored(self, state, tensors):
        return Averaged(*super().restored(state.inner, tensors), self.stacks.tree(state.ema, tensors["ema"]))


class TorchAverage(torch_step.Step):
    """The same in PyTorch."""

    def __init__(self, *args):
        super().__init__(*args)
        self.ema = {name: torch.zeros_like(p, requires_grad=False) for name, p in self.params.items()}

    def update(self, loss, lr, measured=None):
        metrics = super().update(loss, lr, measured)
        if all(map(math.isfinite, metrics.values())):  # T-4
            for name, p in self.params.items():
                self.ema[name].lerp_(p.detach(), 1 - DECAY)
        return metrics

    def tensors(self):
        return super().tensors() | {"ema": self.ema}


@pytest.mark.slow
@pytest.mark.parametrize("backend", loop.BACKENDS)
def test_one_more_entry_is_saved_sized_and_loaded(backend, small, tmp_path, monkeypatch):
    """An entry of the schema, and a step of each backend that makes it, are all that it takes (of the trainer's own models)."""
    before = train_state.disk_bytes(small, backend)
    entry = train_state.PerParameter(name="ema", label="average of the weights")
    monkeypatch.setattr(train_state, "PER_PARAMETER", (*train_state.PER_PARAMETER, entry))
    monkeypatch.setattr(jax_trainer, "Step", JaxAverage)
    monkeypatch.setattr(torch_trainer, "Step", TorchAverage)

    def average(trainer):
        tensors = trainer._step.tensors(*([trainer._state] if backend == "jax" else []))
        return {name: np.asarray(value).copy() for name, value in tensors["ema"].items()}

    tokens = loader.open_batches(small).step(0)
    trainer, other = loop.trainer(backend, small), loop.trainer(backend, small.replace(run={"seed": 1}))
    trainer.step(tokens)
    trainer.save(tmp_path / "state")()
    other.load(tmp_path / "state", 1)
    saved, read = average(trainer), average(other)
    assert any(value.any() for value in saved.values())
    assert all(np.array_equal(read[name], value) for name, value in saved.items())
    assert other.step(tokens) == trainer.step(tokens)

    parameters = sum(value.size for value in saved.values())
    assert train_state.disk_bytes(small, backend) - before == pytest.approx(1.05 * 4 * parameters, abs=1)
    assert memory.lines(sizes.config(), backend)["average of the weights"][0] == 4 * 106816
