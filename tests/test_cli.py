import argparse
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tomli_w
from helpers.training import made_runs
from helpers.training.fakes import FakeTrainer

import fp8ref
from fp8ref import cli
from fp8ref import configs as shipped
from fp8ref.commands import demo, shared, train, vectors
from fp8ref.conformance.gemm import plans
from fp8ref.sim.gemm.accumulate import ACCUMULATIONS
from fp8ref.train import loop
from fp8ref.train.config import config as configs
from fp8ref.train.config import hardware
from fp8ref.train.run import checkpoint, log
from fp8ref.train.run.processes import Alone


@pytest.fixture
def config(tmp_path, small, monkeypatch):
    """The path of a small config in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # no message is broken into lines
    path = tmp_path / "small.toml"
    path.write_text(tomli_w.dumps(configs.to_dict(small)))
    return path


@pytest.fixture
def fake(monkeypatch):
    """Puts a FakeTrainer in place of both backends; fake({step: what happens}) sets what
    happens.
    """

    def install(happens=None):
        monkeypatch.setattr(
            loop, "trainer", lambda _, config, weights=None: FakeTrainer(config, happens)
        )

    install()
    return install


@pytest.fixture
def run(capsys):
    """run("train", ...) -> (exit code, standard output, standard error)."""

    def call(*arguments) -> tuple[int, str, str]:
        try:
            code = cli.main([str(a) for a in arguments])
        except SystemExit as stopped:
            code = stopped.code
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def contents(folder) -> dict:
    """All files but the lock, with the time at which they were written."""
    return {
        path.relative_to(folder): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


FINISHED = "here is finished; nothing to do\nnext: fp8ref report here\n"
COVERAGE = (
    "7 of 8 linears in FP8 (tensorwise), 31.8% of the parameters and 45.5% of the multiplications. "
    "Not in FP8: lm_head (named by filter_fqns 'lm_head').\n"
    "Casts on none: fake: plain operations (nothing is cast).\n"
)


def test_train_writes_a_run_and_reports_its_losses(config, fake, run):
    code, out, err = run("train", config, "--backend", "jax", "--run.out", "here")
    assert (code, err) == (0, COVERAGE)
    assert re.fullmatch(
        r"here: 6 steps in \d+\.\d s, [\d,]+ tokens/s, loss 4\.3750, validation loss 6\.0000\n"
        r"next: fp8ref report here\n",
        out,
    )
    assert len(log.read_metrics(config.parent / "here")) == 6


def test_a_run_is_by_default_named_after_config_backend_and_recipe(config, fake, run):
    assert run("train", config, "--backend", "torch", "--recipe", "rowwise")[0] == 0
    assert (config.parent / "runs" / "small-torch-rowwise" / "manifest.json").is_file()


def test_runs_that_differ_in_their_plan_alone_are_by_default_two(config, fake, run):  # G-20
    plan = plans.plan_to_dict(ACCUMULATIONS["ada"]) | {
        "epilogue": "product_then_round",
        "out_dtype": "bfloat16",
    }
    (config.parent / "plan.json").write_text(
        json.dumps({"ok": True, "subject": "torch-scaled-mm", "plan": plan})
    )
    for accumulate in ("native", "hopper", "exact", "plan.json"):
        assert (
            run("train", config, "--backend", "torch", "--numerics.accumulate", accumulate)[0] == 0
        )
    named = hardware.by_name("plan.json").name
    assert named.startswith("probed_")
    assert {path.name for path in (config.parent / "runs").iterdir()} == {
        f"small-torch-tensorwise{plan}" for plan in ("", "-hopper", "-exact", f"-{named}")
    }


def test_options_change_the_config_that_is_trained(config, fake, run):
    assert (
        run(
            "train",
            config,
            "--backend",
            "jax",
            "--run.out",
            "here",
            "--run.steps",
            "9",
            "--numerics.filter_fqns",
            "mlp",
        )[0]
        == 0
    )
    trained = configs.load(config.parent / "here" / "config.toml")
    assert (trained.run.steps, trained.numerics.filter_fqns) == (9, ("mlp",))


def test_options_may_stand_between_the_flags(config, fake, run):
    assert run("train", config, "--run.steps", "7", "--backend", "jax", "--run.out", "here")[0] == 0
    assert len(log.read_metrics(config.parent / "here")) == 7


def test_options_before_the_config_work_or_the_error_says_where_they_belong(config, fake, run):
    code, _, err = run("train", "--backend", "jax", "--run.steps", "7", config)
    assert code == 0 or "CONFIG" in err


def test_a_real_backend_trains_and_resume_changes_no_byte(config, run):
    arguments = ("train", config, "--backend", "torch", "--run.out", "here")
    code, out, _ = run(*arguments)
    assert code == 0
    assert out.startswith("here: 6 steps in ")
    before = contents(config.parent / "here")
    lines = log.read_metrics(config.parent / "here")
    assert [line["step"] for line in lines] == list(range(6))
    # a fresh model is close to uniform over bytes
    assert lines[0]["loss"] == pytest.approx(np.log(256), abs=0.2)
    assert lines[-1]["loss"] < lines[0]["loss"]
    code, out, _ = run(*arguments, "--resume")
    assert (code, out) == (0, FINISHED)
    assert contents(config.parent / "here") == before


@pytest.mark.parametrize(
    "command",
    [[], ["train"], ["estimate"], ["crosscheck"], ["demo"]],
    ids=["", "train", "estimate", "crosscheck", "demo"],
)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_exits_with_0(run, command, flag):
    code, out, err = run(*command, flag)
    assert (code, err) == (0, "")
    assert "usage: fp8ref" in out


COMMANDS = [
    "",
    *("demo", "configs", "recipes", "policies"),
    *("train", "sweep", "data", "data prepare", "export", "report", "compare", "replay"),
    *("estimate", "ablate", "crosscheck", "certify", "conform", "probe"),
    *("vectors", "vectors gen", "vectors verify"),
    *(f"vectors {verb} {what}" for verb in ("gen", "verify") for what in vectors.OPERATIONS),
]


def parsers(parser, path=""):
    """{path of commands: parser} of a parser and all under it."""
    found = {path: parser}
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for name, inner in action.choices.items():
                found |= parsers(inner, f"{path} {name}".strip())
    return found


def test_every_command_is_measured():
    known = set(parsers(cli._parser()))
    assert set(COMMANDS) <= known
    # commands of others come and go; what is measured below is all of them
    assert known == set(parsers(cli._parser()))


@pytest.mark.parametrize("path", parsers(cli._parser()))
def test_help_fits_a_screen_and_says_where_the_rest_is(run, monkeypatch, path):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run(*path.split(), "--help")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"usage: fp8ref {path}".rstrip())
    assert lines[1] == ""
    parser = parsers(cli._parser())[path]
    assert "--help-all" in out
    if parsers(parser).keys() == {""}:
        examples = [line for line in lines if line.startswith("  fp8ref ")]
        assert len(examples) == 3
        for example in examples:
            for part in re.split(r" \| | < | > ", example):
                if part.strip().startswith("fp8ref "):
                    assert not cli._parser().parse_known_args(shlex.split(part)[1:])[1]
        assert any(example.startswith(f"  fp8ref {path}") for example in examples)


@pytest.mark.parametrize("path", parsers(cli._parser()))
def test_help_all_has_every_option(run, monkeypatch, path):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run(*path.split(), "--help-all")
    assert (code, err) == (0, "")
    actions = [a for a in parsers(cli._parser())[path]._actions if a.help != argparse.SUPPRESS]
    assert [o for action in actions for o in action.option_strings if o not in out] == []


def test_help_all_has_the_values_of_the_config_on_the_command_line(run):
    shown = re.sub(r"\s+", " ", run("train", "tiny", "--help-all", "--run.seed", "77")[1])
    assert "Optimizer steps. (value: 150)" in shown
    assert "Seed of the initial weights. (value: 77)" in shown
    assert all(f" {section}: " in shown for section in ("model", "parallel", "log"))
    code, out, err = run("train", "tiny", "--help-all", "--run.stepz", "3")
    assert (code, out) == (2, "")
    assert "unknown option '--run.stepz'. Did you mean --run.steps?" in err
    code, out, err = run("train", "absent.toml", "--help-all")
    assert (code, out) == (2, "")
    assert err.startswith("fp8ref train: absent.toml: cannot be read")


def test_without_arguments_it_prints_its_help(run):
    code, out, err = run()
    assert (code, err) == (0, "")
    assert (code, out, err) == run("--help")
    groups = ["learn:", "train:", "predict:", "check, also your own code:"]
    assert [line for line in out.splitlines() if line in groups] == groups


def test_help_works_after_a_config(config, run):
    code, out, _ = run("train", config, "--help")
    assert code == 0
    assert "--run.steps" in out


@pytest.mark.parametrize(
    "command",
    [["compare", "here", "here"], ["replay", "here", "--policy", "flax"], ["certify"]],
    ids=lambda c: c[0],
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "manifest.json"])
def test_json_is_not_written_over_what_a_run_keeps(config, run, command, name):
    (config.parent / "here").mkdir()
    (config.parent / "here" / name).write_text("mine")
    code, _, err = run(*command, "--json", f"here/{name}")
    assert code == 2
    assert "--json names no file of a run, checkpoint or shard directory" in err
    assert (config.parent / "here" / name).read_text() == "mine"


def test_a_model_that_does_not_fit_into_memory_is_said_to_be_so(config, run, monkeypatch):
    def trainer(*_):
        raise MemoryError("Unable to allocate 1.00 TiB")

    monkeypatch.setattr(loop, "trainer", trainer)
    code, _, err = run("train", config, "--backend", "jax", "--run.out", "here")
    assert code == 2
    assert (
        "the model does not fit into memory: Unable to allocate 1.00 TiB. Lower the sizes of "
        "model.*" in err
    )
    assert not (config.parent / "here").exists()


def test_a_demo_is_of_the_packaged_config(run, monkeypatch):
    seen = []
    monkeypatch.setattr(demo, "demo", lambda config, out, options: seen.append(config) or True)
    for words in ([], ["--full"], ["parity", "--run.steps", "7"]):
        assert run("demo", *words)[0] == 0
    own = configs.load("parity").replace(run={"steps": 7})
    assert seen == [configs.load("demo"), configs.load("tiny"), own]


def test_it_says_its_version(run):
    assert run("--version") == (0, f"fp8ref {fp8ref.__version__}\n", "")


@pytest.mark.parametrize(
    "arguments", [["teach"], ["train"], ["estimate"], ["crosscheck"], ["vectors"]], ids=" ".join
)
def test_an_incomplete_command_exits_with_2(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert re.search("CONFIG|COMMAND|gen", err)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "fp8ref: COMMAND is one of .*; got 'trian'. Did you mean 'train'?"),
        (["train", "tinny"], "fp8ref train: tinny: cannot be read .* Did you mean 'tiny'?"),
        (["train", "tiny", "--recipe", "rowise"], "fp8ref train: .*got 'rowise'.*'rowwise'?"),
        (
            ["train", "tiny", "--backend", "toch"],
            "fp8ref train: --backend is one of jax, torch; .*",
        ),
        (["train", "tiny", "--run.step", "3"], "fp8ref train: unknown option '--run.step'.*"),
        (["train", "tiny", "--resum"], "fp8ref train: unknown option .*mean --resume?"),
        (["train", "tiny", "--run.steps", "x"], "fp8ref train: --run.steps takes an integer; .*"),
        (["ablate", "x", "--steps", "y"], "fp8ref ablate: --steps takes an integer; got 'y'."),
        (["report"], "fp8ref report: needs RUN; got none."),
        (["replay", "x"], "fp8ref replay: needs --policy; got none."),
        (["vectors", "gen", "cats"], "fp8ref vectors gen: .*; got 'cats'. Did you mean 'cast'?"),
        (["vectors", "gen", "cast"], "fp8ref vectors gen cast: needs --format; got none."),
    ],
    ids=" ".join,
)
def test_every_error_has_one_style(run, arguments, said):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    pattern = re.escape(said).replace(r"\.\*", ".*")
    assert re.fullmatch(f"{pattern}\n", err), err


def test_an_unknown_key_names_the_nearest_one(config, fake, run):
    config.write_text("[run]\nstep = 3\n")
    code, _, err = run("train", config, "--backend", "jax")
    assert code == 2
    assert "unknown key 'run.step'. Did you mean 'run.steps'?" in err


@pytest.mark.parametrize(
    "options", [["--run.stepz", "3"], ["--resum"], ["--no-such-option"], ["stray"]], ids=" ".join
)
@pytest.mark.parametrize(
    "command",
    [["train", "--backend", "jax"], ["estimate"], ["crosscheck"], ["demo"]],
    ids=["train", "estimate", "crosscheck", "demo"],
)
def test_an_unknown_option_exits_with_2_and_is_named(config, fake, run, command, options):
    code, _, err = run(*command, config, *options)
    assert code == 2
    assert options[0] in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--run.steps", "many"], "run.steps"),
        (["--run.steps", "0"], "run.steps is at least 1; got 0"),
        (["--data.seed", "-1"], "data.seed is not negative; got -1"),
        (["--data.validation_fraction", "1"], "data.validation_fraction"),
        (["--data.microbatches", "0"], "data.microbatches is at least 1; got 0"),
        (
            ["--data.microbatches", "3"],
            "data.batch_size is divisible by data.microbatches; got 4 and 3",
        ),
        (["--optimizer.learning_rate", "nan"], "learning_rate"),
        (["--model.num_key_value_heads", "3"], "num_key_value_heads"),
        (["--model.vocab_size", "255"], "model.vocab_size"),
        (["--recipe", "fp9"], "'fp9'"),
        (["--numerics.filter_fqns", "absent"], "'absent' matches none of"),
        (["--numerics.filter_fqns", "*"], "converts no linear"),
        (
            ["--numerics.filter_fqns", "auto_filter_small_kn", "--recipe", "mxfp8"],
            "got 'mxfp8', for which there is no data",
        ),
        (["--data.source", "absent"], "'absent', which is not a directory"),
        (["--data.batch_size", "100000"], "the train split holds"),
        (["--data.sequence_length", "1000000"], "the train split holds 0 sequences"),
    ],
)
def test_a_value_that_cannot_be_used_exits_with_2_and_writes_nothing(
    config, fake, run, options, said
):
    code, out, err = run("train", config, "--backend", "jax", "--run.out", "here", *options)
    assert (code, out) == (2, "")
    assert said in err
    assert not (config.parent / "here").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[run]\nsteps = 'many'\n", "run.steps: Input should be a valid integer; got 'many'"),
        ("[run]\nsteps = 0\n", "run.steps is at least 1; got 0"),
        ("[numerics]\nrecipe = 'fp9'\n", "mxfp8_32x32; got 'fp9'"),
        ("run: 3\n", "is not TOML"),
    ],
)
def test_a_config_that_cannot_be_used_exits_with_2_and_is_named(config, fake, run, text, said):
    config.write_text(text)
    code, out, err = run("train", config, "--backend", "jax")
    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith(f"fp8ref train: {config}: ")
    assert not (config.parent / "runs").exists()


def test_a_missing_config_exits_with_2(config, fake, run):
    code, _, err = run("train", "absent.toml", "--backend", "jax")
    assert code == 2
    assert "absent.toml: cannot be read" in err


@pytest.mark.parametrize(
    "files", [[], ["picture.png"], ["empty.txt"]], ids=["empty", "binary", "blank"]
)
def test_data_without_text_exits_with_2(config, fake, run, files):
    folder = config.parent / "data"
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    code, _, err = run(
        "train", config, "--backend", "jax", "--data.source", "data", "--run.out", "here"
    )
    assert code == 2
    assert "'data' holds no" in err
    assert not (config.parent / "here").exists()


def test_data_shorter_than_one_batch_exits_with_2(config, fake, run):
    folder = config.parent / "data"
    folder.mkdir()
    (folder / "short.txt").write_text("too short")
    code, _, err = run(
        "train", config, "--backend", "jax", "--data.source", "data", "--run.out", "here"
    )
    assert code == 2
    assert "4 are needed" in err
    assert not (config.parent / "here").exists()


@pytest.mark.parametrize(
    ("installed", "named", "backend"),
    [
        (["jax", "torch"], [], "torch"),
        (["torch"], [], "torch"),
        (["jax"], [], "jax"),
        ([], [], "torch"),
        (["jax", "torch"], ["--backend", "jax"], "jax"),
    ],
)
def test_the_default_backend_is_an_installed_one_and_said(
    config, fake, run, monkeypatch, installed, named, backend
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        shared.importlib.util,
        "find_spec",
        lambda name, *rest: (
            (name in installed or None) if name in shared.BACKENDS else find(name, *rest)
        ),
    )
    code, _, err = run("train", config, *named)
    assert code == 0
    said = "" if named else f"backend: {backend} (by default; --backend names another)\n"
    assert err == said + COVERAGE
    assert log.read_manifest(config.parent / "runs" / f"small-{backend}-tensorwise")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--recipe", "rowwise"],
            "--recipes names the recipes of a sweep; got --numerics.recipe too",
        ),
        (["--run.out", "x"], "directories of --out; got run.out 'x'. Leave it out."),
    ],
)
def test_a_sweep_refuses_what_its_plan_replaces(config, run, words, said):
    code, out, err = run("sweep", config, *words)
    assert (code, out, (config.parent / "sweep").exists()) == (2, "", False)
    assert said in err


@pytest.mark.parametrize(("first", "lines"), [(True, 1), (False, 0)])
def test_one_process_of_several_says_the_default_backend(
    config, fake, run, monkeypatch, first, lines
):
    fake()
    processes = Alone()
    processes.first = first
    monkeypatch.setattr(train, "_processes", lambda *_: processes)
    assert run("train", config, "--distributed")[2].count("backend: torch") == lines


def test_an_unknown_backend_exits_with_2(config, fake, run):
    code, _, err = run("train", config, "--backend", "tensorflow")
    assert code == 2
    assert "tensorflow" in err


@pytest.fixture
def existing(config, fake, run):
    """The directory of a finished run, and the command that made it."""
    command = ("train", config, "--backend", "jax", "--run.out", "here")
    assert run(*command)[0] == 0
    return config.parent / "here", command


def test_a_run_is_not_trained_over(existing, run):
    out, command = existing
    before = contents(out)
    code, _, err = run(*command)
    assert code == 2
    assert "already holds a run" in err
    assert contents(out) == before


def test_overwrite_replaces_a_run(existing, run):
    out, command = existing
    assert run(*command, "--overwrite", "--run.steps", "8")[0] == 0
    assert len(log.read_metrics(out)) == 8


def test_resume_and_overwrite_exclude_each_other(existing, run):
    out, command = existing
    before = contents(out)
    code, _, err = run(*command, "--resume", "--overwrite")
    assert code == 2
    assert "give one of them" in err
    assert contents(out) == before


def test_resuming_a_finished_run_changes_no_byte(existing, run):
    out, command = existing
    before = contents(out)
    code, shown, err = run(*command, "--resume")
    assert (code, shown, err) == (0, FINISHED, "")
    assert contents(out) == before


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--run.steps", "5"], "config.run.steps"),
        (["--optimizer.beta1", "0.5"], "config.optimizer.beta1"),
        (["--recipe", "bf16"], "config.numerics.recipe"),
        (["--backend", "torch"], "backend"),
    ],
)
def test_resuming_with_another_config_is_refused_with_its_key(existing, run, options, key):
    out, command = existing
    before = contents(out)
    code, _, err = run(*command, "--resume", *options)
    assert code == 2
    assert f"another {key}: " in err
    assert contents(out) == before


def test_overwrite_with_a_config_that_cannot_be_trained_keeps_the_run(existing, run):
    out, command = existing
    before = contents(out)
    code, _, err = run(*command, "--overwrite", "--data.source", "absent")
    assert code == 2
    assert "'absent'" in err
    assert out.exists()
    assert contents(out) == before


@pytest.mark.parametrize(
    ("every", "starts"), [("0", [0]), ("2", [0, 4])], ids=["no checkpoint", "checkpoint"]
)
def test_a_run_goes_on_from_its_last_checkpoint(config, fake, run, every, starts):
    command = (
        "train",
        config,
        "--backend",
        "jax",
        "--run.out",
        "here",
        "--checkpoint.every",
        every,
    )
    fake({5: RuntimeError("out of memory")})
    with pytest.raises(RuntimeError, match="out of memory"):
        run(*command)
    out = config.parent / "here"
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    fake()
    code, _, err = run(*command, "--resume")
    assert code == 0
    # the first run's line, and the second's
    said = "here has no checkpoint yet: it starts again from step 0.\n" if every == "0" else ""
    assert err == COVERAGE + said + COVERAGE + (
        "here: resumed at step 4 of 6\n" if every == "2" else ""
    )
    assert [line["step"] for line in log.read_metrics(out)] == list(range(6))
    assert [line["loss"] for line in log.read_metrics(out)] == [5 - 0.125 * i for i in range(6)]
    manifest = log.read_manifest(out)
    assert (manifest["status"], manifest["starts"]) == ("finished", starts)


def test_lost_metrics_cost_no_training(existing, run):
    out, command = existing
    (out / "manifest.json").write_text(json.dumps(log.read_manifest(out) | {"status": "running"}))
    (out / "metrics.jsonl").write_text("")
    code, shown, err = run(*command, "--resume")
    assert (code, shown, err) == (0, FINISHED, "")
    assert log.read_manifest(out)["status"] == "finished"


def test_sigterm_saves_and_exits_with_5(config, fake, run):  # K-8
    command = ("train", config, "--backend", "jax", "--run.out", "here", "--checkpoint.every", "0")
    fake({3: lambda: os.kill(os.getpid(), signal.SIGTERM)})
    code, out, err = run(*command)
    assert (code, out) == (5, "")
    assert "stopped by SIGTERM after 4 steps, which are saved; --resume continues" in err
    assert log.read_manifest(config.parent / "here")["status"] == "stopped"
    fake()
    code, _, err = run(*command, "--resume")
    assert code == 0
    assert "here: resumed at step 4 of 6" in err
    assert log.read_manifest(config.parent / "here")["starts"] == [0, 4]
    assert len(log.read_metrics(config.parent / "here")) == 6


def test_ctrl_c_saves_and_exits_with_130(config, fake, run):  # K-8
    # a shell's background jobs ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    command = ("train", config, "--backend", "jax", "--run.out", "here", "--checkpoint.every", "0")
    fake({3: lambda: os.kill(os.getpid(), signal.SIGINT)})
    code, out, err = run(*command)
    signal.signal(signal.SIGINT, before)
    assert (code, out) == (130, "")
    assert "fp8ref train: interrupted after 4 steps, which are saved; --resume continues." in err
    assert log.read_manifest(config.parent / "here")["status"] == "interrupted"
    fake()
    code, _, err = run(*command, "--resume")
    assert code == 0
    assert "here: resumed at step 4 of 6" in err


def test_sigterm_while_a_framework_loads_exits_with_5(config, fake, run, monkeypatch):
    def meet(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        return Alone()

    fake()
    monkeypatch.setattr(train, "_processes", meet)
    command = ("train", config, "--backend", "jax", "--run.out", "here")
    code, out, err = run(*command, "--distributed")
    assert (code, out) == (5, "")
    assert "stopped by SIGTERM before a step was taken; --resume continues" in err
    assert run(*command, "--resume")[0] == 0


@pytest.mark.parametrize(
    "flag", [[], ["--resume"], ["--overwrite"]], ids=["plain", "resume", "overwrite"]
)
def test_a_foreign_directory_is_left_alone(config, fake, run, flag):
    folder = config.parent / "thesis"
    folder.mkdir()
    (folder / "chapter.tex").write_text("mine")
    before = contents(folder)
    code, _, err = run("train", config, "--backend", "jax", "--run.out", "thesis", *flag)
    assert code == 2
    assert "not a run of fp8ref" in err
    assert contents(folder) == before


def test_ctrl_c_keeps_what_was_written_and_exits_with_130(config, fake, run):
    fake({4: KeyboardInterrupt()})
    code, out, err = run("train", config, "--backend", "jax", "--run.out", "here")
    assert (code, out) == (130, "")
    assert "interrupted" in err
    assert [line["step"] for line in log.read_metrics(config.parent / "here")] == [0, 1, 2, 3]
    assert log.read_manifest(config.parent / "here")["status"] == "interrupted"


def test_a_process_ends_at_once_after_ctrl_c(monkeypatch):
    """XLA may still compile in a thread, which crashes at the interpreter's end."""

    def at_once(code):
        raise SystemError(code)

    monkeypatch.setattr(cli.os, "_exit", at_once)
    for code, error in ((130, SystemError), (2, SystemExit)):
        monkeypatch.setattr(cli, "main", lambda code=code: code)
        with pytest.raises(error, match=str(code)):
            cli.run()


