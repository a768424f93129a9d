"""Argument parsers of the commands: argparse, with a help that fits a screen, --help-all for the
rest, and errors in one line.
"""

import argparse
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from fp8ref.shared import console, registry

__all__ = ["Parser"]

KINDS: dict[str, Callable] = {
    **dict.fromkeys(("N", "M"), int),
    **dict.fromkeys(("X", "SECONDS", "NATS"), float),
    **dict.fromkeys(("FILE", "DIR", "PATH", "RUN", "CONFIG"), Path),
}
"""The types of options by metavar; any other is text."""

PLAIN = (
    (r"argument (\S+): invalid int value: (.*)", r"\1 takes an integer; got \2."),
    (r"argument (\S+): invalid float value: (.*)", r"\1 takes a number; got \2."),
    (r"argument (\S+): expected (\d+) arguments", r"\1 takes \2 values; got fewer."),
    (r"argument (\S+): expected .*", r"\1 takes a value; got none."),
    (r"argument (\S+): ignored explicit argument (.*)", r"\1 takes no value; got \2."),
    (r"the following arguments are required: (.*)", r"needs \1; got none."),
)
"""(an error of argparse, the same as a requirement and what was received)."""

_CHOICE = re.compile(r"argument (.*): invalid choice: '?(.*?)'? \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """The parser of a command.

    rare    options that --help-all shows, and --help does not.
    before  called with the words before they are parsed; returns what is parsed.
    more    called with them; returns what --help-all prints after the options.
    """

    def __init__(self, **keys) -> None:
        super().__init__(allow_abbrev=False, formatter_class=Formatter, **keys)
        # -1e-3 and -1,0 are values too, as in newer versions of argparse
        self._negative_number_matcher = re.compile(r"-\.?\d")
        self.rare: list[argparse.Action] = []
        self.before: Callable[[list[str]], list[str]] = list
        self.more: Callable[[list[str]], str] = lambda words: ""
        self.words: list[str] = []
        self.summary = ""

    def describe(self, usage: str, text: str) -> None:
        """Set the texts of the help.

        usage  what the command needs.
        text   a sentence, which lists of commands show; further paragraphs; examples, each a line
               that begins with "$ ".
        """
        lines = inspect.cleandoc(text).splitlines()
        examples = [f"  {line[2:]}" for line in lines if line.startswith("$ ")]
        prose = "\n".join(line for line in lines if not line.startswith("$ ")).strip()
        self.summary, *_ = lines
        self.usage = " ".join([self.prog, *usage.split(), "[options]"])
        self.description = re.sub(r"(?m)^(\S.*)\n(?=\S)", r"\1 ", prose)
        self.description += "\n\nexamples:\n" * bool(examples) + "\n".join(examples)
        self.add_argument(
            "--help-all",
            action=HelpAll,
            nargs=0,
            default=argparse.SUPPRESS,
            help="show every option and exit",
        )

    def option(
        self,
        name: str,
        metavar: str | tuple[str, ...] | None,
        help: str,
        default=None,
        *,
        nargs: int | str | None = None,
        choices: Sequence[str] | None = None,
        rare: bool = False,
        required: bool = False,
    ) -> None:
        """Add an option, or a positional argument; a flag where metavar is None.

        The metavar states the type, by ``KINDS``. The help states the default.
        """
        if metavar is None:
            action = self.add_argument(name, action="store_true", help=help)
        else:
            shown = default not in (None, argparse.SUPPRESS) and not isinstance(default, list)
            action = self.add_argument(
                name,
                metavar=metavar,
                help=f"{help} (default {default})" if shown else help,
                default=default,
                type=KINDS.get(metavar if isinstance(metavar, str) else metavar[0], str),
                nargs=nargs,
                choices=choices,
            )
        action.required = action.required or required
        self.rare += [action] * rare

    def rare_option(self, name: str, metavar: str, help: str, default=None, **keys) -> None:
        """Add an option that --help-all shows, and --help does not."""
        self.option(name, metavar, help, default, rare=True, **keys)

    def parse_known_args(self, args=None, namespace=None):
        """As argparse, of what ``before`` returns."""
        self.words = self.before(sys.argv[1:] if args is None else list(args))
        return super().parse_known_args(self.words, namespace)

    def format_help(self) -> str:
        """The help without ``rare`` options."""
        texts = [(action, action.help) for action in self.rare]
        for action in self.rare:
            action.help = argparse.SUPPRESS
        try:
            return super().format_help()
        finally:
            for action, text in texts:
                action.help = text

    def format_all(self) -> str:
        """The help with every option."""
        try:
            return super().format_help() + self.more(self.words)
        except (ImportError, ValueError) as error:
            self.error(str(error))

    def error(self, message: str) -> NoReturn:
        """Print a usage error in one line, and exit with 2."""
        if choice := _CHOICE.fullmatch(message):
            name, got, names = choice.groups()
            names = names.replace("'", "")
            near = registry.nearest(got, names.split(", "))
            message = f"{name} is one of {names}; got {got!r}.{near}"
        for pattern, text in PLAIN:
            message = re.sub(f"^{pattern}$", text, message)
        self.exit(2, f"{console.one_line(f'{self.prog}: {message}')}\n")

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """The error for words that are no arguments of the command, with the nearest option."""
        words = [word for word in words if word != "--"] or words
        unknown = next((word for word in words if word.startswith("-")), words[0])
        name = unknown.partition("=")[0]
        kind = "option" if name.startswith("-") else "argument"
        options = self._option_string_actions if kind == "option" else ()
        near = registry.nearest(name, options)
        remedy = near.replace("'", "") or f" See {self.prog} --help."
        self.error(f"unknown {kind} {name!r}.{remedy}")


class Formatter(argparse.HelpFormatter):
    """Wraps each line of a text by itself, and keeps lines that begin with a blank."""

    def __init__(self, prog: str, **keys) -> None:
        super().__init__(prog, max_help_position=32, **keys)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(
            line if line.startswith(" ") else textwrap.fill(line, width)
            for line in text.splitlines()
        )


class HelpAll(argparse.Action):
    """``--help-all``."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        """Print every option, and exit."""
        assert isinstance(parser, Parser)
        print(parser.format_all(), end="")
        parser.exit()
