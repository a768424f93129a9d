"""Measure the structure of the package: sizes, names, circles, guards. `make house` prints it.

Everything is read from the source; nothing of the package is imported.
"""

import ast
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fp8ref"
Function = ast.FunctionDef | ast.AsyncFunctionDef

WIDTH = 100
LINES = 60
"""Most lines of a function."""
PARAMETERS = 8
MODULES = 14
"""Most modules in a folder, besides __init__."""
AT_ROOT = {"__main__", "cli", "formats", "policy", "recipe"}
"""The modules of fp8ref/ besides __init__: the command, and what users import by name."""

DIALECT = ("found", "given", "made", "how", "known", "told", "taken", "of_")
"""Names that say neither a noun of the field nor a type; ``of_`` begins them."""

ROOMS = {
    "quantize": "sim jax torch",
    "gemm": "sim jax torch",
    "attention": "sim jax torch",
    "states": "sim jax torch",
    "experts": "sim jax torch",
    "distributed": "sim jax torch",
    "linear": "jax torch",
    "proof": "jax torch",
    "kernels": "sim jax torch",
    "blocks": "torch",
    "transforms": "jax",
    "flax": "jax",
    "delayed": "torch",
    "model": "torch",
    "observe": "torch",
    "tensors": "torch",
}
"""The rooms of sim, jax and torch: the same name is the same idea."""

CASTS = {"encode", "encode_plain", "to_fp8"}
"""The functions that make codes."""


@cache
def modules() -> dict[str, Path]:
    """{dotted name: file} of the package."""
    named = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Every node of a file's syntax tree."""
    return list(ast.walk(tree(path)))


def lines() -> Iterator[tuple[str, str]]:
    """(where, line) of every line of the package."""
    for path in modules().values():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield f"{path.relative_to(ROOT)}:{number}", line


def too_wide() -> list[str]:
    """Where lines have more than 100 columns, a type checker's or linter's pragma apart, as ruff
    counts them.
    """
    return [where for where, line in lines() if len(_PRAGMA.sub("", line)) > WIDTH]


_PRAGMA = re.compile(r"\s+# (type: ignore|noqa).*$")


def lines_at(width: int) -> int:
    """Lines of the package as ruff formats it at a width."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "fp8ref"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        ruff = [sys.executable, "-m", "ruff", "format", "-q", "--isolated", "--line-length"]
        subprocess.run([*ruff, str(width), str(copy)], check=True)
        return sum(len(p.read_text(encoding="utf-8").splitlines()) for p in copy.rglob("*.py"))


def functions() -> Iterator[tuple[str, Function]]:
    """(where, function) of every function and method."""
    for path in modules().values():
        for node in nodes(path):
            if isinstance(node, Function):
                yield f"{path.relative_to(ROOT)}:{node.name}", node


def length(function: Function) -> int:
    """Lines of a function, its decorators and docstring included."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def parameters(function: Function) -> int:
    """Parameters of a function but self and cls."""
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def is_kernel(where: str) -> bool:
    """Whether a function is one of a kernel, whose arrays are parameters one by one."""
    return "kernel" in where.rpartition(":")[0] or where.rpartition(":")[0].endswith("update.py")


def long_functions() -> list[str]:
    """Functions of more than 60 lines, kernels apart."""
    return [where for where, node in functions() if length(node) > LINES and not is_kernel(where)]


def wide_signatures() -> list[str]:
    """Functions of more than 8 parameters, kernels apart."""
    return [
        where
        for where, node in functions()
        if parameters(node) > PARAMETERS and not is_kernel(where)
    ]


def folders() -> dict[str, list[str]]:
    """{folder: its modules but __init__}."""
    held = defaultdict(list)
    for path in modules().values():
        if path.stem != "__init__":
            held[path.parent.relative_to(ROOT).as_posix()].append(path.stem)
    return dict(held)


def shared_prefixes() -> list[str]:
    """folder/prefix_ of words that begin the names of three modules of a folder."""
    found = []
    for folder, names in folders().items():
        counts = Counter(name.split("_")[0] for name in names)
        found += [f"{folder}/{prefix}" for prefix, count in counts.items() if count > 2]
    return found


def imports_by_string() -> list[str]:
    """Where ``import_module`` takes a name of the package."""
    return [f"{name}: {said}" for name, said in _strings_imported()]


def _strings_imported() -> Iterator[tuple[str, str]]:
    """(module, pattern of what it imports) of every ``import_module`` of our own names."""
    for name, path in modules().items():
        for node in nodes(path) if "import_module" in path.read_text(encoding="utf-8") else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                said = ast.unparse(node.args[0]).lstrip("f").strip("'\"")
                if said.startswith("fp8ref"):
                    yield name, said


LAZY_LOADERS = {"fp8ref", "fp8ref.conformance"}
"""The modules that import their public names when one is used; pytest imports both for its plugin."""


def module_getattrs() -> list[str]:
    """Other modules with a ``__getattr__`` of their own, also under an ``if``."""
    return [
        name
        for name, path in modules().items()
        for node in tree(path).body
        for inner in (node, *(node.body if isinstance(node, ast.If) else ()))
        if isinstance(inner, Function) and inner.name == "__getattr__" and name not in LAZY_LOADERS
    ]


