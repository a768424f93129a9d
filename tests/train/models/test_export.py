import importlib
import json
import pickle
import shutil
import tracemalloc

import numpy as np
import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch_file

from fp8ref.shared.errors import ConfigError
from fp8ref.spec import llama
from fp8ref.train import loop
from fp8ref.train.models import export
from fp8ref.train.run import checkpoint


@pytest.fixture(scope="module", params=loop.BACKENDS)
def exported(request, tmp_path_factory):
    """A run of either backend, its config, where it was exported and its weights."""
    folder = tmp_path_factory.mktemp("exported")
    (folder / "text").mkdir()
    for i in range(40):
        (folder / "text" / f"{i}.txt").write_text("amax scale " * 200)
    config = loop.Config().replace(
        model={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
        data={"source": str(folder / "text"), "sequence_length": 16, "batch_size": 4},
        run={"steps": 2, "eval_batches": 1},
        statistics={"every": 0},  # measured steps are programs of their own
    )
    loop.train(config, request.param, folder / "run")
    export.export(folder / "run", folder / "out")
    return folder, config, request.param


def read(path, model):
    """The whole weights."""
    return {name: weight[...] for name, weight in export.read(path, model).items()}


def test_transformers_loads_it_with_equal_weights_and_logits(exported):  # K-7
    """Against transformers' own model of the same numbers, built another way: by
    load_state_dict.
    """
    folder, config, _ = exported
    loaded, report = transformers.LlamaForCausalLM.from_pretrained(
        folder / "out", output_loading_info=True
    )
    assert not any(report.values())
    weights = read(folder / "out", config.model)
    assert {name: value.shape for name, value in weights.items()} == llama.parameter_shapes(
        config.model
    )
    for name, value in loaded.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), weights[name], err_msg=name)
    again = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(folder / "out"))
    again.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    tokens = torch.arange(16)[None]
    assert torch.equal(loaded(tokens).logits, again(tokens).logits)


def test_a_scanned_run_is_exported_layer_by_layer(exported, tmp_path):
    """As a trainer without a scan reads its checkpoint."""
    _, config, backend = exported
    if backend != "jax":
        pytest.skip("JAX alone scans layers")
    # weights are stacked whatever casts them; XLA compiles casts for seconds
    scanned = config.replace(
        model={"num_hidden_layers": 2},
        numerics={"recipe": "bf16"},
        parallel={"scan": True},
        run={"steps": 1},
    )
    loop.train(scanned, "jax", tmp_path / "run")
    export.export(tmp_path / "run", tmp_path / "out")
    apart = loop.trainer("jax", scanned.replace(parallel={"scan": False}))
    apart.load(tmp_path / "run/checkpoints/step-00000001/state", 1)
    weights, stored = apart.weights(), read(tmp_path / "out", scanned.model)
    assert weights.keys() == stored.keys() == llama.parameter_shapes(scanned.model).keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(value, weights[name], err_msg=name)


def test_its_rotary_tables_and_sizes_are_the_models(exported):
    folder, config, _ = exported
    found = transformers.LlamaConfig.from_pretrained(folder / "out")
    for key in (
        "vocab_size",
        "hidden_size",
        "num_key_value_heads",
        "rms_norm_eps",
        "tie_word_embeddings",
        "head_dim",
    ):
        assert getattr(found, key) == getattr(config.model, key)
    assert found.rope_parameters["rope_theta"] == config.model.rope_theta
    assert found.max_position_embeddings == config.data.sequence_length


@pytest.mark.parametrize("backend", loop.BACKENDS)
def test_either_backend_goes_on_from_it_bit_for_bit(exported, backend, tmp_path):  # K-7
    folder, config, _ = exported
    weights = read(folder / "out", config.model)
    started = loop.trainer(backend, config, weights)
    for name, value in started.weights().items():
        np.testing.assert_array_equal(value, weights[name], err_msg=name)


def test_a_run_starts_from_it(exported, tmp_path):
    folder, config, backend = exported
    lines = loop.train(
        config.replace(run={"init_from": str(folder / "out")}), backend, tmp_path / "again"
    )
    before = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert lines[0]["loss"] < before["loss"]  # two steps further


