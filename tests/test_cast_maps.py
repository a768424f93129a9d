"""Where codes are made: the docstring of each room's ``quantize/scaling.py`` lists the modules that
call the parts of a cast, and the syntax trees of the room say the same (spec S-5)."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fp8ref"

PARTS = {
    "sim": {
        "scaling": {"quantize_blocks", "saturate", "scale_blocks"},
        "cast": {"encode", "encode_plain"},
    },
    "jax": {
        "scaling": {"quantize_blocks", "saturate", "scale_blocks"},
        "cast": {"encode", "to_fp8", "to_stored"},
        "operands": {"narrow"},
    },
    "torch": {
        "scaling": {"quantize_blocks", "scale_blocks"},
        "cast": {"encode", "to_fp8"},
        "storage": {"codes"},
        "heads": {"codes"},
    },
}
"""{room: {module: its functions that make codes, or what they round}}"""
ROW = re.compile(r"^    ([a-z_0-9.]+): (.+)$", re.MULTILINE)


def listed(room: str) -> dict[str, set[str]]:
    """{module of a room: the functions that the docstring says it calls}."""
    source = (PACKAGE / room / "quantize" / "scaling.py").read_text(encoding="utf-8")
    rows = ROW.findall(ast.get_docstring(ast.parse(source)) or "")
    assert len(dict(rows)) == len(rows)
    return {module: set(names.split(", ")) for module, names in rows}


def called(source: str, room: str) -> set[str]:
    """The parts of casts that a module names, as the docstrings spell them."""
    nodes = list(ast.walk(ast.parse(source)))
    imports = [
        ((node.module or "").rpartition(".")[2], alias)
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    modules = {alias.asname or alias.name: alias.name for _, alias in imports}
    pairs = [(module, alias.name) for module, alias in imports] + [
        (modules.get(node.value.id, node.value.id), node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    return {
        name if module == "scaling" else f"{module}.{name}"
        for module, name in pairs
        if name in PARTS[room].get(module, ())
    }


def callers(room: str) -> dict[str, set[str]]:
    """{module of a room, outside of quantize: the parts of casts that it names}."""
    modules = {
        ".".join(path.relative_to(PACKAGE / room).with_suffix("").parts): called(
            path.read_text(encoding="utf-8"), room
        )
        for path in sorted((PACKAGE / room).rglob("*.py"))
    }
    return {
        module: names
        for module, names in modules.items()
        if names and not module.startswith("quantize.")
    }


@pytest.mark.parametrize("room", PARTS)
def test_the_docstring_lists_the_modules_that_make_codes(room):  # S-5
    assert listed(room) == callers(room)


@pytest.mark.parametrize(
    ("room", "line", "names"),
    [
        ("sim", "codes = scaling.saturate(x, fmt)", {"saturate"}),
        ("sim", "from fp8ref.sim.quantize.scaling import scale_blocks", {"scale_blocks"}),
        ("jax", "f = partial(cast.to_stored, fmt=fmt)", {"cast.to_stored"}),
        ("torch", "p8 = heads.codes(p, fmt)", {"heads.codes"}),
        ("torch", "from fp8ref.torch.x import heads as h\np8 = h.codes(p, fmt)", {"heads.codes"}),
        ("torch", "q = scaling.quantize(x, fmt)", set()),
    ],
)
def test_a_new_caller_is_seen(room, line, names):  # S-5
    assert called(line, room) == names
