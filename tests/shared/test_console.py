import functools
import io
import os
import re
import subprocess
import sys
import time

import pytest
from helpers.training.fakes import FakeTrainer
from rich.console import Console

from fp8ref.shared import console as consoles
from fp8ref.train import loop
from fp8ref.train.run.processes import Alone


@pytest.fixture
def terminal(monkeypatch) -> io.StringIO:
    """What a person at a terminal of 120 columns sees."""
    shown = io.StringIO()

    def console(**_):
        return Console(
            file=shown, force_terminal=True, width=120, color_system=None, legacy_windows=False
        )

    monkeypatch.setattr("rich.console.Console", console)
    return shown


def last_frame(terminal: io.StringIO) -> str:
    return [line for line in terminal.getvalue().splitlines() if "jax" in line][-1]


def test_the_bar_counts_to_its_total(terminal):
    with consoles.bar("jax rowwise", 3) as advance:
        for _ in range(3):
            advance("")
    assert "3/3" in terminal.getvalue()
    assert "jax rowwise" in terminal.getvalue()


def test_each_advance_is_one(terminal):
    with consoles.bar("jax rowwise", 3) as advance:
        advance("")
    assert "1/3" in last_frame(terminal)
    assert "2/3" not in terminal.getvalue()


def test_the_note_of_the_last_advance_is_shown(terminal):
    with consoles.bar("jax", 2) as advance:
        advance("loss 5.000")
        advance("loss 4.000")
    assert "loss 4.000" in last_frame(terminal)
    assert "loss 5.000" not in last_frame(terminal)


def test_a_note_with_brackets_is_shown_as_it_is(terminal):
    with consoles.bar("jax", 1) as advance:
        advance("[64, 32] GEMMs")
    assert "[64, 32] GEMMs" in terminal.getvalue()


def test_the_note_may_be_left_out(terminal):
    with consoles.bar("jax", 1) as advance:
        advance()
    assert "1/1" in terminal.getvalue()


def test_the_bar_goes_to_standard_error(monkeypatch):
    asked = []

    def console(**keys):
        asked.append(keys)
        return Console(file=io.StringIO())

    monkeypatch.setattr("rich.console.Console", console)
    with consoles.bar("jax", 1):
        pass
    assert [keys["stderr"] for keys in asked] == [True]


def test_the_bar_is_silent_where_there_is_no_terminal(monkeypatch, capfd):
    # with these rich takes anything for a terminal
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(variable, raising=False)
    with consoles.bar("jax", 2) as advance:
        advance("loss 5.000")
    assert capfd.readouterr() == ("", "")


def test_an_error_inside_passes_through_and_ends_the_bar(terminal):
    def fail():
        with consoles.bar("jax", 2):
            raise RuntimeError("from inside")

    with pytest.raises(RuntimeError, match="from inside"):
        fail()
    assert "\x1b[?25h" in terminal.getvalue()  # the cursor is shown again


def test_tables_are_wide_also_in_a_file(monkeypatch):
    monkeypatch.setattr(
        "rich.console.Console", functools.partial(Console, file=io.StringIO(), force_terminal=False)
    )
    assert consoles.console().width == 120


def test_tables_take_the_width_of_a_terminal(monkeypatch):
    monkeypatch.setattr(
        "rich.console.Console",
        functools.partial(Console, file=io.StringIO(), force_terminal=True, width=77),
    )
    assert consoles.console().width == 77


class Other(Alone):
    """A process that is not the one that shows; the first has claimed the run's directory."""

    first = False

    def __init__(self):
        self.told = iter((None, True))

    def gather(self, value):
        return [next(self.told, value)]


@pytest.mark.parametrize("first", [True, False])
def test_a_run_shows_steps_loss_speed_and_the_time_left_on_one_process(
    first, terminal, small, monkeypatch, tmp_path
):
    monkeypatch.setattr(loop, "trainer", lambda _, config, __: FakeTrainer(config))
    loop.train(small, "jax", tmp_path / "run", processes=Alone() if first else Other())
    if first:
        assert re.search(
            r"jax tensorwise .* 6/6 0:00:00 loss 4\.375, [\d,]+ tokens/s", last_frame(terminal)
        )
    else:
        assert terminal.getvalue() == ""


def test_without_a_terminal_progress_is_a_line_now_and_then(monkeypatch, capsys):
    now = iter([0.0, 10.0, 31.0, 31.0, 40.0, 70.0, 70.0])
    monkeypatch.setattr(consoles.time, "monotonic", lambda: next(now))
    with consoles.bar("jax rowwise", 9000, done=1000) as advance:
        for loss in (5, 4, 3, 2):
            advance(f"loss {loss}")
    assert capsys.readouterr().err.splitlines() == [
        "jax rowwise: 1,002 of 9,000, loss 4",
        "jax rowwise: 1,004 of 9,000, loss 2",
    ]