def imports() -> dict[str, set[str]]:
    """{module: the package's modules that it imports}, strings given to import_module counted."""
    named = modules()
    arrows: dict[str, set[str]] = {name: set() for name in named}
    for name, path in named.items():
        for node in nodes(path):
            if isinstance(node, ast.Import):
                arrows[name] |= {alias.name for alias in node.names} & named.keys()
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    arrows[name] |= {full if full in named else node.module} & named.keys()
    for name, said in _strings_imported():
        backend, name_ = r"\\{(?:backend|BACKEND)[^}]*\\}", r"\\{[^}]*\\}"
        pattern = re.compile(
            re.sub(name_, r"[\\w.]+", re.sub(backend, "(jax|torch)", re.escape(said)))
        )
        arrows[name] |= {other for other in named if pattern.fullmatch(other)}
    for name in arrows:
        arrows[name].discard(name)
    return arrows


def circles() -> list[list[str]]:
    """Groups of modules, __init__ apart, that import each other in a circle."""
    arrows = {
        name: {other for other in others if modules()[other].stem != "__init__"}
        for name, others in imports().items()
        if modules()[name].stem != "__init__"
    }
    reached = {name: _reached(name, arrows) for name in arrows}
    groups = {
        tuple(sorted(other for other in seen if name in reached[other]))
        for name, seen in reached.items()
        if name in seen
    }
    return [list(group) for group in sorted(groups)]


def _reached(start: str, arrows: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    ahead = list(arrows[start])
    while ahead:
        name = ahead.pop()
        if name not in seen:
            seen.add(name)
            ahead += arrows[name]
    return seen


def splats() -> list[str]:
    """Calls with ``**name`` of a local variable, which hides their arguments from a type checker."""
    found = []
    for where, function in functions():
        if not any(isinstance(n, ast.keyword) and n.arg is None for n in ast.walk(function)):
            continue
        assigned = {
            node.id
            for node in ast.walk(function)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        found += [
            f"{where} **{keyword.value.id}"
            for node in ast.walk(function)
            if isinstance(node, ast.Call)
            for keyword in node.keywords
            if keyword.arg is None
            and isinstance(keyword.value, ast.Name)
            and keyword.value.id in assigned
        ]
    return found


def dialect() -> dict[str, float]:
    """{word: how many definitions of variables, parameters and functions have it, in 10,000 lines}."""
    counts: Counter[str] = Counter()
    for path in modules().values():
        for node in nodes(path):
            name = None
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            elif isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, Function):
                name = node.name
            if name is not None:
                counts.update(
                    word
                    for word in DIALECT
                    if name == word or (word == "of_" and name.lstrip("_").startswith("of_"))
                )
    total = sum(1 for _ in lines())
    return {word: 1e4 * counts[word] / total for word in DIALECT}


def guards() -> int:
    """``if`` statements whose body only raises."""
    return sum(
        isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise)
        for path in modules().values()
        for node in nodes(path)
    )


def casts_outside() -> list[str]:
    """Functions of sim, jax and torch that make codes by themselves, outside of quantize/."""
    return sorted(
        {
            where
            for where, function in functions()
            if re.match(r"fp8ref/(sim|jax|torch)/(?!quantize/|kernels/)", where)
            for node in ast.walk(function)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute | ast.Name)
            and ast.unparse(node.func).split(".")[-1] in CASTS
        }
    )


def comments() -> float:
    """The share of lines with a comment."""
    total = commented = 0
    for _, line in lines():
        total += 1
        commented += bool(re.match(r"\s*#", line) or re.search(r"\s{2}# ", line))
    return commented / total


def figures() -> dict[str, object]:
    """Every figure by name."""
    sizes = sorted(length(node) for _, node in functions())
    deciles = statistics.quantiles(sizes, n=10)
    widest = max(folders().items(), key=lambda item: len(item[1]))
    return {
        "files": len(modules()),
        "lines": sum(1 for _ in lines()),
        "lines at 88 columns": lines_at(88),
        "lines over 100 columns": len(too_wide()),
        "lines of a function, median": statistics.median(sizes),
        "lines of a function, 90th percentile": deciles[8],
        "functions over 60 lines": len(long_functions()),
        "functions over 8 parameters": len(wide_signatures()),
        "largest folder": f"{widest[0]}, {len(widest[1])} modules",
        "prefixes of three modules": len(shared_prefixes()),
        "circles of imports": len(circles()),
        "imports by string": len(imports_by_string()),
        "module __getattr__": len(module_getattrs()),
        "calls with ** of a local": len(splats()),
        "guards": guards(),
        "functions that cast outside quantize/": len(casts_outside()),
        "comments, % of lines": round(100 * comments(), 1),
        **{f"names '{word}' in 10,000 lines": round(n, 1) for word, n in dialect().items()},
    }


if __name__ == "__main__":
    for what, figure in figures().items():
        print(f"{what:40} {figure}")
    for what in sys.argv[1:]:  # the name of a function above: all that it finds
        print(*(f"  {item}" for item in globals()[what]()), sep="\n")
