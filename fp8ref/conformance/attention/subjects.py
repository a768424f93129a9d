"""Somebody's attention, called with arrays of its framework: fn(q, k, v) -> o, (o, lse), or an
object or dict with them.

q is [B, H, Tq, D], k and v are [B, Hkv, Tk, D]; with ``layout`` BTHD tokens come before heads. What
else a call needs is passed by name, under the names of ``MASKS``, ``SCALES`` and ``DESCALES``, to
functions that take it.
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fp8ref.conformance.kit import arrays
from fp8ref.conformance.kit import subject as subjects
from fp8ref.conformance.kit.subject import ConformanceError, RefusedError, Subject, native_array
from fp8ref.formats import E4M3FN, FP8_FORMATS, Format
from fp8ref.shared.errors import one_of
from fp8ref.sim.attention.operands import heads as head_scaling
from fp8ref.sim.quantize import cast
from fp8ref.spec.attention.variants import FULL, Mask

LAYOUTS = ("BHTD", "BTHD")  # the orders of the axes: batch, heads, tokens, features

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes of q, k and v that are tried, in order."""

SCALES = ("scale", "softmax_scale", "sm_scale", "attn_scale")
"""The names of the softmax scale."""

CAUSAL = ("causal", "is_causal")  # the names of a causal mask, a bool

WINDOWS = ("window", "window_size", "local_window_size")
"""The names of a window, a pair (left, right): None leaves a side open under the first name, -1
under the second, as FlashAttention has it, and is the length of all keys under JAX's."""

DESCALES = (("q_descale", "k_descale", "v_descale"), ("descale_q", "descale_k", "descale_v"))
"""The names of scale_inv, float32 [B, Hkv]: a function that takes them is given q, k and v in FP8.
"""

SOFTCAPS = ("softcap", "logit_cap", "attn_logits_soft_cap")  # names of a softcap

SINKS = ("sinks", "learnable_sink", "s_aux", "attention_sinks")
"""The names of sinks, float32 [H]."""

OUTPUTS, LOGS = ("o", "out", "output"), ("lse", "softmax_lse", "logsumexp")
"""The names of the parts of a result."""

_FIRST = (("q", "query", "queries"), ("k", "key", "keys"), ("v", "value", "values"))


class Answer(NamedTuple):
    """o float32 [B, H, Tq, D], the name of its dtype, and lse float32 [B, H, Tq] or None."""

    o: np.ndarray
    dtype: str
    lse: np.ndarray | None


