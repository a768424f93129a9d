import json
from pathlib import Path

import pytest
from helpers.training.made_runs import DATA, begin, finished

import fp8ref
from fp8ref.shared.errors import ConfigError
from fp8ref.train.config import config as configs
from fp8ref.train.run import log


def test_a_run_is_three_files(tmp_path, small):
    finished(tmp_path / "run", small)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.toml",
        "metrics.jsonl",
        "manifest.json",
    }


def test_config_toml_is_the_config(tmp_path, small):
    finished(tmp_path / "run", small)
    assert configs.load(tmp_path / "run" / "config.toml") == small


@pytest.mark.parametrize("start", [0, 1])
def test_a_run_writes_through_no_link(tmp_path, small, start):
    """In a copied directory a link would lead into another file."""
    finished(tmp_path / "run", small)
    other = tmp_path / "other"
    other.write_text("kept\n")
    with (tmp_path / "run" / log.METRICS).open("a") as file:
        file.write("damaged\n")
    for name in (
        "manifest.json.tmp",
        "config.toml.tmp",
        "metrics.jsonl.tmp",
        "metrics.jsonl.damaged",
        log.STATISTICS,
    ):
        (tmp_path / "run" / name).symlink_to(other)
    begin(tmp_path / "run", small, start=start).close()
    assert other.read_text() == "kept\n"
    assert not any(
        (tmp_path / "run" / name).is_symlink()
        for name in ("manifest.json", "config.toml", log.METRICS, log.STATISTICS)
    )


def test_the_manifest_says_what_ran_and_how(tmp_path, small):
    import jax
    import numpy as np

    finished(tmp_path / "run", small)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["fp8ref"] == fp8ref.__version__
    assert (manifest["backend"], manifest["device"], manifest["data"]) == ("jax", "cpu: test", DATA)
    assert (manifest["versions"]["numpy"], manifest["versions"]["jax"]) == (
        np.__version__,
        jax.__version__,
    )
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
    run = begin(tmp_path / "run", small)
    assert log.read_manifest(tmp_path / "run")["status"] == "running"
    run.status("failed", error="no")
    assert log.read_manifest(tmp_path / "run")["status"] == "failed"
    assert log.read_manifest(tmp_path / "run")["error"] == "no"
    run.close()


def test_each_line_is_on_disk_before_the_next_step(tmp_path, small):
    run = begin(tmp_path / "run", small)
    for step in range(3):
        run.step({"step": step, "loss": 0.1})
        assert log.read_metrics(tmp_path / "run") == [
            {"step": i, "loss": 0.1} for i in range(step + 1)
        ]
    run.close()


def test_metrics_keep_every_bit_of_a_float(tmp_path, small):
    value = 5.502084732055664
    run = begin(tmp_path / "run", small)
    run.step({"loss": value, "grad_norm": 1e-45})
    run.close()
    assert log.read_metrics(tmp_path / "run") == [{"loss": value, "grad_norm": 1e-45}]


@pytest.mark.parametrize("torn", ['{"step": 2, "lo', '{"step": 2}', " ", ""])
def test_a_torn_last_line_is_left_out(tmp_path, torn):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n' + torn)
    assert log.read_metrics(tmp_path) == [{"step": 0}, {"step": 1}]


def test_starting_again_drops_the_old_metrics(tmp_path, small):
    finished(tmp_path / "run", small)
    begin(tmp_path / "run", small).close()
    assert log.read_metrics(tmp_path / "run") == []


def test_a_manifest_is_replaced_whole(tmp_path, small, monkeypatch):
    """A crash between writing and renaming leaves the old manifest."""
    run = begin(tmp_path / "run", small)
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


def test_reading_the_manifest_of_no_run_is_said_to_be_so(tmp_path):
    with pytest.raises(ConfigError, match=r"manifest\.json cannot be read"):
        log.read_manifest(tmp_path)


@pytest.mark.parametrize("torn", ["", '{"step": 3, "lo'])
def test_a_run_that_resumes_keeps_the_lines_before_its_first_step(tmp_path, small, torn):
    out = tmp_path / "run"
    run = begin(out, small)
    for step in range(4):
        run.step({"step": step, "loss": step / 7, "seconds": 1.0})
    run.close()
    if torn:
        (out / "metrics.jsonl").write_text((out / "metrics.jsonl").read_text() + torn)
    run = begin(out, small, start=2)
    assert run.kept == [{"step": step, "loss": step / 7, "seconds": 1.0} for step in range(2)]
    run.step({"step": 2, "loss": 0.5})
    run.close()
    assert log.read_metrics(out) == [*run.kept, {"step": 2, "loss": 0.5}]
    assert log.read_manifest(out)["starts"] == [0, 2]


def test_lines_that_are_synced_are_on_the_disk(tmp_path, small, monkeypatch):
    run = begin(tmp_path / "run", small)
    synced = []
    monkeypatch.setattr(log.os, "fsync", synced.append)
    run.sync()
    assert synced == [run._metrics.fileno()]
    run.close()


