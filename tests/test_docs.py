"""The documentation does what it says: programs are run, commands are parsed, links of the README
lead somewhere.
"""

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fp8ref import cli
from fp8ref.train.config import config as configs
from fp8ref.train.config import options

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "notebooks" not in page.parts]
PROGRAM = re.compile(
    r"^( *)```python\n(.*?)^ *```\n(?:\n* *```text\n(.*?)^ *```)?", re.DOTALL | re.MULTILINE
)
COMMANDS = re.compile(r"^ *```console\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def named(pages) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "page", pages, ids=lambda page: page.relative_to(ROOT).as_posix()
    )


def programs(page: Path) -> list[tuple[str, str]]:
    """(program, what it prints) of each block, without the indentation of a block in a list or a
    box.
    """
    found = PROGRAM.findall(page.read_text(encoding="utf-8"))
    return [
        tuple(re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for text in (program, printed))
        for indent, program, printed in found
    ]


def commands(page: Path) -> list[str]:
    """The command lines of fp8ref, joined where a backslash continues them."""
    lines = (
        "\n".join(COMMANDS.findall(page.read_text(encoding="utf-8")))
        .replace("\\\n", " ")
        .splitlines()
    )
    said = [line.strip().removeprefix("$ ") for line in lines if line.strip().startswith("$ ")]
    parts = [part.strip() for line in said for part in re.split(r"\||&&|;", line.split("  #")[0])]
    return [
        found[1]
        for part in parts
        if (
            found := re.match(
                r"(?:\w+=\S+ )*(?:torchrun .*?-m |python -m |\.venv/bin/)?fp8ref (.*)", part
            )
        )
    ]


LONG = (
    "flax-model.md",
    "how-to/optimizer-states.md",
    "attention.md",
    "how-to/four-bits.md",
    "how-to/study.md",
    "concepts/accumulation.md",
)
"""Pages whose programs take five seconds and more."""


