"""A schedule of recipes: which step runs in which, and runs that switch (T-9)."""

import json
import shutil

import numpy as np
import pytest
from helpers.training.fakes import FakeTrainer

from fp8ref.crosscheck import rerun
from fp8ref.shared.errors import ConfigError, NonFiniteError
from fp8ref.spec.states import health
from fp8ref.train import loop
from fp8ref.train.config import checks as config_checks
from fp8ref.train.config import config as configs
from fp8ref.train.config import options
from fp8ref.train.config.schedule import lowest_sqnr, measured
from fp8ref.train.data import loader
from fp8ref.train.run import log, train_state

BACK = ((0, "delayed"), (2, "tensorwise"), (4, "delayed"))


def scheduled(small, *phases, **sections):
    recipe = phases[0][1] if phases else "tensorwise"
    return small.replace(numerics={"recipe": recipe, "schedule": phases}, **sections)


# ---- the config ----


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([], "at least one phase"),
        ([[1, "tensorwise"]], "begins at step 0; got 1"),
        ([["sqnr < 9", "tensorwise"]], "begins at step 0; got 'sqnr < 9'"),
        (
            [[0, "tensorwise"], [2, "fp9"]],
            "a recipe of numerics.schedule is one of bf16, .*; got 'fp9'",
        ),
        ([[0, "tensorwise"], [2, "bf16"], [2, "rowwise"]], "steps ascend; got 2 and then 2"),
        ([[0, "tensorwise"], [3, "bf16"], [2, "rowwise"]], "steps ascend; got 3 and then 2"),
        ([[0, "tensorwise"], [-1, "bf16"]], "steps ascend; got 0 and then -1"),
        ([[0, "tensorwise"], [2, "tensorwise"]], "'tensorwise' twice in a row"),
        (
            [[0, "bf16"], [2, "tensorwise"]],
            "begins with numerics.recipe, which is 'tensorwise'; got 'bf16'",
        ),
        (
            [[0, "tensorwise"], ["update_noise < 2", "bf16"]],
            "'sqnr < NUMBER' .*; got 'update_noise < 2'",
        ),
        (
            [[0, "tensorwise"], ["update_error < 2", "bf16"]],
            "'update_error > NUMBER'; got 'update_error < 2'",
        ),
        ([[0, "tensorwise"], ["update_error > 2", "bf16"]], "statistics.every records; got 0"),
        ([[0, "tensorwise"], ["sqnr < nan", "bf16"]], "got 'sqnr < nan'"),
        ([[0, "tensorwise"], ["sqnr > 2", "bf16"]], "got 'sqnr > 2'"),
        ([[0, "tensorwise"], ["sqnr < much", "bf16"]], "got 'sqnr < much'"),
        ([[0, "tensorwise"], ["sqnr < 20", "bf16"], ["sqnr < 20", "rowwise"]], "'bf16' has none"),
        ([[0, "tensorwise"], ["sqnr < 20", "bf16"]], "statistics.every records; got 0"),
        (
            [
                [0, "tensorwise"],
                ["learning_rate < 2e-4", "bf16"],
                ["learning_rate < 3e-4", "rowwise"],
            ],
            "learning rates descend; got 0.0002 and then 0.0003",
        ),
        (
            [[0, "tensorwise"], ["learning_rate < 1e-4", "bf16"]],
            "above optimizer.min_learning_rate = 0.0001 .*; got 0.0001",
        ),
        (
            [[0, "tensorwise"], ["learning_rate < 1.1e-3", "bf16"]],
            "at most optimizer.learning_rate = 0.001.*; got 0.0011",
        ),
        (
            [[0, "tensorwise"], ["learning_rate < 9e-4", "bf16"], [20, "rowwise"]],
            "'rowwise' would begin at step 20, and 'bf16', .* at step 48",
        ),
        ([[0, "tensorwise"], [1.5, "bf16"]], "valid integer; got 1.5"),
        ([[0, "tensorwise", 3]], "at most 2 items"),
    ],
)
def test_a_schedule_that_is_none_is_refused_by_name(phases, message):  # T-9
    with pytest.raises(ConfigError, match=message):
        configs.from_dict({"numerics": {"schedule": phases}})


