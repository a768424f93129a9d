import contextlib
import json
import shutil

import pytest

import fp8ref
from fp8ref.run import config as configs
from fp8ref.run import log
from fp8ref.run.config import ConfigError

DATA = {"source": "text", "files": 3}


def start(out, config, backend="jax") -> log.RunLog:
    return log.create(out, config, backend, data=DATA, decisions=config.decisions(), device="cpu: test")


def finished(out, config, backend="jax") -> None:
    run = start(out, config, backend)
    run.step({"step": 0, "loss": 5.5})
    run.status("finished", final={"step": 0})
    run.close()


def contents(folder) -> dict:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def claim(out, config, backend="jax", *, resume=False, overwrite=False) -> bool:
    return log.claim(out, config, backend, resume=resume, overwrite=overwrite)


def test_a_run_is_three_files(tmp_path, small):
    finished(tmp_path / "run", small)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.toml", "metrics.jsonl", "manifest.json"}


def test_config_toml_is_the_config(tmp_path, small):
    finished(tmp_path / "run", small)
    assert configs.load(tmp_path / "run" / "config.toml") == small


def test_the_manifest_says_what_ran_and_how(tmp_path, small):
    import jax
    import numpy as np

    finished(tmp_path / "run", small)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["fp8ref"] == fp8ref.__version__
    assert (manifest["backend"], manifest["device"], manifest["data"]) == ("jax", "cpu: test", DATA)
    assert (manifest["versions"]["numpy"], manifest["versions"]["jax"]) == (np.__version__, jax.__version__)
    assert configs.from_dict(manifest["config"]) == small
    assert (manifest["status"], manifest["final"]) == ("finished", {"step": 0})


def test_the_manifest_lists_every_linear_with_its_reason(tmp_path, small):
    finished(tmp_path / "run", small)
    linears = {linear["path"]: linear for linear in log.read_manifest(tmp_path / "run")["linears"]}
    assert len(linears) == 8
    assert linears["lm_head"] == {
        "path": "lm_head",
        "shape": [256, 32],
        "recipe": "bf16",
        "fp8": False,
        "reason": "named by filter_fqns 'lm_head'",
    }
    assert linears["model.layers.0.mlp.up_proj"]["fp8"]


def test_a_run_is_running_until_it_says_otherwise(tmp_path, small):
    run = start(tmp_path / "run", small)
    assert log.read_manifest(tmp_path / "run")["status"] == "running"
    run.status("failed", error="no")
    assert log.read_manifest(tmp_path / "run")["status"] == "failed"
    assert log.read_manifest(tmp_path / "run")["error"] == "no"
    run.close()


def test_each_line_is_on_disk_before_the_next_step(tmp_path, small):
    run = start(tmp_path / "run", small)
    for step in range(3):
        run.step({"step": step, "loss": 0.1})
        assert log.read_metrics(tmp_path / "run") == [{"step": i, "loss": 0.1} for i in range(step + 1)]
    run.close()


def test_metrics_keep_every_bit_of_a_float(tmp_path, small):
    value = 5.502084732055664
    run = start(tmp_path / "run", small)
    run.step({"loss": value, "grad_norm": 1e-45})
    run.close()
    assert log.read_metrics(tmp_path / "run") == [{"loss": value, "grad_norm": 1e-45}]


@pytest.mark.parametrize("torn", ['{"step": 2, "lo', '{"step": 2}', " ", ""])
def test_a_torn_last_line_is_left_out(tmp_path, torn):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n' + torn)
    assert log.read_metrics(tmp_path) == [{"step": 0}, {"step": 1}]


def test_starting_again_drops_the_old_metrics(tmp_path, small):
    finished(tmp_path / "run", small)
    start(tmp_path / "run", small).close()
    assert log.read_metrics(tmp_path / "run") == []


def test_a_manifest_is_replaced_whole(tmp_path, small, monkeypatch):
    """A crash between writing and renaming leaves the old manifest."""
    run = start(tmp_path / "run", small)
    before = (tmp_path / "run" / "manifest.json").read_bytes()

    def crash(*_):
        raise OSError("power cut")

    with monkeypatch.context() as patched:
        patched.setattr(log.os, "replace", crash)
        with pytest.raises(OSError, match="power cut"):
            run.status("finished")
    run.close()
    assert (tmp_path / "run" / "manifest.json").read_bytes() == before


def test_a_run_leaves_no_temporary_files(tmp_path, small):
    finished(tmp_path / "run", small)
    assert not list((tmp_path / "run").glob("*.tmp"))


@pytest.mark.parametrize(("resume", "overwrite"), [(False, False), (True, False), (False, True)])
def test_a_directory_that_is_not_there_or_empty_is_free(tmp_path, small, resume, overwrite):
    (tmp_path / "empty").mkdir()
    assert claim(tmp_path / "absent", small, resume=resume, overwrite=overwrite)
    assert claim(tmp_path / "empty", small, resume=resume, overwrite=overwrite)
    assert not (tmp_path / "absent").exists()


