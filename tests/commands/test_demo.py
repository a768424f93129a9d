"""fp8ref demo: its options, what it prints and when it fails. Runs and cross-checks are made up,
but for the slow test."""

import contextlib
import os
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.training import made_runs

from fp8ref import cli
from fp8ref.commands import demo, shared
from fp8ref.conformance.kit.compare import Report
from fp8ref.crosscheck import one_device
from fp8ref.train.experiments import demo as experiment


@pytest.fixture
def options(monkeypatch):
    """The Options of a command line."""
    seen = []
    monkeypatch.setattr(demo, "demo", lambda config, out, options: seen.append(options) or True)

    def of(*words):
        assert cli.main(["demo", *words]) == 0
        return seen[-1]

    return of


def test_by_default_both_train_and_one_is_judged(options):
    plan = options()
    assert (plan.recipes, plan.seeds, plan.planted) == (
        ("tensorwise",),
        {"jax": 1, "torch": 4},
        "torch",
    )
    full = options("--full")
    assert (full.recipes, full.seeds, full.planted) == (
        ("tensorwise", "rowwise"),
        {"jax": 3, "torch": 3},
        None,
    )


def test_backend_recipes_and_seeds_are_chosen(options):
    plan = options("--backend", "jax", "--recipes", "rowwise, bf16,mxfp8,", "--seeds", "2")
    assert (plan.recipes, plan.seeds, plan.planted) == (("rowwise", "mxfp8"), {"jax": 2}, "jax")
    assert options("--margin", "0.5").margin == 0.5
    assert options("--recipe", "mxfp8").recipes == ("mxfp8",)


@pytest.mark.parametrize("present", ["jax", "torch"])
def test_it_trains_what_is_installed(options, monkeypatch, present):
    monkeypatch.setattr(shared, "installed", lambda: (present,))
    assert options().seeds == {present: 4}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--recipes", "tensorwize"), "tensorwise"),
        (("--recipes", "rowwise", "--recipe", "mxfp8"), "got --numerics.recipe too. Leave it out"),
        (("--recipes", " ,bf16"), "--recipes takes recipes in FP8, with commas; got ' ,bf16'"),
        (("--run.out", "x"), "directories of --out; got run.out 'x'. Leave it out"),
        (("--seeds", "0"), "--seeds is at least 1; got 0"),
        (("--backend", "numpy"), "jax, torch"),
        (("--out", "/dev/null"), "--out names a directory; /dev/null is a file"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_written(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    try:
        code = cli.main(["demo", *words])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def checked(wrong: int = 0) -> Report:
    """A cross-check of layers, with so many wrong codes."""
    report = Report()
    for backend in ("jax", "torch"):
        for kind, size in (("codes", 1000), ("scale", 7)):
            check = report.check(f"layers/input/{kind}/{backend}")
            check.compared, check.equal = size, size - wrong * (kind == "codes")
    outside = report.check("synthetic.cast/e4m3fn/codes/torch")
    outside.compared = outside.equal = 5
    return report


@pytest.fixture
def run(small, tmp_path, monkeypatch, capsys):
    """A demo whose runs have these losses above bf16's: (whether it is right, what it printed)."""

    def run(*, right: float, fault: float, report: Report | None = None, absent: str = ""):
        @contextlib.contextmanager
        def training(jobs, out):
            rng = np.random.default_rng(0)
            noise = {}

            def wait(ended, advance):
                for job in jobs:
                    recipe = experiment.name_of(job)[1]
                    more = {"bf16": 0.0, experiment.PLANTED: fault}.get(recipe, right)
                    seed = job.config.run.seed
                    base = noise.setdefault(seed, rng.normal(size=60) * 0.01)
                    losses = 3 + base + more + rng.normal(size=60) * 1e-4
                    made_runs.make(
                        job.out,
                        job.config,
                        losses,
                        recipe=job.config.numerics.recipe,
                        seed=seed,
                        backend=job.backend,
                    )
                    ended(job, {"loss": 5.5}, {"loss": losses[-1]})
                    advance("", by=1)

            yield wait

        monkeypatch.setattr(os, "environ", os.environ.copy())
        monkeypatch.setattr(experiment, "training", training)
        monkeypatch.setattr(one_device, "crosscheck", lambda *a, **k: report or checked())
        if absent:
            present = tuple(name for name in shared.BACKENDS if name != absent)
            monkeypatch.setattr(shared, "installed", lambda: present)
        plan = demo.Options(
            recipes=("tensorwise",),
            seeds={name: 4 if name == shared.installed()[-1] else 1 for name in shared.installed()},
            planted=shared.installed()[-1],
        )
        return demo.demo(small, tmp_path / "demo", plan), capsys.readouterr().out

    return run


def test_it_shows_a_tensor_equal_codes_and_two_verdicts(run, tmp_path):
    right, out = run(right=0.001, fault=0.2)
    assert right
    assert "tensorwise makes 39.8% of the elements zero" in out
    assert "2,000 of 2,000 FP8 codes and 14 of 14 scales equal the simulator's." in out
    assert "torch tensorwise: equivalent: +0.0010 nats" in out
    assert f"torch planted-fault ({experiment.FAULT}): worse: +0.2000 nats" in out
    assert "margin: 0.0075 nats, 0.25% of bf16's loss" in out
    assert "next: fp8ref train" in out
    assert "not installed" not in out
    for name in ("outlier.png", "loss.png", "report.html", "crosscheck-tensorwise.json"):
        assert (tmp_path / "demo" / name).stat().st_size > 100
    # in the order of what a person sees
    parts = ["elements zero", "training 14 runs", "equal the simulator's", "equivalent", "next:"]
    assert sorted(parts, key=out.index) == parts


@pytest.mark.parametrize("absent", ["jax", "torch"])
def test_without_a_framework_it_says_so_and_runs(run, absent):
    right, out = run(right=0.001, fault=0.2, absent=absent)
    assert right
    assert out.startswith(f"without {absent}, which is not installed\n")
    assert f"{absent} bf16" not in out


def test_it_fails_where_a_code_differs(run):
    report = checked(wrong=3)
    right, out = run(right=0.001, fault=0.2, report=report)
    assert not right
    assert "1,994 of 2,000 FP8 codes" in out


@pytest.mark.parametrize(
    ("kinds", "right"),
    [
        (("equivalent", "worse"), True),
        (("better", "worse"), True),
        (("cannot tell", "cannot tell"), True),
        (("worse", "worse"), False),
        (("equivalent", "equivalent"), False),
        (("equivalent", "better"), False),
    ],
)
def test_it_succeeds_by_the_verdicts(kinds, right):
    names = (("torch", "rowwise"), ("torch", experiment.PLANTED))
    judged = {name: SimpleNamespace(kind=kind) for name, kind in zip(names, kinds, strict=True)}
    assert demo._decides(judged) is right


@pytest.mark.slow
def test_the_long_form_trains_and_keeps_operands(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.chdir(tmp_path)
    sizes = ("--run.steps", "5", "--model.num_hidden_layers", "1", "--data.batch_size", "4")
    words = ["demo", "--full", "--backend", "torch", "--seeds", "2", "--recipes", "tensorwise"]
    assert cli.main([*words, *sizes, "--run.eval_every", "5"]) == 0
    out = capsys.readouterr().out
    assert "equal the simulator's" in out
    assert "planted" not in out
    assert (tmp_path / "demo" / "tensors.npz").is_file()
    assert (tmp_path / "demo" / "report.html").is_file()