def test_states_of_two_rules_are_refused(monkeypatch):  # T-9
    from fp8ref.recipe import RECIPES, CastSpec, GemmSpec, Recipe
    from fp8ref.spec.delayed import DELAYED

    rule = DELAYED["te_delayed"]
    cast = CastSpec(fmt=RECIPES["delayed"].casts[0].fmt, policy=rule.policy, delayed=rule)
    monkeypatch.setitem(
        RECIPES, "other", Recipe(name="other", output=GemmSpec(a=cast, b=cast, accumulate="fast"))
    )
    with pytest.raises(ConfigError, match="'other' keeps that of input in another way"):
        configs.from_dict(
            {"numerics": {"recipe": "delayed", "schedule": [[0, "delayed"], [2, "other"]]}}
        )


def test_options_and_files_hold_a_schedule(small):  # T-9
    words = [
        "--numerics.schedule",
        "0",
        "tensorwise",
        "learning_rate < 3e-4",
        "rowwise",
        "9",
        "bf16",
        "--run.steps",
        "8",
    ]
    config = options.override(small, words, prog="")
    assert config.numerics.schedule == (
        (0, "tensorwise"),
        ("learning_rate < 3e-4", "rowwise"),
        (9, "bf16"),
    )
    assert config.recipes == ("tensorwise", "rowwise", "bf16")
    assert configs.from_dict(json.loads(json.dumps(configs.to_dict(config)))) == config
    assert options.override(
        config, ["--numerics.schedule", "None", "--recipe", "bf16"], prog=""
    ).recipes == ("bf16",)
    assert config.under("rowwise") == small.replace(
        numerics={"recipe": "rowwise"}, run={"steps": 8}
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tensor": 2}, r"takes parallel\.tensor 1"),
        ({"fsdp": 2}, r"Set parallel\.gather to compute"),
        (
            {"fsdp": 2, "gather": "compute", "amax_scope": "local"},
            r"'delayed' keeps one state for all ranks",
        ),
    ],
)
def test_meshes_that_cannot_switch_are_refused_before_anything_is_made(small, keys, message):  # T-9
    config = scheduled(small, (0, "tensorwise"), (2, "bf16"), (4, "delayed"), parallel=keys)
    with pytest.raises(ConfigError, match=message):
        loop.trainer("torch", config)
    assert config_checks.unswitched(config, "jax") == []
    config = scheduled(small, (0, "rowwise"), (2, "bf16"), parallel={"fsdp": 2})
    assert config_checks.unswitched(config, "torch") == []


# ---- which step runs in which recipe ----


def test_a_learning_rate_that_never_falls_begins_nothing(small):  # T-9
    with pytest.raises(ValueError, match=r"optimizer\.decay is 'none'"):
        small.replace(
            numerics={"schedule": [[0, "tensorwise"], ["learning_rate < 5e-4", "rowwise"]]},
            optimizer={"decay": "none"},
        )


def test_a_learning_rate_begins_where_it_first_is_lower(small):  # T-9, T-3
    config = scheduled(
        small,
        (0, "tensorwise"),
        ("learning_rate < 3e-4", "rowwise"),
        (190, "bf16"),
        run={"steps": 200},
    )
    rates = [config.optimizer.learning_rate_at(step, 200) for step in range(200)]
    first = next(step for step in range(config.optimizer.warmup_steps, 200) if rates[step] < 3e-4)
    assert config.starts == (0, first, 190)
    # the worked example
    assert (first, round(rates[139], 9), round(rates[140], 9)) == (140, 0.00030037, 0.000294371)
    assert rates[0] < 3e-4  # in warm-up, where it rises
    phases = config.scheduled()
    assert [phases.recipe(step) for step in (0, first - 1, first, 189, 190, 199)] == [
        "tensorwise",
        "tensorwise",
        "rowwise",
        "rowwise",
        "bf16",
        "bf16",
    ]
    short = config.replace(run={"steps": 6})  # one step after warm-up, at the peak
    assert short.scheduled().ran(5) == [[0, "tensorwise"]]


