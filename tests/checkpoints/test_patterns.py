"""Patterns exclude the modules that engines exclude, in bounded time and memory."""

import itertools
import re
import tracemalloc

import pytest

from fp8ref.checkpoints import patterns

LAYER = "model.layers.1.mlp"


@pytest.mark.parametrize(
    ("engine", "pattern", "module", "excluded"),
    [
        ("transformers", "lm_head", "lm_head", True),
        ("transformers", "model.layers.1", f"{LAYER}.up_proj", True),
        ("transformers", "model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("transformers", "model.layers.1|x", "model.layers.11.mlp.up_proj", False),
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
        (
            "compressed-tensors",
            "re:" + r"(\w+\.){3}x\d{1,2}|" * 4 + ".*gate",
            f"{LAYER}.gate",
            True,
        ),
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


ATOMS = [
    "a",
    ".",
    "[^b]",
    r"\w",
    "(ab|a)",
    "(a*)*",
    "b+?",
    "^",
    "$",
    r"\b",
    "(?!b)",
    "(?<=a)",
    "a*+",
]


@pytest.mark.parametrize("text", ["", "a", "ab", "aab", "b.a", "abba"])
def test_matches_are_those_of_pythons_re(text):
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    for pattern in map("".join, itertools.product(ATOMS, [*ATOMS, "(a?){3}", "(a|){2,}"], ATOMS)):
        for behind in ("", boundary):
            expected = re.match(f"(?:{pattern}){behind}", text) is not None
            assert patterns.matches(pattern, text, behind) == expected, pattern


@pytest.mark.parametrize(
    "pattern", ["(a|a)*$", "(?:x{0,9}){0,99}$|(a|aa)*$", "(?:a{0,60}){0,60}$", "((a?){3,9}){0,90}$"]
)
def test_a_match_that_takes_exponential_time_is_refused(pattern, monkeypatch):
    monkeypatch.setattr(patterns, "SECONDS", 0.05)
    with pytest.raises(
        ValueError, match=r"takes more than 0\.05 s to match 'aaa.*write it shorter"
    ):
        patterns.matches(pattern, "a" * 200 + "!")


@pytest.mark.parametrize(
    "pattern",
    [
        "(a{1000}){1000}",
        "((a{,99}){99}){99}",
        "a{99999}|a{,99999}",
        "(?:" * 20 + "a?" + ")+" * 20,
        "(a){9999999999999}",
        "(?x)" + "(?:" * 20 + "a?" + ") +" * 20,
        "(?i-s:(?sx:a))",
        "(ab){e<=1}",
    ],
)
def test_repeats_that_need_much_memory_are_refused_before_they_are_compiled(pattern, monkeypatch):
    monkeypatch.setattr("regex.compile", None)
    with pytest.raises(ValueError, match="repeats too much"):
        patterns.matches(pattern, "a")


def test_the_largest_pattern_takes_little_memory():
    tracemalloc.start()
    try:
        pattern = "(?:" * 6 + "(ab|[bc])" * 50 + "a{999}" + ")+" * 6
        assert not patterns.matches(pattern, "b" * 1000)
        # 64 copies of 1200 nodes; a node of regex's parser takes about 300 bytes
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("pattern", ["(", "a{3,1}", r"(?P<n>a)\2", "(?R)", r"\p{L}", "a" * 2000])
def test_other_expressions_are_refused(pattern):
    with pytest.raises(ValueError, match=r"no regular expression|no repeat|at most 1000"):
        patterns.matches(pattern, "a")


NAMES = [f"{LAYER}.{last}" for last in ("gate", "gate_proj", "experts.0.up_proj")] + ["lm_head"]
KEYS = ["mlp.gate", "model.layers.1", r"model\..*gate", "lm_head", "(lm|x)_head", "proj"]
KEYS += [
    "model.layers.1.mlp.gate|lm",
    r"(?!.*gate).*proj",
    r"(\w+\.)+gate",
    "a{,3}",
    r"(?i:LM_HEAD)",
]


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


def test_flags_at_the_start_are_those_of_the_whole_expression():
    assert patterns.excluding("transformers", ["(?i)LM_head"], "lm_head") == "(?i)LM_head"
    assert patterns.excluding("transformers", ["(?i)LM_head|GATE"], "mlp.gate") is None
    assert patterns.excluding("transformers", ["(?i).*GATE"], "mlp.gate") == "(?i).*GATE"
