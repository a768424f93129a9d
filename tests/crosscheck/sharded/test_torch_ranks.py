import dataclasses
import json

import numpy as np
import pytest
import tomli_w
from helpers.processes import rank_jobs

from fp8ref import cli
from fp8ref.crosscheck import fsdp_run, process_group
from fp8ref.crosscheck.sharded import torch_ranks as sharded_torch
from fp8ref.shared.errors import ConfigError
from fp8ref.train.config import config as configs
from fp8ref.train.data import loader

STEPS = 2
UP = "model.layers.0.mlp.up_proj"
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def small(small):
    """Hidden size 64, two steps, as few rows as two ranks share."""
    model = dataclasses.replace(small.model, hidden_size=64, intermediate_size=96)
    return dataclasses.replace(small, model=model).replace(data={"batch_size": 2})


@pytest.fixture
def one_mesh(monkeypatch):
    monkeypatch.setattr(sharded_torch, "_meshes", lambda n: [sharded_torch._Mesh(1, n)])


@pytest.fixture
def local(small):
    return small.replace(parallel={"amax_scope": "local"})


def failed(report):
    return {check.name for check in report.failures}


@pytest.mark.slow
# P-4, P-6, P-11, P-13
def test_two_ranks_hold_to_the_simulator_and_to_one_process(small, tmp_path, capsys):
    """By the command; every mesh and scope."""
    config, result = tmp_path / "config.toml", tmp_path / "check.json"
    config.write_text(tomli_w.dumps(configs.to_dict(small)))
    command = [
        "crosscheck",
        str(config),
        "--backend",
        "torch",
        "--sharded",
        "2",
        "--steps",
        str(STEPS),
        "--json",
        str(result),
    ]
    assert cli.main(command) == 0, capsys.readouterr().out
    checks = {check["name"]: check for check in json.loads(result.read_text())["checks"]}
    for mesh in ("1x2", "2x1"):
        for scope in ("local", "global"):
            name = f"torch {mesh} {scope}"
            for what in (
                "input/codes",
                "input/scale",
                "weight/codes",
                "weight/scale",
                "grad_output/codes",
                "grad_output/scale",
            ):
                assert checks[f"{UP}/{what}/{name}"]["equal"] > 0
            for how in ("fp8 each", "compute", "native"):
                assert checks[f"model/losses/value/{name} {how}"]["equal"] == 2 * STEPS
                assert checks[f"{UP}/weights/value/{name} {how}"]["equal"] == 2 * 96 * 64
        # against one process
        assert checks[f"model/losses/value/torch {mesh} local fp8"]["equal"] == 2 * STEPS
        assert checks[f"{Q}/input/codes/torch {mesh} global one process"]["equal"] > 0
    assert checks["model/bytes saved/value/torch 1x2 local fp8"]["equal"] == 2
    assert not any(check["bound"] for check in checks.values())


@pytest.mark.slow
def test_scales_of_rows_are_each_ranks_own(local, one_mesh):  # P-5
    report, unfit = sharded_torch.crosscheck(
        local.replace(numerics={"recipe": "rowwise_with_gw_hp"}), 2, steps=1
    )
    assert report.ok
    assert not unfit
    # weights scaled by rows are gathered as they are
    assert not any("fp8" in name or "bytes" in name for name in report.checks)
    assert report.checks["model/losses/value/torch 1x2 local compute"].equal == 2
    # before and after the step
    assert report.checks[f"{Q}/input/scale/torch 1x2 local"].equal == 2 * 2 * 16


def test_scales_of_rows_under_scope_global(small, one_mesh, monkeypatch):  # P-5
    monkeypatch.setattr(sharded_torch, "SCOPES", ("global",))
    report, _ = sharded_torch.crosscheck(small.replace(numerics={"recipe": "rowwise"}), 2, steps=1)
    assert report.ok, failed(report)