def test_an_interrupted_run_resumes(config, fake, run):
    command = ("train", config, "--backend", "jax", "--run.out", "here")
    fake({4: KeyboardInterrupt()})
    assert run(*command)[0] == 130
    fake()
    assert run(*command, "--resume")[0] == 0
    assert len(log.read_metrics(config.parent / "here")) == 6
    assert log.read_manifest(config.parent / "here")["status"] == "finished"


def test_a_loss_that_is_not_finite_exits_with_3(config, fake, run):  # T-4
    fake({2: {"loss": float("inf")}})
    code, out, err = run("train", config, "--backend", "jax", "--run.out", "here")
    assert (code, out) == (3, "")
    assert err.startswith(f"{COVERAGE}fp8ref train: step 2: loss inf")
    assert [line["step"] for line in log.read_metrics(config.parent / "here")] == [0, 1]
    assert log.read_manifest(config.parent / "here")["status"] == "failed"


def test_a_defect_keeps_its_traceback(config, fake, run):
    fake({1: RuntimeError("a defect")})
    with pytest.raises(RuntimeError, match="a defect"):
        run("train", config, "--backend", "jax", "--run.out", "here")


@pytest.mark.parametrize("steps", ["-1", "7"])
def test_crosscheck_refuses_steps_outside_the_run(config, run, steps):
    code, _, err = run("crosscheck", config, "--steps", steps)
    assert code == 2
    assert f"between 0 and run.steps = 6; got {steps}" in err


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_dry_run_needs_no_data_writes_nothing_and_loads_no_framework(config, backend):
    program = (
        "import sys; from fp8ref import cli; code = cli.main(sys.argv[1:]); "
        "print(code, sorted({'jax', 'torch', 'grain'} & set(sys.modules)))"
    )
    arguments = [
        "train",
        str(config),
        "--backend",
        backend,
        "--dry-run",
        "--data.source",
        "absent",
        "--run.out",
        "here",
    ]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 []"
    assert "parameters: all" in done.stdout
    assert done.stderr == ""
    assert not (config.parent / "here").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--backend", "jax", "--parallel.compile", "block"],
            "parallel.compile is not a key of --backend jax",
        ),
        (
            ["--backend", "torch", "--parallel.fsdp", "3"],
            "data.batch_size is divisible by data x fsdp = 3",
        ),
        (
            ["--backend", "torch", "--resume"],
            "--dry-run reads a config alone, in one process; got --resume",
        ),
        (["--backend", "jax", "--distributed"], "got --distributed"),
    ],
)
def test_a_dry_run_of_what_cannot_be_trained_exits_with_2(config, run, options, said):
    code, out, err = run("train", config, "--dry-run", *options)
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.parametrize("command", ["crosscheck", "demo"])
def test_a_cross_check_takes_whole_batches(config, run, command):
    code, out, err = run(command, config, "--data.microbatches", "2")
    assert (code, out, err) == (
        2,
        "",
        f"fp8ref {command}: a cross-check takes whole batches; got data.microbatches = 2. Set it to 1.\n",
    )