class Question(NamedTuple):
    """The arguments of one call, float32 arrays as ``sim.attention.forward`` takes them."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: Mask = FULL
    documents: Any = None
    softcap: float | None = None
    sinks: np.ndarray | None = None
    scale: float | None = None
    descales: Mapping[str, np.ndarray] | None = None

    def __str__(self) -> str:
        more = "" if self.mask == FULL else f", {self.mask}"
        more += ", documents" if self.documents is not None else ""
        more += f", softcap {self.softcap:g}" if self.softcap is not None else ""
        more += ", sinks" if self.sinks is not None else ""
        more += f", scale {self.scale:g}" if self.scale is not None else ""
        return f"q {list(self.q.shape)}, k and v {list(self.k.shape)}{more}"


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The function under test.

    subject   the function, its framework and its device.
    dtype     of q, k and v, unless they are codes.
    layout    one of LAYOUTS.
    names     of its arguments.
    fmt       of q, k and v, where it takes codes.
    ones      whether codes have descales of 1, so that an ignored descale changes nothing.
    """

    subject: Subject
    dtype: str = "float32"
    layout: str = "BHTD"
    names: tuple[str, ...] = ()
    fmt: Format = E4M3FN
    ones: bool = False

    @property
    def name(self) -> str:
        """The function's name, for a report."""
        return self.subject.name

    @property
    def takes_codes(self) -> bool:
        """Whether q, k and v come in FP8, with their scales."""
        return self.descale_names is not None

    @property
    def descale_names(self) -> tuple[str, ...] | None:
        """The names of the descales of q, k and v; None of a function without them."""
        return next((names for names in DESCALES if set(names) <= set(self.names)), None)

    def argument(self, names: tuple[str, ...]) -> str | None:
        """Its argument of one of these names, such as SOFTCAPS; None without."""
        return next((name for name in names if name in self.names), None)

    def takes(self, mask: Mask) -> bool:
        """Whether it can be asked with that mask."""
        return "mask" in self.names or self._apart(mask)

    def _apart(self, mask: Mask) -> bool:
        """Whether it takes all parts of a mask under names of their own."""
        causal = not mask.causal or self.argument(CAUSAL) is not None
        return causal and (mask.window is None or self.argument(WINDOWS) is not None)

    @property
    def takes_documents(self) -> bool:
        """Whether it has an argument for them."""
        return "documents" in self.names

    def ask(self, question: Question) -> Answer:
        """Call it, and read what it returns.

        Raises:   RefusedError: it raises. ConformanceError: it changes its input, or returns
                  something else than it should.
        """
        tensors, descales = self._operands(question)
        before = [arrays.written(x) for x in tensors]
        try:
            function = self.subject.function
            with np.errstate(all="ignore"):
                output = function(*tensors, **(self._named(question) | descales))
        except (Exception, SystemExit) as error:  # of a function under test: anything
            text = " ".join(str(error).split())[:300].rstrip(".")
            asked = f"{self.subject.framework} {self.dtype} {question}"
            raise RefusedError(
                f"{self.name} raised {type(error).__name__} for {asked}: {text}. Call it on such "
                "an input alone to find the cause."
            ) from error
        if [arrays.written(x) for x in tensors] != before:
            raise ConformanceError(f"{self.name} changed its input. Let it work on a copy.")
        return self._read(output, question)

    def _named(self, question: Question) -> dict[str, Any]:
        """What a call needs beside q, k and v, under the function's own names."""
        named: dict[str, Any] = {}
        if question.mask != FULL:
            named |= self._masked(question.mask, question.k.shape[2])
        if question.documents is not None:
            named["documents"] = question.documents
        sinks = question.sinks
        if sinks is not None:
            sinks = self.subject.make_array(sinks, "float32")
        softcap, scale = question.softcap, question.scale
        for names, value in ((SOFTCAPS, softcap), (SCALES, scale), (SINKS, sinks)):
            if value is not None and (name := self.argument(names)):
                named[name] = value
        return named

    def _masked(self, mask: Mask, keys: int) -> dict[str, Any]:
        # a name of its own goes first: under ``mask`` others may want an array
        if not self._apart(mask):
            return {"mask": mask}
        options: dict[str, Any] = {}
        causal, window = self.argument(CAUSAL), self.argument(WINDOWS)
        if mask.causal and causal:
            options[causal] = True
        if mask.window is not None and window:
            unbounded = {"window": None, "window_size": -1, "local_window_size": keys}
            opened, sides = unbounded[window], mask.window
            options[window] = tuple(opened if x is None else x for x in sides)
        return options

    def _operands(self, question: Question) -> tuple[list[Any], dict[str, Any]]:
        """(q, k, v as arrays of the framework, the scales of codes by name)."""
        tensors = [np.asarray(x, np.float32) for x in question[:3]]
        names = self.descale_names
        if names is None:
            return [self.subject.make_array(self._turned(x), self.dtype) for x in tensors], {}
        codes, descales = [], {}
        for role, name, x in zip("qkv", names, tensors, strict=True):
            shape = x.shape[0], question.k.shape[1]
            one = np.ones((*shape, 1, 1), np.float32) if self.ones else None
            q = head_scaling.quantize(x, self.fmt, "head", "te_current", heads=shape[1], scale=one)
            assert q.codes is not None
            codes.append(native_array(self.subject, self._turned(q.codes), self.fmt))
            inverse = (question.descales or {}).get(role, q.scale_inv.reshape(shape))
            descales[name] = self.subject.make_array(inverse, "float32")
        return codes, descales

    def _turned(self, x: np.ndarray) -> np.ndarray:
        if self.layout == "BTHD":
            return np.ascontiguousarray(x.transpose(0, 2, 1, 3))
        return x

    def _read(self, output: Any, question: Question) -> Answer:
        o, lse = _parts(output)
        tensor = subjects.read_array(o)
        if tensor is None:
            raise ConformanceError(
                f"{self.name} returned a {type(output).__name__}; o, (o, lse), or an object with "
                "o is needed."
            )
        values, dtype = tensor
        if dtype.startswith("float8_"):
            values = cast.decode(values, FP8_FORMATS[dtype.removeprefix("float8_")])
        values = values.astype(np.float32)
        if self.layout == "BTHD" and values.ndim == 4:
            values = values.transpose(0, 2, 1, 3)
        if values.shape != question.q.shape:
            raise ConformanceError(
                f"{self.name} returned o {list(values.shape)}; it has q's shape, "
                f"{list(question.q.shape)}."
            )
        log = None if lse is None else subjects.read_array(lse)
        shown = log is not None and log[0].shape == question.q.shape[:3]
        lse = log[0].astype(np.float32) if log and shown else None
        return Answer(values, dtype, lse)


