"""A command that calls somebody's function runs in a child, and nothing but a verdict ends with
exit code 0.
"""

import os
import subprocess
import sys

import pytest

from fp8ref import cli
from fp8ref.commands import supervision


def in_child(monkeypatch, script: str, timeout: float = 60.0) -> int:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", script])
    return supervision.in_child(timeout)


@pytest.mark.parametrize("code", [0, 1])
def test_the_code_that_is_reported_is_returned(monkeypatch, code):
    script = (
        "import os; from fp8ref.commands import supervision; assert supervision.is_child(); "
        f"supervision.report({code}); os._exit(9)"
    )
    assert in_child(monkeypatch, script) == code


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import os; os._exit(0)", r"ended the process \(exit code 0\), and there is no verdict"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            r"ended the process \(signal 9\)",
        ),
        ("import os\nif os.fork(): os._exit(0)\nimport time; time.sleep(3)", r"exit code 0"),
    ],
    ids=["_exit", "killed", "a process that goes on"],
)
def test_an_end_without_a_verdict_is_an_error(monkeypatch, script, said):
    with pytest.raises(ValueError, match=said):
        in_child(monkeypatch, script)


def test_a_function_that_hangs_is_stopped(monkeypatch):
    with pytest.raises(ValueError, match=r"no verdict within --timeout 0\.5 seconds"):
        in_child(monkeypatch, "import time; time.sleep(600)", 0.5)


def test_a_thread_that_is_left_keeps_no_verdict(monkeypatch):
    script = (
        "import threading, time; from fp8ref.commands import supervision; "
        "threading.Thread(target=time.sleep, args=(600,)).start(); supervision.report(0)"
    )
    assert in_child(monkeypatch, script) == 0


def test_processes_of_the_function_are_no_children_of_the_command(monkeypatch):
    inner = f"import os; os._exit({supervision.VARIABLE!r} in os.environ)"
    script = (
        "import subprocess, sys; from fp8ref.commands import supervision; "
        f"supervision.report(subprocess.call([sys.executable, '-c', {inner!r}]))"
    )
    assert in_child(monkeypatch, script) == 0


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_an_unfit_timeout_is_refused(timeout):
    with pytest.raises(ValueError, match="--timeout is a number of seconds above 0"):
        supervision.in_child(timeout)


@pytest.mark.parametrize("command", ["conform", "probe"])
@pytest.mark.parametrize(
    "error",
    [SystemExit(0), GeneratorExit(), BaseException("mine")],
    ids=["SystemExit", "GeneratorExit", "own"],
)
def test_what_is_no_exception_is_an_error(monkeypatch, capsys, command, error):
    def load(name):
        raise error

    monkeypatch.setattr("fp8ref.conformance.gemm.library_gemms.load", load)
    assert cli.main([command, "module:function"]) == 2
    assert f"the function raised {type(error).__name__}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["conform", "probe"])
def test_a_function_that_ends_the_process_does_not_pass(tmp_path, command):
    (tmp_path / "ends.py").write_text("import os\n\n\ndef function(x, y=None):\n    os._exit(0)\n")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    }
    ended = subprocess.run(
        [sys.executable, "-m", "fp8ref", command, "ends:function"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 2
    assert "ended the process (exit code 0), and there is no verdict" in ended.stderr