@named(
    [
        pytest.param(page, marks=[pytest.mark.slow] * page.as_posix().endswith(LONG))
        for page in PAGES
        if programs(page)
    ]
)
def test_programs_print_what_the_page_says(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    if page.stem == "equinox":
        pytest.importorskip("equinox")  # of the test extra alone
    for program, printed in programs(page):
        # no file: hypothesis would read its source there
        exec(compile(program, f"<{page.name}>", "exec"), names)
        run_parametrized(names)
        assert capsys.readouterr().out == printed, program


def run_parametrized(names: dict) -> None:
    """Call the pytest functions of a program with each of their parameters; a later program does
    not call them again.
    """
    for name in [name for name, value in names.items() if getattr(value, "pytestmark", None)]:
        function = names.pop(name)
        parametrize = function.pytestmark[0]
        for parameter in parametrize.args[1]:
            function(**dict(zip(parametrize.args[0], parameter.values, strict=True)))


@named([page for page in PAGES if commands(page)])
def test_commands_parse(page):
    for command in commands(page):
        arguments = shlex.split(
            command.split(" > ")[0].split(" < ")[0].rstrip("&").replace("[", "").replace("]", "")
        )
        known, rest = parse(arguments)
        assert not rest, command
        if getattr(known, "config", None) is not None:
            # keys of experts are of a model that has some
            base = (
                configs.load(known.config)
                if str(known.config) in ("tiny-moe", "qwen3-30b-a3b")
                else configs.Config()
            )
            options.apply(base, known)


def parse(arguments: list[str]):
    """(known arguments, words that are none); nothing of a command that only prints."""
    if {"--help", "--help-all", "--version", "--completion"} & {*arguments} or not arguments:
        return None, []
    return cli._parser().parse_known_args(arguments)


# Commands that take seconds, need nothing and print the same everywhere: what a page says of them
# is compared.
REPEATABLE = re.compile(r"estimate |train .*--dry-run|vectors gen |--version")


def outputs(page: Path) -> list[tuple[str, str]]:
    """(command, what the page says it prints) of the repeatable commands."""
    found = []
    for block in COMMANDS.findall(page.read_text(encoding="utf-8")):
        for part in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            command, _, printed = part.partition("\n")
            if (
                "|" not in command
                and ">" not in command
                and printed.strip()
                and re.match(rf"fp8ref (?:{REPEATABLE.pattern})", command)
            ):
                found.append((command.removeprefix("fp8ref "), printed))
    return found


@named([page for page in PAGES if outputs(page)])
def test_commands_print_what_the_page_says(page, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    for command, said in outputs(page):
        assert cli.main(shlex.split(command)) == 0
        printed = tidy(capsys.readouterr().out)
        for piece in tidy(said).split("..."):  # what the page leaves out
            assert piece.strip() in printed, command


def tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines())


def names_taken(program: str) -> Iterator[tuple[ModuleType, str]]:
    """(module of fp8ref, name) of each name that a program takes from a module."""
    modules: dict[str, ModuleType] = {}
    nodes = list(ast.walk(ast.parse(program)))
    for node in nodes:
        if isinstance(node, ast.Import):
            aliases = [alias for alias in node.names if alias.name.startswith("fp8ref.")]
            modules |= {a.asname: importlib.import_module(a.name) for a in aliases if a.asname}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fp8ref":
            for alias in node.names:
                value = member(importlib.import_module(node.module), alias.name)
                if isinstance(value, ModuleType):
                    modules[alias.asname or alias.name] = value
                else:
                    yield importlib.import_module(node.module), alias.name
    for node in nodes:
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path, node = [node.attr, *path], node.value
        if path and isinstance(node, ast.Name) and node.id in modules:
            value = modules[node.id]
            while path and isinstance(member(value, path[0]), ModuleType):
                value, path = member(value, path[0]), path[1:]
            if path:
                yield value, path[0]


def member(module: ModuleType, name: str):
    """What a module has under a name, a module of a package imported if need be."""
    if not hasattr(module, name):
        importlib.import_module(f"{module.__name__}.{name}")
    return getattr(module, name)


@named(PAGES)
def test_a_page_takes_public_names_alone(page):
    taken = {pair for program, _ in programs(page) for pair in names_taken(program)}
    private = {f"{m.__name__}.{name}" for m, name in taken if name not in getattr(m, "__all__", ())}
    assert private == set()


def test_a_private_name_is_seen():
    program = "from fp8ref.sim import scaling\nscaling.quantize(x)\nscaling.magnitudes(x)"
    assert [name for _, name in names_taken(program)] == ["quantize", "magnitudes"]
    assert "magnitudes" not in importlib.import_module("fp8ref.sim.quantize.scaling").__all__


def test_there_is_something_to_run():
    assert sum(len(programs(page)) for page in PAGES) > 50
    assert sum(len(commands(page)) for page in PAGES) > 80
    assert sum(len(outputs(page)) for page in PAGES) > 3


def test_the_readme_is_a_page():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 250


@named(PAGES)
def test_every_block_that_is_opened_is_closed(page):
    opened = None
    for line in page.read_text(encoding="utf-8").splitlines():
        if opened is None and (found := re.match(r"^ *(```+)", line)):
            opened = found[1]
        elif opened is not None and re.match(rf"^ *{opened}$", line):
            opened = None
        else:
            assert opened is not None or not re.match(r"^[┏┃┡│└]", line), (
                f"a table outside of a block: {line}"
            )
    assert opened is None


JAX_CLASSES = {"llama/llama": "Llama", "mesh": "Layout", "llama/forward_pass": "Pass"}
"""{module of train/jax: the class whose methods the text names}; PyTorch's Llama.forward is in a
table.
"""


def test_the_files_and_names_of_a_step_are_there():
    """Of the tables of step-in-code.md: each file defines the functions and methods that a reader
    is sent to, and no path is longer than ten.
    """
    text = (ROOT / "docs/concepts/step-in-code.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (\d+)(?:, (?:instead|on ranks))? \| `([^`]+)` \| ([^|]+) \|", text, re.MULTILINE
    )
    assert [int(n) for n, *_ in rows] == [
        *range(1, 5),
        *range(4, 9),
        6,
        9,
        *range(1, 11),
        *range(1, 5),
        4,
    ]
    for _, path, names in rows:
        assert set(re.findall(r"`([^`]+)`", names)) <= defined(
            ast.parse((ROOT / "fp8ref" / path).read_text(encoding="utf-8"))
        ), path
    # of files that need not be opened
    for name, path in re.findall(r"`([\w.]+)` of\s`([\w/]+\.py)`", text):
        there = defined(ast.parse((ROOT / "fp8ref" / path).read_text(encoding="utf-8")))
        assert any(f".{one}".endswith(f".{name}") for one in there), (name, path)
    methods = {
        f"train/jax/{name}.py": set(re.findall(rf"`({of}\.\w+)`", text))
        for name, of in JAX_CLASSES.items()
    }
    for path, names in methods.items():
        assert names - {"Llama.forward"} <= defined(
            ast.parse((ROOT / "fp8ref" / path).read_text(encoding="utf-8"))
        ), path
    # torchao's
    others = (
        set(re.findall(r"`([\w/]+\.py)`", text))
        - {path for _, path, _ in rows}
        - {"float8_linear.py"}
    )
    assert [path for path in others if not (ROOT / "fp8ref" / path).exists()] == []


def defined(tree: ast.Module) -> set[str]:
    """Functions and classes of a module by name, and methods as Class.method."""
    kinds = ast.FunctionDef | ast.ClassDef
    found = {node.name for node in tree.body if isinstance(node, kinds)}
    return found | {
        f"{node.name}.{inner.name}"
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for inner in node.body
        if isinstance(inner, kinds)
    }


@named([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"])
def test_links_to_files_lead_to_files(page):
    """Of what the site does not hold; mkdocs checks the rest."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_search_ranks_tutorials_first_and_finds_few_api_pages(monkeypatch):
    """Only where the documentation's tools are installed; ``make docs`` installs them."""
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "scripts"))
    hooks = importlib.import_module("hooks")
    boost = {
        page: hooks._search_rank(page).get("boost", 1)
        for page in ("tutorials/first-quantization.md", "how-to/train.md", "spec/s.md")
    }
    assert sorted(boost, key=boost.__getitem__, reverse=True) == list(boost)
    api = [page for page in hooks._modules().values() if "exclude" not in hooks._search_rank(page)]
    assert len(api) == len(hooks._IN_SEARCH) < 25
    assert hooks._search_rank("changelog.md") == {"exclude": True}