def _parts(output: Any) -> tuple[Any, Any]:
    """(o, lse or None) of what a function returned."""
    if isinstance(output, Mapping):
        parts = dict(output)
    elif hasattr(output, "dtype"):
        return output, None
    else:
        names = [name for name in (*OUTPUTS, *LOGS) if hasattr(output, name)]
        parts = {name: getattr(output, name) for name in names}
    o = next((parts[name] for name in OUTPUTS if name in parts), None)
    if o is None and isinstance(output, tuple | list) and output:
        return output[0], output[1] if len(output) > 1 else None
    return o, next((parts[name] for name in LOGS if name in parts), None)


def wrap(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    framework: str | None = None,
    device: str = "cpu",
    layout: str = "BHTD",
    fmt: Format = E4M3FN,
) -> Attention:
    """A function as a subject: of the framework and dtype named, else of the first that it takes,
    and whose arrays it returns.

    Raises:   ValueError: an unknown layout; as subject.wrap. RefusedError: it takes no arrays.
              ConformanceError: it does not repeat itself.
    """
    one_of("layout", layout, LAYOUTS)
    name = name or subjects.name_of(
        function if not isinstance(function, functools.partial) else function.func
    )
    subject = Subject(name=name, function=function, device=device)
    attention = Attention(subject=subject, layout=layout, names=names_of(function), fmt=fmt)
    if attention.takes_codes:
        imported = [f for f in subjects.FRAMEWORKS if f == "numpy" or f in sys.modules]
        attention = _with_codes(attention, [framework] if framework else imported)
    else:
        tensors = (1, 16, 1, 64) if layout == "BTHD" else (1, 1, 16, 64)
        first = lambda x: _parts(function(x, x, x))[0]  # noqa: E731
        alone = subjects.wrap(name, first, framework=framework, device=device, shape=tensors)
        attention = dataclasses.replace(
            attention,
            subject=dataclasses.replace(alone, function=function),
            dtype=subjects.first_dtype(alone, tensors),
        )
    question = small_question()
    if attention.ask(question).o.tobytes() != attention.ask(question).o.tobytes():
        raise ConformanceError(
            f"{attention.name} does not repeat itself for {question}. Turn off random state, such "
            "as a seed from the clock."
        )
    return attention


def _with_codes(attention: Attention, frameworks: list[str]) -> Attention:
    """A function that takes codes and descales, in the first framework whose arrays it takes."""
    refused = []
    for framework in frameworks:
        subject = dataclasses.replace(attention.subject, framework=framework)
        candidate = dataclasses.replace(attention, subject=subject)
        try:
            candidate.ask(small_question())
        except RefusedError as error:
            refused.append(str(error))
        else:
            return candidate
    raise RefusedError("\n".join(refused))


def small_question() -> Question:
    """Few random tokens."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 1, 16, 64)).astype(np.float32)
    return Question(q, k, v)


def is_attention(function: Callable[..., Any]) -> bool:
    """Whether the first three arguments are called as q, k and v are."""
    return len(names := names_of(function)) >= 3 and all(
        name in allowed for name, allowed in zip(names, _FIRST, strict=False)
    )


def names_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's arguments; none of one without a signature."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()
