"""Which modules a pattern of a checkpoint's config excludes, as each engine matches it.

One list of names means other modules to other engines: ``mlp.gate`` is the router alone where
names are compared part by part, and also ``mlp.gate_up_proj`` where they are compared as texts.

A regular expression of a stranger's config never takes exponential time: ``ends`` follows all
positions of a text at once, in place of one path after another.
"""

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]

from fp8ref.shared import registry
from fp8ref.shared.errors import require

__all__ = ["ENGINES", "FUSED", "ends", "excluding", "fused_name"]

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""{module of an engine: the modules of a checkpoint that it holds}."""

LONGEST = 1000
"""The most characters of a regular expression, and of a name that it is compared with."""

Matcher = Callable[[str], bool]
"""Whether a pattern matches the name of a module."""

_PLAIN = re.compile(r"[\w.]+", re.ASCII)
"""Names, of which a config may have thousands: their match has one length."""

_REPEATS = {_constants.MAX_REPEAT, _constants.MIN_REPEAT}
_ASSERTIONS = {_constants.ASSERT, _constants.ASSERT_NOT}
_singles: dict[tuple[int, str], re.Pattern] = {}
_REFUSED = {"GROUPREF", "GROUPREF_EXISTS", "ATOMIC_GROUP", "POSSESSIVE_REPEAT"}


def fused_name(module: str) -> str:
    """The module of an engine that holds a checkpoint's: ``qkv_proj`` for ``q_proj``."""
    parent, dot, last = module.rpartition(".")
    return parent + dot + next((name for name, parts in FUSED.items() if last in parts), last)


def ends(pattern: str, text: str) -> set[int]:
    """Where the matches of a regular expression end that begin at the start of a text.

    Order:    all paths at once, in time polynomial in both lengths; the first match of Python's
              ``re`` is one of them.
    Raises:   ValueError: no regular expression, a reference to a group, an atomic group or a
              possessive repeat, or more than ``LONGEST`` characters.

    >>> sorted(ends("a*", "aab"))
    [0, 1, 2]
    """
    too_long = max(len(pattern), len(text)) > LONGEST
    require(not too_long, f"a pattern and a name have at most {LONGEST} characters.")
    if _PLAIN.fullmatch(pattern):
        return {len(pattern)} if re.match(pattern, text) else set()
    return _after(_parsed(pattern), text, {0})


@functools.lru_cache(maxsize=4096)
def _parsed(pattern: str):
    try:
        parsed = _parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern[:99]!r} is no regular expression: {error}.") from error
    text = f"{pattern[:99]!r} refers to a group, or is atomic; write it without."
    require(not _REFUSED & set(map(str, _operations(parsed))), text)
    return parsed


def _operations(items) -> list:
    """The operations of a parsed expression, also the inner ones."""
    names: list = []
    for operation, value in items:
        names.append(operation)
        for inner in _inner(operation, value):
            names += _operations(inner)
    return names


def _inner(operation, value) -> Sequence:
    """The expressions within one of a parsed expression."""
    if operation is _constants.BRANCH:
        return value[1]
    if operation is _constants.SUBPATTERN or operation in _REPEATS | _ASSERTIONS:
        return value[-1:]
    return ()


def _after(items, text: str, starts: set[int]) -> set[int]:
    """The positions behind an expression that begins at one of ``starts``."""
    for item in items:
        operation, value = item
        inner = _inner(operation, value)
        if operation in _REPEATS:
            starts = _repeated(inner[0], value[:2], text, starts)
        elif operation in _ASSERTIONS:
            holds = operation is _constants.ASSERT
            starts = {s for s in starts if _seen(value[0], inner[0], text, s) == holds}
        elif inner:
            starts = set().union(*(_after(one, text, starts) for one in inner))
        else:
            single = _single(items.state, item)
            starts = {match.end() for s in starts if (match := single.match(text, s))}
    return starts


def _repeated(items, bounds: tuple[int, int], text: str, starts: set[int]) -> set[int]:
    least, most = bounds
    positions, count = set(starts) if least == 0 else set(), 0
    while starts and count < most:
        following, count = _after(items, text, starts), count + 1
        # from the least number on, positions that were seen lead nowhere else
        fresh = following - positions if count >= least else following
        positions |= fresh if count >= least else set()
        if count < least and fresh == starts:
            return fresh
        starts = fresh
    return positions


def _seen(direction: int, items, text: str, at: int) -> bool:
    """Whether an expression is ahead of a position, or, of direction -1, ends there."""
    if direction > 0:
        return bool(_after(items, text, {at}))
    return any(at in _after(items, text, {start}) for start in range(at + 1))


def _single(state, item) -> re.Pattern:
    """The compiled expression of one character or of none, such as ``[ab]`` and ``$``."""
    key = state.flags, repr(item)
    if key not in _singles:
        _singles[key] = _compiler.compile(_parser.SubPattern(state, [item]), state.flags)
    return _singles[key]


def _transformers(pattern: str, module: str) -> bool:
    def bounds(end: int) -> bool:
        return end == len(module) or "." in (module[end], module[end - 1 : end])

    return module.endswith(pattern) or any(map(bounds, ends(pattern, module)))


def _compressed_tensors(pattern: str, module: str) -> bool:
    if not pattern.startswith("re:"):
        return module == pattern
    return bool(ends(pattern.removeprefix("re:"), module))


def _torchao(pattern: str, module: str) -> bool:
    return _transformers(pattern, f"{module}.weight")


def _modelopt(pattern: str, module: str) -> bool:
    names = (module, module.removeprefix("language_model."))
    return any(pattern in name or fnmatch.fnmatchcase(name, pattern) for name in names)


def _vllm(pattern: str, module: str) -> bool:
    layer, experts, _ = module.partition(".experts")
    return layer + experts in pattern if experts else module == pattern


def _sglang(pattern: str, module: str) -> bool:
    return f".{pattern.rstrip('.')}." in f".{module}." or module == pattern


def _substring(pattern: str, module: str) -> bool:
    return pattern in module or pattern in fused_name(module)


ENGINES: dict[str, Callable[[str, str], bool]] = {
    "transformers": _transformers,
    "compressed-tensors": _compressed_tensors,
    "torchao": _torchao,
    "modelopt": _modelopt,
    "vllm": _vllm,
    "sglang": _sglang,
    "substring": _substring,
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

    Raises:   ValueError: an unknown engine; as ``ends``.

    >>> excluding("substring", ["mlp.gate"], "model.layers.0.mlp.gate_proj")
    'mlp.gate'
    >>> excluding("transformers", ["mlp.gate"], "model.layers.0.mlp.gate_proj")
    """
    matches = registry.lookup("an engine is", ENGINES, engine)
    return next((pattern for pattern in patterns if matches(pattern, module)), None)
