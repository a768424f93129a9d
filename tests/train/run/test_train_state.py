"""The schema is what both backends save, and one more entry in it is saved, sized and loaded."""

import contextlib
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.models import own_configurations, sizes
from safetensors import safe_open

from fp8ref.estimate import memory
from fp8ref.shared.errors import ConfigError
from fp8ref.train import loop
from fp8ref.train.config.config import Config
from fp8ref.train.data import loader
from fp8ref.train.jax import optimizer as jax_optimizer
from fp8ref.train.jax import step as jax_step
from fp8ref.train.run import train_state
from fp8ref.train.torch import optimizer as torch_optimizer

ROOT = Path(__file__).parents[3]
STATES = {"kind": "adamw_states", "layout": "msamp_o2"}
OWN = {"torch": own_configurations.of("Tied"), "jax": own_configurations.nnx("Plain")}


def on_disk(folder, backend) -> dict[str, tuple[int, ...]]:
    """Name -> shape, as the backend's own library reads the files; shapes of JAX's are not in its
    index.
    """
    if backend == "jax":
        index = json.loads((folder / "_METADATA").read_text())
        return {
            ".".join(key["key"] for key in one["key_metadata"]): ()
            for one in index["tree_metadata"].values()
        }
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
    assert (
        train_state.logical("exp_avg.model.norm.weight.rank12.codes") == "exp_avg.model.norm.weight"
    )
    assert (
        train_state.logical("exp_avg.model.norm.weight.rank0.scale") == "exp_avg.model.norm.weight"
    )
    assert train_state.logical("fp8.lm_head.states.input.scale") == "fp8.lm_head.states.input.scale"
    assert train_state.disk_bytes(small.replace(optimizer={"kind": "adamw_fp8"}), "torch") == 0


@pytest.mark.parametrize(
    ("saved", "mine", "said"),
    [
        ("w", "w m.w.rank1.codes", r"m\.w\.rank1\.codes is not in the checkpoint\."),
        ("w old", "w", r"old is in the checkpoint, and not in this model\."),
        ("w m.w.rank1.codes mu.w", "w", None),
        ("w", "w mu.w", None),
    ],
)
def test_a_saved_state_may_have_more_ranks_and_not_fewer(saved, mine, said):  # T-6
    states = [dict.fromkeys(names.split(), (2,)) for names in (saved, mine)]
    refused = pytest.raises(ConfigError, match=said) if said else contextlib.nullcontext()
    with refused:
        train_state.check_saved(*states, "model")


def test_a_state_that_the_schema_does_not_name_is_not_saved(small):
    with pytest.raises(AssertionError, match=r"disagree on \['count', 'exp_avg"):
        train_state.check({"model": {}}, small, "jax")


def changed(module) -> dict:
    """The names of a module whose file has the changes that the how-to lists."""
    page = (ROOT / "docs/how-to/checkpoints.md").read_text(encoding="utf-8")
    path = Path(module.__file__).relative_to(ROOT).as_posix()
    (diff,) = re.findall(rf'^```diff title="{path}"\n(.*?)^```', page, re.DOTALL | re.MULTILINE)
    text = Path(module.__file__).read_text(encoding="utf-8")
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before, after = (
            "".join(line[1:] for line in lines if line[0] in kept) for kept in (" ", " +")
        )
        assert text.count(before) == 1, f"{path} has not, or not once:\n{before}"
        text = text.replace(before, after)
    names = dict(vars(module))
    exec(compile(text, path, "exec"), names)
    return names


@pytest.fixture
def averaged(monkeypatch):
    """The three files are changed, to keep a moving average of the weights."""
    monkeypatch.setattr(train_state, "PER_PARAMETER", changed(train_state)["PER_PARAMETER"])
    torch_names, jax_names = changed(torch_optimizer), changed(jax_optimizer)
    for name in ("begin", "step", "tensors"):
        monkeypatch.setattr(torch_optimizer, name, torch_names[name])
    monkeypatch.setattr(jax_step, "Optimizer", jax_names["Optimizer"])


def arrays(trainer) -> dict[str, np.ndarray]:
    """A copy of the state by the names on disk."""
    live = train_state.flat(
        trainer._step.tensors(*([trainer._state] if trainer.backend == "jax" else []))
    )
    return {name: np.asarray(value).copy() for name, value in live.items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("backend", "own", "optimizer"),
    [
        # which decides on the device whether it skips a step
        ("torch", False, {"kind": "adamw_fused"}),
        ("torch", False, STATES),
        ("torch", True, {}),
        pytest.param("jax", False, STATES, marks=pytest.mark.slow),
        ("jax", True, {}),
    ],
    ids=str,
)
# K-2, T-4
def test_the_how_to_keeps_another_tensor(backend, own, optimizer, small, tmp_path, averaged):
    """In three files, for the trainer's own models and for those of users: it is sized, saved,
    loaded, and a skipped step leaves it.
    """
    config = small.replace(optimizer=optimizer)
    if own:
        config = Config(architecture=OWN[backend], data=small.data, run=small.run)
    tokens = loader.open_batches(small).step(0)
    trainer, other = loop.trainer(backend, config), loop.trainer(backend, config)
    old = other.weights()
    trainer.step(tokens)
    before, new = arrays(trainer), trainer.weights()
    for name, w in new.items():
        # factors, products and the sum are rounded once, each time by at most 2^-24 of the larger
        # weight (0.01: second orders)
        bound = 3.01 * 2.0**-24 * np.maximum(np.abs(old[name]), np.abs(w))
        assert (
            np.abs(before[f"ema.{name}"] - (0.99 * old[name].astype(np.float64) + 0.01 * w))
            <= bound
        ).all(), name
    assert not np.array_equal(next(iter(new.values())), next(iter(old.values())))

    trainer.save(tmp_path / "state")()
    other.load(tmp_path / "state", 1)
    assert same(arrays(other), before)
    assert other.step(tokens) == trainer.step(tokens)
    assert same(arrays(other), arrays(trainer))

    poisoned = before | {
        name: np.full_like(x, np.inf) for name, x in before.items() if name.startswith("model.")
    }
    trainer.adopt(poisoned, 1)
    assert not np.isfinite(trainer.step(tokens)["loss"])
    assert same(arrays(trainer), poisoned)


def test_what_is_declared_is_counted(small, averaged, monkeypatch):
    """Disk space and the memory table."""
    with_average = train_state.disk_bytes(small, "torch")
    assert memory.lines(sizes.config(), "torch")["moving average of the weights"][0] == 4 * 106816
    monkeypatch.setattr(train_state, "PER_PARAMETER", train_state.PER_PARAMETER[:-1])
    parameters = sum(map(math.prod, small.shapes.parameters.values()))
    assert with_average - train_state.disk_bytes(small, "torch") == pytest.approx(
        1.05 * 4 * parameters, abs=1
    )