def test_a_run_may_be_called_finished_afterwards(tmp_path, small):
    run = begin(tmp_path / "run", small)
    run.step({"step": 0, "loss": 1.0})
    run.status("failed", error="power cut")
    run.close()
    log.finish(tmp_path / "run")
    manifest = log.read_manifest(tmp_path / "run")
    assert (manifest["status"], manifest["final"], "error" in manifest) == (
        "finished",
        {"step": 0, "loss": 1.0},
        False,
    )


DAMAGED = [
    *(
        "null",
        "[1]",
        '{"step": 1',
        "[" * 100_000,
        "\udcff\x00",
        '{"step": "x", "loss": 1.0, "seconds": 1.0}',
        '{"loss": 1.0, "seconds": 1.0}',
    ),
    *(
        '{"step": 1}',
        '{"step": 1, "seconds": 1.0}',
        '{"step": 0, "loss": 1.0, "seconds": 1.0}',
        '{"step": 1, "loss": "low", "seconds": 1.0}',
    ),
    *(
        '{"step": 1, "loss": 1.0, "seconds": 1e400}',
        '{"step": 1, "loss": NaN, "seconds": 1.0}',
        '{"step": true, "loss": 1.0, "seconds": 1.0}',
    ),
]


@pytest.mark.grid(5)
@pytest.mark.parametrize("line", DAMAGED, ids=range(len(DAMAGED)))
# K-10
def test_damaged_lines_stay_out_of_a_run_that_resumes_and_are_kept_aside(
    tmp_path, small, capsys, line
):
    out = tmp_path / "run"
    run = begin(out, small)
    for step in range(3):
        run.step({"step": step, "loss": 1.0, "seconds": 1.0})
    run.close()
    good = (out / "metrics.jsonl").read_text().splitlines()
    damaged = "\n".join([good[0], line, good[2]]).encode(errors="surrogateescape") + b"\n"
    (out / "metrics.jsonl").write_bytes(damaged)
    run = begin(out, small, start=3)
    run.close()
    assert [kept["step"] for kept in run.kept] == [0, 2]
    assert log.read_metrics(out) == run.kept
    assert (out / "metrics.jsonl.damaged").read_bytes() == damaged
    assert "1 of 3 lines are damaged" in capsys.readouterr().err


@pytest.mark.parametrize("line", DAMAGED[:4], ids=range(4))
def test_a_line_that_is_no_object_is_named_where_it_is_read(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2, is not a JSON object"):
        log.read_metrics(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "null",
        '{"step": 1}',
        '{"step": 0, "statistics": {}}',
        '{"step": 1, "statistics": 5}',
        '{"step": 1, "statistics": {}, "states": 1}',
    ],
)
def test_damaged_statistics_stay_out_too(tmp_path, small, line):
    begin(tmp_path / "run", small).close()
    good = [
        '{"step": 0, "statistics": {}}',
        '{"step": 2, "statistics": {}, "states": {"": {"count": 3}}}',
    ]
    (tmp_path / "run" / "statistics.jsonl").write_text("\n".join([good[0], line, good[1]]) + "\n")
    begin(tmp_path / "run", small, start=3).close()
    assert (tmp_path / "run" / "statistics.jsonl").read_text().splitlines() == good
    assert (tmp_path / "run" / "statistics.jsonl.damaged").exists()


@pytest.mark.parametrize("starts", [5, None, "0"])
def test_starts_of_a_manifest_that_are_none_are_left_out(tmp_path, small, starts):
    begin(tmp_path / "run", small).close()
    path = tmp_path / "run" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"starts": starts}))
    begin(tmp_path / "run", small, start=3).close()
    assert log.read_manifest(tmp_path / "run")["starts"] == [3]


def test_a_full_disk_is_named_with_the_file(tmp_path, small, monkeypatch):
    run = begin(tmp_path / "run", small)

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log.checkpoint, "sync", full)
    with pytest.raises(
        OSError, match=r"manifest\.json could not be written: No space left on device\. Free space"
    ):
        run.status("failed")
    assert not list((tmp_path / "run").glob("*.tmp"))
    run.close()


FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a file on a full disk")
SAID = r"could not be written: No space left on device\. Free space"


@FULL
def test_a_full_disk_is_named_with_the_metrics(tmp_path, small):
    run = begin(tmp_path / "run", small)
    run._metrics.close()
    run._metrics = Path("/dev/full").open("a")  # noqa: SIM115  (the run closes it)
    # what could not be written is tried again
    for write in (lambda: run.step({"step": 0}), run.close):
        with pytest.raises(OSError, match=r"run/metrics\.jsonl " + SAID):
            write()


@FULL
def test_a_full_disk_is_named_with_the_statistics(tmp_path, small):
    run = begin(tmp_path / "run", small)
    (tmp_path / "run" / "statistics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"run/statistics\.jsonl " + SAID):
        run.statistics({"step": 0})
    run.close()


def test_metrics_that_are_lost_stop_nobody(tmp_path, small):
    begin(tmp_path / "run", small).close()
    (tmp_path / "run" / "metrics.jsonl").unlink()
    run = begin(tmp_path / "run", small, start=3)
    assert run.kept == []
    run.close()
    (tmp_path / "run" / "metrics.jsonl").unlink()
    log.finish(tmp_path / "run")
    assert log.read_manifest(tmp_path / "run")["final"] == {}