def test_crosscheck_refuses_a_report_in_a_directory_that_is_not_there(config, run):
    code, _, err = run("crosscheck", config, "--json", config.parent / "absent" / "report.json")
    assert code == 2
    assert "a directory that exists" in err


@pytest.fixture
def runs(tmp_path, small, monkeypatch):
    """Runs bf16-0 to bf16-2 and, with the losses of bf16-0 and one more, off, in the current
    directory.
    """
    made_runs.three_seeds(tmp_path, small)
    made_runs.make(tmp_path / "off", small, made_runs.falling(wobble=0) + 1, recipe="tensorwise")
    monkeypatch.chdir(tmp_path)
    return ["bf16-0", "bf16-1", "bf16-2", "off"]


def test_report_writes_a_page_and_says_the_verdict(runs, run, tmp_path):
    code, out, err = run("report", *runs, "--out", "page.html")
    assert (code, err) == (0, "")
    assert out.splitlines()[0].startswith(
        "off: worse: +0.9980 nats [+0.7933, +1.2027] from bf16-0 over the last 5 of 60 steps"
    )
    assert out.splitlines()[-1] == "wrote page.html and 5 PNGs next to it"
    assert "worse" in (tmp_path / "page.html").read_text()


def test_report_takes_a_directory_of_runs(runs, run, tmp_path):
    assert (
        run("report", ".", "--out", "page.html")[:2]
        == run("report", *runs, "--out", "page.html")[:2]
    )