def test_gradients_are_summed_in_the_dtype_that_is_asked_for(local, one_mesh):  # P-13
    """One process that rounds every sum to bfloat16 ends with the same weights; one that does not,
    with others.
    """
    report, _ = sharded_torch.crosscheck(
        local.replace(parallel={"reduce_dtype": "bfloat16"}), 2, steps=2
    )
    assert report.ok, failed(report)
    tokens = [loader.open_batches(local).step(step) for step in range(3)]
    ends = [
        fsdp_run.replicate(local.replace(parallel={"reduce_dtype": dtype}), 1, 2, tokens).weights
        for dtype in ("float32", "bfloat16")
    ]
    assert any((ends[0][name] != ends[1][name]).any() for name in ends[0])


def test_gradients_in_fp8_are_those_that_the_simulator_sums(local):  # P-21, P-25
    """Losses, norms and weights of ranks are one process's, in which the simulator reduces each
    rank's gradients.
    """
    report, unfit = sharded_torch.crosscheck(
        local.replace(parallel={"reduce_dtype": "float8_e4m3fn"}), 2, steps=2
    )
    assert report.ok, failed(report)
    assert list(unfit) == ["torch 2x1 local", "torch 1x1x2 local", "torch 1x1x2 local sequence"]
    assert "FSDP2's sum over data has no hook" in unfit["torch 2x1 local"]
    assert report.checks[f"{UP}/weights/value/torch 1x2 local native"].equal


def test_histories_are_of_all_ranks(small, one_mesh):  # H-4
    config = small.replace(numerics={"recipe": "delayed"})
    report, _ = sharded_torch.crosscheck(config, 2, steps=STEPS)
    assert report.ok
    assert {name.rsplit("/", 1)[1].split()[2] for name in report.checks} == {"global"}
    for role in ("input", "weight", "grad_output"):
        assert report.checks[f"{UP}/{role} history/value/torch 1x2 global"].equal == STEPS * 2 * (
            2 + 16
        )
        assert report.checks[
            f"{UP}/{role} state/value/torch 1x2 global compute"
        ].equal == STEPS * 2 * (2 + 16)


def test_a_gather_by_another_scale_is_reported(local, one_mesh):  # P-6
    report, _ = sharded_torch.crosscheck(local, 2, steps=STEPS, prepare=rank_jobs.wrong_scale)
    assert not report.ok
    found = failed(report)
    assert f"{UP}/weight/codes/torch 1x2 local" in found
    assert {
        f"model/losses/value/torch 1x2 local {how}" for how in ("fp8", "fp8 each", "native")
    } <= found
    assert (
        not {f"{UP}/weight/scale/torch 1x2 local", "model/losses/value/torch 1x2 local compute"}
        & found
    )
    check = report.checks[f"{Q}/weight/codes/torch 1x2 local"]
    assert check.compared / 2 <= check.equal < check.compared  # the first rank's rows are right
    assert "sim 0x" in check.detail


@pytest.mark.slow
def test_histories_of_a_ranks_own_are_reported(small, one_mesh):  # H-4
    config = small.replace(numerics={"recipe": "delayed"})
    report, _ = sharded_torch.crosscheck(config, 2, steps=STEPS, prepare=rank_jobs.apart)
    assert {
        f"{UP}/input history/value/torch 1x2 global",
        f"{UP}/input state/value/torch 1x2 global fp8",
    } <= failed(report)


@pytest.mark.slow
def test_other_rows_are_reported(local, one_mesh):  # P-10
    report, _ = sharded_torch.crosscheck(local, 2, steps=1, prepare=rank_jobs.same_rows)
    found = failed(report)
    assert "model/losses/value/torch 1x2 local fp8" in found
    assert not any("/codes/" in name for name in found)  # those are of the rows that a rank has


def test_a_rank_that_fails_ends_the_check(small, one_mesh):
    with pytest.raises(process_group.RankError, match=r"(?s)rank 1: Traceback.*KeyError"):
        sharded_torch.crosscheck(small, 2, prepare=rank_jobs.broken)


