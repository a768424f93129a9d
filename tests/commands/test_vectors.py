"""The commands in pipes, as a C program stands between them."""

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fp8ref import cli

EXAMPLE = Path(__file__).parents[2] / "examples" / "cast_e4m3fn.c"


class Input:
    def __init__(self, text: str):
        self.buffer = io.BytesIO(text.encode())


@pytest.fixture
def run(capsys, monkeypatch):
    """run("gen", ..., given=text) -> (exit code, standard output, standard error)."""

    def call(*arguments, given: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", Input(given))
        try:
            code = cli.main(["vectors", *map(str, arguments)])
        except SystemExit as stopped:
            code = stopped.code
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """compiled(macro) -> the program of examples/, compiled with -Dmacro."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler, cc")
    folder = tmp_path_factory.mktemp("c")

    def build(*macros: str) -> str:
        program = str(folder / ("_".join(macros) or "right"))
        warnings = ["-Wall", "-Wextra", "-Werror", "-std=c99"]
        subprocess.run(
            [compiler, *warnings, "-O2", *(f"-D{m}" for m in macros), "-o", program, str(EXAMPLE)],
            check=True,
        )
        return program

    return build


@pytest.fixture
def answered(compiled, run):
    """answered(macros, options of gen) -> the casts of gen, answered by the program that was
    compiled with these macros.
    """

    def call(*macros: str, options: tuple = ()) -> str:
        _, vectors, _ = run("gen", "cast", "--format", "e4m3fn", *options)
        return subprocess.run(
            [compiled(*macros)], input=vectors, capture_output=True, text=True, check=True
        ).stdout

    return call


def test_a_program_in_c_is_right(answered, run):
    code, out, err = run("verify", "cast", "--format", "e4m3fn", given=answered())
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "11,562 of 11,562 vectors judged; 11,562 of 11,562 answers agree"


@pytest.mark.parametrize(
    ("macro", "says"),
    [
        (
            "TIES_AWAY",
            "3A800000, float32 0.0009765625 (tie): expected 0x00 (0), got 0x01 (0.001953125)",
        ),
        ("TIES_AWAY", "\nAll codes are what rounding nearest_away gives.\n"),
        ("NO_SUBNORMALS", "\nAll codes are what flushing subnormals to zero gives.\n"),
        ("UNSIGNED", "\nAll codes are what losing the sign gives.\n"),
    ],
)
def test_a_wrong_program_in_c_is_caught_and_told_why(answered, run, tmp_path, macro, says):
    path = tmp_path / "found.json"
    code, out, err = run(
        "verify", "cast", "--json", path, given=answered(macro, options=("--count", 100))
    )
    assert (code, err) == (1, "")
    assert says in out
    found = json.loads(path.read_text())
    assert not found["ok"]
    assert sum(found["differ"].values()) > 90
    assert (found["missing"], found["unasked"], found["repeated"]) == ([], [], [])
    assert {"line", "kind", "vector", "expected", "got", "rule"} == set(found["first"][0])


@pytest.mark.parametrize("macros", [(), ("TIES_AWAY",)])
def test_the_documentation_shows_what_is_said_of_the_program(answered, run, macros):
    _, out, _ = run("verify", "cast", "--format", "e4m3fn", given=answered(*macros))
    page = (EXAMPLE.parents[1] / "docs" / "how-to" / "vectors.md").read_text(encoding="utf-8")
    blocks = [
        block.split("\n...\n")
        for block in re.findall(r"verify cast --format e4m3fn\n(.*?)```", page, re.DOTALL)
    ]
    assert any(all(piece.strip() in out for piece in block) and block[0] in out for block in blocks)


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            lambda lines: lines[:100],
            "missing: 11,464 of the 11,562 vectors; in gen's output, line 101 (",
        ),
        (
            lambda lines: lines[:-1],
            "missing: 1 of the 11,562 vectors; in gen's output, line 11564 (",
        ),
        (
            lambda lines: lines[:50] + lines[51:],
            "missing: 1 of the 11,562 vectors; in gen's output, line 51 (",
        ),
        (
            lambda lines: lines[:50] + lines[49:],
            "repeated: 1 of the vectors received, judged like the others; line 51\n",
        ),
        (
            lambda lines: [*lines, "40490FDB 45\n"],
            "not asked: 1 of the vectors received, judged like the others; line 11565\n",
        ),
    ],
    ids=["stopped early", "last", "amid", "twice", "unasked"],
)
def test_other_vectors_than_were_asked_fail(answered, run, damage, says):
    given = "".join(damage(answered().splitlines(keepends=True)))
    code, out, err = run("verify", "cast", given=given)
    assert (code, err) == (1, "")
    assert says in out
    code, out, _ = run("verify", "cast", "--some", given=given)
    assert code == 0
    assert says in out


def test_a_program_may_drop_the_comments(answered, run):
    options = ("--seed", 1, "--count", 100)
    given = "".join(
        line
        for line in answered(options=options).splitlines(keepends=True)
        if not line.startswith("#")
    )
    assert run("verify", "cast", "--format", "e4m3fn", *options, given=given)[0] == 0
    code, out, _ = run("verify", "cast", "--format", "e4m3fn", given=given)
    assert code == 1
    assert (
        "the vectors have no header, so verify assumes fp8ref vectors gen cast --format e4m3fn: "
        in out
    )
    assert "1,662 of 1,662 answers agree" in out


PIPE = """
import subprocess, sys
fp8ref = [sys.executable, "-m", "fp8ref", "vectors"]
gen = subprocess.Popen([*fp8ref, "gen", "cast", "--format", "e5m2", "--count", "200000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
gen.stdout.readline()
gen.stdout.close()
said = gen.stderr.read().decode()
print(gen.wait(), repr(said))
"""


def test_a_closed_pipe_ends_it_in_silence():
    done = subprocess.run(
        [sys.executable, "-c", PIPE], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "141 ''\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("gen", "cast"), "--format"),
        (("gen", "cast", "--format", "e9m9"), "a cast's format is one of e4m3fn"),
        (("gen", "cast", "--format", "e5m2", "--source", "float8"), "a source is one of float32"),
        (("gen", "cast", "--format", "e5m2", "--seed", "-1"), "seed is an integer in [0, 2^32)"),
        (("gen", "cast", "--format", "e5m2", "--policy", "flax"), "unknown option '--policy'"),
        (
            ("gen", "scale", "--format", "e5m2", "--policy", "best"),
            "policy is a ScalePolicy or one of torchao",
        ),
        (
            ("gen", "quantize", "--format", "e5m2", "--shape", "4,x"),
            "a shape is 1 to 32 axes, each at least 1",
        ),
        (
            ("gen", "quantize", "--format", "e5m2", "--granularity", "mx_1x32", "--shape", "4,33"),
            "mx_1x32 needs K",
        ),
        (
            ("gen", "gemm", "--format", "e5m2", "--shape", "4,4"),
            "a shape is M,N,K, each at least 1",
        ),
        (("verify", "cast"), "got none"),
        (
            ("verify", "cast", "--rounding", "stochastic"),
            "a rounding that gives each input one code is one of nearest_even",
        ),
        (
            ("verify", "gemm", "--accumulate", "quick"),
            "accumulate is an Accumulation, 'exact', 'f32' or one of",
        ),
        (
            ("verify", "cast", "--json", "/nowhere/x.json"),
            "--json names a file in a directory that exists",
        ),
        (("verify", "cast", "--some", "--format", "e4m3fn"), "got none"),
        (("verify", "cast", "--all"), "unknown option '--all'"),
    ],
)
def test_errors_of_a_user_are_one_message(run, arguments, says):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [(), ("gen",), ("verify",), ("verify", "gemm")])
def test_help_states_the_form(run, arguments):
    code, out, _ = run(*arguments, "--help")
    assert code == 0
    if len(arguments) < 2:
        assert "quantize  SHAPE VALUES" in out


@pytest.mark.parametrize("operation", ["scale", "quantize", "gemm"])
def test_the_other_operations_from_end_to_end(run, operation):
    _, vectors, _ = run("gen", operation, "--format", "e4m3fn", "--count", 3)
    body = [line for line in vectors.splitlines() if not line.startswith("#")]
    answers = {
        "scale": " 00000000",
        "quantize": f" {','.join(['00'] * 512)} 3F800000",
        "gemm": f" {','.join(['00000000'] * 16)}",
    }
    code, out, _ = run(
        "verify",
        operation,
        given="\n".join([vectors.splitlines()[0], *(line + answers[operation] for line in body)]),
    )
    assert code == 1
    assert "expected" in out
    code, _, err = run("verify", operation, given=vectors)
    assert code == 2
    assert "line 3: " in err
    assert "the answer is missing" in err


def test_a_line_without_an_end_is_refused(run, monkeypatch):
    """Before memory is taken for all of it."""
    monkeypatch.setattr("fp8ref.shared.files.LINE", 1000)
    code, shown, said = run(
        "verify", "cast", "--count", "2", given="# fp8ref vectors 1: cast\n" + "4" * 10_000
    )
    assert (code, shown) == (2, "")
    assert "a line of more than 1,000 bytes" in said
