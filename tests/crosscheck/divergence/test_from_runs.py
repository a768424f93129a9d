import json
import math
import re
import shutil

import pytest
import torch
from torchao.float8 import float8_utils

from fp8ref import cli
from fp8ref.crosscheck.divergence.from_runs import compare_runs
from fp8ref.shared.errors import ConfigError, NonFiniteError
from fp8ref.spec import llama
from fp8ref.train import loop
from fp8ref.train.config import config as configs
from fp8ref.train.run import checkpoint, log

BLOCK = "model.layers.0"
AT = (3, 5)


@pytest.fixture
def trained(small, tmp_path):
    """trained(name, section={...}): a run in torch of four steps, a checkpoint every second."""

    def train(name, backend="torch", **sections):
        config = small.replace(
            run={"steps": 4, "eval_every": 4}, checkpoint={"every": 2, "keep_last": 9}
        )
        for section, keys in sections.items():
            config = config.replace(**{section: keys})
        loop.train(config, backend, tmp_path / name)
        return tmp_path / name

    return train


def parameters_of(run) -> int:
    return sum(
        map(math.prod, llama.parameter_shapes(configs.load(run / "config.toml").model).values())
    )


def changed(run, step: int, config) -> None:
    """One weight of a checkpoint moved by one ulp, and its manifest with it."""
    path = run / checkpoint.FOLDER / f"step-{step:08d}"
    about = checkpoint.verify(path)
    trainer = loop.trainer("torch", config)
    trainer.load(path / "state", step)
    with torch.no_grad():
        trainer._params[f"{BLOCK}.mlp.up_proj.weight"].view(torch.int32)[AT] += 1
    shutil.rmtree(path / "state")
    trainer.save(path / "state")()
    checkpoint.write_manifest(
        path, {k: v for k, v in about.items() if k not in ("format", "files")}
    )


