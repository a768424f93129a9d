"""fp8ref audit and agree: a table, findings, JSON, a page and exit codes."""

import json

import pytest
from checkpoints import made, models

from fp8ref import cli
from fp8ref.checkpoints.tensors import stored

X = models.linears({"mlp.up_proj": (256, 256)}, 1)
(NAME,) = X


@pytest.fixture
def checkpoint(tmp_path):
    tensors = models.quantized(X, models.fp8("deepseek_v3_block", ".weight_scale_inv"))
    return models.write(tmp_path / "fp8", tensors, models.BLOCKS)


def test_a_right_checkpoint_exits_with_0(checkpoint, tmp_path, capsys):
    original = {f"{NAME}.weight": X[NAME].astype(made.BF16)}
    models.write(tmp_path / "bf16", original, None)
    words = ["audit", str(checkpoint), "--originals", str(tmp_path / "bf16")]
    assert cli.main([*words, "--json", str(tmp_path / "a.json")]) == 0
    out = capsys.readouterr().out
    assert "nothing wrong in 1 quantized weights" in out
    assert "blockwise_128x128" in out
    kept = json.loads((tmp_path / "a.json").read_text())
    assert kept["ok"]
    assert "deepseek_v3_block:float32" in kept["weights"][0]["made_by"]


def test_findings_exit_with_1_and_fill_a_page(checkpoint, tmp_path, capsys):
    (checkpoint / "config.json").write_text('{"model_type": "<b>"}')
    page = tmp_path / "audit.html"
    for _ in range(2):  # also over its own page
        assert cli.main(["audit", str(checkpoint), "--page", str(page)]) == 1
    out = capsys.readouterr().out
    assert "finding config_missing" in out
    assert "remedy: Add quantization_config" in out
    text = page.read_text()
    assert "<h3>Finding: config missing (1)</h3>" in text
    assert f'<th scope="row">{NAME}.weight</th>' in text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["{tmp}/none"], "has neither model.safetensors nor"),
        (["{tmp}/damaged"], "damaged, or no safetensors"),
        (["{tmp}/fp8", "--originals", "{tmp}/none"], "has neither model.safetensors nor"),
        (["{tmp}/fp8", "--page", "{tmp}/fp8/config.json"], "is no page of fp8ref audit"),
        (["{tmp}/fp8", "--page", "{tmp}/none/a.html"], "is no directory"),
    ],
)
def test_a_users_error_is_one_line_and_exits_with_2(checkpoint, tmp_path, capsys, words, text):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"x" * 99)
    assert cli.main(["audit", *(word.format(tmp=tmp_path) for word in words)]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert len(error.splitlines()) == 1


def test_agree_says_what_differs_and_exits_by_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_agrees.py").write_text(
        "import ml_dtypes, numpy as np\n"
        "def quantize(x):\n"
        "    inv = np.maximum(abs(x).max(1, keepdims=True), np.float32(1e-10)) / np.float32(448)\n"
        "    return (x / inv).astype(ml_dtypes.float8_e4m3fn), inv\n"
    )
    assert cli.main(["agree", "mine_agrees:quantize", "vllm_row"]) == 0
    assert "A and B agree" in capsys.readouterr().out
    path = tmp_path / "agree.json"
    assert cli.main(["agree", "vllm_block", "flashinfer_block", "--json", str(path)]) == 1
    assert json.loads(path.read_text())["causes"][0]["cause"] == "amax_floor"
    assert "the first cause is amax_floor" in capsys.readouterr().out
    assert cli.main(["agree", "vllm_block", "./missing"]) == 2
    assert "'./missing' is no path" in capsys.readouterr().err
    weights = models.write(tmp_path / "x", {f"{NAME}.weight": X[NAME]}, None)
    for kept in (weights / "model.safetensors", weights / "config.json"):
        words = [
            "agree",
            "vllm_block",
            "torchao_block",
            "--weights",
            str(weights),
            "--json",
            str(kept),
        ]
        assert cli.main(words) == 2
    assert stored(weights)[f"{NAME}.weight"].shape == X[NAME].shape
    assert cli.main(["agree", "vllm_blok", "vllm_block"]) == 2
    assert "Did you mean" in capsys.readouterr().err
