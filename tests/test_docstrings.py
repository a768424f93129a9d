"""pydoc is the reference: whatever a user calls says its shapes, order, special values and errors,
and where to begin.
"""

import ast
import io
import itertools
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fp8ref"
# of which users call the next alone
INNER = {PACKAGE / "commands", PACKAGE / "crosscheck" / "divergence", PACKAGE / "conformance"}
CALLED = {
    PACKAGE / "conformance" / f"{name}.py" for name in ("strategies", "parameters", "require")
}
Documented = ast.FunctionDef | ast.ClassDef

ALL = ("Shapes", "Order", "Specials", "Raises", "Source")
# What users rely on, and the sections that each has: an array's shapes, and its bits where the
# order of operations makes them.
SECTIONS = {
    "sim/quantize/cast.py": {
        "encode": ALL,
        "decode": ("Shapes", "Specials", "Raises", "Source"),
        "round_to": ALL,
    },
    "sim/quantize/scales.py": {"scales_from_amax": ALL},
    "sim/quantize/scaling.py": {
        "amax": ("Shapes", "Specials", "Raises"),
        "quantize": ("Units", *ALL),
        "quantize_with": ("Shapes", "Raises", "Source"),
        "dequantize": ("Shapes", "Specials", "Raises"),
    },
    "sim/gemm/gemm.py": {
        "mma": ALL,
        "matmul": ("Units", *ALL),
        "matmul_hp": ("Shapes", "Order", "Specials", "Raises"),
    },
    "sim/delayed.py": {
        "observe": ("Shapes", "Raises"),
        "merge": ("Shapes", "Specials", "Raises"),
        "scales": ("Order", "Specials", "Raises"),
        "update": ALL,
    },
    "sim/states/states.py": {
        "init": ("Shapes", "Raises"),
        "decode": ("Order", "Raises"),
        "step": ("Shapes", "Order", "Specials", "Raises"),
    },
    "sim/attention/attention.py": {"forward": ALL},
    "sim/attention/plain.py": {"attention_plain": ("Shapes", "Order", "Specials", "Source")},
    "sim/attention/gradients/gradients.py": {"backward": ALL},
    "sim/attention/operands/heads.py": {"quantize": ("Shapes", "Order", "Raises")},
    "sim/attention/operands/hadamard.py": {"rotate": ("Shapes", "Order", "Raises")},
    "sim/attention/softmax.py": {"step": ("Shapes", "Order")},
    "sim/linear.py": {"forward": ALL, "backward": ALL},
    "sim/distributed/sharding.py": {
        "amax": ALL,
        "quantize": ALL,
        "gather": ("Shapes", "Specials", "Raises", "Source"),
    },
    "sim/distributed/sharded_gemm.py": {"matmul": ALL},
    "sim/quantize/stats.py": {
        "statistics": ("Units", *ALL),
        "exponents": ("Shapes", "Units", "Raises", "Source"),
        "error": ("Shapes", "Raises"),
    },
    "jax/quantize/cast.py": {
        "encode": ("Shapes", "Specials", "Raises", "Source"),
        "decode": ("Raises",),
    },
    "jax/quantize/scales.py": {"scales_from_amax": ("Shapes", "Order", "Specials", "Raises")},
    "jax/quantize/scaling.py": {
        "amax": ("Shapes", "Order", "Specials", "Raises"),
        "quantize": ("Units", *ALL),
        "quantize_with": ("Shapes", "Raises"),
    },
    "jax/gemm/gemm.py": {"matmul": ALL},
    "jax/delayed.py": {
        "init": ("Raises",),
        "merge": ("Raises",),
        "update": ("Shapes", "Specials", "Raises"),
    },
    "jax/attention/attention.py": {
        "apply": ("Shapes", "Order", "Specials", "Gradient", "Raises"),
        "forward": ALL,
        "backward": ALL,
    },
    "jax/attention/exponentials.py": {"fused": ("Order", "Specials")},
    "jax/attention/operands/heads.py": {"quantize": ("Shapes", "Order", "Specials", "Raises")},
    "jax/attention/operands/hadamard.py": {"signs": ("Raises",), "rotate": ("Shapes", "Order")},
    "jax/attention/softmax.py": {"step": ("Shapes", "Order")},
    "jax/attention/probability_value.py": {"add": ("Shapes", "Order")},
    "jax/states/states.py": {"adamw": ALL, "decode": ("Raises",)},
    "jax/linear/linear.py": {
        "apply": ("Shapes", "Order", "Specials", "Returns", "Gradient", "Raises")
    },
    "jax/linear/contraction.py": {
        "dot_general": ("Shapes", "Order", "Returns", "Raises"),
        "einsum": ("Shapes", "Raises"),
    },
    "torch/quantize/cast.py": {
        "encode": ("Shapes", "Specials", "Raises", "Source"),
        "decode": ("Raises",),
    },
    "torch/quantize/scales.py": {"scales_from_amax": ALL},
    "torch/quantize/scaling.py": {
        "amax": ("Shapes", "Specials", "Raises"),
        "quantize": ("Units", *ALL),
        "quantize_with": ("Shapes", "Raises"),
    },
    "torch/gemm/gemm.py": {"matmul": ALL},
    "torch/attention/attention.py": {
        "apply": ("State", "Gradient", *ALL),
        "forward": ALL,
        "backward": ALL,
    },
    "torch/delayed/role_states.py": {"observe": ("Raises",)},
    "torch/delayed/__init__.py": {"advance": ("Shapes", "Specials"), "update": ("Specials",)},
    "torch/states/states.py": {
        "AdamW": ("Shapes", "State", "Order", "Specials", "Raises", "Source"),
        "decode": ("Raises",),
    },
    "torch/linear/linear.py": {
        "Linear": ("Shapes", "Order", "State", "Gradient", "Specials", "Raises")
    },
    "torch/model/convert.py": {
        "convert": ("Keeps", "Returns", "Raises"),
        "deconvert": ("Returns", "Raises"),
        "weights": ("Raises",),
    },
    "torch/model/parallel.py": {"parallelize": ("Raises",)},
    "selection/linears.py": {"select": ("Shapes", "Returns", "Raises")},
    "conformance/parameters.py": dict.fromkeys(
        ("casts", "scales", "quantizers"), ("Raises", "Source")
    ),
    "conformance/require.py": dict.fromkeys(
        ("require_cast", "require_scales", "require_quantized"),
        ("Shapes", "Specials", "Raises", "Source"),
    ),
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def public(path: Path) -> Iterator[Documented]:
    """The functions and classes of a module whose names have no underscore in front."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, Documented) and not node.name.startswith("_"):
            yield node


def called() -> Iterator[tuple[Path, Documented]]:
    """What users may call, and what that is made of."""
    for path in modules():
        if path in CALLED or INNER.isdisjoint(path.parents):
            yield from ((path, node) for node in public(path))


def names(path: Path) -> set[str]:
    """What a module has at its top: definitions, imports, values."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, Documented):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def test_every_module_says_what_lives_there():
    assert len(modules()) > 150
    assert [
        str(path)
        for path in modules()
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ] == []


def undocumented(
    body: list[ast.stmt], where: str, commented: frozenset[int] = frozenset()
) -> Iterator[str]:
    """The public functions, methods, classes and constants of a module's or a class's body that
    have no docstring.

    commented  lines that end in a comment, which documents a constant that ``__all__`` does not
               name: the reference shows those of ``__all__`` alone.
    """
    for node, after in itertools.zip_longest(body, body[1:]):
        if isinstance(node, Documented) and not node.name.startswith("_"):
            if not ast.get_docstring(node):
                yield f"{where}.{node.name}"
            if isinstance(node, ast.ClassDef):
                yield from undocumented(
                    [inner for inner in node.body if isinstance(inner, Documented)],
                    f"{where}.{node.name}",
                )
        elif isinstance(node, ast.Assign | ast.AnnAssign) and "." not in where:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            said = (
                isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            )
            if not isinstance(target, ast.Name) or target.id.startswith("_") or said:
                continue
            if node.end_lineno not in commented or target.id in exported(body):
                yield f"{where}.{target.id}"


def exported(body: list[ast.stmt]) -> set[str]:
    """The names in a module's ``__all__``."""
    lists = (
        node.value
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return {name for value in lists for name in ast.literal_eval(value)}


def lines_that_end_in_a_comment(text: str) -> frozenset[int]:
    """Comments beside code; one on a line of its own belongs to what follows."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return frozenset(
        token.start[0]
        for token in tokens
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip()
    )


def undocumented_of(text: str, where: str) -> list[str]:
    return list(undocumented(ast.parse(text).body, where, lines_that_end_in_a_comment(text)))


def test_every_public_name_is_documented():
    found = {
        path: undocumented_of(path.read_text(encoding="utf-8"), path.stem)
        for path in modules()
        if not path.stem.startswith("_") or path.stem == "__init__"
    }
    assert {str(path): names for path, names in found.items() if names} == {}


def test_a_comment_documents_what_the_reference_does_not_show():
    text = '__all__ = ["A"]\nA = 1  # shown\nB = 2  # tries\n# of nothing\nC = 3\n'
    assert undocumented_of(text, "m") == ["m.A", "m.C"]


def test_all_that_users_call_is_documented():
    found = list(called())
    rooms = {path.relative_to(PACKAGE).parts[0] for path, _ in found}
    assert {
        "sim",
        "jax",
        "torch",
        "conformance",
        "crosscheck",
        "estimate",
        "plots",
        "train",
        "formats.py",
    } <= rooms
    assert len(found) > 500
    assert [f"{path}: {node.name}" for path, node in found if not ast.get_docstring(node)] == []


def test_what_raises_says_so():
    raising = [
        (path, node)
        for path, node in called()
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(inner, ast.Raise) and inner.exc for inner in ast.walk(node))
    ]
    assert len(raising) > 100
    said = re.compile(r"Error\b|\b[Rr]aises\b")
    assert [
        f"{path}: {node.name}"
        for path, node in raising
        if not said.search(ast.get_docstring(node) or "")
    ] == []


@pytest.mark.parametrize("module", SECTIONS)
def test_what_makes_bits_states_its_sections(module):
    documented = {node.name: ast.get_docstring(node) or "" for node in public(PACKAGE / module)}
    for name, sections in SECTIONS[module].items():
        lines = documented[name].splitlines()
        absent = [
            section
            for section in sections
            if not any(line.lstrip().startswith(f"{section}:") for line in lines)
        ]
        assert not absent, f"{module}, {name}, states no {', '.join(absent)}"


def test_the_package_says_where_to_begin():
    said = ast.get_docstring(ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))) or ""
    parts = [
        p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists() and p.name != "commands"
    ]
    assert {
        "jax",
        "torch",
        "sim",
        "train",
        "conformance",
        "crosscheck",
        "study",
        "selection",
        "spec",
    } < set(parts)
    begins = {}
    for room in parts:
        paragraph = re.search(
            rf"^ {{4}}{room}\s(.*?)(?=^ {{4}}\w|\n\n)", said, re.MULTILINE | re.DOTALL
        )
        assert paragraph, f"nothing is said of {room}"
        begins[room] = re.findall(r"\b\w+(?:\.\w+)+", paragraph[1])
    assert all(begins[room] for room in begins if room not in ("plots", "configs", "shared"))
    for room, entries in begins.items():
        for entry in entries:
            *folders, name = entry.split(".")
            at = imported(PACKAGE / room, folders)
            held = (
                {p.stem for p in at.glob("*.py")} | names(at / "__init__.py")
                if at.is_dir()
                else names(at.with_suffix(".py"))
            )
            assert name in held, f"fp8ref.{room}.{entry} is no more"


def imported(room: Path, folders: list[str]) -> Path:
    """The file or folder of a module that a room has or imports."""
    for node in ast.parse((room / "__init__.py").read_text(encoding="utf-8")).body:
        if (
            folders
            and isinstance(node, ast.ImportFrom)
            and folders[0] in (name.name for name in node.names)
        ):
            return ROOT.joinpath(*str(node.module).split("."), *folders)
    return room.joinpath(*folders)


def test_examples_in_docstrings_are_run():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "pytest"
    ]["ini_options"]
    assert "--doctest-modules" in options["addopts"].split()
    assert "fp8ref" in options["testpaths"]
    assert sum(">>>" in path.read_text(encoding="utf-8") for path in modules()) > 5
