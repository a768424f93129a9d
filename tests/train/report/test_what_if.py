import json
import math

import numpy as np
import pytest

from fp8ref import cli
from fp8ref.shared.errors import ConfigError
from fp8ref.spec.delayed import DELAYED
from fp8ref.train import loop
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import StatisticsConfig
from fp8ref.train.report import what_if
from fp8ref.train.run import log


def recorded(run, amaxes, *, recipe="delayed", every=1, name="model.layers.0.mlp.up_proj"):
    """A run directory with these amaxes of one linear's input and grad_output; it has no step, as
    one that failed in its first.
    """
    config = Config(statistics=StatisticsConfig(every=every)).replace(numerics={"recipe": recipe})
    decisions = [decision for decision in config.decisions() if decision.path == name]
    run.mkdir()
    manifest = log.manifest(config, "torch", data={}, decisions=decisions, device="cpu")
    log.create(run, config, manifest).close()
    keys = ("output/input", "grad_weight/input", "grad_input/grad_output")
    lines = [
        {"step": i * every, "statistics": {f"{name}/{key}": {"amax": amax} for key in keys}}
        for i, amax in enumerate(amaxes)
    ]
    (run / "statistics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def outcomes(run, policy, **options) -> tuple[what_if.Outcome, what_if.Outcome]:
    found = what_if.replay(run, policy, **options)
    assert [name.rpartition("proj/")[2] for name in found.outcomes] == [
        "input/e4m3fn",
        "grad_output/e5m2",
    ]
    return tuple(found.outcomes.values())


def test_by_hand(tmp_path):
    run = recorded(tmp_path / "run", [448.0, 112.0, 224.0, 1792.0, 448.0])
    of_input, of_gradient = outcomes(run, "delayed", history=2)
    # scales 1, 1, 1, 2, 1/4: max / (largest of the two before); amax * scale / max = 1, 1/4, 1/2,
    # 8, 1/4
    assert (of_input.steps, of_input.clipped, of_input.skipped) == (5, 1, 0)
    assert of_input.excess == pytest.approx(3)
    assert of_input.wasted_mean == pytest.approx((0 + 2 + 1 + 2) / 4)
    assert of_input.wasted_max == pytest.approx(2)
    assert of_gradient.wasted_max == pytest.approx(7)  # 57344 / 448, by the first scale, 1


@pytest.mark.parametrize("policy", DELAYED)
def test_a_history_beyond_what_was_recorded_takes_no_memory(tmp_path, policy):
    run = recorded(tmp_path / "run", [448.0, 112.0, 0.0, 224.0, 1792.0, 3.0, 448.0])
    assert (
        outcomes(run, policy, history=10**14)
        == outcomes(run, policy, history=50)
        != outcomes(run, policy, history=2)
    )


def test_margin_is_room(tmp_path):
    run = recorded(tmp_path / "run", [3.0, 3.0, 6.5])
    plain, _ = outcomes(run, "delayed")
    with_room, _ = outcomes(run, "delayed", margin=2)
    assert (plain.clipped, with_room.clipped) == (1, 0)
    assert with_room.wasted_mean == pytest.approx(
        (math.log2(448 / 3) + 2 + 2 - math.log2(6.5 / 3)) / 3
    )


@pytest.mark.parametrize(
    "policy", ["torchao", "torchao_pow2", "te_current", "msamp", "mx_rceil", "flax_bf16"]
)
def test_a_dynamic_policy_clips_nothing(tmp_path, policy):
    for outcome in outcomes(recorded(tmp_path / "run", [3.7, 1e-9, 55.0, 1e4]), policy):
        assert (outcome.steps, outcome.clipped, outcome.excess) == (4, 0, None)
        assert outcome.wasted_max <= (
            1 if policy in ("torchao_pow2", "msamp", "mx_rceil") else 1e-6
        )


def test_what_is_zero_or_not_finite_is_left_out(tmp_path):
    of_input, _ = outcomes(recorded(tmp_path / "run", [0.0, None, 448.0]), "delayed")
    assert (of_input.steps, of_input.skipped, of_input.clipped) == (1, 2, 0)


def test_a_run_under_delayed_scaling_replays_to_what_it_clipped(tmp_path, small):
    """Recorded at every step, the policy that trained: a step would have been clipped where it
    was.
    """
    config = small.replace(
        numerics={"recipe": "delayed"}, statistics={"every": 1}, optimizer={"learning_rate": 0.05}
    )
    loop.train(config, "torch", tmp_path / "run")
    lines = log.read_lines(tmp_path / "run" / "statistics.jsonl")
    assert [line["step"] for line in lines] == list(range(config.run.steps))
    found = what_if.replay(tmp_path / "run", "delayed")
    assert any(outcome.clipped for outcome in found.outcomes.values())
    for name, outcome in found.outcomes.items():
        layer, role, _ = name.split("/")
        gemm = "grad_input" if role == "grad_output" else "output"
        happened = sum(
            line["statistics"][f"{layer}/{gemm}/{role}"]["overflow_rate"] > 0 for line in lines
        )
        assert outcome.clipped == happened, name


@pytest.mark.slow
@pytest.mark.parametrize("backend", loop.BACKENDS)
def test_statistics_are_recorded_every_so_often_as_plain_json(tmp_path, small, backend):
    config = small.replace(numerics={"recipe": "rowwise"}, statistics={"every": 4})
    loop.train(config, backend, tmp_path / "run")
    loop.train(small.replace(numerics={"recipe": "rowwise"}), backend, tmp_path / "without")
    text = (tmp_path / "run" / "statistics.jsonl").read_text()
    constants: list = []
    lines = [json.loads(line, parse_constant=constants.append) for line in text.splitlines()]
    assert ([line["step"] for line in lines], constants) == ([0, 4], [])
    assert all(line["statistics"] for line in lines)
    assert not (tmp_path / "without" / "statistics.jsonl").exists()
    losses = [
        [line["loss"] for line in log.read_metrics(tmp_path / name)] for name in ("run", "without")
    ]
    assert losses[0] == losses[1]


def test_a_run_of_several_recipes_is_refused(tmp_path, small):  # T-9
    config = small.replace(numerics={"schedule": ((0, "tensorwise"), (3, "rowwise"))})
    (tmp_path / "run").mkdir()
    manifest = log.manifest(config, "jax", data={}, decisions=config.decisions(), device="")
    run = log.create(tmp_path / "run", config, manifest)
    run.statistics(
        {"step": 0, "statistics": {"model.layers.0.mlp.up_proj/output/input": {"amax": 1.0}}}
    )
    run.close()
    with pytest.raises(ConfigError, match="takes runs of one recipe"):
        what_if.replay(tmp_path / "run", "te_delayed")


@pytest.mark.parametrize(("start", "kept"), [(0, []), (4, [0, 3])])
def test_a_run_that_resumes_keeps_the_statistics_before_its_first_step(
    tmp_path, small, start, kept
):
    config = small.replace(statistics={"every": 3})
    out = tmp_path / "run"
    out.mkdir()
    manifest = log.manifest(config, "jax", data={}, decisions=[], device="")
    run = log.create(out, config, manifest)
    for step in (0, 3, 6):
        run.statistics({"step": step, "statistics": {}})
    run.close()
    run = log.create(out, config, manifest, start=start)
    run.statistics({"step": 9, "statistics": {}})
    run.close()
    assert [line["step"] for line in log.read_lines(out / "statistics.jsonl")] == [*kept, 9]


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("nobody's", {}, "--policy is one of delayed, te_delayed, flax, torchao,"),
        ("delayed", {"history": 0}, "--history is at least 1; got 0"),
        ("torchao", {"history": 3}, "uses one amax. Leave it out"),
        ("delayed", {"margin": -1}, "margin is an integer in"),
        ("mx_rceil", {"margin": 1}, "so margin is 0; got 1"),
    ],
)
def test_options_that_are_none(tmp_path, policy, options, message):
    with pytest.raises(ConfigError, match=message):
        what_if.replay(recorded(tmp_path / "run", [1.0]), policy, **options)