def test_what_is_not_shown_prints_no_line(monkeypatch, capsys):
    monkeypatch.setattr(consoles, "SECONDS", 0.0)
    with consoles.bar("jax", 3, shown=False) as advance:
        advance("")
    assert capsys.readouterr().err == ""


class Errors(io.StringIO):
    """Standard error of a terminal, or of a file."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_a_wait_is_said_after_a_time_and_not_beside_a_bar(monkeypatch, terminal):
    shown = Errors(terminal)
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setattr(consoles, "PATIENCE", 0.01)
    monkeypatch.setattr(consoles, "SECONDS", 0.01)
    with consoles.waiting("probe"):
        while not shown.getvalue():
            time.sleep(0.001)
    assert re.match("\rprobe: 0 s\x1b\\[K" if terminal else "probe: 0 s\n", shown.getvalue())
    assert shown.getvalue().endswith("\r\x1b[K" if terminal else " s\n")
    shown.seek(0)
    shown.truncate()
    monkeypatch.setattr(consoles, "_bars", ["another"])
    with consoles.waiting("probe"):
        time.sleep(0.05)
    assert shown.getvalue() == ""


def test_items_are_counted_and_a_library_needs_no_rich(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert list(consoles.counted("judge", iter(range(3)))) == [0, 1, 2]


HOSTILE = "a\x1b[2J\x9b31m\x08\r\u202e\x7f\ud800b"
ESCAPED = r"a\x1b[2J\x9b31m\x08\r\u202e\x7f\ud800b"


def test_a_terminal_obeys_no_text(capsys):
    """A run's name, a key of a file and an error's text reach it as escapes, by whatever way."""
    assert consoles.printable(HOSTILE) == ESCAPED
    assert (
        consoles.printable("tabs\tand\nlines, \u00e9 \u8a66") == "tabs\tand\nlines, \u00e9 \u8a66"
    )
    table = consoles.table(HOSTILE, title=HOSTILE)
    table.add_row(HOSTILE)
    out = consoles.console()
    out.print(table)
    out.print(HOSTILE, soft_wrap=True)
    consoles.show(HOSTILE)
    consoles.say(HOSTILE)
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert not [c for c in text if c in "\x1b\x9b\x08\r\u202e\x7f"]
    assert text.count("x1b[2J") == 6


FORGED = "run\nfp8ref: all is well"


def test_a_name_forges_no_line(capsys):
    """Whatever its lines say, they are shown in one."""
    assert consoles.one_line(FORGED + "\t\u2029") == r"run\nfp8ref: all is well\t\u2029"
    table = consoles.table("name", FORGED, title=FORGED)
    table.add_row(FORGED, "1")
    consoles.console().print("before", table)
    consoles.show(FORGED, FORGED)
    consoles.say(FORGED)
    with consoles.bar(FORGED, 1) as advance:
        advance(FORGED)
    shown = capsys.readouterr()
    lines = (shown.out + shown.err).splitlines()
    assert not [line for line in lines if line.strip(" │|").startswith("fp8ref")]
    assert len([line for line in lines if r"run\nfp8ref: all is well" in line]) >= 6


def test_text_is_no_markup(capsys):
    consoles.console().print("[red]a[/red] [/b] :smile:")
    consoles.say("[/]")
    with consoles.bar("[/a]", 1, shown=True) as advance:
        advance("[/b]")
    assert capsys.readouterr().out == "[red]a[/red] [/b] :smile:\n"


COLORS = """
from fp8ref.shared import console

table = console.table("name", title="names")
table.add_row("[bold]tiny[/bold] 12")
console.console().print(table)
console.console().print("12 of 13", highlight=True, style="red")
console.say("note 3")
"""


def shown(environment, *, terminal: bool) -> bytes:
    """What COLORS writes to a terminal, or to a pipe."""
    reader, writer = os.openpty() if terminal else os.pipe()
    variables = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    subprocess.run(
        [sys.executable, "-c", COLORS],
        stdout=writer,
        stderr=writer,
        env=variables | {"TERM": "xterm-256color"} | environment,
        check=True,
    )
    os.close(writer)
    text = b""
    while True:
        try:
            piece = os.read(reader, 1 << 16)
        except OSError:  # a terminal whose other end is closed
            piece = b""
        if not piece:
            os.close(reader)
            return text
        text += piece


def test_no_color_and_no_terminal_leave_out_what_they_should():
    colors = re.compile(rb"\x1b\[[0-9;]*3[0-9]")
    assert colors.search(shown({}, terminal=True))
    plain = shown({"NO_COLOR": "1"}, terminal=True)
    assert b"tiny" in plain
    assert not colors.search(plain)
    assert b"\x1b" not in shown({}, terminal=False)


def test_a_closed_pipe_is_left_to_the_command_line():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        consoles._rich(file=Closed()).print("text")