def test_one_process_has_the_gradients_of_the_whole_batch(small):
    """Two ranks' mean is that of the batch, but for rounding: the norm of a step's gradient is
    nearly that of one device's.
    """
    tokens = [loader.open_batches(small).step(step) for step in range(2)]
    run = process_group.run(
        1, fsdp_run.replicate, small.replace(numerics={"recipe": "bf16"}), 1, 2, tokens
    )[0]
    alone = process_group.run(
        1, fsdp_run.replicate, small.replace(numerics={"recipe": "bf16"}), 1, 1, tokens
    )[0]
    np.testing.assert_allclose(run.metrics, alone.metrics, rtol=1e-2)  # of bfloat16's 2^-8
    assert (run.metrics != alone.metrics).any()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_four_ranks(small, recipe):
    config = small.replace(numerics={"recipe": recipe}, data={"batch_size": 4})
    report, unfit = sharded_torch.crosscheck(config, 4)
    assert report.ok, failed(report)
    scopes = ["global"] if recipe == "delayed" else ["local", "global"]
    cut = {
        f"torch {mesh} global{how}"
        for mesh in ("1x2x2", "2x1x2", "1x1x4")
        for how in ("", " sequence")
    }
    assert set(unfit) == {f"torch 4x1 {scope} against one process" for scope in scopes} | cut
    assert all("num_key_value_heads is divisible by" in unfit[name] for name in cut)
    for mesh in ("1x4", "2x2", "4x1"):
        assert (
            report.checks[f"model/losses/value/torch {mesh} {scopes[0]} compute"].equal
            == 4 * sharded_torch.STEPS
        )
    assert report.checks[f"model/bytes saved/value/torch 2x2 {scopes[0]} fp8"].equal == 4


def cut(monkeypatch, small, recipe, *mesh, **sizes):
    """A config whose model ranks cut, checked on one mesh."""
    monkeypatch.setattr(sharded_torch, "_meshes", lambda n: [sharded_torch._Mesh(*mesh)])
    config = small.replace(numerics={"recipe": recipe}, model={"num_key_value_heads": 2} | sizes)
    return config if not sizes else config.replace(data={"sequence_length": 128})


# P-4, P-5, P-14, P-15, H-4
def test_ranks_that_share_linears_hold_to_the_simulator(small, monkeypatch):
    report, unfit = sharded_torch.crosscheck(
        cut(monkeypatch, small, "delayed", 1, 1, 2, True), 2, steps=STEPS
    )
    name = "torch 1x1x2 global sequence"
    assert report.ok, failed(report)
    assert set(unfit) == {f"{name} against one process"}
    for role, size in (("input", 2 * 16 * 64), ("weight", 48 * 64), ("grad_output", 2 * 16 * 48)):
        # ranks, passes, GEMMs
        assert report.checks[f"{UP}/{role}/codes/{name}"].equal == 2 * 2 * 2 * size
        assert report.checks[f"{UP}/{role} history/value/{name}"].equal == STEPS * 2 * (2 + 16)
    assert report.checks[f"{Q}/input/codes/{name} one process"].equal == 2 * 2 * 2 * 16 * 64
    # the second rank's are the first's
    assert report.checks[f"model/losses/value/{name} alone"].equal == STEPS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "mesh"),
    [
        ("delayed", (1, 2, 2)),
        ("tensorwise", (1, 2, 2, True)),
        ("rowwise", (2, 1, 2)),
        ("blockwise", (1, 2, 2, True)),
        ("mxfp8", (2, 1, 2)),
        ("nvfp4", (1, 2, 2, True)),
    ],
)
# P-4, P-5, P-11, P-14
def test_linears_and_batches_cut_by_four_ranks(small, monkeypatch, recipe, mesh):
    sizes = (
        {"hidden_size": 256, "intermediate_size": 256} if recipe in ("blockwise", "mxfp8") else {}
    )
    config = cut(monkeypatch, small, recipe, *mesh, **sizes).replace(data={"batch_size": 4})
    report, _ = sharded_torch.crosscheck(config, 4, steps=1)
    assert report.ok, failed(report)
    name = sharded_torch._Mesh(*mesh).name("global")
    assert report.checks[f"{UP}/grad_output/codes/{name}"].equal > 0
    if recipe in ("delayed", "tensorwise"):
        assert report.checks[f"model/losses/value/{name} compute"].equal == 4
        assert report.checks[f"model/bytes saved/value/{name} fp8"].equal == 4


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"numerics": {"recipe": "bf16"}}, "got 'bf16'"),
        (
            {"numerics": {"recipe": "mxfp8"}},
            r"whose blocks of 32 tokens are those of ranks if each rank has a multiple of 32 "
            r".*\(P-5\); got 16",
        ),
        ({"data": {"batch_size": 3}}, "got 2 and 3"),
        (
            {"numerics": {"recipe": "delayed"}, "parallel": {"amax_scope": "local"}},
            "keeps one state for all ranks",
        ),
        (
            {"parallel": {"fsdp": 2, "reduce_dtype": "float8_e4m3fn", "reduce_mu": "automatic"}},
            "got parallel.reduce_mu 'automatic'. Set it to one",
        ),
        ({"parallel": {"tensor": 2}}, "got parallel.tensor. Leave"),
        ({"parallel": {"compile": True}}, "got parallel.compile"),
        ({"parallel": {"checkpointing": "full"}}, "got parallel.checkpointing"),
        ({"parallel": {"through": "jit"}}, "parallel.through is not a key of --backend torch"),
    ],
)
def test_refusals(small, keys, message):
    with pytest.raises(ConfigError, match=message):
        sharded_torch.crosscheck(small.replace(**keys), 2)