def small_model(config):
    return config.model, llama.initial_weights(config.model, seed=0)


def write(folder, weights, config):
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(export._hugging_face(config)))
    return folder


def saying(**keys):
    """Changes config.json; a key that is None goes."""

    def change(folder):
        found = json.loads((folder / "config.json").read_text()) | keys
        (folder / "config.json").write_text(
            json.dumps({key: value for key, value in found.items() if value is not None})
        )

    return change


def test_several_files_and_an_index(tmp_path, small, monkeypatch):
    model, weights = small_model(small)
    monkeypatch.setattr(export, "LARGEST", 20_000)
    (tmp_path / "out").mkdir()
    export._write(tmp_path / "out", small, iter(weights.items()))
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert all(
        sum(v.nbytes for v in load_file(f).values()) <= 20_000 or len(load_file(f)) == 1
        for f in files
    )
    found = read(tmp_path / "out", model)
    for name, value in weights.items():
        np.testing.assert_array_equal(found[name], value)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(np.array_equal(loaded[name].numpy(), value) for name, value in weights.items())


def test_whoever_may_read_new_files_may_read_all_of_them(exported):
    out = exported[0] / "out"
    assert {path.stat().st_mode for path in out.iterdir()} == {(out / "config.json").stat().st_mode}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrower_weights_are_widened(tmp_path, small, dtype):  # K-7
    model, weights = small_model(small)
    narrow = {name: torch.from_numpy(value).to(dtype) for name, value in weights.items()}
    write(tmp_path / "in", {}, small)
    save_torch_file(narrow, tmp_path / "in" / "model.safetensors")
    for name, value in read(tmp_path / "in", model).items():
        np.testing.assert_array_equal(value, narrow[name].float().numpy())


def test_a_tied_models_second_copy_is_left_out(tmp_path, small):
    config = small.replace(model={"tie_word_embeddings": True})
    model, weights = small_model(config)
    write(tmp_path / "in", weights | {"lm_head.weight": weights[llama.EMBEDDING]}, config)
    assert export.read(tmp_path / "in", model).keys() == weights.keys()


def reworded(path, **keys) -> None:
    """Write config.json with other values, null too."""
    (path / "config.json").write_text(
        json.dumps(json.loads((path / "config.json").read_text()) | keys)
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: (p / "config.json").unlink(), r"config\.json cannot be read"),
        (saying(hidden_size=64), r"hidden_size 64; model\.hidden_size is 32"),
        (saying(model_type="gpt2"), r"model_type 'gpt2'"),
        (saying(hidden_act="gelu"), r"hidden_act 'gelu'"),
        (saying(num_hidden_layers=None), r"has no num_hidden_layers"),
        (saying(attention_bias=True), r"attention_bias True"),
        (lambda p: reworded(p, hidden_size=None), r"has no hidden_size"),
        (lambda p: reworded(p, layer_types=3), r"layer_types is a list; got 3"),
        (lambda p: reworded(p, rope_parameters=[]), r"rope_parameters is an object; got \[\]"),
        (
            lambda p: (p / "config.json").write_text('{"rope_scaling": {"rope_type": "llama3"}}'),
            r"rope_type 'default' only \(M-4\).*'llama3'",
        ),
        (
            lambda p: (p / "model.safetensors").unlink(),
            r"model\.safetensors.*pickled ones are never read",
        ),
        (
            lambda p: (p / "model.safetensors").write_bytes(b"\\0" * 9),
            r"in: .*pickled ones are never read",
        ),
        (
            lambda p: save_file({"a": np.ones(2, np.float32)}, p / "model.safetensors"),
            r"missing \['lm_head",
        ),
        (
            lambda p: save_file({"a": np.ones(2, np.int64)}, p / "model.safetensors"),
            r"a is I64; weights are float32",
        ),
        (
            lambda p: (p / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "../b"}}'
            ),
            r"\.\./b.*names files of its own directory",
        ),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, small, change, said):
    model, weights = small_model(small)
    change(write(tmp_path / "in", weights, small))
    with pytest.raises(ConfigError, match=said):
        export.read(tmp_path / "in", model)


