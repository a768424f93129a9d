"""A data set: every operation and format, the same bytes each time, and checksums that show changes."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp8ref import cli
from fp8ref.conformance.vectors import cast, dataset, decode
from fp8ref.conformance.vectors.operations import OPERATIONS, generate, judge
from fp8ref.formats import FP8_FORMATS, QUANTIZED_FORMATS
from fp8ref.policy import FP4_POLICIES, POLICIES
from fp8ref.spec.attention.variants import VARIANTS

SETS = list(dataset.sets())
FEW = [next(s for s in SETS if s[0] == operation) for operation in OPERATIONS]


@pytest.fixture
def few(monkeypatch):
    """A set of each operation alone."""
    monkeypatch.setattr(dataset, "sets", lambda: iter(FEW))


@pytest.fixture
def folder(few, tmp_path):
    """A small data set."""
    assert dataset.write(tmp_path / "set").ok
    return tmp_path / "set"


def asked(operation: str, key: str) -> set:
    return {settings.get(key) for name, settings, _ in SETS if name == operation}


def test_every_operation_format_policy_and_variant_is_in_it():
    assert {operation for operation, _, _ in SETS} == set(OPERATIONS)
    assert asked("cast", "format") == set(cast.NAMES)
    assert asked("decode", "format") == set(decode.NAMES)
    assert asked("scale", "format") == asked("quantize", "format") == set(QUANTIZED_FORMATS)
    assert asked("gemm", "format") == asked("gemm", "format_b") - {None} == set(FP8_FORMATS)
    assert asked("scale", "policy") == set(POLICIES)
    assert asked("quantize", "policy") >= set(FP4_POLICIES)
    assert asked("attention", "variant") == set(VARIANTS)


def judged(operation, settings, rules):
    lines = (f"{line}\n".encode() for line in generate(operation, settings, rules))
    return judge(operation, lines, settings={}, rules=rules)


@pytest.mark.grid(24)
@pytest.mark.parametrize("number", range(len(SETS)))
def test_verify_agrees_with_its_answers(number):  # C-1 to C-9, S-5, S-8, S-22, G-2, A-1
    operation, settings, rules = SETS[number]
    verdict = judged(operation, settings, rules)
    assert verdict.ok, verdict.text()
    assert verdict.complete


def test_the_scale_of_a_tensor_comes_last():  # S-22
    settings = {"format": "e2m1fn", "granularity": "nvfp4_1x16", "policy": "te_nvfp4", "count": 2}
    assert judged("quantize", settings, {"made": "scale_inv"}).ok


def test_answers_of_other_rules_are_others():
    settings = {"format": "e4m3fn", "count": 3}
    for operation, rules in (
        ("cast", {"saturate": False}),
        ("gemm", {"accumulate": "hopper_fast"}),
    ):
        lines = [f"{line}\n".encode() for line in generate(operation, settings, rules)]
        assert not judge(operation, lines, settings={}, rules={}).ok
        assert judge(operation, lines, settings={}, rules=rules).ok


def test_the_manifest_states_each_file(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {"schema", "fp8ref", "text_format", "seed", "bytes", "files"} == set(manifest)
    paths = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert {entry["path"] for entry in manifest["files"]} == paths - {"manifest.json"}
    for entry in manifest["files"]:
        data = (folder / entry["path"]).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        if "operation" in entry:
            header, form, *lines = data.decode().splitlines()
            assert header.startswith(f"# fp8ref vectors 1: {entry['operation']} ")
            assert form.startswith("# a line is ")
            assert len(lines) == entry["vectors"]
    assert manifest["bytes"] == sum(entry["bytes"] for entry in manifest["files"])


WRITE = """
import sys
from fp8ref.conformance.vectors import dataset
every = list(dataset.sets())[::40]
dataset.sets = lambda: iter(every)
print(dataset.write(__import__("pathlib").Path(sys.argv[1])).digest)
"""


def test_other_processes_write_the_same_bytes(tmp_path):
    digests = {
        subprocess.run(
            [sys.executable, "-c", WRITE, str(tmp_path / seed)],
            env=os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_another_seed_writes_others(few, tmp_path):
    first, second = (dataset.write(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    assert first.digest != second.digest


@pytest.mark.slow
def test_all_of_it_is_bounded(tmp_path):
    assert dataset.write(tmp_path / "set").ok
    size = sum(p.stat().st_size for p in (tmp_path / "set").rglob("*.txt"))
    assert 8 << 20 < size < dataset.MOST


def change(folder: Path) -> None:
    path = next(folder.glob("cast/*.txt"))
    path.write_text(path.read_text().replace(" 7E\n", " 7D\n", 1))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (change, "cast/e4m3fn-float32.txt was changed: "),
        (lambda folder: next(folder.glob("gemm/*.txt")).unlink(), ".txt is missing"),
        (lambda folder: (folder / "new.txt").write_text("x"), "new.txt is not listed"),
        (lambda folder: (folder / "README.md").write_text(""), "README.md was changed: 0 bytes"),
    ],
)
def test_what_was_changed_is_found(folder, capsys, damage, says):
    assert cli.main(["vectors", "dataset", str(folder), "--check"]) == 0
    assert ", 0 problems; manifest.json " in capsys.readouterr().out
    damage(folder)
    assert cli.main(["vectors", "dataset", str(folder), "--check"]) == 1
    out = capsys.readouterr().out
    assert says in out
    assert ", 1 problems; " in out


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"schema": 1', '"schema": 2', "it is of schema 2; this fp8ref reads 1"),
        ('"schema"', '"scheme"', "has no 'schema'"),
        ('"README.md"', '"../README.md"', "'../README.md' is outside of the folder"),
        ('"README.md"', '"/etc/passwd"', "'/etc/passwd' is outside of the folder"),
        ('"README.md"', "7", "is no manifest of a data set"),
        ("{", "[", "is no manifest of a data set"),
    ],
)
def test_a_manifest_that_is_none_is_an_error(folder, capsys, old, new, says):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace(old, new, 1))
    assert cli.main(["vectors", "dataset", str(folder), "--check"]) == 2
    assert says in capsys.readouterr().err


def test_the_command_writes_to_a_folder_that_is_new_or_empty(few, tmp_path, capsys):
    folder, path = tmp_path / "set", tmp_path / "found.json"
    folder.mkdir()
    command = ["vectors", "dataset", str(folder)]
    assert cli.main([*command, "--seed", "3", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    manifest = (folder / "manifest.json").read_bytes()
    assert found["ok"]
    assert found["digest"] == hashlib.sha256(manifest).hexdigest()
    assert json.loads(manifest)["seed"] == 3
    capsys.readouterr()
    assert cli.main(command) == 2
    assert "a data set needs a folder that is new or empty" in capsys.readouterr().err
    assert cli.main([*command, "--check", "--seed", "3"]) == 2
    assert cli.main(["vectors", "dataset", str(tmp_path / "none"), "--seed", "-1"]) == 2
    assert not (tmp_path / "none").exists()
    assert cli.main(["vectors", "dataset", str(tmp_path / "none"), "--check"]) == 2