def test_refusals_of_the_command(small, capsys):
    for steps in (0, small.run.steps + 1):
        with pytest.raises(ConfigError, match="--steps must be between 1 and"):
            sharded_torch.crosscheck(small, 2, steps=steps)
    assert cli.main(["crosscheck", "tiny", "--sharded", "2"]) == 2
    assert "--backend jax or torch" in capsys.readouterr().err
    assert cli.main(["crosscheck", "tiny", "--backend", "torch", "--sharded", "1"]) == 2
    assert (
        cli.main(["crosscheck", "tiny", "--backend", "jax", "--sharded", "2", "--steps", "3"]) == 2
    )
    assert "no --steps" in capsys.readouterr().err


EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "qk_norm": True,
}


@pytest.mark.parametrize(
    ("recipe", "n", "expert"),
    [
        ("tensorwise", 2, 2),
        pytest.param("delayed", 4, 2, marks=pytest.mark.slow),
        pytest.param("rowwise", 4, None, marks=pytest.mark.slow),
    ],
)
#
def test_experts_on_ranks_hold_to_the_simulator(recipe, n, expert, small, monkeypatch):
    """One mesh of fsdp x expert, or every mesh."""
    if expert:
        monkeypatch.setattr(
            sharded_torch,
            "_meshes_of_experts",
            lambda n: [sharded_torch._Mesh(1, n // 2, expert=2)],
        )
        monkeypatch.setattr(sharded_torch, "SCOPES", ("global",))
    config = small.replace(numerics={"recipe": recipe}, model=EXPERTS, data={"batch_size": n})
    report, unfit = sharded_torch.crosscheck(config, n, steps=1)
    assert report.ok, failed(report)
    assert all("runs are compared with each other" in why for why in unfit.values())
    name = f"torch 1x{n // 2}x2 expert global"
    layer = "model.layers.0.mlp.experts.up_proj"
    for what in (
        "input/codes",
        "input/scale",
        "weight/codes",
        "weight/scale",
        "grad_output/codes",
        "grad_output/scale",
    ):
        assert report.checks[f"{layer}/{what}/{name}"].equal > 0
        assert report.checks[f"{layer}/{what}/torch one process"].equal > 0
    for which in ("output", "grad_input", "grad_weight"):
        assert report.checks[f"{layer}/{which}/value/{name}"].compared > 0
    # without FP8 gathers it is the first
    assert report.checks[f"model/losses/value/{name} compute"].equal == n - (recipe == "rowwise")
    #
    assert report.checks[f"{layer}/weights/value/{name} compute rows"].equal == n * 4 * 16 * 32
    if expert is None:
        meshes = {
            check.split("/torch ")[1].split()[0] for check in report.checks if "/torch " in check
        } - {"one"}
        assert meshes == {"4x1", "2x2", "1x4", "2x1x2", "1x2x2", "1x1x4"}
