import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.training.fakes import FakeTrainer
from helpers.training.made_runs import begin

from fp8ref.shared.errors import ConfigError, LostRunError, NonFiniteError, StoppedError
from fp8ref.train import loop
from fp8ref.train.data import loader
from fp8ref.train.run import checkpoint, log
from fp8ref.train.run.processes import Alone


@pytest.fixture
def fake(monkeypatch, small):
    """Puts a FakeTrainer in place of the backends: fake({step: what happens there}) -> the
    trainer.
    """

    def install(on_step=None) -> FakeTrainer:
        made = FakeTrainer(small, on_step)
        monkeypatch.setattr(loop, "trainer", lambda *_: made)
        return made

    return install


def contents(folder) -> dict:
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_train_returns_and_writes_one_line_a_step(tmp_path, small, fake):
    fake()
    lines = loop.train(small, "jax", tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert [line["loss"] for line in lines] == [5.0, 4.875, 4.75, 4.625, 4.5, 4.375]
    assert log.read_metrics(tmp_path / "run") == lines


def test_the_manifest_says_how_much_memory_it_took(tmp_path, small, fake):
    fake()
    loop.train(small, "jax", tmp_path / "run")
    assert log.read_manifest(tmp_path / "run")["memory"] == {"peak_bytes": 3 << 29, "of": "device"}


def test_each_step_trains_on_its_batch(tmp_path, small, fake):  # D-2
    trainer = fake()
    loop.train(small, "jax", tmp_path / "run")
    batches = loader.open_batches(small)
    assert len(trainer.batches) == 6
    for step, tokens in enumerate(trainer.batches):
        np.testing.assert_array_equal(tokens, batches.step(step))


def test_validation_follows_the_update_every_so_often_and_at_the_end(tmp_path, small, fake):  # T-5
    fake()
    lines = loop.train(small.replace(run={"eval_every": 4}), "jax", tmp_path / "run")
    assert {line["step"]: line["val_loss"] for line in lines if "val_loss" in line} == {
        3: 4.0,
        5: 6.0,
    }


def test_validation_may_wait_for_the_end(tmp_path, small, fake):  # T-5
    fake()
    lines = loop.train(small.replace(run={"eval_every": 0}), "jax", tmp_path / "run")
    assert {line["step"]: line["val_loss"] for line in lines if "val_loss" in line} == {5: 6.0}


def test_a_finished_run_without_decay_is_extended(tmp_path, small, fake):  # K-2, T-3
    config = small.replace(optimizer={"decay": "none"}, run={"steps": 3})
    fake()
    loop.train(config, "jax", tmp_path / "run")
    trainer = fake()
    lines = loop.train(config.replace(run={"steps": 5}), "jax", tmp_path / "run", resume=True)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert len(trainer.batches) == 2
    manifest = log.read_manifest(tmp_path / "run")
    assert (manifest["status"], manifest["starts"], manifest["config"]["run"]["steps"]) == (
        "finished",
        [0, 3],
        5,
    )


def test_a_stopped_run_is_extended_before_its_decay(tmp_path, small, fake):  # T-3
    """Warm-up, stable, decay: the steps that were taken are at the peak either way."""
    config = small.replace(
        optimizer={"warmup_steps": 0, "decay": "linear", "decay_steps": 2},
        run={"steps": 6},
        checkpoint={"every": 3},
    )
    fake({4: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        loop.train(config, "jax", tmp_path / "run")
    fake()
    lines = loop.train(config.replace(run={"steps": 8}), "jax", tmp_path / "run", resume=True)
    assert [line["step"] for line in lines] == list(range(8))
    assert log.read_manifest(tmp_path / "run")["starts"] == [0, 3]


@pytest.mark.parametrize(
    ("keys", "steps"),
    [({}, 5), ({"decay": "linear", "decay_steps": 2}, 5), ({"decay": "none"}, 2)],
    ids=["cosine", "decayed", "shorter"],
)
def test_a_run_whose_rates_would_have_been_others_is_not(tmp_path, small, fake, keys, steps):
    config = small.replace(optimizer={"warmup_steps": 0, **keys}, run={"steps": 3})
    fake()
    loop.train(config, "jax", tmp_path / "run")
    fake()
    with pytest.raises(ConfigError, match=r"holds a run with another config\.run\.steps: 3; got"):
        loop.train(config.replace(run={"steps": steps}), "jax", tmp_path / "run", resume=True)


def test_every_validation_takes_the_same_batches(tmp_path, small, fake):  # D-2
    trainer = fake()
    config = small.replace(
        run={"eval_batches": 2, "eval_every": 3}, data={"validation_fraction": 0.4}
    )
    loop.train(config, "jax", tmp_path / "run")
    batches = loader.open_batches(config)
    for found, expected in zip(
        trainer.validated, [batches.held_out(0), batches.held_out(1)] * 2, strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_time_and_throughput_are_measured(tmp_path, small, fake):
    fake()
    lines = loop.train(small, "jax", tmp_path / "run")
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    # 4 sequences of 16 tokens in less than the whole run
    assert all(line["tokens_per_second"] > 4 * 16 / seconds[-1] for line in lines)


def test_a_finished_run_says_so(tmp_path, small, fake):
    fake()
    lines = loop.train(small, "jax", tmp_path / "run")
    manifest = log.read_manifest(tmp_path / "run")
    assert (manifest["status"], manifest["final"]) == ("finished", lines[-1])
    assert manifest["device"] == "none: fake"
    assert manifest["kernels"] == {"none: fake": {"by": "plain", "reason": "nothing is cast"}}
    assert manifest["data"] == loader.open_batches(small).description


@pytest.mark.parametrize(
    "metrics", [{"loss": np.nan}, {"loss": np.inf}, {"grad_norm": np.nan}, {"grad_norm": np.inf}]
)
def test_a_loss_or_gradient_that_is_not_finite_stops_the_run(tmp_path, small, fake, metrics):  # T-4
    trainer = fake({2: metrics})
    with pytest.raises(NonFiniteError, match="step 2: loss") as error:
        loop.train(small, "jax", tmp_path / "run")
    assert len(trainer.batches) == 3
    assert [line["step"] for line in log.read_metrics(tmp_path / "run")] == [0, 1]
    manifest = log.read_manifest(tmp_path / "run")
    assert manifest["status"] == "failed"
    assert str(error.value) in manifest["error"]


def test_the_error_names_the_weights_that_are_not_finite(tmp_path, small, fake):  # T-4
    fake({0: {"loss": float("nan")}})
    with pytest.raises(
        NonFiniteError, match=r"non-finite weights: broken\. fp8ref crosscheck --replay"
    ):
        loop.train(small, "jax", tmp_path / "run")


# K-6
def test_a_failed_step_is_saved_when_the_checkpoint_before_it_is_complete(tmp_path, small, fake):
    trainer, written, save = fake({3: {"loss": np.nan}}), [], FakeTrainer.save

    def slowly(directory):
        # what processes save at the same time would meet in the same collectives
        assert [step.name for step in (tmp_path / "run" / "checkpoints").glob("*[0-9]")] == written
        save(trainer, directory)
        written.append(directory.parent.name.removesuffix(checkpoint.UNFINISHED))
        return lambda: time.sleep(0.2)

    trainer.save = slowly
    with pytest.raises(NonFiniteError, match="crosscheck --replay"):
        loop.train(small.replace(checkpoint={"every": 3}), "jax", tmp_path / "run")
    assert written == ["step-00000003", "step-00000003"]  # the second is of failures/


# T-4
def test_a_backend_keeps_its_weights_when_the_gradient_is_not_finite(tmp_path, small, monkeypatch):
    trainer = loop.trainer("jax", small.replace(model={"initializer_range": 1e30}))
    monkeypatch.setattr(loop, "trainer", lambda *_: trainer)
    before = trainer.weights()
    with pytest.raises(NonFiniteError, match=r"step 0: .*nan.*all weights are finite"):
        loop.train(small, "jax", tmp_path / "run")
    for name, value in trainer.weights().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_an_interrupted_run_keeps_its_metrics(tmp_path, small, fake):
    fake({4: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        loop.train(small, "jax", tmp_path / "run")
    assert [line["step"] for line in log.read_metrics(tmp_path / "run")] == [0, 1, 2, 3]
    assert log.read_manifest(tmp_path / "run")["status"] == "interrupted"


def test_a_run_that_fails_keeps_its_metrics_and_its_error(tmp_path, small, fake):
    fake({1: RuntimeError("out of memory")})
    with pytest.raises(RuntimeError, match="out of memory"):
        loop.train(small, "jax", tmp_path / "run")
    assert len(log.read_metrics(tmp_path / "run")) == 1
    manifest = log.read_manifest(tmp_path / "run")
    assert (manifest["status"], manifest["error"]) == ("failed", "RuntimeError: out of memory")


def test_a_full_disk_does_not_hide_what_happened(tmp_path, small, fake, monkeypatch):
    fake({1: RuntimeError("out of memory")})
    plain = log.RunLog.status

    def full(self, status, **more):
        if status == "failed":
            raise OSError(28, "No space left on device")
        plain(self, status, **more)

    monkeypatch.setattr(log.RunLog, "status", full)
    with pytest.raises(RuntimeError, match="out of memory"):
        loop.train(small, "jax", tmp_path / "run")


@pytest.mark.parametrize("how", ["removed", "moved", "replaced", "metrics removed"])
@pytest.mark.parametrize("saved", ["by every", "at the end", "by sigterm"])
# K-10
def test_a_run_whose_directory_is_lost_stops_at_its_next_save(tmp_path, small, fake, how, saved):
    """And writes nothing: neither a directory anew, nor into that of another run."""
    out, other = tmp_path / "run", tmp_path / "other"
    fake()
    loop.train(small, "jax", other)
    theirs = contents(other)

    def lose():
        if how == "metrics removed":
            (out / "metrics.jsonl").unlink()
            return
        shutil.move(out, tmp_path / "moved")
        if how == "removed":
            shutil.rmtree(tmp_path / "moved")
        elif how == "replaced":
            shutil.copytree(other, out)

    def then():
        lose()
        if saved == "by sigterm":
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = fake({3: then})
    config = small.replace(checkpoint={"every": 2 if saved == "by every" else 0})
    with pytest.raises(
        LostRunError,
        match=r"run was removed, moved or replaced .* Nothing more was saved\. Resume from a copy",
    ):
        loop.train(config, "jax", out)
    assert trainer.count == (6 if saved == "at the end" else 4)
    assert out.exists() == (how in ("replaced", "metrics removed"))
    if how == "replaced":
        assert contents(out) == theirs


# K-10
def test_a_checkpoint_that_is_written_while_the_directory_is_lost_is_not_completed(tmp_path, small):
    run = begin(tmp_path / "run", small)
    writer = checkpoint.Checkpoints(
        tmp_path / "run", {}, keep_last=2, processes=Alone(), check=run.check
    )
    gate = threading.Event()
    writer.save(SimpleNamespace(save=lambda _: gate.wait), 1)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    # as a backend that writes would
    (tmp_path / "run" / "checkpoints" / "step-00000001.unfinished").mkdir(parents=True)
    gate.set()
    with pytest.raises(LostRunError, match="was removed, moved or replaced"):
        writer.finish()
    run.close()
    assert not checkpoint.saved(tmp_path / "run")


def test_an_interrupted_run_resumes_to_the_metrics_of_an_uninterrupted_one(tmp_path, small, fake):
    fake({4: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        loop.train(small, "jax", tmp_path / "run")
    fake()
    resumed = loop.train(small, "jax", tmp_path / "run", resume=True)
    fake()
    whole = loop.train(small, "jax", tmp_path / "whole")
    timeless = [
        [
            {k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")}
            for line in run
        ]
        for run in (resumed, whole)
    ]
    assert timeless[0] == timeless[1]
    manifest = log.read_manifest(tmp_path / "run")
    assert manifest["status"] == "finished"
    assert "error" not in manifest


def test_resuming_a_finished_run_does_nothing(tmp_path, small, fake):
    fake()
    loop.train(small, "jax", tmp_path / "run")
    before = contents(tmp_path / "run")
    again = fake()
    assert loop.train(small, "jax", tmp_path / "run", resume=True) is None
    assert not again.batches
    assert contents(tmp_path / "run") == before


def test_overwriting_replaces_a_run(tmp_path, small, fake):
    fake()
    loop.train(small, "jax", tmp_path / "run")
    (tmp_path / "run" / "note.txt").write_text("old")
    longer = small.replace(run={"steps": 8})
    assert len(loop.train(longer, "jax", tmp_path / "run", overwrite=True)) == 8
    assert len(log.read_metrics(tmp_path / "run")) == 8
    # only a run's own files are replaced
    assert (tmp_path / "run" / "note.txt").read_text() == "old"


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"source": "absent"}},
        {"data": {"batch_size": 10**6}},
        {"numerics": {"filter_fqns": ("absent",)}},
    ],
    ids=["source", "batch", "pattern"],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_config_that_cannot_be_trained_writes_and_removes_nothing(
    tmp_path, small, monkeypatch, sections, overwrite
):
    """loop.train raises ConfigError before anything is written; a run about to be overwritten is
    still there.
    """
    out = tmp_path / "run"
    if overwrite:
        monkeypatch.setattr(loop, "trainer", lambda *_: FakeTrainer(small))
        loop.train(small, "jax", out)
    before = contents(out) if overwrite else None
    monkeypatch.setattr(loop, "trainer", lambda _, config, __: FakeTrainer(config))
    with pytest.raises(ValueError, match=r"data\.source|train split|filter_fqns"):
        loop.train(small.replace(**sections), "jax", out, overwrite=overwrite)
    assert (contents(out) if overwrite else None) == before
    assert out.exists() == overwrite


def test_an_unknown_backend_is_refused(tmp_path, small):
    with pytest.raises(ConfigError, match="jax, torch; got 'tensorflow'"):
        loop.trainer("tensorflow", small)


def test_importing_the_loop_imports_no_backend():
    code = (
        "import sys, fp8ref.train.loop; print(sorted({'torch', 'fp8ref.jax', 'fp8ref.torch'} & "
        "sys.modules.keys()))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_a_validation_loss_that_is_not_finite_does_not_pass_for_a_finished_run(
    tmp_path, small, fake
):
    trainer = fake()
    trainer.evaluate = lambda _: float("nan")
    with pytest.raises(NonFiniteError):
        loop.train(small, "jax", tmp_path / "run")
    assert log.read_manifest(tmp_path / "run")["status"] == "failed"


def test_metrics_are_json_that_every_reader_takes(tmp_path, small, fake):
    """NaN and Infinity are no numbers of JSON's."""
    trainer = fake()
    trainer.evaluate = lambda _: float("nan")
    with contextlib.suppress(NonFiniteError):
        loop.train(small, "jax", tmp_path / "run")
    for name in ("metrics.jsonl", "manifest.json"):
        text = (tmp_path / "run" / name).read_text()
        constants = []
        for part in text.splitlines() if name == "metrics.jsonl" else [text]:
            json.loads(part, parse_constant=constants.append)
        assert constants == [], name


@pytest.mark.parametrize(
    ("backend", "sections", "key"),
    [
        ("torch", {"parallel": {"through": "jit"}}, "parallel.through"),
        ("jax", {"parallel": {"gather": "compute"}}, "parallel.gather"),
        (
            "jax",
            {"parallel": {"reduction": "ordered", "compile": "block"}},
            "parallel.reduction, parallel.compile",
        ),
        (
            "torch",
            {"parallel": {"scan": True, "reduce": "accumulators"}},
            "parallel.scan, parallel.reduce",
        ),
    ],
)
def test_a_backend_refuses_keys_that_it_would_ignore(small, backend, sections, key):
    with pytest.raises(
        ConfigError, match=f"{key} is not a key of --backend {backend}. Leave it out"
    ):
        loop.trainer(backend, small.replace(**sections))


def test_a_full_disk_does_not_hide_a_loss_that_is_not_finite(tmp_path, small, fake):  # T-4
    trainer = fake({2: {"loss": float("nan")}})

    def full(directory):
        raise OSError(28, "No space left on device")

    trainer.save = full
    with pytest.raises(
        NonFiniteError, match=r"step 2: loss nan.*The step could not be kept: .*No space left"
    ):
        loop.train(small, "jax", tmp_path / "run")
    assert not list((tmp_path / "run").glob("failures/*"))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("backend", "torch", "its backend is 'torch'; this run has 'jax'"),
        ("seed", 3, r"its config\.run\.seed is 3"),
        ("step", 9, "it holds step 9, but run.steps is 6"),
    ],
)
def test_another_runs_checkpoint_is_refused(tmp_path, small, fake, key, value, said):
    fake({5: RuntimeError("out of memory")})
    with pytest.raises(RuntimeError):
        loop.train(small.replace(checkpoint={"every": 2}), "jax", tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "step-00000004"
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["config"]["run"] |= {key: value} if key == "seed" else {}
    (path / "manifest.json").unlink()
    about = {name: manifest[name] for name in ("backend", "config", "data", "step")} | (
        {key: value} if key != "seed" else {}
    )
    checkpoint.write_manifest(path, about)
    trainer = fake()
    with pytest.raises(ConfigError, match=said):
        loop.train(small.replace(checkpoint={"every": 2}), "jax", tmp_path / "run", resume=True)
    assert not trainer.batches


@pytest.mark.parametrize(
    ("backend", "recipe", "ranks", "said"),
    [
        (
            "torch",
            "delayed",
            (1, 4),
            "of 1 rank that shared the batch, and 4 read it: grad_outputs are 4 times as large "
            ".* clips the largest",
        ),
        (
            "torch",
            "delayed",
            (4, 2),
            "of 4 ranks that shared the batch, and 2 read it: grad_outputs are 0.5 times as "
            "large .* loses small ones",
        ),
        ("torch", "delayed", (2, 2), None),
        ("torch", "tensorwise", (1, 4), None),  # scales are of the step's own amaxes
        ("jax", "delayed", (1, 4), None),  # whose gradients are of the mean over all tokens
    ],
)
# K-2
def test_histories_of_another_number_of_ranks_are_told_of(
    tmp_path, small, fake, capsys, backend, recipe, ranks, said
):
    for count, failing in zip(ranks, ({3: RuntimeError("lost")}, {}), strict=True):
        fake(failing).backend = backend
        config = small.replace(
            numerics={"recipe": recipe}, parallel={"fsdp": count}, checkpoint={"every": 2}
        )
        with pytest.raises(RuntimeError) if failing else contextlib.nullcontext():
            loop.train(config, backend, tmp_path / "run", resume=not failing)
    told = " ".join(capsys.readouterr().err.split())
    assert "resumed at step 2" in told
    assert re.search(said, told) if said else "grad_outputs" not in told


def test_a_set_for_validation_does_not_change_between(tmp_path, small, fake):  # D-9
    held = tmp_path / "held"
    held.mkdir()
    (held / "a.txt").write_text("x" * 2000)
    config = small.replace(checkpoint={"every": 2}, data={"evaluation": (("held", str(held)),)})
    fake({5: RuntimeError("out of memory")})
    with pytest.raises(RuntimeError):
        loop.train(config, "jax", tmp_path / "run")
    moved = held.rename(tmp_path / "moved")
    config = config.replace(data={"evaluation": (("held", str(moved)),)})
    (moved / "a.txt").write_text("y" * 2000)
    fake()
    with pytest.raises(
        ConfigError,
        match=r"another set: the sha256 of data\.evaluation 'held' was [0-9a-f]{64} and is",
    ):
        loop.train(config, "jax", tmp_path / "run", resume=True)
    (moved / "a.txt").write_text("x" * 2000)
    fake()
    assert len(loop.train(config, "jax", tmp_path / "run", resume=True)) == config.run.steps


def test_a_warm_up_longer_than_the_run_is_warned_of(tmp_path, small, fake, capsys):
    fake()
    loop.train(
        small.replace(optimizer={"warmup_steps": small.run.steps}), "jax", tmp_path / "reached"
    )
    assert "warmup_steps" not in capsys.readouterr().err
    loop.train(
        small.replace(optimizer={"warmup_steps": small.run.steps + 1}), "jax", tmp_path / "run"
    )
    said = (
        "optimizer.warmup_steps 7 is more than run.steps 6: the learning rate never reaches "
        "optimizer.learning_rate"
    )
    assert said in capsys.readouterr().err.replace("\n", " ")


def test_sigterm_before_the_first_step_is_heard(tmp_path, small, monkeypatch):  # K-8
    def building(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        return FakeTrainer(small)

    monkeypatch.setattr(loop, "trainer", building)
    with pytest.raises(StoppedError, match="before a step was taken; --resume continues"):
        loop.train(small, "jax", tmp_path / "run")
    assert log.read_manifest(tmp_path / "run")["status"] == "stopped"


def recorded(path):
    return (
        [line["step"] for line in log.read_lines(path / log.STATISTICS)]
        if (path / log.STATISTICS).exists()
        else []
    )


@pytest.mark.parametrize(
    ("every", "recipe", "steps"),
    [
        (None, "rowwise", [0, 5]),
        (None, "bf16", []),
        (0, "rowwise", []),
        (4, "rowwise", [0, 4]),
        (4, "bf16", [0, 4]),
    ],
)
#
def test_the_first_and_the_last_step_are_recorded_by_default(
    tmp_path, small, monkeypatch, every, recipe, steps
):
    config = small.replace(statistics={"every": every}, numerics={"recipe": recipe})
    monkeypatch.setattr(loop, "trainer", lambda *_: FakeTrainer(config))
    loop.train(config, "jax", tmp_path / "run")
    assert recorded(tmp_path / "run") == steps


def test_attention_of_a_kernel_is_not_recorded_by_default(tmp_path, by_kernel, monkeypatch):
    config = by_kernel.replace(statistics={"every": None}, numerics={"recipe": "delayed"})
    monkeypatch.setattr(loop, "trainer", lambda *_: FakeTrainer(config))
    loop.train(config, "jax", tmp_path / "run")
    assert recorded(tmp_path / "run") == []


def test_what_cannot_be_recorded_by_default_trains_all_the_same(
    tmp_path, small, fake, monkeypatch, capsys
):
    def refused(tokens):
        raise ValueError("a pass calls it again")

    monkeypatch.setattr(fake(), "measured_step", refused)
    lines = loop.train(
        small.replace(statistics={"every": None}, numerics={"recipe": "rowwise"}),
        "jax",
        tmp_path / "run",
    )
    assert len(lines) == small.run.steps
    assert "step 0: no FP8 statistics: a pass calls it again" in " ".join(
        capsys.readouterr().err.split()
    )
    with pytest.raises(ValueError, match="a pass calls it again"):
        loop.train(
            small.replace(statistics={"every": 1}, numerics={"recipe": "rowwise"}),
            "jax",
            tmp_path / "asked",
        )


@pytest.mark.parametrize("backend", [pytest.param("jax", marks=pytest.mark.slow), "torch"])
#
def test_a_default_run_has_numbers_of_its_operands_and_the_bits_of_one_without(
    tmp_path, small, backend
):
    config = small.replace(numerics={"recipe": "rowwise"}, run={"steps": 3})
    plain, measured = (
        loop.train(config.replace(statistics={"every": every}), backend, tmp_path / str(every))
        for every in (0, None)
    )
    assert [line["loss"] for line in plain] == [line["loss"] for line in measured]
    assert recorded(tmp_path / "None") == [0, 2]
    found = log.read_lines(tmp_path / "None" / log.STATISTICS)[-1]["statistics"]
    assert found
    assert all(one["sqnr"] > 10 for one in found.values())
