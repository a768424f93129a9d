"""The keys of a config as options, ``--run.steps 20``: argparse splits, pydantic checks them."""

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import re
import typing
from collections.abc import Sequence

import pydantic

from fp8ref.shared import registry
from fp8ref.shared.arguments import Parser
from fp8ref.shared.errors import ConfigError
from fp8ref.train.config.config import INSTEAD, TABLES, Config

__all__ = ["add", "apply", "override"]

COMMON = (
    *("data.source", "data.sequence_length", "data.batch_size"),
    *("numerics.filter_fqns", "optimizer.learning_rate"),
    *("run.steps", "run.seed", "run.out"),
)
"""The keys that --help shows."""

VALUES = {int: ("N", "an integer"), float: ("X", "a number"), str: ("TEXT", "text")}
"""{type: (metavar, requirement)}."""


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of a config.

    dotted    section.name
    hint      its type, without None.
    optional  whether it may be None.
    text      its docstring.
    """

    dotted: str
    hint: typing.Any
    optional: bool
    text: str

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a Literal."""
        literal = typing.get_origin(self.hint) is typing.Literal
        return typing.get_args(self.hint) * literal

    @property
    def width(self) -> int:
        """How many words an element of a tuple takes; 0 for a value of one word."""
        if typing.get_origin(self.hint) is not tuple:
            return 0
        return len(typing.get_args(typing.get_args(self.hint)[0])) or 1

    def add(
        self, group: argparse._ActionsContainer, text: str, option: str = ""
    ) -> argparse.Action:
        """Add its option, --section.key or another."""
        absent = argparse.SUPPRESS
        if self.hint is bool:
            names = (f"--{self.dotted}", f"--{self.dotted.replace('.', '.no_')}")
            return group.add_argument(
                *names, action=_Flag, nargs=0, dest=self.dotted, default=absent, help=text
            )
        metavar = VALUES.get(self.hint, ("|".join(self.choices) or "NAME", ""))[0]
        return group.add_argument(
            option or f"--{self.dotted}",
            dest=self.dotted,
            default=absent,
            help=text,
            metavar=metavar if self.width < 2 else "A B",
            nargs="*" if self.width else None,
        )

    def value(self, words: str | Sequence[str] | bool):
        """The value of words of a command line.

        Raises:   ConfigError: another type than the key's; a table.
        """
        if self.dotted in TABLES:
            raise ConfigError(
                f"{self.dotted} are tables of a config file, [[{self.dotted}]], and no option. "
                "Write them in CONFIG."
            )
        if isinstance(words, bool) or (self.optional and words in ("None", ["None"])):
            return words if isinstance(words, bool) else None
        shown = words if isinstance(words, str) else " ".join(words)
        if instead := INSTEAD.get((self.dotted, shown)):
            raise ConfigError(instead)
        starts = range(0, len(words), self.width) if self.width > 1 else ()
        try:
            several = [words[start : start + self.width] for start in starts] or words
            return pydantic.TypeAdapter(self.hint).validate_python(several)
        except pydantic.ValidationError:
            names = ", ".join([*self.choices, *["None"] * self.optional])
            need = f"one of {names}" if self.choices else "pairs of values"
            raise ConfigError(
                f"--{self.dotted} takes {VALUES.get(self.hint, ('', need))[1]}; got {shown!r}."
                f"{registry.nearest(shown, self.choices)}"
            ) from None


class _Flag(argparse.Action):
    """``--section.key`` and ``--section.no_key``."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        setattr(namespace, self.dest, ".no_" not in str(option_string))


@functools.cache
def config_keys() -> dict[str, Key]:
    """{section.key: the key}, in the order of the sections."""
    every = {}
    for section in dataclasses.fields(Config):
        kind = section.default_factory
        hints = typing.get_type_hints(kind, include_extras=True)
        texts = _docstrings(kind)
        for field in dataclasses.fields(kind):  # type: ignore[arg-type]
            hint, dotted = hints[field.name], f"{section.name}.{field.name}"
            optional = type(None) in typing.get_args(hint)
            hint = typing.get_args(hint)[0] if optional else hint
            every[dotted] = Key(dotted, hint, optional, texts[field.name])
    return every


def _docstrings(kind) -> dict[str, str]:
    """{field: the string that follows it in the source of a dataclass}, each on one line."""
    (body,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in itertools.pairwise(body.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def add(parser: Parser, config: Config | None = None) -> None:
    """Add the option of every key.

    config   with one, a group a section, and each help ends with its value; without, one group,
             whose help has the first sentences of ``COMMON``.
    """
    group, section = parser.add_argument_group("keys of CONFIG, among others"), ""
    if config is None:
        recipe = config_keys()["numerics.recipe"]
        recipe.add(group, "how linears are cast: fp8ref recipes", "--recipe")
    for dotted, key in config_keys().items():
        text = key.text.replace("``", "")
        if dotted in TABLES:
            key.add(group, argparse.SUPPRESS)
        elif config is None:
            action = key.add(group, text.split(". ")[0].rstrip(".").replace("%", "%%"))
            parser.rare += [action] * (dotted not in COMMON)
        else:
            if section != (section := dotted.partition(".")[0]):
                group = parser.add_argument_group(section)
            value = getattr(getattr(config, section), dotted.partition(".")[2])
            key.add(group, f"{text} (value: {value})".replace("%", "%%"))


def spelled(words: Sequence[str]) -> list[str]:
    """The words with keys as they are declared: --run.eval-every is --run.eval_every."""
    key = re.compile(r"^--[^=.]+\.[^=]*")
    return [key.sub(lambda name: f"--{name[0][2:].replace('-', '_')}", word) for word in words]


def override(config: Config, words: Sequence[str], *, prog: str) -> Config:
    """config with the options of a command line, which are keys alone.

    Raises as ``apply``; SystemExit: an unknown option.
    """
    parser = Parser(prog=prog)
    add(parser)
    arguments, rest = parser.parse_known_args(spelled(words))
    return parser.refuse(rest) if rest else apply(config, arguments)


def apply(config: Config, arguments: argparse.Namespace) -> Config:
    """config with the keys that a command line sets.

    Raises:   ConfigError: a value of another type; ValueError as ``Config``.
    """
    sections: dict[str, dict[str, typing.Any]] = {}
    for dotted, key in config_keys().items():
        if hasattr(arguments, dotted):
            section, name = dotted.split(".")
            sections.setdefault(section, {})[name] = key.value(getattr(arguments, dotted))
    return config.replace(**{section: dict(keys) for section, keys in sections.items()})
