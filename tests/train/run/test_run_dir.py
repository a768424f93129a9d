import contextlib
import json
import os
import shutil

import pytest
from helpers.models import own_configurations
from helpers.training.made_runs import begin, contents, finished

from fp8ref.shared.errors import ConfigError
from fp8ref.train.config import user_model
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import ArchitectureConfig
from fp8ref.train.run import log, run_dir
from fp8ref.train.run import run_dir as claims


def claim(out, config, backend="jax", *, resume=False, overwrite=False) -> bool:
    with contextlib.closing(run_dir.Lock()) as held:
        return claims.claim(out, config, backend, held, resume=resume, overwrite=overwrite)


@pytest.mark.parametrize(("resume", "overwrite"), [(False, False), (True, False), (False, True)])
def test_a_directory_that_is_not_there_or_empty_is_free(tmp_path, small, resume, overwrite, capsys):
    (tmp_path / "empty").mkdir()
    assert claim(tmp_path / "absent", small, resume=resume, overwrite=overwrite)
    assert claim(tmp_path / "empty", small, resume=resume, overwrite=overwrite)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("holds no run to resume: this one starts at step 0.") == 2 * resume
    assert not (tmp_path / "absent").exists()


def test_a_run_is_refused_and_untouched(tmp_path, small):
    finished(tmp_path / "run", small)
    before = contents(tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"already holds a run.*--resume.*--overwrite.*--run\.out"
    ):
        claim(tmp_path / "run", small)
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("folder", ["checkpoints", "failures", "tensorboard"])
def test_a_link_that_overwriting_would_remove_is_refused_before_anything_is(
    tmp_path, small, folder
):
    finished(tmp_path / "run", small)
    (tmp_path / "elsewhere" / "step-00000001").mkdir(parents=True)
    (tmp_path / "run" / folder).symlink_to(tmp_path / "elsewhere")
    before = contents(tmp_path / "run")
    with pytest.raises(
        ConfigError,
        match=rf"--overwrite removes {folder}/ .* is a link to .*elsewhere\. Nothing was "
        r"changed\. Remove it",
    ):
        claim(tmp_path / "run", small, overwrite=True)
    assert contents(tmp_path / "run") == before
    assert (tmp_path / "elsewhere" / "step-00000001").is_dir()
    (tmp_path / "run" / folder).unlink()
    (tmp_path / "run" / folder).write_text("a file")
    with pytest.raises(ConfigError, match=r"is a file\. Nothing was changed"):
        claim(tmp_path / "run", small, overwrite=True)


@pytest.mark.parametrize(
    ("section", "value", "said"),
    [
        ("run", {"seed": None}, r"/manifest\.json: run\.seed: Input should be a valid integer"),
        ("parallel", {"coopile": "none"}, r"/manifest\.json: unknown key 'parallel\.coopile'"),
        ("data", {"mixture": 3}, r"/manifest\.json: data\.mixture"),
        ("data", {"evaluation": [3]}, r"/manifest\.json: data\.evaluation"),
    ],
)
def test_a_damaged_config_of_a_manifest_is_named(tmp_path, small, section, value, said):
    finished(tmp_path / "run", small)
    path = tmp_path / "run" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["config"][section] |= value
    path.write_text(json.dumps(manifest))
    longer = small.replace(run={"steps": small.run.steps + 5})
    with pytest.raises(ConfigError, match=rf"{tmp_path}/run{said}"):
        claim(tmp_path / "run", longer, resume=True)


@pytest.mark.parametrize(
    "data", [{}, {"evaluation": []}, {"evaluation": {"a": 3}}, {"evaluation": None}], ids=str
)
def test_what_is_no_evaluation_is_none(data):
    assert run_dir.evaluated(data) == {}
    assert run_dir.evaluated({"evaluation": {"a": {"sha256": "0"}}}) == {"a": "0"}