@pytest.mark.parametrize(
    "more",
    [[], ["--seeds", "bf16-1", "bf16-2"], ["--margin", "0.5"]],
    ids=["steps", "seeds", "margin"],
)
def test_compare_exits_with_1_where_it_is_worse(runs, run, more):
    code, out, err = run("compare", "bf16-0", "off", *more, "--json", "found.json")
    assert (code, err) == (1, "")
    assert f"worse: the loss of off is {'+0.9980' if '--seeds' in more else '+1.0000'}" in out
    with open("found.json") as file:
        assert json.load(file)["ok"] is False


def test_compare_exits_with_0_where_it_is_equivalent(runs, run):
    code, out, _ = run("compare", "bf16-0", "off", "--margin", "1.5")
    assert (code, "equivalent" in out) == (0, True)
    assert run("compare", "bf16-0", "./bf16-0")[0] == 0


def test_compare_reads_the_log_of_another_trainer(runs, run, tmp_path):
    (tmp_path / "theirs.csv").write_text(
        "Step,my loss\n" + "".join(f"{i},{3 / (i + 1)}\n" for i in range(60))
    )
    code, out, err = run("compare", "theirs.csv", "theirs.csv", "--loss", "my loss")
    assert (code, err) == (0, "")
    assert "identical: loss of all 60 steps" in out
    assert "Name the loss with --loss" in run("compare", "bf16-0", "theirs.csv")[2]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["report", "absent"], "absent is not a directory"),
        (["report", "bf16-0", "./bf16-0"], "named once"),
        (["report", "bf16-0", "--out", "absent/page.html"], "in a directory that exists"),
        (["report", "bf16-0", "--confidence", "0.4"], "between 0.5 and 1; got 0.4"),
        (["report"], "RUN"),
        (["report", "bf16-0", "--ouT", "x"], "--ouT"),
        (["compare", "bf16-0"], "B"),
        (["compare", "bf16-0", "absent"], "absent is not a directory"),
        (["compare", "bf16-0", "bf16-1"], "Train both with the same seeds"),
        (
            ["compare", "bf16-0", "off", "--margin", "0"],
            "--margin is a number of nats above 0; got 0.0",
        ),
        (["compare", "bf16-0", "off", "--json", "absent/x.json"], "in a directory that exists"),
        (["compare", "bf16-0", "off", "--stray"], "--stray"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_report_and_compare_refuse_what_they_cannot_use(runs, run, tmp_path, command, said):
    before = contents(tmp_path)
    code, out, err = run(*command)
    assert (code, out) == (2, "")
    assert said in err
    assert contents(tmp_path) == before


def python(*arguments, **keys) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        **keys,
    )


