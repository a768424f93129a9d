"""Patterns exclude the modules that engines exclude, and take no exponential time."""

import itertools
import re

import pytest

from fp8ref.checkpoints import patterns

LAYER = "model.layers.1.mlp"


@pytest.mark.parametrize(
    ("engine", "pattern", "module", "excluded"),
    [
        ("transformers", "lm_head", "lm_head", True),
        ("transformers", "model.layers.1", f"{LAYER}.up_proj", True),
        ("transformers", "model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("transformers", "up_proj", f"{LAYER}.up_proj", True),
        ("transformers", "mlp.gate", f"{LAYER}.gate", True),
        ("transformers", "mlp.gate", f"{LAYER}.gate_proj", False),
        ("transformers", r"model\.layers\.\d+\.mlp", f"{LAYER}.gate_proj", True),
        ("torchao", "lm_head", "lm_head", True),
        ("torchao", "mlp", f"{LAYER}.gate_proj", False),
        ("compressed-tensors", "lm_head", "lm_head", True),
        ("compressed-tensors", "lm_head", "model.lm_head", False),
        ("compressed-tensors", "re:.*gate$", f"{LAYER}.gate", True),
        ("compressed-tensors", "re:.*gate$", f"{LAYER}.gate_proj", False),
        ("compressed-tensors", "re:^(?!.*experts).*proj", f"{LAYER}.up_proj", True),
        ("compressed-tensors", "re:^(?!.*experts).*proj", f"{LAYER}.experts.0.up_proj", False),
        ("modelopt", "*.gate", f"{LAYER}.gate", True),
        ("modelopt", "model.layers.1*", f"{LAYER}.gate", True),
        ("modelopt", "lm_head", "language_model.lm_head", True),
        ("modelopt", "*.gate", f"{LAYER}.gate_proj", False),
        ("vllm", f"{LAYER}.gate", f"{LAYER}.gate", True),
        ("vllm", "mlp.gate", f"{LAYER}.gate", False),
        ("vllm", f"{LAYER}.experts.3.up_proj", f"{LAYER}.experts.0.up_proj", True),
        ("sglang", "mlp.gate", f"{LAYER}.gate", True),
        ("sglang", "mlp.gate", f"{LAYER}.gate_proj", False),
        ("substring", "mlp.gate", f"{LAYER}.gate_proj", True),
        ("substring", "mlp.gate_up", f"{LAYER}.up_proj", True),
    ],
)
def test_a_pattern_excludes_as_its_engine_says(engine, pattern, module, excluded):
    assert (patterns.excluding(engine, ["x", pattern], module) == pattern) == excluded


ATOMS = ["a", ".", "[^b]", r"\w", "(ab|a)", "(a*)*", "b+?", "^", "$", r"\b", "(?!b)", "(?<=a)"]


@pytest.mark.parametrize("text", ["", "a", "ab", "aab", "b.a", "abba"])
def test_ends_are_those_of_all_paths_of_pythons_re(text):
    for pattern in map("".join, itertools.product(ATOMS, [*ATOMS, "(a?){3}", "(a|){2,}"], ATOMS)):
        n = len(text)
        only = (rf"(?:{pattern})(?=.{{{n - k}}})(?!.{{{n - k + 1}}})" for k in range(n + 1))
        expected = {k for k, p in enumerate(only) if re.match(p, text)}
        assert patterns.ends(pattern, text) == expected, pattern


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "(a|a)*$", "(.*)*(.*)*x", "(?:(?:a{0,1000}){0,1000}){0,1000}b", "(a*){50}b"],
)
def test_a_pattern_that_takes_exponential_time_elsewhere_ends(pattern):
    assert patterns.ends(pattern, "a" * 200 + "!") == set()


@pytest.mark.parametrize("pattern", ["(", "a{3,1}", r"(a)\1", "(?>a)", "a*+", "a" * 2000])
def test_other_expressions_are_refused(pattern):
    with pytest.raises(ValueError, match=r"no regular expression|without|at most 1000"):
        patterns.ends(pattern, "a")


NAMES = [f"{LAYER}.{last}" for last in ("gate", "gate_proj", "experts.0.up_proj")] + ["lm_head"]
KEYS = ["mlp.gate", "model.layers.1", r"model\..*gate", "lm_head", "(lm|x)_head", "proj"]


def test_transformers_agrees():
    library = pytest.importorskip("transformers.quantizers.quantizers_utils")
    for name, key in itertools.product(NAMES, KEYS):
        theirs = not library.should_convert_module(name, [key])
        assert (patterns.excluding("transformers", [key], name) == key) == theirs, (name, key)


def test_compressed_tensors_agrees():
    library = pytest.importorskip("compressed_tensors.utils.match")
    for name, key in itertools.product(NAMES, [*KEYS, *(f"re:{key}" for key in KEYS)]):
        theirs = library.match_name(name, key)
        assert (patterns.excluding("compressed-tensors", [key], name) == key) == theirs, (name, key)
