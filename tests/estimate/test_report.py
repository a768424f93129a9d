import io
import json

import pytest
from helpers.models import sizes
from rich.console import Console

from fp8ref import cli
from fp8ref.estimate import report
from fp8ref.estimate.gpu_rates import PUBLISHED
from fp8ref.shared.errors import ConfigError
from fp8ref.train.config import config as configs

H200 = PUBLISHED["h200"]
LARGE = configs.load("llama-8b").replace(
    parallel={"checkpointing": "selective", "compile": "block"}, numerics={"kernels": "plain"}
)


def printed(found) -> str:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    found.render(console)
    return console.file.getvalue()


def test_rows_are_linears_of_one_name_and_shape():
    found = report.of(LARGE, "torch", H200)
    assert [(row.linear, row.shape, row.count) for row in found.rows] == [
        ("q_proj", (4096, 4096), 32),
        ("k_proj", (1024, 4096), 32),
        ("v_proj", (1024, 4096), 32),
        ("o_proj", (4096, 4096), 32),
        ("gate_proj", (14336, 4096), 32),
        ("up_proj", (14336, 4096), 32),
        ("down_proj", (4096, 14336), 32),
        ("lm_head", (128256, 4096), 1),
    ]
    assert found.to_filter == []
    assert "No linear is slower in FP8." in printed(found)
    assert "FILTER" not in printed(found)


def test_linears_that_lose_are_named():
    found = report.of(sizes.config(), "torch", H200)
    assert found.to_filter == [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    text = printed(found)
    assert text.count("FILTER") == 7
    assert (
        f"SLOWER in FP8: {', '.join(found.to_filter)}. Casts are not fused: set "
        "parallel.compile to block" in " ".join(text.split())
    )
    assert "NOT MEASURED" in text


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (sizes.config(compile="block"), "SLOWER in FP8: every linear. Use recipe bf16."),
        (LARGE, "No linear is slower in FP8."),
        (
            LARGE.replace(parallel={"compile": "none"}),
            "Casts are not fused: set parallel.compile to block and estimate again.",
        ),
        (
            LARGE.replace(model={"num_key_value_heads": 1}),
            "add k_proj, v_proj to numerics.filter_fqns.",
        ),
        (
            LARGE.replace(model={"num_key_value_heads": 1}, numerics={"fp8_fqns": ("k_proj",)}),
            "add k_proj, v_proj to numerics.filter_fqns, and remove the patterns that name them "
            "from numerics.fp8_fqns.",
        ),
    ],
)
def test_the_advice(config, said):
    assert said in " ".join(printed(report.of(config, "torch", H200)).split())


def test_the_report_says_what_casts():
    """Triton's kernels fuse without a compiler, and gain more."""
    eager = LARGE.replace(parallel={"compile": "none"}, numerics={"kernels": "auto"})
    by_triton = report.of(eager, "torch", H200)
    assert "with torch, cast by Triton kernels" in printed(by_triton)
    assert "Casts are not fused" not in printed(by_triton)
    plain = report.of(LARGE, "torch", H200)
    assert "with torch, cast by plain operations" in printed(plain)
    assert by_triton.step.ratio > plain.step.ratio
    assert [found.to_dict()["casts"] for found in (by_triton, plain)] == ["triton", "plain"]


def test_a_model_with_experts_is_not_told_to_compile():
    """The trainer refuses parallel.compile for it."""
    text = " ".join(printed(report.of(configs.load("tiny-moe"), "torch", H200)).split())
    assert "SLOWER in FP8: every linear. Use recipe bf16." in text
    assert "parallel.compile" not in text


def test_a_config_without_fp8_says_so():
    text = printed(report.of(sizes.config("bf16"), "jax", H200))
    assert "No linear is in FP8." in text


def test_a_config_that_the_backend_refuses_is_refused():
    with pytest.raises(ConfigError):
        report.of(sizes.config(tensor=4), "torch", H200)


def test_the_command_writes_what_it_prints(tmp_path, capsys):
    written, measured = tmp_path / "out.json", tmp_path / "ceilings.json"
    keys = {
        "gpu": "H100 SXM",
        "bf16": 6e14,
        "fp8": 1.1e15,
        "fp8_rowwise": 1e15,
        "attention": 4e14,
        "bandwidth": 2.5e12,
        "launch": 3e-6,
    }
    measured.write_text(json.dumps(keys | {"source": "a made-up card"}))
    command = ["estimate", "tiny", "--gpu", "h100", "--backend", "jax", "--ceilings", str(measured)]
    assert cli.main([*command, "--recipe", "rowwise", "--json", str(written)]) == 0
    assert "MEASURED: H100 SXM reaches 600 and 1100" in capsys.readouterr().out
    made = json.loads(written.read_text())
    assert (made["backend"], made["recipe"], made["ceilings"]["measured"]) == (
        "jax",
        "rowwise",
        True,
    )
    assert made["filter_fqns"] == [one["linear"] for one in made["linears"] if one["filter"]]
    one = made["linears"][0]
    assert one["ratio"] == pytest.approx(
        one["ledger"]["bf16"] / sum(one["ledger"]["parts"].values())
    )
    assert one["ledger"]["floor"] == pytest.approx(3e-6 * one["ledger"]["kernels"])
    rest, plain = (sum(made["step"][key].values()) for key in ("rest", "in_bf16"))
    assert made["step"]["ratio"] == pytest.approx(
        (made["step"]["bf16"] + plain) / (made["step"]["configured"] + rest)
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "needs --gpu h100, h200 or b200"),
        (["--gpu", "b300"], "--gpu is one of h100, h200, b200; got 'b300'"),
        (["--gpu", "h100", "--ceilings", "nowhere.json"], "nowhere.json: cannot be read"),
        (["--gpu", "h100", "--json", "no/such/directory/out.json"], "--json names a file"),
    ],
)
def test_errors_are_clear(options, said, capsys):
    assert cli.main(["estimate", "tiny", *options]) == 2
    assert said in capsys.readouterr().err
