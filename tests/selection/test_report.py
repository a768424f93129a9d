"""What a conversion says to a person, and to logging."""

import io
import logging
import sys
import types

import _pytest.capture
import pytest

from fp8ref.selection import report as reports
from fp8ref.selection.report import Report, Row

LINE = "fp8: 1 of 2 layers (rowwise); in high precision: head. print(report(model)) says why.\n"


def row(path: str, recipe: str | None = None, kind: str = "Linear") -> Row:
    return Row(path=path, kind=kind, shape=(16, 16), recipe=recipe, reason="")


def announce(logger: logging.Logger, *, warns: bool = False, rank: int = 0) -> None:
    report = Report(rows=[row("up", "rowwise"), row("head"), row("norm", kind="vectors")])
    reports.announce(report, logger, "Model", warns=warns, see="report(model)", rank=lambda: rank)


@pytest.fixture
def logger():
    """A logger whose level and handlers the test may change."""
    logger = logging.getLogger("fp8ref.tests.report")
    yield logger
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def terminal(capsys, monkeypatch):
    """Standard output, which the test reads, as a terminal."""
    monkeypatch.setattr(_pytest.capture.CaptureIO, "isatty", lambda self: True)
    return capsys


def test_a_terminal_gets_one_line(terminal, logger):
    announce(logger)
    assert terminal.readouterr() == (LINE, "")


def test_a_notebook_gets_it_too(capsys, monkeypatch, logger):
    shell = types.SimpleNamespace(kernel=object())
    notebook = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    announce(logger)
    assert capsys.readouterr().out == LINE
    monkeypatch.delattr(shell, "kernel")  # IPython in a pipe
    announce(logger)
    assert capsys.readouterr().out == ""


def test_a_file_gets_none(capsys, logger):
    announce(logger)
    assert capsys.readouterr().out == ""


class Broken(io.StringIO):
    """A terminal that cannot be written."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise self.error


class Tee:
    """A stream without isatty."""

    def write(self, text):
        raise AssertionError(text)


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize(
    "stream", [None, Tee(), closed(), Broken(BrokenPipeError), Broken(ValueError)]
)
def test_a_stream_that_cannot_be_written_changes_nothing(monkeypatch, logger, stream):
    monkeypatch.setattr(sys, "stdout", stream)
    announce(logger)


def test_a_line_that_nobody_sees_asks_for_no_rank(capsys, logger):
    def rank():
        raise AssertionError

    reports.announce(Report(), logger, "Model", warns=False, see="", rank=rank)


def test_another_rank_prints_none(terminal, logger):
    announce(logger, rank=1)
    assert terminal.readouterr().out == ""


def test_what_logging_shows_is_not_printed_again(terminal, logger, caplog):
    announce(logger, warns=True)
    with caplog.at_level(logging.INFO):  # of the root
        announce(logger)
    assert terminal.readouterr().out == ""
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_level_silences_it(terminal, logger):
    logger.setLevel(logging.ERROR)
    announce(logger)
    assert terminal.readouterr().out == ""


def test_conversions_of_copies_print_nothing(terminal, logger):
    with reports.quiet():
        announce(logger)
    assert terminal.readouterr().out == ""
    announce(logger)
    assert terminal.readouterr().out == LINE


def test_a_long_line_names_six_layers():
    report = Report(rows=[row("up", "rowwise"), row("", kind="Conv1d"), *map(row, "abcdefg")])
    assert report.headline() == (
        "fp8: 1 of 9 layers (rowwise); in high precision: Conv1d, a, b, c, d, e, 2 more"
    )
    assert Report(rows=[row("up", "rowwise")]).headline() == "fp8: 1 of 1 layers (rowwise)"
