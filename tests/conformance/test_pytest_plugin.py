"""pytest in pytest: what a maintainer's tests get from the fixture ``fp8ref_kit``."""

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import ml_dtypes  # noqa: F401  # what a run in this process imports first, is gone after it
import numba
import pytest
import torch  # noqa: F401

from fp8ref.conformance import pytest_plugin
from fp8ref.conformance.cast import identify
from fp8ref.conformance.delayed import require as _  # noqa: F401
from fp8ref.conformance.gemm import require_gemm as __  # noqa: F401
from fp8ref.conformance.quantizer import identify as ___  # noqa: F401

pytest_plugins = ["pytester"]
numba.njit(lambda: 0)()  # its first compilation imports more, which cannot be imported twice
ROOT = Path(__file__).parents[2]

MINE = """
import ml_dtypes
import numpy as np


def right(x):
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)


def wrong(x):
    return np.clip(x, -448, 448).astype(ml_dtypes.bfloat16).astype(ml_dtypes.float8_e4m3fn)


def quantize(x):
    scale = np.float32(448) / np.maximum(np.abs(x).max(axis=-1, keepdims=True), np.float32(1e-12))
    return (x * scale).astype(ml_dtypes.float8_e4m3fn), scale


def four(x):
    return np.nan_to_num(x, nan=6).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn)


def raises(x):
    raise KeyError("mine")

"""


@pytest.fixture
def run(pytester, monkeypatch):
    """run(tests, options) -> the result of pytest with the plugin alone, in this process."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def call(tests: str, *options: str, process: bool = False):
        pytester.makepyfile(MINE + tests)
        ours = ("-p", pytest_plugin.__name__, "-p", "no:cacheprovider")
        start = pytester.runpytest_subprocess if process else pytester.runpytest_inprocess
        return start(*ours, *options)

    return call


def test_functions_that_are_right_pass_and_the_summary_says_what_was_asked(run):
    result = run("""
def test_cast(fp8ref_kit):
    outcome = fp8ref_kit.require_cast(right, "e4m3fn")
    assert outcome.named
    fp8ref_kit.require_cast(right, "e4m3fn")

def test_quantizer(fp8ref_kit):
    fp8ref_kit.require_quantizer(quantize, "e4m3fn", granularity="rowwise")
""")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        [
            "*= fp8ref 0.* (numpy *, ml_dtypes *) =*",
            "*::test_cast: right is 'saturating': a cast to e4m3fn,*rounds nearest_even,*"
            "Asked of numpy arrays, format: 253 of 253 numbers*not tested: all but*",
            "*::test_quantizer: quantize is 'torchao': a quantizer to e4m3fn, rowwise, axis -1,*",
        ]
    )
    assert str(result.stdout).count("right is 'saturating'") == 1


def test_a_failure_shows_the_simplest_input_and_no_frame_of_fp8ref(run):
    result = run("""
def test_wrong(fp8ref_kit):
    fp8ref_kit.require_cast(wrong)
""")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E*AssertionError: wrong is not 'saturating', but *float32 is rounded to bfloat16 first*",
            "E*1.06640625 (float32 0x3F888000): got 0x38 = 1, expected 0x39 = 1.125 (C-1)",
        ]
    )
    for frame in ("identify.py", "finding.py", "pytest_plugin.py", "= fp8ref 0"):
        result.stdout.no_fnmatch_line(f"*{frame}*")


def test_a_function_that_raises_is_an_error_without_frames_of_fp8ref(run):
    result = run("""
def test_raises(fp8ref_kit):
    fp8ref_kit.require_cast(raises, framework="numpy")
""")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*raises raised KeyError for x numpy float32 [[]16]: 'mine'. *"])
    for frame in ("subject.py", "identify.py", "pytest_plugin.py:"):
        result.stdout.no_fnmatch_line(f"*{frame}*")


def test_other_functions_of_the_kit_say_what_they_require(run, pytester):
    result = run(
        """
from hypothesis import given, strategies
from fp8ref.formats import E4M3FN

@given(strategies.integers(1, 9))
def test_scales(fp8ref_kit, n):
    amax = np.float32([n])
    fp8ref_kit.require_scales(amax, np.float32(448) / amax, E4M3FN)
    fp8ref_kit.require_scales(amax=amax, found=np.float32(448) / amax, fmt=E4M3FN)

def test_sharded(fp8ref_kit):
    def amax(shards):
        return [max(shard.max(initial=0) for shard in shards)] * len(shards)
    with pytest.raises(AssertionError, match="a NaN|ordinary"):
        fp8ref_kit.require_sharded(amax)
    fp8ref_kit.require_sharded(lambda shards: [largest(shards)] * len(shards), "torchao")

def largest(shards):
    return np.abs(np.concatenate([shard.ravel() for shard in shards])).max()

import pytest
import torch  # noqa: F401
""",
        "--junitxml=tests.xml",
    )
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        [
            "*::test_scales: ndarray passed require_scales(): Require that found are *",
            "*::test_sharded: *<lambda> passed require_sharded('torchao'): Require that every rank *",
        ]
    )
    assert str(result.stdout).count("require_scales()") == 1
    assert 'name="fp8ref" value="ndarray passed' in (pytester.path / "tests.xml").read_text()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnknownMarkWarning")
def test_the_options_reach_the_kit_where_they_mean_something(run, monkeypatch):
    compared = []

    def every(differing, **options):
        compared.append(options)
        return 0, None

    monkeypatch.setattr(identify.all_inputs, "simplest_difference", every)
    tests = """
def test_eight(fp8ref_kit):
    fp8ref_kit.require_cast(right)

def test_four(fp8ref_kit):
    fp8ref_kit.require_cast(four, "e2m1fn")

def test_not(fp8ref_kit):
    fp8ref_kit.require_cast(right, exhaustive=False)
"""
    run(tests, "--fp8ref-exhaustive").assert_outcomes(passed=3)
    assert len(compared) == 1
    result = run(tests, "--fp8ref-device=nowhere", "-k", "eight")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*device 'nowhere' is not available:*"])


def test_a_run_without_the_kit_prints_nothing_of_it(run):
    result = run("def test_nothing():\n    pass\n")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*fp8ref 0*")


def test_workers_pass_on_what_was_asked(run):
    tests = "def test_cast(fp8ref_kit):\n    fp8ref_kit.require_cast(right)\n"
    result = run(tests, "-p", "xdist.plugin", "-n1", process=True)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*::test_cast: right is 'saturating'*"])


def test_every_require_of_the_kit_is_in_the_table():
    package = ROOT / "fp8ref" / "conformance"
    defined = {
        (path.relative_to(package).with_suffix("").parts[0], node.name)
        for path in package.rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("require_")
    }
    rooms = {(room.partition(".")[0], name) for name, room in pytest_plugin.ROOMS.items()}
    assert rooms == defined - {("require", "require_cast")}  # of arrays, not of a function
    for name, room in pytest_plugin.ROOMS.items():
        module = importlib.import_module(f"fp8ref.conformance.{room}")
        assert callable(getattr(module, name))


def test_an_unknown_function_is_an_error_that_names_the_others():
    kit = pytest_plugin.Kit(None)
    with pytest.raises(AttributeError, match=r"fp8ref_kit has require_attention, .* got 'cast'"):
        kit.cast  # noqa: B018


def test_strangers_import_nothing_for_it():
    code = "import sys, fp8ref.conformance.pytest_plugin\n"
    code += "print({'numpy', 'numba', 'fp8ref.formats', 'fp8ref.conformance.kit'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_entry_point_is_the_plugin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"fp8ref": pytest_plugin.__name__}
