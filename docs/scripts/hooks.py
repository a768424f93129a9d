"""mkdocs hooks: pages that are made from the code, and a link from each clause to its text.

Made pages are the Python API, a page a module; the commands; the keys of a config. Some pages are
files from elsewhere in the repository, such as the changelog.
"""

import argparse
import ast
import dataclasses
import functools
import inspect
import re
import sys
import tomllib
import typing
from pathlib import Path

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fp8ref"
sys.path.insert(0, str(ROOT))
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "benchmarks" / "compiled")]
import support  # noqa: E402
from docstrings import linked, markdown  # noqa: E402

import floor  # noqa: E402

# Not for users to import: commands are documented as commands.
_INNER = {"commands", "kernels"}
_ELSEWHERE = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "aot.md": "benchmarks/results/aot.md",
    "aot-torch.md": "benchmarks/results/aot_torch.md",
    "compile-matrix.md": "benchmarks/results/compile_matrix.md",
}


_TUTORIAL_BOOST = 20  # a search finds tutorials first, then guides and concepts
_GUIDE_BOOST = 3
_BEHIND = ("reference/api/", "spec/tests.md", "changelog.md", "aot", "compile-matrix.md")
_IN_SEARCH = {
    *("fp8ref", "fp8ref.front.quantized", "fp8ref.front.comparison", "fp8ref.front.sweeps"),
    *("fp8ref.formats", "fp8ref.policy", "fp8ref.recipe", "fp8ref.study", "fp8ref.plots"),
    *("fp8ref.sim.quantize.cast", "fp8ref.sim.quantize.scaling", "fp8ref.sim.linear"),
    *("fp8ref.jax.linear.linear", "fp8ref.jax.flax.convert", "fp8ref.jax.states.states"),
    *("fp8ref.torch.model.convert", "fp8ref.torch.model.parallel", "fp8ref.torch.model.report"),
    *("fp8ref.torch.delayed", "fp8ref.conformance", "fp8ref.conformance.require"),
    *("fp8ref.conformance.strategies", "fp8ref.train.config.config", "fp8ref.train.loop"),
}
"""Modules whose API pages the search finds. Pages of the others are in the navigation alone."""


def on_config(config):
    """Add the modules to the navigation, and the addresses that pyproject.toml has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    urls = project.get("urls", {})
    config.site_url, config.repo_url = urls.get("Documentation"), urls.get("Source")
    for section in config.nav or []:
        if isinstance(section, dict) and "Reference" in section:
            section["Reference"] = [*section["Reference"], {"Python API": _api_nav()}]
    return config


@event_priority(100)  # before the plugins that read the files
def on_files(files, config):
    """Add the pages that are made."""
    for name, page in _modules().items():
        files.append(File.generated(config, page, content=_module_page(name)))
    files.append(File.generated(config, "reference/cli.md", content=cli_page()))
    files.append(File.generated(config, "reference/config.md", content=config_page()))
    files.append(File.generated(config, "reference/support.md", content=support.page()))
    for page, source in _ELSEWHERE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = re.sub(r"\]\(docs/", "](", text)
        text = re.sub(
            r"\[([^\]]*)\]\((?!https?:|[a-z/-]+\.md)[^)]*\)", r"\1", text
        )  # files that the site does not have
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(text: str, page, config, files) -> str:
    """Link each mention of a clause to its text in the specification, rank the page in the search,
    and fill in the tables that benchmarks make.
    """
    page.meta.setdefault("search", _search_rank(page.file.src_uri))
    if page.file.src_uri == "concepts/speed.md":
        text = floor.filled(text)
    up = "../" * page.file.src_uri.count("/")
    return linked(
        text, lambda clause: f"[{clause}]({up}spec/{clause[0].lower()}.md#{clause.lower()})"
    )


def _search_rank(source: str) -> dict:
    """What Material's search reads of a page: whether it is left out, or its boost."""
    pages_in_search = {_modules()[name] for name in _IN_SEARCH}
    if source.startswith(_BEHIND) and source not in pages_in_search:
        return {"exclude": True}
    if source.startswith("tutorials/") or source == "install.md":
        return {"boost": _TUTORIAL_BOOST}
    return {"boost": _GUIDE_BOOST} if source.startswith(("how-to/", "concepts/")) else {}


def cli_page() -> str:
    """Every command with its options, as its parser declares them."""
    from fp8ref import cli

    parser = cli._parser()
    out = ["# Command line", "", f"{parser.description.splitlines()[0]}", "", "Exit codes:", ""]
    out += ["| code | meaning |", "|---|---|"]
    codes = re.sub(r"\s+", " ", inspect.getdoc(cli).split("Exit codes: ")[1]).rstrip(".")
    out += [f"| {code.split(' ', 1)[0]} | {code.split(' ', 1)[1]} |" for code in codes.split("; ")]
    out += [
        "",
        "`--help` of a command has what people change, `--help-all` every option; with a CONFIG "
        "also every key and its value there. `--json -` prints JSON on standard output, and the "
        "text for a person goes to standard error. Colors stop with `NO_COLOR=1`, and where the "
        "output is no terminal.",
    ]
    for name, command in _subparsers(parser):
        out += ["", f"## fp8ref {name} {{ #{name} }}", "", *_command(command)]
        for path, inner in _inner(command):
            anchor = f"{name}-{path.replace(' ', '-')}"
            out += ["", f"### fp8ref {name} {path} {{ #{anchor} }}", "", *_command(inner)]
    return "\n".join(out) + "\n"