def test_python_m_fp8ref_is_the_command():
    shown = python("-m", "fp8ref", "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "usage: fp8ref" in shown.stdout


def test_python_m_fp8ref_passes_its_exit_code_on(config):
    shown = python("-m", "fp8ref", "train", "absent.toml", "--backend", "jax")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.splitlines() == [
        "fp8ref train: absent.toml: cannot be read (No such file or directory). Name a TOML file, "
        f"or one of {', '.join(shipped.NAMES)}."
    ]


WITHOUT_TORCH = """
import sys

class Absent:
    @staticmethod
    def find_spec(name, *_):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name=name)

sys.meta_path.insert(0, Absent)
from fp8ref.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_backend_that_is_not_installed_says_how_to_install_it(config):
    shown = python("-c", WITHOUT_TORCH, "train", config, "--backend", "torch", "--run.out", "here")
    assert shown.returncode == 2
    assert "pip install 'fp8ref[torch]'" in shown.stderr
    assert "Traceback" not in shown.stderr
    assert not (config.parent / "here").exists()


def test_sigint_while_training_saves_the_state_of_every_whole_line(config, tmp_path):
    # a shell's background jobs ignore SIGINT, and Python with them: put its handler back
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\nfrom "
        "fp8ref.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = [
        "train",
        str(config),
        "--backend",
        "torch",
        "--run.out",
        "here",
        "--run.steps",
        "1000000",
    ]
    metrics = tmp_path / "here" / "metrics.jsonl"
    with (
        (tmp_path / "stderr").open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stderr=stderr,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        ) as process,
    ):
        try:
            deadline = time.monotonic() + 60
            while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
                assert process.poll() is None, (tmp_path / "stderr").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 130
        finally:
            process.kill()
    assert metrics.read_text().endswith("\n")
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert len(steps) >= 3
    assert steps == list(range(len(steps)))
    assert [path.name for path in checkpoint.saved(tmp_path / "here")][:1] == [
        f"step-{len(steps):08d}"
    ]
    assert log.read_manifest(tmp_path / "here")["status"] == "interrupted"
    assert "Traceback" not in (tmp_path / "stderr").read_text()


@pytest.mark.parametrize("name", ["a\nfp8ref: all is well", "a//b\nfp8ref: all is well"])
def test_a_name_in_an_error_is_of_one_line(capsys, name):
    assert cli.main(["report", name]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("fp8ref report: a")
    assert (
        r"b\nfp8ref: all is well is not a directory".removeprefix("b" * ("//" not in name)) in said
    )


def test_further_lines_of_an_error_are_indented(capsys, tmp_path):
    """A text of a file may have several."""
    (tmp_path / "a.toml").write_text('[run]\nsteps = 5\n["x\\nfp8ref: all is well"]\na = 1\n')
    assert cli.main(["train", str(tmp_path / "a.toml"), "--backend", "jax"]) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("fp8ref train: ")
    assert all(line.startswith("  ") for line in rest)


def test_a_value_that_is_echoed_does_not_fill_the_terminal(capsys, tmp_path):
    (tmp_path / "a.csv").write_text(f"step,loss\n{'9' * 100_000},1\n")
    assert cli.main(["compare", str(tmp_path / "a.csv"), str(tmp_path / "a.csv")]) == 2
    said = capsys.readouterr().err
    assert len(said) < 2100
    assert said.startswith(f"fp8ref compare: {tmp_path / 'a.csv'} has step = '999")
    assert said.endswith("Repair the row, or name another column.\n")


@pytest.mark.parametrize(
    ("command", "code", "text", "key"),
    [
        (["compare", "bf16-0", "off"], 1, "worse: the loss of off", "ok"),
        (["recipes"], 0, "rowwise", "rowwise"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_json_dash_prints_json_alone_and_the_text_on_standard_error(
    runs, capfd, command, code, text, key
):
    assert cli.main([*command, "--json", "-"]) == code
    out, err = capfd.readouterr()
    assert key in json.loads(out)
    assert text in err
    assert "-" not in os.listdir()
