"""The lists of names, and the completion script."""

import json
import re
import subprocess
import sys

import pytest

from fp8ref import cli, configs, policy, recipe

EXPECTED = {
    "configs": configs.NAMES,
    "recipes": tuple(recipe.RECIPES),
    "policies": (*policy.POLICIES, *policy.FP4_POLICIES),
}


@pytest.mark.parametrize("command", EXPECTED)
def test_each_name_is_a_line_with_a_sentence(capsys, command):
    assert cli.main([command]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert tuple(line.split()[0] for line in lines) == EXPECTED[command]
    assert all(line.endswith(".") for line in lines)


@pytest.mark.parametrize("command", EXPECTED)
def test_json_has_the_same(capfd, command):
    assert cli.main([command, "--json", "-"]) == 0
    out, err = capfd.readouterr()
    assert tuple(json.loads(out)) == EXPECTED[command]
    assert [line.split()[0] for line in err.splitlines()] == list(EXPECTED[command])


def test_configs_have_their_size_and_model(capsys, tmp_path):
    assert cli.main(["configs", "--json", str(tmp_path / "configs.json")]) == 0
    rows = json.loads((tmp_path / "configs.json").read_text())
    assert rows["llama-8b"] == {
        "size": "8.0B",
        "model": "Llama",
        "summary": configs.summary("llama-8b"),
    }
    assert (rows["tiny"]["size"], rows["tiny-moe"]["model"]) == ("0.5M", "Qwen3-MoE")


CORE = """
import sys
sys.modules |= dict.fromkeys(["rich", "pydantic", "shtab", "torch", "jax", "matplotlib"])
from fp8ref.cli import main
sys.exit(main(sys.argv[1:]))
"""


def without_extras(*words):
    return subprocess.run(
        [sys.executable, "-c", CORE, *words], capture_output=True, text=True, check=False
    )


def test_lists_and_help_need_no_extra_and_completion_names_it():
    for words in (["recipes"], ["policies"], ["configs", "--json", "-"], ["train", "--help"], []):
        shown = without_extras(*words)
        assert (shown.returncode, shown.stderr if "--json" not in words else "") == (0, ""), words
        assert re.search("tiny|torchao|mxfp8|COMMAND", shown.stdout)
    for words in (
        ["--completion", "bash"],
        ["train", "tiny", "--run.steps", "3"],
        ["train", "--help-all"],
    ):
        shown = without_extras(*words)
        assert (shown.returncode, shown.stdout) == (2, "")
        assert "pip install 'fp8ref[train]'" in shown.stderr
        assert shown.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The completion script of bash."""
    path = tmp_path_factory.mktemp("completion") / "fp8ref.bash"
    path.write_bytes(
        subprocess.run(
            [sys.executable, "-m", "fp8ref", "--completion", "bash"],
            capture_output=True,
            check=True,
        ).stdout
    )
    return path


COMPLETE = """
source "$1"; shift
function=$(complete -p fp8ref | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); "$function"; printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["tra"], {"train"}),
        (["train", "tiny-"], {"tiny-moe"}),
        (["train", "mi"], {"mine.toml"}),
        (["train", "tiny", "--run.st"], {"--run.steps"}),
        (["train", "tiny", "--dry"], {"--dry-run"}),
        (
            ["train", "tiny", "--recipe", "roww"],
            {"rowwise", "rowwise_with_gw_hp", "rowwise_native"},
        ),
        (["train", "tiny", "--backend", ""], {"jax", "torch"}),
        (["train", "tiny", "--parallel.compile", "m"], {"model"}),
        (["replay", "run", "--policy", "te_b"], {"te_block", "te_block_unmasked_bf16"}),
        (["replay", "run", "--policy", "del"], {"delayed"}),
        (["replay", "run", "--policy", "te_n"], set()),
        (
            ["vectors", "gen", "scale", "--policy", "te_nvfp4_4over6_m"],
            {"te_nvfp4_4over6_mse", "te_nvfp4_4over6_mse_fast"},
        ),
        (["vectors", "gen", "scale", "--policy", "torchao_nvfp4_"], {"torchao_nvfp4_one_level"}),
        (["sweep", "tiny", "--recipes", "nv"], {"nvfp4"}),
        (["vectors", "ver"], {"verify"}),
        (["vectors", "gen", "ca"], {"cast"}),
        (["--completion", ""], {"bash", "zsh"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bash_completes_commands_options_and_names(script, tmp_path, words, completed):
    (tmp_path / "mine.toml").touch()
    (tmp_path / "mind.txt").touch()
    shown = subprocess.run(
        ["bash", "-c", COMPLETE, "bash", str(script), "fp8ref", *words],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert set(shown.stdout.split()) == completed


def test_zsh_has_a_script_with_the_same_names(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--completion", "zsh"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("#compdef fp8ref")
    assert re.search(r"_alternative \"configs:config:\(.*tiny.*\)\"", shown)
    assert "--run.steps" in shown