def test_a_rate_that_equals_the_threshold_is_not_below_it(small):  # T-9
    """A line from 1 to 0 in 8 steps, all numbers exact: at 2^-1 in step 4, below it from step 5
    on.
    """
    rates = {"learning_rate": 1.0, "min_learning_rate": 0.0, "warmup_steps": 0, "decay": "linear"}
    config = scheduled(
        small,
        (0, "tensorwise"),
        ("learning_rate < 0.5", "rowwise"),
        optimizer=rates,
        run={"steps": 8},
    )
    assert [config.optimizer.learning_rate_at(step, 8) for step in (3, 4, 5)] == [0.625, 0.5, 0.375]
    assert config.starts == (0, 5)


def test_a_phase_after_the_last_step_is_no_error(small):  # T-9
    assert scheduled(small, (0, "tensorwise"), (9000, "bf16")).scheduled().ran(5) == [
        [0, "tensorwise"]
    ]


def test_a_measured_phase_is_compared_while_the_one_before_it_runs(small):  # T-9
    phases = ((0, "tensorwise"), ("sqnr < 20", "rowwise"), ("sqnr < 20", "delayed"), (9, "bf16"))
    config = scheduled(small, *phases, statistics={"every": 1}, run={"steps": 20})
    found = config.scheduled()
    assert found.waits(0).sqnr == 20
    assert not found.measure(0, 20.0)  # below, not at
    assert found.measure(1, 19.0)
    assert [found.recipe(step) for step in (1, 2)] == ["tensorwise", "rowwise"]
    assert found.measure(4, 3.0)  # one phase further, whatever the threshold after it
    assert [found.recipe(step) for step in (4, 5, 8, 9)] == [
        "rowwise",
        "delayed",
        "delayed",
        "bf16",
    ]
    assert found.waits(9) is None
    assert found.ran(19) == [[0, "tensorwise"], [2, "rowwise"], [5, "delayed"], [9, "bf16"]]
    assert config.scheduled(found.measured).ran(8) == found.ran(8)
    # a step is reached without the phases between
    assert config.scheduled().ran(19) == [[0, "tensorwise"], [9, "bf16"]]


@pytest.mark.parametrize(
    ("sqnrs", "ran"), [((25, 21, 19.5, 18), [[3, "rowwise"]]), ((25, 21, 20, 20), [])]
)
def test_the_worked_example_of_a_measured_phase(small, sqnrs, ran):  # T-9
    phases = ((0, "tensorwise"), ("sqnr < 20", "rowwise"), (9, "bf16"))
    found = scheduled(small, *phases, statistics={"every": 1}, run={"steps": 12}).scheduled()
    for step, lowest in enumerate(sqnrs):
        if found.waits(step) is not None:
            found.measure(step, lowest)
    assert found.ran(11) == [[0, "tensorwise"], *ran, [9, "bf16"]]


def test_the_lowest_sqnr_is_that_of_an_operand_that_has_one():  # T-9
    assert lowest_sqnr({"a": {"sqnr": 30.0}, "b": {"sqnr": None}, "c": {"sqnr": 20.5}}) == (
        20.5,
        "c",
    )
    assert lowest_sqnr({"b": {"sqnr": None}}) is None
    assert lowest_sqnr({}) is None


def test_what_states_measure_begins_a_phase_above_its_threshold(small):  # T-9, O-12
    phases = ((0, "bf16"), ("update_error > 0.1", "tensorwise"), (9, "bf16"))
    narrow = {
        "optimizer": {"kind": "adamw_states", "layout": "sqrt_e4m3"},
        "statistics": {"every": 1},
        "run": {"steps": 20},
    }
    found = scheduled(small, *phases, **narrow).scheduled()
    waiting = found.waits(0)
    assert (
        measured(
            waiting, {"a": {"sqnr": 3.0}}, {"": {"update_error": 0.1}, "w": {"update_error": 9.0}}
        )[0]
        == 0.1
    )
    assert measured(waiting, {}, {"": {"update_error": None}}) is measured(waiting, {}, {}) is None
    assert not found.measure(0, 0.1)  # above, not at
    assert found.measure(2, 0.11)
    assert found.ran(19) == [[0, "bf16"], [3, "tensorwise"], [9, "bf16"]]
    for optimizer, got in (
        ({"kind": "adamw", "layout": None}, "got kind 'adamw'"),
        ({"layout": "float32"}, "with layout 'float32'"),
    ):
        with pytest.raises(
            ValueError,
            match=f"'update_error' in numerics.schedule is of states narrower than float32.*{got}",
        ):
            scheduled(small, *phases, **narrow).replace(optimizer=optimizer)