@pytest.mark.parametrize("keys", [{"resume": True}, {"overwrite": True}], ids=str)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_lock_is_a_file_of_the_run(tmp_path, small, keys, kind):
    """In a copied directory a link would lead the lock's text into another file."""
    finished(tmp_path / "run", small)
    lock, other = tmp_path / "run" / run_dir.LOCK, tmp_path / "other"
    lock.unlink(missing_ok=True)
    other.write_text("kept")
    os.mkfifo(lock) if kind == "pipe" else lock.symlink_to(other)
    longer = small.replace(run={"steps": small.run.steps + 5})
    with pytest.raises(
        ConfigError, match=r"run cannot be written \(.*(symbolic links|a pipe or a device)"
    ):
        claim(tmp_path / "run", longer, **keys)
    assert other.read_text() == "kept"
    assert not run_dir.killed(tmp_path / "run")


def test_resume_and_overwrite_exclude_each_other(tmp_path, small):
    finished(tmp_path / "run", small)
    before = contents(tmp_path / "run")
    with pytest.raises(ConfigError, match="give one of them"):
        claim(tmp_path / "run", small, resume=True, overwrite=True)
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])
def test_a_run_that_did_not_finish_is_resumed(tmp_path, small, status):
    run = begin(tmp_path / "run", small)
    run.status(status)
    run.close()
    assert claim(tmp_path / "run", small, resume=True)


def test_a_finished_run_is_left_alone_under_resume(tmp_path, small):
    finished(tmp_path / "run", small)
    before = contents(tmp_path / "run")
    assert not claim(tmp_path / "run", small, resume=True)
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("sections", "key", "was", "now"),
    [
        ({"run": {"steps": 5}}, "config.run.steps", "6", "5"),
        ({"data": {"seed": 3}}, "config.data.seed", "0", "3"),
        ({"numerics": {"recipe": "bf16"}}, "config.numerics.recipe", "'tensorwise'", "'bf16'"),
        (
            {"numerics": {"filter_fqns": ("mlp",)}},
            "config.numerics.filter_fqns",
            r"\[\]",
            r"\['mlp'\]",
        ),
    ],
)
@pytest.mark.parametrize("status", ["finished", "interrupted"])
def test_resuming_another_config_is_refused_with_the_key_and_both_values(
    tmp_path, small, sections, key, was, now, status
):
    run = begin(tmp_path / "run", small)
    run.status(status)
    run.close()
    before = contents(tmp_path / "run")
    with pytest.raises(ConfigError, match=f"another {key}: {was}; got {now}"):
        claim(tmp_path / "run", small.replace(**sections), resume=True)
    assert contents(tmp_path / "run") == before


def test_resuming_with_another_backend_is_refused(tmp_path, small):
    finished(tmp_path / "run", small, "jax")
    with pytest.raises(ConfigError, match="another backend: 'jax'; got 'torch'"):
        claim(tmp_path / "run", small, "torch", resume=True)


def test_a_run_may_be_resumed_where_it_was_moved_to(tmp_path, small):
    there = small.replace(run={"out": str(tmp_path / "run")})
    finished(tmp_path / "run", there)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    assert not claim(
        tmp_path / "moved", there.replace(run={"out": str(tmp_path / "moved")}), resume=True
    )
    assert not claim(tmp_path / "moved", there.replace(run={"out": None}), resume=True)


@pytest.mark.parametrize(("resume", "overwrite"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("name", ["thesis.tex", "metrics.jsonl", "config.toml"])
def test_a_foreign_directory_is_left_alone(tmp_path, small, name, resume, overwrite):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match="is not a run of fp8ref; it is left alone"):
        claim(tmp_path, small, resume=resume, overwrite=overwrite)
    assert (tmp_path / name).read_text() == "mine"


def test_a_foreign_directory_with_a_manifest_of_its_own_is_left_alone(tmp_path, small):
    """Browser extensions and web apps have a manifest.json too."""
    (tmp_path / "manifest.json").write_text('{"manifest_version": 3, "name": "my extension"}')
    (tmp_path / "source.js").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="left alone"):
        claim(tmp_path, small, overwrite=True)
    assert contents(tmp_path) == before