def test_equal_runs_do_not_diverge(trained, capsys):
    a = trained("a")
    found = compare_runs(a, trained("b"))
    assert found.ok
    assert (found.steps, found.settings, found.notes) == (4, {}, [])
    # both metrics of four steps, and the states after two and four
    assert found.compared == 2 * 4 + 2 * 3 * parameters_of(a)
    found.print()
    assert "4 steps are equal, bit for bit" in capsys.readouterr().out


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("sections", "key", "step", "place", "clauses"),
    [
        (
            {"optimizer": {"eps": 1e-3}},
            "optimizer.eps",
            0,
            ("optimizer", "model.embed_tokens", "master weight", "value"),
            ("T-1",),
        ),
        (
            {"optimizer": {"beta2": 0.9}},
            "optimizer.beta2",
            0,
            ("optimizer", "model.embed_tokens", "exp_avg_sq", "value"),
            ("T-1", "T-2", "T-6"),
        ),
        (
            {"optimizer": {"warmup_steps": 2}},
            "optimizer.warmup_steps",
            0,
            ("optimizer", "optimizer", "learning rate", "value"),
            ("T-3",),
        ),
        (
            {"data": {"seed": 1}},
            "data.seed",
            0,
            ("batch", "batch", "tokens", "value"),
            ("D-2", "D-3"),
        ),
        (
            {"run": {"seed": 1}},
            "run.seed",
            0,
            ("state before", "model.embed_tokens", "master weight", "value"),
            ("M-6", "K-7"),
        ),
        (
            {"numerics": {"recipe": "rowwise"}},
            "numerics.recipe",
            0,
            ("forward", f"{BLOCK}.self_attn.q_proj", "input", "scale"),
            ("R-1",),
        ),
        (
            {"numerics": {"recipe": "delayed"}},
            "numerics.recipe",
            0,
            ("forward", f"{BLOCK}.self_attn.q_proj", "input", "scale"),
            ("R-1",),
        ),
        (
            {"numerics": {"recipe": "bf16"}},
            "numerics.recipe",
            0,
            ("forward", f"{BLOCK}.self_attn.q_proj", "output", "value"),
            ("R-2",),
        ),
        (
            {"numerics": {"accumulate": "hopper"}},
            "numerics.accumulate",
            0,
            ("forward", f"{BLOCK}.self_attn.q_proj", "output", "value"),
            ("G-20",),
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
# B-10
def test_a_difference_of_configs_is_named_and_the_place_found(
    sections, key, step, place, clauses, trained, capsys
):
    found = compare_runs(trained("a"), trained("b", **sections))
    assert key in found.settings
    first = found.first
    assert (first.phase, first.layer, first.role, first.part) == place
    assert first.step == step
    assert first.reason.clauses == clauses
    found.print()
    shown = capsys.readouterr().out
    assert re.search(rf"^configs differ in {re.escape(key)}: ", shown, re.MULTILINE)
    assert found.notes == []


def test_an_edited_checkpoint_is_named_with_the_run_that_it_is_of(trained, tmp_path, small):  # K-2
    a = trained("a")
    b = tmp_path / "b"
    shutil.copytree(a, b)
    shutil.rmtree(b / checkpoint.FOLDER / "step-00000004")
    config = small.replace(
        run={"steps": 4, "eval_every": 4}, checkpoint={"every": 2, "keep_last": 9}
    )
    changed(b, 2, config)
    manifest = json.loads((b / "manifest.json").read_text())
    (b / "manifest.json").write_text(json.dumps(manifest | {"status": "interrupted"}))
    loop.train(config, "torch", b, resume=True)
    found = compare_runs(a, b)
    first = found.first
    assert (first.step, first.phase, first.layer, first.role) == (
        2,
        "state before",
        f"{BLOCK}.mlp.up_proj",
        "master weight",
    )
    assert (first.difference.element, first.difference.differ, first.difference.worst) == (AT, 1, 1)
    [note] = found.notes
    assert note.startswith(
        f"{b} is not reproduced: in its checkpoint of 2 steps, {BLOCK}.mlp.up_proj, master "
        "weight, element [3, 5] is "
    )
    assert (
        f"states after 2 steps differ first in {BLOCK}.mlp.up_proj, master weight, element [3, 5]"
        in found.recorded
    )


def test_runs_go_on_from_the_last_checkpoint_that_both_have(trained, small, monkeypatch):
    """B was trained by other code from step 2 on, which is still there."""
    a = trained("a")
    original = loop.trainer

    def other(*args):
        trainer = original(*args)
        step = trainer.step

        def stepped(tokens):
            metrics = step(tokens)
            if trainer.count == 3:
                with torch.no_grad():
                    trainer._params[f"{BLOCK}.mlp.up_proj.weight"][AT] = 4.0
            return metrics

        trainer.step = stepped
        return trainer

    monkeypatch.setattr(loop, "trainer", other)
    b = trained("b")
    made = []

    def second(*args):
        made.append(None)
        return (original if len(made) % 2 else other)(*args)

    monkeypatch.setattr(loop, "trainer", second)
    found = compare_runs(a, b)
    assert found.start == 2
    assert (found.first.step, found.first.layer, found.first.role) == (
        2,
        f"{BLOCK}.mlp.up_proj",
        "master weight",
    )
    assert found.first.difference.element == AT
    assert found.notes == []
    assert "the first difference is loss of step 3" in found.recorded
    monkeypatch.setattr(loop, "trainer", original)  # and it is gone
    found = compare_runs(a, b)
    assert (found.first.step, found.first.layer, found.first.role) == (3, "loss", "recorded")
    assert f"{b} is not reproduced: its loss of step 3 was" in found.notes[0]
    assert len(found.notes) == 1


def test_a_run_by_other_code_is_named(trained, monkeypatch):
    a = trained("a")
    with monkeypatch.context() as patch:
        original = float8_utils.amax_to_scale
        patch.setattr(
            float8_utils, "amax_to_scale", lambda *args, **kwargs: original(*args, **kwargs) * 0.75
        )
        b = trained("b")
    found = compare_runs(a, b)
    assert (found.first.step, found.first.layer, found.first.role) == (0, "loss", "recorded")
    assert found.first.reason.clauses == ()
    [note] = found.notes
    assert f"{b} is not reproduced: its loss of step 0 was" in note


def test_a_run_that_ended_parts_from_one_that_went_on(trained, small, tmp_path):  # T-4
    a = trained("a")
    with pytest.raises(NonFiniteError):
        trained("b", optimizer={"learning_rate": 1e30, "warmup_steps": 0})
    found = compare_runs(a, tmp_path / "b")
    assert {"optimizer.learning_rate", "optimizer.warmup_steps"} == found.settings.keys()
    assert (found.first.step, found.first.role) == (0, "learning rate")
    assert "the first difference is loss of step 1, " in found.recorded
    assert found.recorded.endswith("and none")


@pytest.mark.slow
def test_runs_of_two_backends_part_where_both_are_live(trained):
    found = compare_runs(trained("a", backend="jax"), trained("b"))
    assert found.settings["backend"] == ("jax", "torch")
    assert (found.first.step, found.first.phase) == (0, "forward")
    assert found.first.reason.clauses
    assert found.notes == []


def test_what_cannot_be_compared_is_refused_by_name(trained, small, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    a, b = trained("a"), trained("b", model={"hidden_size": 64})
    with pytest.raises(
        ConfigError, match=r"models of one shape.*model.hidden_size is 32 in .*a and 64 in .*b"
    ):
        compare_runs(a, b)
    shutil.rmtree(b)
    shutil.copytree(a, b)
    for name, options, said in (
        (
            "steps",
            ["--steps", "2"],
            "--first-divergence of two runs takes config and steps from them; got --steps too",
        ),
        ("keys", ["--run.steps", "2"], "got --run.steps too"),
    ):
        assert cli.main(["crosscheck", "--first-divergence", str(a), str(b), *options]) == 2, name
        assert said in capsys.readouterr().err
    assert cli.main(["crosscheck", "--first-divergence", str(a), str(tmp_path / "absent")]) == 2
    assert "absent is not a directory" in capsys.readouterr().err
    lines = (b / log.METRICS).read_text().splitlines()
    (b / log.METRICS).write_text("\n".join([lines[0], "{nothing", *lines[2:]]) + "\n")
    assert cli.main(["crosscheck", "--first-divergence", str(a), str(b)]) == 2
    assert "metrics.jsonl, line 2, " in capsys.readouterr().err
    (b / log.METRICS).write_text("\n".join(lines) + "\n")
    next((tmp_path / "text").glob("*.txt")).write_text("another text " * 200)
    assert cli.main(["crosscheck", "--first-divergence", str(a), str(b)]) == 2
    assert "was trained on different data" in capsys.readouterr().err


def test_the_command_exits_by_what_it_found(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    a, b = trained("a"), trained("b", optimizer={"eps": 1e-3})
    found = tmp_path / "found.json"
    assert cli.main(["crosscheck", "--first-divergence", str(a), str(b), "--json", str(found)]) == 1
    shown = capsys.readouterr().out
    assert "configs differ in optimizer.eps: 1e-08 and 0.001" in shown
    assert "recorded: the first difference is loss of step 1, " in shown
    assert (
        "first divergence, step 0, optimizer: model.embed_tokens, master weight, element [" in shown
    )
    written = json.loads(found.read_text())
    assert written["settings"] == {"optimizer.eps": [1e-08, 0.001]}
    assert (written["first"]["step"], written["first"]["clauses"]) == (0, ["T-1"])
    shutil.rmtree(b)
    shutil.copytree(a, b)
    assert cli.main(["crosscheck", "--first-divergence", str(a), str(b)]) == 0


def test_a_damaged_checkpoint_is_passed_over(trained, tmp_path):  # K-3
    a = trained("a")
    b = tmp_path / "b"
    shutil.copytree(a, b)
    file = next((b / checkpoint.FOLDER / "step-00000002" / "state").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    found = compare_runs(a, b)
    assert found.ok
    assert found.compared == 2 * 4 + 3 * parameters_of(a)  # the state after four steps alone
