import os
import pickle
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.processes.ranks import run
from safetensors import safe_open

from fp8ref.shared.errors import ConfigError
from fp8ref.spec import llama
from fp8ref.spec.states.layouts import WITH_MASTERS
from fp8ref.train.config.config import Config
from fp8ref.train.torch import checkpoint
from fp8ref.train.torch.trainer import Trainer

MODEL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def config_of(recipe, kind="adamw", **parallel):
    """kind: of an optimizer, or the name of a layout with masters."""
    optimizer = {"kind": "adamw_states", "layout": kind} if kind in WITH_MASTERS else {"kind": kind}
    sections = {
        "model": MODEL,
        "data": {"batch_size": 8, "sequence_length": 32},
        "optimizer": optimizer,
    }
    return Config().replace(**sections, numerics={"recipe": recipe}, parallel=parallel)


def batches():
    return np.random.default_rng(0).integers(0, 256, (4, 8, 33))


def saving(folder, config):
    """Train 2 steps, save, and train 2 more: weights when saved, metrics of the later steps,
    weights at the end.
    """
    with torch.compiler.set_stance("force_eager"):
        trainer = Trainer(config)
        for tokens in batches()[:2]:
            trainer.step(tokens)
        trainer.evaluate(batches()[3])  # after it FSDP2 leaves the embedding gathered
        weights = trainer.weights()
        written = trainer.save(Path(folder))
        metrics = [trainer.step(tokens) for tokens in batches()[2:]]
        written()
        return weights, metrics, trainer.weights()


def resuming(folder, config):
    """The same of one that starts from what was saved."""
    with torch.compiler.set_stance("force_eager"):
        trainer = Trainer(config)
        trainer.load(Path(folder), 2)
        weights = trainer.weights()
        metrics = [trainer.step(tokens) for tokens in batches()[2:]]
        return weights, metrics, trainer.weights()


def equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize(
    ("recipe", "kind", "before", "after"),
    [
        ("delayed", "adamw", {"fsdp": 2}, {"fsdp": 2}),
        ("tensorwise", "adamw_fp8", {"fsdp": 2}, {"fsdp": 2}),
        ("tensorwise", "adamw_states", {"fsdp": 2}, {"fsdp": 2}),
        ("tensorwise", "msamp_o2", {"fsdp": 2}, {}),
        pytest.param(
            "tensorwise", "sqrt_e4m3_f16", {"fsdp": 2}, {"fsdp": 2}, marks=pytest.mark.slow
        ),
        pytest.param(
            "tensorwise", "msamp_o2", {"fsdp": 2, "tensor": 2}, {"fsdp": 4}, marks=pytest.mark.slow
        ),
        pytest.param(
            "rowwise", "sqrt_e4m3_f16", {"data": 2, "fsdp": 2}, {"fsdp": 4}, marks=pytest.mark.slow
        ),
        pytest.param(
            "tensorwise", "adamw_states", {"fsdp": 4}, {"fsdp": 2}, marks=pytest.mark.slow
        ),
        pytest.param("rowwise", "adamw_states", {"data": 2, "fsdp": 2}, {}, marks=pytest.mark.slow),
        ("delayed", "adamw_fused", {"fsdp": 2}, {}),
        pytest.param("delayed", "adamw", {"fsdp": 2}, {"fsdp": 4}, marks=pytest.mark.slow),
        pytest.param(
            "rowwise",
            "adamw",
            {"fsdp": 2, "tensor": 2, "amax_scope": "local"},
            {"fsdp": 4, "amax_scope": "local"},
            marks=pytest.mark.slow,
        ),
        pytest.param("tensorwise", "adamw", {}, {"data": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_state_is_read_by_any_mesh(tmp_path, recipe, kind, before, after):  # K-2
    """Exactly; on the mesh that wrote it training goes on bit for bit, on another as between meshes
    (test_processes): 2^-9 of a loss.
    """
    old, new = config_of(recipe, kind, **before), config_of(recipe, kind, **after)

    def on(config, function):
        n = config.parallel.devices
        return (
            run(n, function, str(tmp_path / "state"), config)
            if n > 1
            else [function(str(tmp_path / "state"), config)]
        )

    saved = on(old, saving)
    shapes = {name: value.shape for name, value in saved[0][0].items()}
    assert equal(dict(checkpoint.weights(tmp_path / "state", shapes)), saved[0][0])
    for weights, metrics, final in on(new, resuming):
        assert equal(weights, saved[0][0])
        if before == after:
            assert metrics == saved[0][1]
            assert equal(final, saved[0][2])
        assert [m["loss"] for m in metrics] == pytest.approx(
            [m["loss"] for m in saved[0][1]], rel=2.0**-9
        )


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    "kind", ["adamw", "adamw_fused", "adamw_fp8", "adamw_states", *WITH_MASTERS]
)
def test_moments_of_every_optimizer_are_kept_bit_for_bit(tmp_path, kind):  # K-2, T-6
    with torch.compiler.set_stance("force_eager"):
        weights, metrics, final = saving(tmp_path / "state", config_of("bf16", kind))
        again = resuming(tmp_path / "state", config_of("bf16", kind))
    assert equal(weights, again[0])
    assert metrics == again[1]
    assert equal(final, again[2])


def test_factors_that_one_side_lacks_are_no_error(tmp_path):  # K-2, P-22
    """mu that is not in the state becomes 1, and what only the state has is not read; of other
    tensors either is refused.
    """
    name, mu, store = "model.norm.weight", "mu.lm_head.weight", checkpoint.Store()
    store.save(tmp_path / "with", {name: torch.full((2,), 5.0), mu: torch.tensor(0.5)})()
    store.save(tmp_path / "without", {name: torch.full((2,), 7.0)})()
    found = {name: torch.zeros(2), mu: torch.tensor(4.0)}
    for folder, value, factor in (("without", 7, 1), ("with", 5, 0.5)):
        store.load(tmp_path / folder, found)
        assert found[name].tolist() == [value] * 2
        assert found[mu] == factor
    found.pop(mu)
    found[name].zero_()
    store.load(tmp_path / "with", found)
    assert found[name].tolist() == [5, 5]
    with pytest.raises(ConfigError, match=r"count is not in the checkpoint"):
        store.load(tmp_path / "with", found | {"count": torch.tensor(0)})
    with pytest.raises(ConfigError, match=r"mu.lm_head.weight is \[3\] here and \[\] in"):
        store.load(tmp_path / "with", found | {mu: torch.ones(3)})


def test_only_tensors_are_written(tmp_path):  # K-5
    saving(tmp_path / "state", config_of("delayed"))
    (file,) = (tmp_path / "state").iterdir()
    with safe_open(file, framework="pt") as found:
        names = set(found.keys())
    parameters = llama.parameter_shapes(config_of("delayed").model)
    assert {
        name.removeprefix(f"{key}.")
        for key in ("model", "exp_avg", "exp_avg_sq")
        for name in names
        if name.startswith(f"{key}.")
    } == {*parameters}
    # linears, roles, and of each scale, history and step
    assert sum(name.startswith("fp8.") for name in names) == 14 * 3 * 3


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_planted_pickle_is_never_read(tmp_path):  # K-5
    saving(tmp_path / "state", config_of("bf16"))
    for name in (".metadata", "__0_0.distcp", "shard.pt", "model.bin"):
        (tmp_path / "state" / name).write_bytes(pickle.dumps(Evil(tmp_path / "read")))
    resuming(tmp_path / "state", config_of("bf16"))
    dict(checkpoint.weights(tmp_path / "state", llama.parameter_shapes(config_of("bf16").model)))
    assert not (tmp_path / "read").exists()


def test_weights_alone(tmp_path, monkeypatch):
    """One after the other, each read when it is asked for, of a file whose header is read once."""
    weights, _, _ = saving(tmp_path / "state", config_of("delayed"))
    opened, read = [], []

    class Opened:
        def __init__(self, path, **keys):
            opened.append(path)
            self.file = safe_open(path, **keys)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.__exit__(*error)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def get_tensor(self, name):
            read.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr(checkpoint, "safe_open", Opened)
    found = {}
    for name, value in checkpoint.weights(
        tmp_path / "state", {name: value.shape for name, value in weights.items()}
    ):
        found[name] = value
        assert read == [f"model.{n}" for n in found]
    assert equal(found, weights)
    assert all(value.dtype == np.float32 for value in found.values())
    assert opened == list((tmp_path / "state").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("model.norm.weight", (63,)), ("model.norm.weight", (65,)), ("model.norm.bias", (64,))],
    ids=["less", "more", "absent"],
)
def test_another_models_weights_are_refused(tmp_path, name, shape):
    Trainer(config_of("bf16")).save(tmp_path / "state")()
    with pytest.raises(ConfigError, match=rf"{name} .* Load a state of the same model"):
        dict(checkpoint.weights(tmp_path / "state", {name: shape}))


def test_a_full_disk_is_an_error_of_the_system(tmp_path):  # K-4
    """dcp's own is no Exception, and would pass everyone who waits for one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    plain = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    trainer = Trainer(config_of("bf16"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            trainer.save(tmp_path / "state")()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, plain)