def test_a_file_in_place_of_the_directory_is_left_alone(tmp_path, small):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ConfigError, match="left alone"):
        claim(tmp_path / "run", small, overwrite=True)
    assert (tmp_path / "run").read_text() == "mine"


@pytest.mark.parametrize("damage", ["", '{"backend": "jax", "sta', "[]", "null"])
def test_a_damaged_manifest_is_said_to_be_damaged(tmp_path, small, damage):
    finished(tmp_path / "run", small)
    (tmp_path / "run" / "manifest.json").write_text(damage)
    with pytest.raises(ConfigError, match=r"not an intact run|not a manifest of fp8ref"):
        claim(tmp_path / "run", small, resume=True)


@pytest.mark.parametrize("writes", range(8))
def test_a_run_that_is_killed_while_it_begins_is_a_run_or_nothing(
    tmp_path, small, monkeypatch, writes
):
    """After any number of its writes, half of the last one on the disk, the same command goes
    on.
    """
    left, plain = [writes], log.Path.write_text

    def write(path, text, **options):
        left[0] -= 1
        plain(path, text if left[0] >= 0 else text[: len(text) // 2], **options)
        if left[0] < 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(log.Path, "write_text", write)
    with contextlib.suppress(KeyboardInterrupt):
        begin(tmp_path / "run", small).close()
    monkeypatch.undo()
    assert claim(tmp_path / "run", small, resume=True)
    begin(tmp_path / "run", small).close()
    assert log.read_metrics(tmp_path / "run") == []


def checkpointed(out, config) -> None:
    """A run with something that looks like a checkpoint; whether it is one is asked later."""
    finished(out, config)
    (out / "checkpoints" / "step-00000003").mkdir(parents=True)


@pytest.mark.parametrize("damage", [None, "", '{"backend": "jax", "sta', "[]", "null"])
# K-10
def test_a_run_whose_manifest_is_damaged_goes_on_from_its_checkpoints(
    tmp_path, small, capsys, damage
):
    checkpointed(tmp_path / "run", small)
    manifest = tmp_path / "run" / "manifest.json"
    manifest.unlink() if damage is None else manifest.write_text(damage)
    assert claim(tmp_path / "run", small, resume=True)
    assert (
        "manifest.json is lost or damaged. The run resumes from its last checkpoint."
        in capsys.readouterr().err
    )
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"not an intact run|not a manifest of fp8ref"):
            claim(tmp_path / "run", small, overwrite=overwrite)


@pytest.mark.parametrize("below", ["run", "runs/run"])
def test_a_directory_below_a_file_is_refused_at_once(tmp_path, small, below):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"--run\.out .*run cannot be made: .*file is a file"):
        claim(tmp_path / "file" / below, small)


@pytest.mark.parametrize("keys", [{"resume": True}, {"overwrite": True}])
def test_two_do_not_train_in_one_directory(tmp_path, small, keys):  # K-10
    begin(tmp_path / "run", small).close()
    with contextlib.closing(run_dir.Lock()) as held:
        assert claims.claim(tmp_path / "run", small, "jax", held, resume=True, overwrite=False)
        with pytest.raises(
            ConfigError, match=r"run is in use: process \d+ on \S+ trains there\. Wait"
        ):
            claim(tmp_path / "run", small, **keys)
        claims.make(tmp_path / "run", held)  # it has it
    assert claim(tmp_path / "run", small, **keys)


def test_two_do_not_begin_in_one_directory(tmp_path, small):
    with contextlib.closing(run_dir.Lock()) as first, contextlib.closing(run_dir.Lock()) as second:
        for held in (first, second):
            assert claims.claim(tmp_path / "run", small, "jax", held, resume=False, overwrite=False)
        claims.make(tmp_path / "run", first)
        with pytest.raises(ConfigError, match="is in use: process"):
            claims.make(tmp_path / "run", second)
        begin(tmp_path / "run", small).close()
        first.close()
        with pytest.raises(ConfigError, match="another process has just started a run in"):
            claims.make(tmp_path / "run", second)