# ---- the loop ----


@pytest.fixture
def fake(monkeypatch):
    def install(config, on_step=None) -> FakeTrainer:
        made = FakeTrainer(config, on_step)
        monkeypatch.setattr(loop, "trainer", lambda *_: made)
        return made

    return install


# the fake's SQNR is 28, 26, 24 ...
MEASURED = ((0, "tensorwise"), ("sqnr < 27", "rowwise"), (4, "bf16"))


def test_a_run_records_where_its_phases_began(tmp_path, small, fake, capsys):  # T-9
    config = scheduled(small, *MEASURED, statistics={"every": 1})
    trainer = fake(config)
    loop.train(config, "jax", tmp_path / "run")
    assert trainer.recipes == ["tensorwise", "tensorwise", "rowwise", "rowwise", "bf16", "bf16"]
    manifest = log.read_manifest(tmp_path / "run")
    assert manifest["schedule"]["ran"] == [[0, "tensorwise"], [2, "rowwise"], [4, "bf16"]]
    assert list(manifest["schedule"]["recipes"]) == ["tensorwise", "rowwise", "bf16"]
    assert [part["fp8"]["linears"] for part in manifest["schedule"]["recipes"].values()] == [
        7,
        7,
        0,
    ]
    said = capsys.readouterr().err
    assert "step 1: layer/output/input has an SQNR of 26.00 dB" in said
    assert "step 2: recipe rowwise\nstep 4: recipe bf16\n" in said


