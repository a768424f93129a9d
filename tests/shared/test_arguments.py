import argparse
from pathlib import Path

import pytest

from fp8ref.shared.arguments import Parser


@pytest.fixture
def parser():
    parser = Parser(prog="it")
    parser.describe("FILE", "Do it.\n\nAt length,\nand well.\n\n$ it a.txt\n$ it a.txt --count 2")
    parser.option("file", "FILE", "what to read")
    parser.option("--count", "N", "how often", 1)
    parser.option("--rate", "X", "how fast", rare=True)
    parser.option("--shape", ("M", "N"), "sizes", nargs=2)
    parser.option("--quiet", None, "say nothing")
    parser.option("--kind", "NAME", "which", choices=("left", "right"))
    return parser


def test_the_metavar_states_the_type(parser):
    words = ["a", "--count", "3", "--rate", "0.5", "--shape", "2", "4", "--quiet"]
    arguments = vars(parser.parse_args(words))
    assert arguments == {
        "file": Path("a"),
        "count": 3,
        "rate": 0.5,
        "shape": [2, 4],
        "quiet": True,
        "kind": None,
    }
    assert parser.parse_args(["a"]).count == 1


def test_a_value_may_begin_with_a_minus(parser):
    parser.option("--window", "A,B", "text")
    words = ["a", "--rate", "-1e-3", "--window", "-1,0", "--shape", "-2", "-4"]
    arguments = parser.parse_args(words)
    assert (arguments.rate, arguments.window, arguments.shape) == (-0.001, "-1,0", [-2, -4])
    assert parser.parse_args(["a", "--rate", "-.5"]).rate == -0.5


def test_help_leaves_out_what_is_rare_and_help_all_does_not(parser, capsys):
    short, long = parser.format_help(), parser.format_all()
    assert short.startswith(
        "usage: it FILE [options]\n\nDo it.\n\nAt length, and well.\n\nexamples:\n  it a.txt\n"
    )
    assert "how often (default 1)" in short
    assert ("--rate" in short, "--rate" in long) == (False, True)
    assert parser.format_help() == short
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(["--help-all"])
    assert (stopped.value.code, capsys.readouterr().out) == (0, long)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs FILE; got none."),
        (["a", "--count", "x"], "--count takes an integer; got 'x'."),
        (["a", "--rate", "x"], "--rate takes a number; got 'x'."),
        (["a", "--count"], "--count takes a value; got none."),
        (["a", "--shape", "1"], "--shape takes 2 values; got fewer."),
        (["a", "--quiet=1"], "--quiet takes no value; got '1'."),
        (["a", "--kind", "lefd"], "--kind is one of left, right; got 'lefd'. Did you mean 'left'?"),
        (
            ["a", "--kind", "up\nfp8ref: fine"],
            r"--kind is one of left, right; got 'up\nfp8ref: fine'.",
        ),
    ],
)
def test_an_error_is_one_line_with_what_was_received(parser, capsys, words, said):
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(words)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.replace("\\\\", "\\") == f"it: {said}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cuont", "3"], "unknown option '--cuont'. Did you mean --count?"),
        (["--xyz"], "unknown option '--xyz'. See it --help."),
        (["--", "more"], "unknown argument 'more'. See it --help."),
        (["more"], "unknown argument 'more'. See it --help."),
    ],
)
def test_words_that_are_none_are_refused_with_the_nearest_option(parser, capsys, words, said):
    _, rest = parser.parse_known_args(["a", *words])
    with pytest.raises(SystemExit):
        parser.refuse(rest)
    assert capsys.readouterr().err == f"it: {said}\n"


def test_an_option_without_its_own_parser_is_argparses():
    parser = Parser(prog="it")
    parser.add_argument("--old", type=int, default=argparse.SUPPRESS)
    assert vars(parser.parse_args([])) == {}
    assert parser.parse_args(["--old", "3"]).old == 3
