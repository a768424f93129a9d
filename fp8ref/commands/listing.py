"""fp8ref configs, recipes and policies: the names that commands take, and completing them."""

import argparse
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

from fp8ref.commands import shared
from fp8ref.commands.shared import check_json, conclude
from fp8ref.shared import console, extras
from fp8ref.shared.arguments import Parser
from fp8ref.shared.result import Result

EXAMPLES = {
    "configs": "train tiny --run.steps 20",
    "recipes": "train tiny --recipe rowwise",
    "policies": "vectors gen scale --format e4m3fn --policy te_block",
}
"""{command: what to do with one of its names}."""


@dataclass(frozen=True)
class Listing(Result):
    """Rows of words, each with a name first and a sentence last."""

    rows: list[dict[str, str]]
    ok: bool = True

    def to_dict(self) -> dict[str, dict[str, str]]:
        """{name: the rest of its row}."""
        return {row["name"]: {k: v for k, v in row.items() if k != "name"} for row in self.rows}

    def render(self, console) -> None:
        """Print a line for each row, in columns."""
        widths = {key: max(len(row[key]) for row in self.rows) for key in self.rows[0]}
        for row in self.rows:
            console.show("  ".join(text.ljust(widths[key]) for key, text in row.items()).rstrip())

    def print(self) -> None:
        """``render`` without rich, which the core install lacks."""
        self.render(console)


def add(commands) -> None:
    """Add ``fp8ref configs``, ``recipes`` and ``policies``."""
    for name, example in EXAMPLES.items():
        text = f"List the {name} that commands take by name.\n\n$ fp8ref {name}\n"
        text += f"$ fp8ref {name} --json -\n$ fp8ref {example}"
        command = shared.plain(commands, name, _list, text)
        command.set_defaults(names=name)
        shared.add_json(command, "write the list to FILE")


def _list(arguments: argparse.Namespace) -> int:
    check_json(arguments.json)
    from fp8ref import configs, front

    if arguments.names == "configs":
        rows = [_config(name) for name in configs.NAMES]
    else:
        listed = front.recipes if arguments.names == "recipes" else front.policies
        rows = [{"name": name, "summary": line} for name, line in listed.rows]
    return conclude(Listing(rows), arguments.json)


def _config(name: str) -> dict[str, str]:
    from fp8ref import configs
    from fp8ref.spec import llama

    keys = tomllib.loads((configs.FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    model = llama.LlamaConfig(**keys["model"])
    size = sum(math.prod(shape) for shape in llama.parameter_shapes(model).values())
    return {
        "name": name,
        "size": f"{size / 1e9:.1f}B" if size >= 1e9 else f"{size / 1e6:.1f}M",
        "model": "Qwen3-MoE" if model.num_experts else "Llama",
        "summary": configs.summary(name),
    }


SHELLS = ("bash", "zsh")
"""The shells of ``--completion``."""

_BASH = """_fp8ref_configs() {
  compgen -W "%s" -- "$1"
  compgen -f -X "!*.toml" -- "$1"
  compgen -d -- "$1"
}"""
_ZSH = """_fp8ref_configs() {
  _alternative "configs:config:(%s)" "files:file:_files -g '*.toml'"
}"""


class Completion(argparse.Action):
    """``--completion SHELL``."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        """Print the script, and exit."""
        assert isinstance(parser, Parser)
        try:
            extras.require("train", "fp8ref --completion", "shtab")
            import shtab

            _name_values(parser)
            print(shtab.complete(parser, str(values)))
        except ImportError as error:
            parser.error(str(error))
        parser.exit()


def _name_values(command: Parser) -> None:
    """Set what shtab completes each option of a command by, and of those under it."""
    import shtab

    from fp8ref import configs, front, recipe
    from fp8ref.train.config import options
    from fp8ref.train.report import what_if

    command.before([])
    names = {dotted: key.choices for dotted, key in options.config_keys().items()}
    names |= dict.fromkeys(("recipe", "recipes", "numerics.recipe"), tuple(recipe.RECIPES))
    replays = command.prog.endswith(" replay")
    names |= {"policy": what_if.KNOWN if replays else tuple(front.policies)}
    for action in command._actions:
        if isinstance(action.choices, dict):
            for inner in action.choices.values():
                _name_values(inner)
        elif action.dest == "config":
            words = " ".join(configs.NAMES)
            action.complete = {  # type: ignore[attr-defined]
                **dict.fromkeys(SHELLS, "_fp8ref_configs"),
                "preamble": {"bash": _BASH % words, "zsh": _ZSH % words},
            }
        elif names.get(action.dest):
            action.choices = names[action.dest]
        elif action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
