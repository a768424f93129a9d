"""Which modules a pattern of a checkpoint's config excludes, as each engine matches it.

One list of names means other modules to other engines: ``mlp.gate`` is the router alone where
names are compared part by part, and also ``mlp.gate_up_proj`` where they are compared as texts.

A regular expression of a stranger's config takes bounded time and memory: ``regex`` has a timeout,
and its copies of repeated groups are counted before it makes them.
"""

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable

import regex

from fp8ref.shared import registry
from fp8ref.shared.errors import require

__all__ = ["ENGINES", "FUSED", "excluding", "fused_name", "matches"]

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""{module of an engine: the modules of a checkpoint that it holds}."""

LONGEST = 1000
"""The most characters of a regular expression, and of a name that it is compared with."""

LARGEST = 100_000
"""The most characters of a regular expression whose repeats are written out."""

SECONDS = 0.5
"""The longest time of a match."""

_REPEATS = re.compile(r"(\)?)(?:\+|\{(\d*),?(\d*)\})")
"""Repeats of which ``regex`` makes copies, as of ``(...)+`` two; behind ``)`` copies of copies."""


def fused_name(module: str) -> str:
    """The module of an engine that holds a checkpoint's: ``qkv_proj`` for ``q_proj``."""
    parent, dot, last = module.rpartition(".")
    whole = next((name for name, parts in FUSED.items() if last in parts), last)
    return parent + dot + whole


def matches(pattern: str, name: str, behind: str = "") -> bool:
    """Whether a regular expression matches a name from its start, as ``re.match`` does.

    behind    an expression that has to match behind the pattern.
    Raises:   ValueError: no regular expression, one of more than ``LONGEST`` characters or of more
              than ``LARGEST`` with its repeats written out, or a match that takes ``SECONDS``.

    >>> matches("(?!.*gate).*proj", "mlp.up_proj"), matches("(?!.*gate).*proj", "mlp.gate_proj")
    (True, False)
    """
    too_long = max(len(pattern), len(name)) > LONGEST
    require(not too_long, f"a pattern and a name have at most {LONGEST} characters.")
    flags = re.match(r"(?:\(\?[aiLmsu]+\))*", pattern)
    assert flags is not None
    wrapped = f"{flags[0]}(?:{pattern[flags.end() :]}){behind}" if behind else pattern
    compiled = _compiled(wrapped)
    try:
        return compiled.match(name, timeout=SECONDS) is not None
    except TimeoutError as error:
        text = f"{pattern[:99]!r} takes more than {SECONDS} s to match {name!r}; write it shorter."
        raise ValueError(text) from error


def _compiled(pattern: str) -> regex.Pattern:
    size, copies = len(pattern), 1
    for group, *counts in _REPEATS.findall(pattern):
        count = 1 + max(1, *(int(count or 0) for count in counts))
        size, copies = (size, copies * count) if group else (size + count, copies)
    # blanks of a verbose pattern hide what is repeated; (a){e<2} is a fuzzy match of ``regex``
    odd = re.search(r"\(\?\w*x|\{(?!\d*,?\d*\})", pattern)
    text = f"{pattern[:99]!r} repeats too much, is verbose, or has a brace that is no repeat."
    require(size * copies <= LARGEST and odd is None, text)
    return _small(pattern) if size * copies <= LONGEST else _large(pattern)


def _compile(pattern: str) -> regex.Pattern:
    try:
        re.compile(pattern)  # ``regex`` takes more than engines do
        return regex.compile(pattern, regex.VERSION0, cache_pattern=False)
    except (re.error, regex.error, RecursionError) as error:
        raise ValueError(f"{pattern[:99]!r} is no regular expression: {error}.") from error


# a written-out character takes 80 bytes: at most 0.3 GB each
_small = functools.lru_cache(maxsize=2**12)(_compile)
_large = functools.lru_cache(maxsize=2**5)(_compile)


def _transformers(pattern: str, module: str) -> bool:
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return module.endswith(pattern) or matches(pattern, module, boundary)


def _compressed_tensors(pattern: str, module: str) -> bool:
    if not pattern.startswith("re:"):
        return module == pattern
    return matches(pattern.removeprefix("re:"), module)


def _modelopt(pattern: str, module: str) -> bool:
    names = (module, module.removeprefix("language_model."))
    return any(pattern in name or fnmatch.fnmatchcase(name, pattern) for name in names)


def _vllm(pattern: str, module: str) -> bool:
    layer, experts, _ = module.partition(".experts")
    return layer + experts in pattern if experts else module == pattern


def _sglang(pattern: str, module: str) -> bool:
    return f".{pattern.rstrip('.')}." in f".{module}." or module == pattern


ENGINES: dict[str, Callable[[str, str], bool]] = {
    "transformers": _transformers,
    "compressed-tensors": _compressed_tensors,
    "torchao": lambda pattern, module: _transformers(pattern, f"{module}.weight"),
    "modelopt": _modelopt,
    "vllm": _vllm,
    "sglang": _sglang,
    "substring": lambda pattern, module: pattern in module or pattern in fused_name(module),
}
"""{engine: whether its pattern excludes a module, by names}.

transformers         from the start up to the end of a part of the name, as a regular expression, or
                     as the end of the name: 5.23 quantizers_utils.py, should_convert_module.
compressed-tensors   equal, or behind ``re:`` a regular expression from the start: 0.20
                     utils/match.py, match_name.
torchao              as transformers, of the weight's name: 5.23 quantizer_torchao.py.
modelopt             part of the name, or a wildcard of it: vLLM modelopt.py, is_layer_excluded.
vllm                 equal; all experts of a layer if a pattern has their common name: vLLM
                     utils/quant_utils.py, is_layer_skipped.
sglang               whole parts of the name: SGLang quantization/utils.py, _module_path_match.
substring            part of the name, or of the fused module's: SGLang before #23467, and vLLM
                     with skip_with_substr.
"""


def excluding(engine: str, patterns: Iterable[str], module: str) -> str | None:
    """The first pattern that excludes a module from quantization as an engine of ``ENGINES``
    matches it; None: it is quantized.

    Raises:   ValueError: an unknown engine; as ``matches``.

    >>> excluding("substring", ["mlp.gate"], "model.layers.0.mlp.gate_proj")
    'mlp.gate'
    >>> excluding("transformers", ["mlp.gate"], "model.layers.0.mlp.gate_proj")
    """
    excludes = registry.lookup("an engine is", ENGINES, engine)
    return next((pattern for pattern in patterns if excludes(pattern, module)), None)
