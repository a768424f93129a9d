"""The hardware that a config names: what it is, what it cannot be, and what a run keeps of it."""

import json

import pytest
import tomli_w

from fp8ref import cli
from fp8ref.conformance.gemm import plans
from fp8ref.shared.errors import ConfigError
from fp8ref.sim.gemm.accumulate import ACCUMULATIONS
from fp8ref.spec.epilogue import EPILOGUES
from fp8ref.train import loop
from fp8ref.train.config import config as configs
from fp8ref.train.config import hardware
from fp8ref.train.report import page
from fp8ref.train.report.runs import read
from fp8ref.train.run import log


def probed(path, accumulate="hopper_slow", epilogue="product_then_round", **changes):
    """What ``fp8ref probe --json`` writes, of a plan."""
    plan = (
        plans.plan_to_dict(ACCUMULATIONS.get(accumulate, accumulate))
        | {"epilogue": epilogue, "out_dtype": "bfloat16"}
        | changes
    )
    path.write_text(json.dumps({"ok": True, "subject": "torch-scaled-mm", "plan": plan}))
    return str(path)


# G-20
def test_native_and_nothing_are_the_frameworks_own(small):
    for accumulate in (None, "native"):
        assert hardware.of(small.replace(numerics={"accumulate": accumulate})) is None
    assert "accumulate" not in configs.to_dict(small)["numerics"]


def test_a_file_of_a_probe_is_its_plan_and_epilogue(small, tmp_path):
    found = hardware.of(small.replace(numerics={"accumulate": probed(tmp_path / "plan.json")}))
    assert found.fast.promotion == found.slow.promotion == 128
    assert found.fast.unit.fraction_bits == 13
    assert found.epilogue == EPILOGUES["product_then_round"]
    assert found.name.startswith("probed_")
    assert (
        hardware.by_name(probed(tmp_path / "exact.json", "exact", "round_then_bias")).fast
        == "exact"
    )


def test_what_is_no_hardware_is_refused(small, tmp_path):
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "text.json").write_text("hopper")
    for name, message in (
        (
            "volta",
            "one of native, exact, .*hopper, .*blackwell_mx, or the .json of a plan that fp8ref "
            "probe wrote; got 'volta'",
        ),
        (str(tmp_path / "none.json"), "none.json cannot be read"),
        (
            str(tmp_path / "list.json"),
            "list.json holds no complete plan of a GEMM .it is no JSON object.",
        ),
        (str(tmp_path / "text.json"), "text.json holds no complete plan of a GEMM"),
        (probed(tmp_path / "open.json", split_k=None), "split_k could not be identified"),
        (
            probed(tmp_path / "other.json", epilogue="none such"),
            "epilogue is one that a probe names",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            hardware.of(small.replace(numerics={"accumulate": name}))
    with pytest.raises(ConfigError, match=r"got ''\. Leave it out"):
        configs.from_dict({"numerics": {"accumulate": ""}})


def test_a_recipe_that_cannot_run_under_it_is_refused(small, tmp_path):
    with pytest.raises(ConfigError, match="recipe 'bf16' has none"):
        hardware.of(small.replace(numerics={"recipe": "bf16", "accumulate": "hopper"}))
    wide = small.replace(model={"hidden_size": 128, "intermediate_size": 128})
    twice = probed(tmp_path / "twice.json", epilogue="unit_round_scale_round")
    with pytest.raises(
        ConfigError, match=r"rounds the sum over all of K .* recipe 'blockwise' scales blocks"
    ):
        hardware.of(wide.replace(numerics={"recipe": "blockwise", "accumulate": twice}))
    with pytest.raises(ConfigError, match=r"on a mesh .* Use one device"):
        hardware.of(small.replace(numerics={"accumulate": twice}, parallel={"data": 2}), "jax")


@pytest.mark.parametrize("backend", loop.BACKENDS)
def test_a_trainer_that_is_not_given_it_does_not_ignore_the_key(small, backend):
    import importlib

    make = importlib.import_module(f"fp8ref.train.{backend}.trainer").Trainer
    with pytest.raises(
        ValueError,
        match=r"numerics\.accumulate is 'hopper', but the trainer was given multiply none",
    ):
        make(small.replace(numerics={"accumulate": "hopper"}))
    with pytest.raises(ValueError, match="is None, but the trainer was given multiply hopper"):
        make(small, multiply=hardware.by_name("hopper"))


# B-12
@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_run_says_its_plan_its_proof_names_simulated_gemms_and_another_plan_does_not_resume_it(
    small, backend, tmp_path
):
    path = tmp_path / "plan.json"
    config = small.replace(numerics={"accumulate": probed(path)}, run={"steps": 2})
    lines = loop.train(config, backend, tmp_path / "run")
    manifest = log.read_manifest(tmp_path / "run")
    assert manifest["hardware"]["fast"]["promotion"] == 128
    assert manifest["hardware"]["scale_then_round"]["scale"] == "product"
    assert (manifest["proof"]["gemms"], len(manifest["proof"]["simulated"])) == ([], 21)
    told = page.fp8_coverage(read(tmp_path / "run").manifest)[0].gemms
    assert told[0] == f"simulated: f8e4m3fn x f8e4m3fn, fast, under {manifest['hardware']['name']}"
    native = loop.train(small.replace(run={"steps": 2}), backend, tmp_path / "native")
    assert "hardware" not in log.read_manifest(tmp_path / "native")
    assert [line["loss"] for line in native] != [line["loss"] for line in lines]
    assert loop.train(config, backend, tmp_path / "run", resume=True) is None
    probed(path, "hopper_fast")
    with pytest.raises(ConfigError, match="holds a run with another hardware"):
        loop.train(config, backend, tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ["estimate", "--gpu", "h200"],
            "an estimate is for a GPU's own GEMMs; got numerics.accumulate 'hopper'",
        ),
        (
            ["crosscheck", "--backend", "jax", "--sharded", "2"],
            "--sharded checks the frameworks' own GEMMs on meshes",
        ),
        (["train", "--backend", "jax", "--recipe", "bf16"], "recipe 'bf16' has none"),
        (["train", "--backend", "jax", "--dry-run", "--recipe", "bf16"], "recipe 'bf16' has none"),
    ],
)
def test_commands_that_have_no_use_for_it_say_so(
    small, tmp_path, monkeypatch, capsys, command, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(
        tomli_w.dumps(configs.to_dict(small.replace(numerics={"accumulate": "hopper"})))
    )
    assert cli.main([command[0], "small.toml", *command[1:]]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err


def test_a_dry_run_names_it(small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "small.toml").write_text(
        tomli_w.dumps(configs.to_dict(small.replace(numerics={"accumulate": "hopper"})))
    )
    assert cli.main(["train", "small.toml", "--backend", "jax", "--dry-run"]) == 0
    assert "simulated on the host's CPU" in capsys.readouterr().out