def test_a_run_without_statistics(tmp_path):
    run = recorded(tmp_path / "run", [1.0])
    (run / "statistics.jsonl").unlink()
    with pytest.raises(
        ConfigError, match=r"no statistics of FP8 operands\. Train with --statistics\.every"
    ):
        what_if.replay(run, "delayed")


def test_no_run(tmp_path):
    with pytest.raises(ConfigError, match="is not a directory"):
        what_if.replay(tmp_path / "absent", "delayed")


def test_a_damaged_line_is_named(tmp_path):
    run = recorded(tmp_path / "run", [1.0, "oops"])
    with pytest.raises(ConfigError, match=r'statistics\.jsonl, line 2, has .*amax = "oops"'):
        what_if.replay(run, "delayed")


def test_a_recipe_without_a_name_is_refused(tmp_path):
    run = recorded(tmp_path / "run", [1.0])
    manifest = (run / "manifest.json").read_text()
    (run / "manifest.json").write_text(manifest.replace('"recipe": "delayed"', '"recipe": "mine"'))
    with pytest.raises(ConfigError, match=r"manifest\.json: recipe is a Recipe or one of .*'mine'"):
        what_if.replay(run, "delayed")


def test_the_command(tmp_path, capsys):
    run = recorded(tmp_path / "run", np.linspace(1, 9, 5).tolist(), every=50)
    arguments = [
        "replay",
        str(run),
        "--policy",
        "delayed",
        "--history",
        "16",
        "--json",
        str(tmp_path / "out.json"),
    ]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "4 of 5" in shown
    assert (
        "Amaxes were recorded every 50 steps: a history here holds steps that are 50 apart" in shown
    )
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["history"], written["recorded"]) == (16, [0, 50, 100, 150, 200])
    assert written["outcomes"]["model.layers.0.mlp.up_proj/input/e4m3fn"]["clipped"] == 4
    assert cli.main([*arguments[:3], "absent"]) == 2
    assert "--policy is one of" in capsys.readouterr().err


def test_amaxes_of_four_bits_are_replayed(tmp_path):
    run = recorded(tmp_path / "run", [3.0, 6.9, 7.5], recipe="mxfp4")
    replayed = what_if.replay(run, "delayed").outcomes
    assert {name.rpartition("/")[2] for name in replayed} == {"e2m1fn"}
    # a scale of 6 / 3 for 6.9, and of 6 / 6.9 for 7.5, which rounds to 6
    assert [outcome.clipped for outcome in replayed.values()] == [1, 1]