def test_a_directory_that_nobody_can_write_is_refused(tmp_path, small, monkeypatch):
    begin(tmp_path / "run", small).close()

    def refused(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(run_dir.os, "open", refused)
    with pytest.raises(
        ConfigError, match=r"run cannot be written \(Read-only file system\)\. Make it writable"
    ):
        claim(tmp_path / "run", small, resume=True)


def test_what_training_started_from_is_not_changed_afterwards(tmp_path, small):
    begin(tmp_path / "run", small).close()
    with pytest.raises(ConfigError, match=r"another config\.run\.init_from: None; got 'weights'"):
        claim(tmp_path / "run", small.replace(run={"init_from": "weights"}), resume=True)


def older(manifest: dict) -> dict:
    """A manifest from before there were experts, attention's scaling, and models of the user's."""
    config = manifest["config"]
    model = {
        key: value
        for key, value in config["model"].items()
        if key not in ("qk_norm", "num_experts", "norm_topk_prob")
    }
    numerics = {
        key: value for key, value in config["numerics"].items() if key != "attention_scaling"
    }
    kept = {key: value for key, value in config.items() if key != "architecture"}
    return manifest | {"config": kept | {"model": model, "numerics": numerics}}


def test_a_run_from_before_there_were_new_keys_resumes(tmp_path, small):
    run = begin(tmp_path / "run", small)
    run.status("interrupted")
    run.close()
    path = tmp_path / "run" / "manifest.json"
    path.write_text(json.dumps(older(json.loads(path.read_text()))))
    assert claim(tmp_path / "run", small, resume=True)
    with pytest.raises(ConfigError, match=r"another config\.model\.qk_norm: False; got True"):
        claim(tmp_path / "run", small.replace(model={"qk_norm": True}), resume=True)


def test_paths_of_a_mixture_and_of_sets_may_move_but_not_weights_and_names(tmp_path, small):
    keys = {"source": "stdlib", "mixture": (("a", 1.0), ("b", 2.0)), "evaluation": (("x", "c"),)}
    run = begin(tmp_path / "run", small.replace(data=keys))
    run.status("interrupted")
    run.close()

    def resumed(**changed):
        return claim(tmp_path / "run", small.replace(data=keys | changed), resume=True)

    assert resumed(mixture=(("moved/a", 1.0), ("b", 2.0)), evaluation=(("x", "moved/c"),))
    with pytest.raises(
        ConfigError, match=r"another config\.data\.mixture: \[1\.0, 2\.0\]; got \[1\.0, 3\.0\]"
    ):
        resumed(mixture=(("a", 1.0), ("b", 3.0)))
    with pytest.raises(
        ConfigError, match=r"another config\.data\.evaluation: \['x'\]; got \['y'\]"
    ):
        resumed(evaluation=(("y", "c"),))


@pytest.mark.parametrize("kind", ["transformers", "torch"])
# T-10
def test_another_content_of_the_architecture_s_source_is_refused(
    tmp_path, small, kind, monkeypatch
):
    if kind == "torch":
        monkeypatch.syspath_prepend(tmp_path)
        edited = tmp_path / "edited_model.py"
        edited.write_text("from helpers.models.own_torch_models import Tied as Made\n")
        architecture = ArchitectureConfig(kind="torch", source="edited_model:Made")
        user_model.trust("edited_model:Made")
    else:
        architecture, edited = own_configurations.transformers(tmp_path), tmp_path / "config.json"
    config = Config(architecture=architecture, data=small.data, run=small.run)
    run = begin(tmp_path / "run", config, "torch")
    run.status("interrupted")
    run.close()
    assert claim(tmp_path / "run", config, "torch", resume=True)
    edited.write_text(edited.read_text() + "\n")
    with pytest.raises(
        ConfigError,
        match=r"another sha256 of architecture\.source: '[0-9a-f]{64}'; got '[0-9a-f]{64}'",
    ):
        claim(tmp_path / "run", config, "torch", resume=True)