def test_a_run_is_refused_and_untouched(tmp_path, small):
    finished(tmp_path / "run", small)
    before = contents(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"already holds a run.*--resume.*--overwrite.*--run\.out"):
        claim(tmp_path / "run", small)
    assert contents(tmp_path / "run") == before


def test_resume_and_overwrite_exclude_each_other(tmp_path, small):
    finished(tmp_path / "run", small)
    before = contents(tmp_path / "run")
    with pytest.raises(ConfigError, match="give one of them"):
        claim(tmp_path / "run", small, resume=True, overwrite=True)
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])
def test_a_run_that_did_not_finish_is_resumed(tmp_path, small, status):
    run = start(tmp_path / "run", small)
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
        ({"run": {"steps": 7}}, "config.run.steps", "6", "7"),
        ({"data": {"seed": 3}}, "config.data.seed", "0", "3"),
        ({"numerics": {"recipe": "bf16"}}, "config.numerics.recipe", "'tensorwise'", "'bf16'"),
        ({"numerics": {"filter_fqns": ("mlp",)}}, "config.numerics.filter_fqns", r"\[\]", r"\['mlp'\]"),
    ],
)
@pytest.mark.parametrize("status", ["finished", "interrupted"])
def test_resuming_another_config_is_refused_with_the_key_and_both_values(tmp_path, small, sections, key, was, now, status):
    run = start(tmp_path / "run", small)
    run.status(status)
    run.close()
    before = contents(tmp_path / "run")
    with pytest.raises(ConfigError, match=f"another {key}: {was}, and now {now}"):
        claim(tmp_path / "run", small.replace(**sections), resume=True)
    assert contents(tmp_path / "run") == before


def test_resuming_with_another_backend_is_refused(tmp_path, small):
    finished(tmp_path / "run", small, "jax")
    with pytest.raises(ConfigError, match="another backend: 'jax', and now 'torch'"):
        claim(tmp_path / "run", small, "torch", resume=True)


def test_a_run_may_be_resumed_where_it_was_moved_to(tmp_path, small):
    there = small.replace(run={"out": str(tmp_path / "run")})
    finished(tmp_path / "run", there)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    assert not claim(tmp_path / "moved", there.replace(run={"out": str(tmp_path / "moved")}), resume=True)
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
    with pytest.raises(ConfigError, match=r"no intact run|not a manifest of fp8ref"):
        claim(tmp_path / "run", small, resume=True)


def test_reading_the_manifest_of_no_run_is_said_to_be_so(tmp_path):
    with pytest.raises(ConfigError, match=r"manifest\.json cannot be read"):
        log.read_manifest(tmp_path)


@pytest.mark.parametrize("torn", ["", '{"step": 3, "lo'])
def test_a_run_that_resumes_keeps_the_lines_before_its_first_step(tmp_path, small, torn):
    out = tmp_path / "run"
    run = start(out, small)
    for step in range(4):
        run.step({"step": step, "loss": step / 7})
    run.close()
    if torn:
        (out / "metrics.jsonl").write_text((out / "metrics.jsonl").read_text() + torn)
    run = log.create(out, small, "jax", data=DATA, decisions=small.decisions(), device="cpu: test", start=2)
    assert run.kept == [{"step": 0, "loss": 0.0}, {"step": 1, "loss": 1 / 7}]
    run.step({"step": 2, "loss": 0.5})
    run.close()
    assert log.read_metrics(out) == [*run.kept, {"step": 2, "loss": 0.5}]
    assert log.read_manifest(out)["starts"] == [0, 2]


def test_lines_that_are_synced_are_on_the_disk(tmp_path, small, monkeypatch):
    run = start(tmp_path / "run", small)
    synced = []
    monkeypatch.setattr(log.os, "fsync", synced.append)
    run.sync()
    assert synced == [run._metrics.fileno()]
    run.close()


def test_a_run_may_be_called_finished_afterwards(tmp_path, small):
    run = start(tmp_path / "run", small)
    run.step({"step": 0, "loss": 1.0})
    run.status("failed", error="power cut")
    run.close()
    log.finish(tmp_path / "run")
    manifest = log.read_manifest(tmp_path / "run")
    assert (manifest["status"], manifest["final"], "error" in manifest) == ("finished", {"step": 0, "loss": 1.0}, False)


@pytest.mark.parametrize("writes", range(8))
def test_a_run_that_is_killed_while_it_begins_is_a_run_or_nothing(tmp_path, small, monkeypatch, writes):
    """After any number of its writes, half of the last one on the disk, the same command goes on."""
    left, plain = [writes], log.Path.write_text

    def write(path, text, **options):
        left[0] -= 1
        plain(path, text if left[0] >= 0 else text[: len(text) // 2], **options)
        if left[0] < 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(log.Path, "write_text", write)
    with contextlib.suppress(KeyboardInterrupt):
        start(tmp_path / "run", small).close()
    monkeypatch.undo()
    assert claim(tmp_path / "run", small, resume=True)
    start(tmp_path / "run", small).close()
    assert log.read_metrics(tmp_path / "run") == []