def test_weights_that_are_not_finite_are_named(tmp_path, small):
    model, weights = small_model(small)
    weights["model.norm.weight"][1] = np.nan
    with pytest.raises(
        ConfigError, match=r"run\.init_from .*model\.norm\.weight holds nan at \[1\]"
    ):
        read(write(tmp_path / "in", weights, small), model)
    with pytest.raises(
        ConfigError, match=r"run\.init_from .*model\.norm\.weight holds nan at \[1\]"
    ):
        loop.train(small.replace(run={"init_from": str(tmp_path / "in")}), "jax", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    embedding = weights[llama.EMBEDDING]
    embedding[5, 3] = np.inf
    found = export.read(write(tmp_path / "again", weights, small), model)[llama.EMBEDDING]
    np.testing.assert_array_equal(found[:5], embedding[:5])
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight holds inf at \[5, 3\]"):
        found[slice(4, 6), slice(2, 9)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_piece_of_a_stored_weight_is_read_alone(tmp_path, small, dtype):  # K-7
    value = torch.randn(4096, 512).to(dtype)
    save_torch_file({"w": value}, tmp_path / "w.safetensors")
    stored = export.stored(tmp_path / "w.safetensors")["w"]
    tracemalloc.start()
    piece = stored[slice(1024, 1026), slice(None)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(piece, value[1024:1026].float().numpy())
    assert peak < value.numel() * value.element_size() / 8


class Evil:
    def __reduce__(self):
        return exit, (1,)


def test_pickled_weights_are_not_looked_at(tmp_path, small):  # K-5
    folder = write(tmp_path / "in", {}, small)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ConfigError, match="pickled ones are never read"):
        export.read(folder, small.model)


def test_exporting_leaves_what_is_there_alone(exported, tmp_path):
    folder, _, _ = exported
    (tmp_path / "mine").write_text("thesis")
    with pytest.raises(ConfigError, match="is not empty; it is left alone"):
        export.export(folder / "run", tmp_path)
    with pytest.raises(ConfigError, match=r"--tokenizer .*absent is not there"):
        export.export(folder / "run", tmp_path / "out", tokenizer=tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"is not an intact run"):
        export.export(tmp_path / "absent", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("directory", [True, False])
def test_a_tokenizer_comes_along(exported, tmp_path, directory):
    folder, _, _ = exported
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    given = tmp_path / "tokenizer" if directory else tmp_path / "tokenizer" / "tokenizer.json"
    assert export.export(folder / "run", tmp_path / "out", tokenizer=given) == 2
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("text", "copied"),
    [
        ('{"model": {"vocab": {}}}', True),
        ("token = hunter2", False),
        ('{"token": "hunter2"}', False),
        ('{"model": {"token": "hunter2"}}', False),
    ],
)
def test_the_runs_own_tokenizer_comes_along(exported, tmp_path, text, copied):
    """A file that a run names is copied only if it is a tokenizer: a run of others may name a
    private one.
    """
    folder, _, _ = exported
    own = tmp_path / "own.json"
    own.write_text(text)
    shutil.copytree(folder / "run", tmp_path / "run")
    (path,) = checkpoint.saved(tmp_path / "run")
    about = {
        key: value
        for key, value in checkpoint.verify(path).items()
        if key not in ("format", "files")
    }
    about["config"]["data"]["tokenizer"] = str(own)
    checkpoint.write_manifest(path, about)
    said = []
    export.export(tmp_path / "run", tmp_path / "out", say=said.append)
    assert (tmp_path / "out" / "own.json").exists() == copied
    assert any("is no tokenizer.json; it is left out" in line for line in said) != copied


def test_a_run_whose_own_manifest_is_lost_is_exported(exported, tmp_path):
    folder, _, _ = exported
    shutil.copytree(folder / "run" / "checkpoints", tmp_path / "run" / "checkpoints")
    assert export.export(tmp_path / "run", tmp_path / "out") == 2
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        folder / "out" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")]
)
def test_exporting_to_a_full_disk_says_so_and_leaves_nothing(
    exported, tmp_path, monkeypatch, error
):
    folder, _, _ = exported

    def full(tensors, path, **_):
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(
        OSError, match=r"--out .*out could not be written: .*No space left.* Make room"
    ):
        export.export(folder / "run", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_a_run_removes_meanwhile_gives_way_to_a_newer_one(
    exported, tmp_path, monkeypatch
):
    folder, _, _ = exported
    shutil.copytree(folder / "run", tmp_path / "run")
    (path,) = checkpoint.saved(tmp_path / "run")
    about = {
        key: value
        for key, value in checkpoint.verify(path).items()
        if key not in ("format", "files")
    }
    plain = export._write

    def while_training(*arguments):
        if path.exists():
            path.rename(path.with_name("step-00000009"))
            checkpoint.write_manifest(path.with_name("step-00000009"), about | {"step": 9})
            raise ConfigError("some of it is gone")
        plain(*arguments)

    monkeypatch.setattr(export, "_write", while_training)
    assert export.export(tmp_path / "run", tmp_path / "out") == 9
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        folder / "out" / "model.safetensors"
    ).read_bytes()
    assert not list(tmp_path.glob("*.unfinished"))


def test_exporting_changes_nothing_of_a_run(exported, tmp_path):
    folder, _, _ = exported
    shutil.copytree(folder / "run", tmp_path / "run")
    damaged = tmp_path / "run" / "checkpoints" / "step-00000009"
    damaged.mkdir()
    said = []
    assert export.export(tmp_path / "run", tmp_path / "out", say=said.append) == 2
    assert "step-00000009: manifest.json cannot be read" in said[0]
    assert damaged.exists()
    with pytest.raises(ConfigError, match=r"is in the run's own directory"):
        export.export(tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000011")


def damaged_state(exported, tmp_path, damage):
    """A run whose last checkpoint is damaged, with sums of what it holds now: a forged one."""
    folder, _, backend = exported
    shutil.copytree(folder / "run", tmp_path / "run")
    (path,) = checkpoint.saved(tmp_path / "run")
    about = {
        key: value
        for key, value in checkpoint.verify(path).items()
        if key not in ("format", "files")
    }
    damage(path / "state", backend)
    checkpoint.write_manifest(path, about)
    return tmp_path / "run"


def without_a_header(state, backend):
    for file in [*state.glob("*.safetensors"), *state.glob("_METADATA")]:
        file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


def without_metadata(state, backend):
    if backend == "torch":
        for file in state.glob("*.safetensors"):
            save_file(load_file(file), file)
    else:
        (state / "_METADATA").write_text("[]")


def with_other_metadata(state, backend):
    if backend == "torch":
        for file in state.glob("*.safetensors"):
            save_file(load_file(file), file, metadata={"DCP_SHARDING_INFO": "[]"})
    else:
        (state / "_METADATA").write_text('{"tree_metadata": {"a": {"key_metadata": 1}}}')


@pytest.mark.parametrize("damage", [without_a_header, without_metadata, with_other_metadata])
def test_a_state_that_cannot_be_read_is_named_and_not_the_disk(exported, tmp_path, damage):
    run = damaged_state(exported, tmp_path, damage)
    with pytest.raises(ConfigError, match=r"state cannot be exported: ") as error:
        export.export(run, tmp_path / "out")
    assert "Make room" not in str(error.value)
    assert not (tmp_path / "out").exists()
    _, config, backend = exported
    if (damage, backend) != (without_metadata, "torch"):  # dcp takes such files for whole tensors
        with pytest.raises(ConfigError, match="state cannot be read"):
            loop.trainer(backend, config).load(checkpoint.latest(run, print).state, 2)


def test_weights_that_are_not_finite_are_not_exported(exported, tmp_path, monkeypatch):  # K-7
    folder, _, backend = exported
    library = importlib.import_module(f"fp8ref.train.{backend}.checkpoint")
    plain = library.weights

    def bad(*arguments):
        for name, value in plain(*arguments):
            yield (
                name,
                np.where(np.arange(value.size).reshape(value.shape) == 3, np.nan, value)
                if "up_proj" in name
                else value,
            )

    monkeypatch.setattr(library, "weights", bad)
    with pytest.raises(
        ConfigError,
        match=r"cannot be exported: .*model\.layers\.0\.mlp\.up_proj\.weight holds nan at \[0, 3\]",
    ):
        export.export(folder / "run", tmp_path / "out")
    assert not list(tmp_path.iterdir())
