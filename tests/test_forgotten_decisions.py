"""A decision that is added and then forgotten fails here: every field of a variant, of a cast, of a
GEMM, of a scale policy and of the trainer's configuration is read in every backend, or is listed
as refused there. Reads are attributes in the syntax trees of the rooms.
"""

import ast
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from fp8ref.conformance.attention import decisions
from fp8ref.policy import E8M0Rule, ScalePolicy, TwoLevel
from fp8ref.spec.attention.variant import Variant
from fp8ref.spec.gemm import CastSpec, GemmSpec
from fp8ref.train.config import sections

PACKAGE = Path(__file__).parents[1] / "fp8ref"
ROOMS = ("sim", "jax", "torch")
PLANTED = "planted_decision"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def trees(where: str) -> list[ast.Module]:
    """The syntax trees of a module, or of all modules of a room."""
    path = PACKAGE / where
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert files, where
    return [ast.parse(file.read_text(encoding="utf-8")) for file in files]


def attributes(nodes: Iterable[ast.AST]) -> set[str]:
    """The names of the attributes that are read, and of what is imported."""
    names = set()
    for node in itertools.chain.from_iterable(map(ast.walk, nodes)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
    return names


def functions(where: str) -> Iterator[Function]:
    """The functions and properties of rooms that others reach; checks read every field."""
    for node in itertools.chain.from_iterable(map(ast.walk, trees(where))):
        if isinstance(node, Function) and not node.name.lstrip("_").startswith(
            ("post_init", "check", "foreign")
        ):
            yield node


def reads(start: set[str], through: tuple[str, ...]) -> set[str]:
    """Attributes that are read, directly or by a property or function of the modules ``through``."""
    read, before = set(start), set()
    while read != before:
        before = set(read)
        for function in itertools.chain.from_iterable(map(functions, through)):
            if function.name in read:
                read |= attributes([function])
    return read


def room_reads(*rooms: str, through: tuple[str, ...]) -> set[str]:
    """``reads`` of rooms."""
    return reads(set().union(*(attributes(trees(room)) for room in rooms)), through)


def limit_reads(backend: str) -> set[str]:
    """What the limits of a backend read, in ``spec.support``."""
    (module,) = trees("spec/support.py")
    (table,) = (
        node.value
        for node in module.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "TAKES"
    )
    assert isinstance(table, ast.Dict)
    helpers = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    limits: list[ast.AST] = []
    for value in table.values:
        if isinstance(value, ast.Dict):
            keys = [ast.literal_eval(key) for key in value.keys if key is not None]
            limits += [v for key, v in zip(keys, value.values, strict=True) if key == backend]
        else:
            assert ast.unparse(value).startswith("_both("), ast.unparse(value)
            limits.append(value)
    names = {n.id for limit in limits for n in ast.walk(limit) if isinstance(n, ast.Name)}
    return attributes([*limits, *(helpers[name] for name in names & helpers.keys())])


def keys_of(kind: type, *without: str) -> set[str]:
    """The fields of a dataclass."""
    return {field.name for field in dataclasses.fields(kind)} - {*without}


# ---- Attention


def unread_of_variants(keys: set[str], room: str) -> set[str]:
    through = ("spec/attention",)
    read = room_reads(f"{room}/attention", through=through)
    if room != "sim":
        read |= reads(limit_reads(room), through)
    return keys - read


def unasked(keys: set[str]) -> set[str]:
    # p_scale is in the simulator's ``probability_scale``, which "largest P" asks
    read = room_reads("conformance/attention/decisions.py", through=("spec/attention",))
    return keys - read - {"p_scale"}


@pytest.mark.parametrize("room", ROOMS)
def test_every_decision_of_a_variant_is_read_or_refused(room):
    keys = keys_of(Variant, "name", "source")
    assert unread_of_variants(keys, room) == set()
    assert unread_of_variants({*keys, PLANTED}, room) == {PLANTED}


def test_every_decision_of_a_variant_is_asked_or_listed_as_unseen():
    keys = keys_of(Variant, "name", "source")
    assert unasked(keys) == set(decisions.UNSEEN)
    assert unasked({*keys, PLANTED}) == {*decisions.UNSEEN, PLANTED}


# ---- Casts, GEMMs and scale policies


def unread_of_casts(keys: set[str], room: str) -> set[str]:
    through = ("spec/gemm.py", "recipe.py")
    read = room_reads(room, through=through)
    return keys - (read if room == "sim" else read | reads(limit_reads(room), through))


@pytest.mark.parametrize("kind", [CastSpec, GemmSpec])
@pytest.mark.parametrize("room", ROOMS)
def test_every_decision_of_a_cast_is_read_or_refused(room, kind):
    assert unread_of_casts(keys_of(kind), room) == set()
    assert unread_of_casts({*keys_of(kind), PLANTED}, room) == {PLANTED}


def taken_by_backends() -> set[str]:
    """The decisions of a policy and of its e8m0 rule that backends take with other values than the
    defaults: those besides which ``_is_in_backends`` and ``_is_floored_quotient`` want no other."""
    besides = {
        key.value
        for function in functions("policy.py")
        if function.name in ("_is_in_backends", "_is_floored_quotient")
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_changed"
        for keyword in node.keywords
        for key in ast.walk(keyword.value)
        if isinstance(key, ast.Constant)
    }
    return {str(key) for key in besides} - {"name"}


def test_the_simulator_reads_every_decision_of_a_policy():  # S-9
    read = room_reads("sim", through=("policy.py",))
    for kind in (ScalePolicy, E8M0Rule, TwoLevel):
        assert keys_of(kind) - read == set()


@pytest.mark.parametrize("room", ["jax", "torch"])
def test_backends_read_every_decision_of_a_policy_that_they_take(room):  # S-9
    """They refuse all others, one that is added too: tests/test_policy.py."""
    keys = taken_by_backends()
    assert keys == {"eps", "ratio", "power_of_two", "e8m0", "scale_of_code_0", "scale_of_nan"}
    assert keys - attributes(trees(room)) == set()


# ---- The trainer's configuration

SECTIONS = [kind for name in sections.__all__ if isinstance(kind := getattr(sections, name), type)]
SHARED = (
    *("train/loop.py", "train/tensors.py", "train/data", "train/run", "train/models"),
    "commands/train.py",
)
"""What both trainers share."""


def foreign(backend: str) -> set[str]:
    """The keys that ``ParallelConfig.foreign`` refuses of a backend, set to any other value."""
    (function,) = (
        node
        for tree in trees("train/config/sections/parallel.py")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "foreign"
    )
    (choice,) = (
        node
        for node in ast.walk(function)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "backend == 'torch'"
    )
    lists = {"torch": choice.body, "jax": choice.orelse}
    keys = {
        node.value
        for statement in lists[backend]
        for node in ast.walk(statement)
        if isinstance(node, ast.Constant)
    }
    return keys & keys_of(sections.ParallelConfig)


def unread_keys(backend: str, refused: set[str], *added: str) -> set[str]:
    read = room_reads(f"train/{backend}", *SHARED, through=("train/config",))
    keys = set(added).union(*map(keys_of, SECTIONS))
    return keys - read - refused


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_every_key_of_the_configuration_is_read_or_refused(backend):  # T-1
    assert unread_keys(backend, foreign(backend)) == set()
    assert unread_keys(backend, foreign(backend), PLANTED) == {PLANTED}


@pytest.mark.parametrize(("backend", "key"), [("jax", "reduction"), ("torch", "scan")])
def test_a_key_of_one_backend_alone_has_to_be_refused_by_the_other(backend, key):  # T-1
    assert key in unread_keys(backend, set())
    assert key in foreign(backend)