def _command(parser: argparse.ArgumentParser) -> list[str]:
    """What a command does, its usage, its examples and its options."""
    text, _, examples = (parser.description or "").partition("\n\nexamples:\n")
    first, *rest = text.split("\n", 1)
    out = [first, ""]
    for more in rest:
        filled = parser._get_formatter()._fill_text(more.strip("\n"), 100, "")
        fence = ["```"] * ("\n  " in filled)  # the form of vectors
        out += [*[f"{mark}text" for mark in fence], filled, *fence, ""]
    usage = re.sub(r"^usage: ", "", parser.format_usage()).rstrip()
    shown = [re.sub(r"^  ", "$ ", line) for line in examples.splitlines()]
    out += ["```text", usage, "```", "", *_options(parser)]
    out += ["```console", *shown, "```", ""] if shown else []
    if any(action.dest == "config" for action in parser._actions):
        out += ["Every [key of the config](config.md) is an option too: `--run.steps 20`.", ""]
    return out


def _inner(parser: argparse.ArgumentParser, path: str = ""):
    """(path, parser) of the commands of a command."""
    for name, inner in _subparsers(parser):
        commands = list(_inner(inner, f"{path} {name}".strip()))
        yield from commands or [(f"{path} {name}".strip(), inner)]


def _subparsers(parser: argparse.ArgumentParser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _options(parser: argparse.ArgumentParser) -> list[str]:
    rows = []
    for action in parser._actions:
        if (
            isinstance(action, argparse._SubParsersAction | argparse._HelpAction)
            or action.dest == "help_all"
        ):
            continue
        names = (
            ", ".join(f"`{option}`" for option in action.option_strings)
            or f"`{action.metavar or action.dest}`"
        )
        takes = f"one of {', '.join(f'`{c}`' for c in action.choices)}" if action.choices else ""
        default = (
            ""
            if action.default in (None, False, argparse.SUPPRESS)
            or "default" in (action.help or "")
            else f" Default: `{action.default}`."
        )
        text = (action.help or "").replace("|", "\\|").replace("%%", "%")
        rows.append(f"| {names} | {takes} | {text}{default} |")
    return ["| option | values | meaning |", "|---|---|---|", *rows, ""] if rows else []


def config_page() -> str:
    """Every key of a config: type, default and meaning, from the dataclasses of the sections."""
    from fp8ref.train.config import config as configs
    from fp8ref.train.config import options

    out = [
        "# Config keys",
        "",
        "A config is a TOML file with a table for each section. Every key is also an option: "
        "`--section.key VALUE`.",
        "",
    ]
    for section in dataclasses.fields(configs.Config):
        kind = typing.get_type_hints(configs.Config)[section.name]
        first = markdown(inspect.getdoc(kind) or "").split("\n\n")[0]
        out += [
            f"## {section.name} {{ #{section.name} }}",
            "",
            first,
            "",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
        ]
        for key in dataclasses.fields(kind):
            shown = "" if key.default is None else f"`{_toml(key.default)}`"
            text = options.config_keys()[f"{section.name}.{key.name}"].text
            text = text.replace("|", "\\|").replace("``", "`")
            out.append(f"| `{section.name}.{key.name}` | {_type(key.type)} | {shown} | {text} |")
        out.append("")
    return "\n".join(out)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _type(hint: object) -> str:
    hint = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f'`"{v}"`' for v in typing.get_args(hint))
    if typing.get_args(hint):
        inner = [_type(a) for a in typing.get_args(hint) if a not in (type(None), ...)]
        return f"list of {inner[0]}" if typing.get_origin(hint) is tuple else ", ".join(inner)
    return {"str": "string", "int": "integer", "float": "number", "bool": "true, false"}.get(
        getattr(hint, "__name__", str(hint)), str(hint)
    )


@functools.cache
def _modules() -> dict[str, str]:
    """{module: its page} of every module with public names, those in its ``__all__``, and of the
    packages around them.
    """
    public: set[tuple[str, ...]] = set()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if _public_names(path) and not _INNER & set(parts):
            package = parts[:-1]
            public |= {package[: i + 1] for i in range(len(package))}
            public.add(package if parts[-1] == "__init__" else parts)
    return {".".join(parts): f"reference/api/{'/'.join(parts)}.md" for parts in sorted(public)}


def _module_page(name: str) -> str:
    """The page of a module: its docstring, and the public names that it defines itself."""
    path = ROOT.joinpath(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    defined = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    members = [public for public in _public_names(path) or [] if public in defined]
    return f"::: {name}\n    options:\n      members: {members or 'false'}\n"


def _public_names(path: Path) -> list[str] | None:
    """The names in a module's ``__all__``; None: it has none."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return None


def _api_nav() -> list:
    rooms: dict[str, list] = {}
    for name, page in _modules().items():
        parts = name.split(".")
        room = "fp8ref" if len(parts) == 1 or not (PACKAGE / parts[1]).is_dir() else parts[1]
        rooms.setdefault(room, []).append({name.removeprefix("fp8ref."): page})
    return [{room: pages} for room, pages in rooms.items()]