# T-9, O-12
def test_a_run_begins_a_phase_by_the_error_of_its_updates(tmp_path, small, fake, capsys):
    narrow = {
        "optimizer": {"kind": "adamw_states", "layout": "sqrt_e4m3"},
        "statistics": {"every": 2},
    }
    config = scheduled(small, (0, "bf16"), ("update_error > 0.04", "tensorwise"), **narrow)
    trainer = fake(config)
    figures = dict.fromkeys(
        (*health.COUNTS, "root_bias", "largest_ratio", "bytes_per_parameter"), 1.0
    )
    trainer.measured_step = lambda tokens: (
        trainer.step(tokens),
        {},
        {"": {**figures, "update_error": 0.02 * trainer.count}},
    )
    loop.train(config, "jax", tmp_path / "run")
    # errors of 0.02 in step 0 and 0.06 in step 2
    assert trainer.recipes == ["bf16"] * 3 + ["tensorwise"] * 3
    assert log.read_manifest(tmp_path / "run")["schedule"]["ran"] == [
        [0, "bf16"],
        [3, "tensorwise"],
    ]
    assert (
        "step 2: the update of all parameters has an error of 0.06, above that of the next phase"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("stopped", [1, 2, 3, 5])
def test_a_resumed_run_repeats_what_was_measured(tmp_path, small, fake, stopped):  # T-9, K-2
    config = scheduled(small, *MEASURED, statistics={"every": 1}, checkpoint={"every": 1})
    fake(config, {stopped: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        loop.train(config, "jax", tmp_path / "run")
    last = json.loads(
        (tmp_path / "run" / "checkpoints" / f"step-{stopped:08d}" / "manifest.json").read_text()
    )
    assert last.get("measured") == ([[2, 1]] if stopped >= 2 else None)
    trainer = fake(config)
    loop.train(config, "jax", tmp_path / "run", resume=True)
    assert (
        trainer.recipes
        == ["tensorwise", "tensorwise", "rowwise", "rowwise", "bf16", "bf16"][stopped:]
    )
    assert log.read_manifest(tmp_path / "run")["schedule"]["ran"] == [
        [0, "tensorwise"],
        [2, "rowwise"],
        [4, "bf16"],
    ]


@pytest.mark.parametrize(
    ("phases", "refused"), [(MEASURED, True), (((0, "tensorwise"), (4, "bf16")), False)]
)
def test_statistics_that_decide_cannot_change(tmp_path, small, fake, phases, refused):  # T-9, K-10
    config = scheduled(small, *phases, statistics={"every": 2}, checkpoint={"every": 1})
    fake(config, {3: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        loop.train(config, "jax", tmp_path / "run")
    other = config.replace(statistics={"every": 1})
    fake(other)
    if refused:
        with pytest.raises(ConfigError, match=r"another config.statistics.every"):
            loop.train(other, "jax", tmp_path / "run", resume=True)
    else:
        loop.train(other, "jax", tmp_path / "run", resume=True)


class Other:
    """The second of two processes, whose own record says something else."""

    first = False

    def naming_lost_processes(self):
        from contextlib import nullcontext

        return nullcontext()

    def gather(self, value):
        return [[26.5, "its operand"] if isinstance(value, tuple) else value, value]


def test_the_first_process_decides_for_all(small, fake, tmp_path):  # T-9
    config = scheduled(small, *MEASURED, statistics={"every": 1})
    trainer = fake(config)
    phases = config.scheduled()
    training = loop._Training(
        trainer,
        loader.open_batches(config),
        config,
        tmp_path,
        log.Unwritten(),
        Other(),
        lambda: False,
        phases,
    )
    training.step(0)  # 28 dB here
    training.step(1)
    assert trainer.recipes == ["tensorwise", "rowwise"]


# ---- both backends ----


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", [{}, {"kind": "adamw_states", "layout": "sqrt_e4m3_f16"}], ids=["adamw", "masters"]
)
@pytest.mark.parametrize("backend", loop.BACKENDS)
# T-9, O-16
def test_a_schedule_is_its_recipes_one_after_the_other(backend, optimizer, small, tmp_path):
    """The losses are those of one run for each recipe, chained by checkpoints; each recipe is
    compiled once.
    """
    small = small.replace(optimizer=optimizer)
    phases = ((0, "tensorwise"), (1, "rowwise"), (2, "bf16"), (3, "tensorwise"))
    batches, trainer, chained = (
        loader.open_batches(small),
        loop.trainer(backend, scheduled(small, *phases)),
        None,
    )
    for step, recipe in phases:
        one = loop.trainer(backend, small.replace(numerics={"recipe": recipe}))
        if chained is not None:
            chained.save(tmp_path / str(step))()
            one.load(tmp_path / str(step), step)
        trainer.switch(recipe)
        assert trainer.step(batches.step(step)) == one.step(batches.step(step))
        chained = one
    for name, value in trainer.weights().items():
        np.testing.assert_array_equal(value, chained.weights()[name], err_msg=name)
    if backend == "jax":
        assert {
            recipe: programs.train._cache_size() for recipe, programs in trainer._programs.items()
        } == {"tensorwise": 1, "rowwise": 1, "bf16": 1}
    with pytest.raises(ValueError, match="got 'delayed'"):
        trainer.switch("delayed")


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", [{}, {"kind": "adamw_states", "layout": "sqrt_e4m3_f16"}], ids=["adamw", "masters"]
)
@pytest.mark.parametrize("backend", loop.BACKENDS)
# T-9, K-2
def test_a_resumed_schedule_has_the_bits_of_an_unbroken_one(backend, optimizer, small, tmp_path):
    """Before, at and after a switch; histories wait while another recipe runs, and go on after
    it.
    """
    config = scheduled(small, *BACK, checkpoint={"every": 1, "keep_last": 6}, optimizer=optimizer)
    whole = loop.train(config, backend, tmp_path / "whole")
    for after in (1, 2, 3):
        run = tmp_path / str(after)
        shutil.copytree(tmp_path / "whole", run)
        for path in (run / "checkpoints").iterdir():
            if int(path.name.removeprefix("step-")) > after:
                shutil.rmtree(path)
        manifest = log.read_manifest(run)
        (run / "manifest.json").write_text(json.dumps(manifest | {"status": "interrupted"}))
        lines = loop.train(config, backend, run, resume=True)
        assert [(line["loss"], line["grad_norm"], line.get("val_loss")) for line in lines] == [
            (line["loss"], line["grad_norm"], line.get("val_loss")) for line in whole
        ]
        assert log.read_manifest(run)["schedule"]["ran"] == [list(phase) for phase in BACK]
    trainer, states = loop.trainer(backend, config), {}
    for step in (2, 4, 6):
        trainer.load(tmp_path / "whole" / "checkpoints" / f"step-{step:08d}" / "state", step)
        states[step] = trainer.fp8_states()
    assert states[2].keys() == states[6].keys()
    assert len(states[2]) == 3 * 7
    for name, (scale, history, count) in states[2].items():
        for before, waited in zip((scale, history, count), states[4][name], strict=True):
            # two steps in another recipe
            np.testing.assert_array_equal(before, waited, err_msg=name)
        assert (count, states[6][name][2]) == (2, 4)
        assert states[6][name][1][2] == history[0]  # two amaxes further: the histories went on


@pytest.mark.parametrize("backend", loop.BACKENDS)
def test_a_state_holds_what_any_phase_needs(backend, small, tmp_path):  # T-9, K-2
    config = scheduled(small, (0, "bf16"), (2, "delayed"))
    trainer = loop.trainer(backend, config)
    trainer.save(tmp_path / "state")()  # ``train_state.check`` compares the names
    assert train_state.schema(config, backend) == train_state.schema(
        config.under("delayed"), backend
    )
    assert all(scale == 1 and count == 0 for scale, _, count in trainer.fp8_states().values())
    with pytest.raises(ConfigError, match="is in the checkpoint, and not in this model"):
        loop.trainer(backend, config.under("bf16")).load(tmp_path / "state", 0)


@pytest.mark.slow
def test_a_failed_step_is_replayed_in_its_own_recipe(small, tmp_path):  # T-9, K-6, K-9
    config = scheduled(small, (0, "tensorwise"), (2, "delayed"), model={"initializer_range": 1e30})
    with pytest.raises(NonFiniteError):
        loop.train(config, "torch", tmp_path / "run")
    found = rerun.rerun(tmp_path / "run" / "failures" / "step-00000000")
    assert found.failed.recipe == "tensorwise"
    assert found.first is not None


def test_who_takes_one_recipe_refuses_a_schedule(small):  # T-9
    from fp8ref.commands import shared
    from fp8ref.crosscheck.divergence import live
    from fp8ref.estimate import report
    from fp8ref.estimate.gpu_rates import PUBLISHED

    config = scheduled(small, (0, "tensorwise"), (2, "bf16"))
    for refuse in (
        lambda: shared.check_whole(config),
        lambda: live.check_alone(config, "it"),
        lambda: report.of(config, "torch", next(iter(PUBLISHED.values()))),
    ):
        with pytest.raises(
            ConfigError, match=r"takes one recipe; got numerics.schedule with tensorwise, bf16"
        ):
            refuse()


@pytest.mark.slow
def test_a_scan_on_a_mesh_switches(small, tmp_path):  # T-9, T-8
    """Stacks of layers, cut over devices: the same as recipes one after the other, and resumed
    before delayed scaling begins.
    """
    small = small.replace(parallel={"fsdp": 2, "scan": True})
    config = scheduled(small, (0, "tensorwise"), (1, "bf16"), (2, "delayed"), (3, "bf16"))
    batches, trainer = loader.open_batches(small), loop.trainer("jax", config)
    one = loop.trainer("jax", small.replace(numerics={"recipe": "tensorwise"}))
    assert trainer.step(batches.step(0)) == one.step(batches.step(0))
    one.save(tmp_path / "one")()
    other = loop.trainer("jax", small.replace(numerics={"recipe": "bf16"}))
    other.load(tmp_path / "one", 1)
    trainer.switch("bf16")
    assert trainer.step(batches.step(1)) == other.step(batches.step(1))
    trainer.save(tmp_path / "two")()
    resumed = loop.trainer("jax", config)
    resumed.load(tmp_path / "two", 2)
    for step, recipe in ((2, "delayed"), (3, "bf16")):
        trainer.switch(recipe)
        resumed.switch(recipe)
        assert trainer.step(batches.step(step)) == resumed.step(batches.step(step))
    assert {count.item() for _, _, count in trainer.fp8_states().values()} == {1}
    assert [programs.train._cache_size() for programs in trainer._programs.values()] == [1, 1, 1]
