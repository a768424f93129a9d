"""The function under test, called with arrays of its framework and checked for side effects.

``kind_of`` tells whether it is a cast, a quantizer or a GEMM.
"""

import dataclasses
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

from fp8ref.conformance.kit import arrays
from fp8ref.conformance.kit.finding import Counterexample, bits_of
from fp8ref.formats import Format
from fp8ref.shared.errors import one_of
from fp8ref.sim.quantize import packing

Kind = Literal["cast", "quantizer", "gemm"]  # what a function under test is
KINDS: tuple[Kind, ...] = ("cast", "quantizer", "gemm")  # the values of ``Kind``

FRAMEWORKS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda x: x,
    "torch": arrays.as_torch,
    "jax": arrays.as_jax,
}
"""{framework: how it makes an array of NumPy's}, in the order in which they are tried."""

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""The dtypes that a cast is asked with."""

SHAPE = (256, 384)
"""The shape [M, K] of the tensors with which a function is classified, and a quantizer is asked."""

_Case = TypeVar("_Case")

Make = Callable[[np.ndarray], Any]
"""A function that makes a framework's array of a NumPy array."""

VIEWS: dict[str, Callable[[Make, np.ndarray], Any]] = {
    "transposed": lambda make, x: make(np.ascontiguousarray(x.T)).T,
    "every second column": lambda make, x: make(
        np.repeat(x, 2, axis=1) * np.tile(np.array([1, 0.5], np.float32), x.shape[1])
    )[:, ::2],
    "behind a row": lambda make, x: make(np.concatenate([x[:1] / 2, x]))[1:],
}
"""{name of a view: function that makes it of x [M, K]}.

A view is not contiguous, or starts inside its memory. JAX has no views.
"""


class ConformanceError(ValueError):
    """Not a valid cast or quantizer: it raises, has wrong outputs or side effects, or varies."""


class RefusedError(ConformanceError):
    """The function raises for this input."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The function under test, of one array.

    framework  whose arrays it takes: "numpy", "torch" or "jax".
    device     of torch's tensors.
    """

    name: str
    function: Callable[..., Any] = field(repr=False)
    framework: str = "numpy"
    device: str = "cpu"

    @property
    def views(self) -> list[str]:
        """The names of VIEWS that its framework has."""
        return [] if self.framework == "jax" else list(VIEWS)

    @property
    def other_devices(self) -> list[str]:
        """The devices that it is not asked on, in words; none of NumPy's arrays."""
        return [] if self.framework == "numpy" else [f"devices other than {self.device}"]

    def ask(self, x: np.ndarray, dtype: str = "float32", *, view: str = "contiguous") -> Any:
        """Call it with x, as an array of a dtype and a view, and return what it returns.

        Raises:   RefusedError: it raises. ConformanceError: it changes its input.
        """
        if view == "contiguous":
            array = self.make_array(x, dtype)
        else:
            with np.errstate(invalid="ignore"):  # a signalling NaN is an input like others
                array = VIEWS[view](lambda a: self.make_array(a, dtype), x)
        # Compare bits, as NaN is not equal to itself.
        before = arrays.written(array)
        try:
            with np.errstate(all="ignore"):  # inputs include NaN and overflow
                output = self.function(array)
        except (Exception, SystemExit) as error:  # a function under test may raise anything
            raise RefusedError(
                f"{self.name} raised {type(error).__name__} for "
                f"{describe(x, dtype, self.framework)}: {_first_lines(error)}. Call it on this "
                "input alone to find the cause."
            ) from error
        if arrays.written(array) != before:
            raise ConformanceError(
                f"{self.name} changed its input, {describe(x, dtype, self.framework)}. Let it "
                "work on a copy."
            )
        return output

    def make_array(self, x: np.ndarray, dtype: str) -> Any:
        """x as an array of this framework and of a dtype.

        Raises:   RefusedError: the framework has no such array, as NumPy has no bfloat16 alone.
        """
        if self.framework == "jax":
            import jax

            if dtype == "float64" and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
                raise RefusedError("jax has no float64 here: set JAX_ENABLE_X64=1 to test it.")
        try:
            array = x.astype(arrays.numpy_dtype(dtype))
        except ImportError as error:
            raise RefusedError(str(error)) from error
        if self.framework == "torch":
            return arrays.as_torch(array, self.device)
        return FRAMEWORKS[self.framework](array)


def compare_each(
    cases: Iterable[_Case], compare: Callable[[_Case], list[Counterexample]]
) -> tuple[list[_Case], list[_Case], list[Counterexample]]:
    """The cases taken, those that ``compare`` refuses, and its first counterexamples."""
    accepted: list[_Case] = []
    refused: list[_Case] = []
    wrong: list[Counterexample] = []
    for case in cases:
        try:
            counterexamples = compare(case)
        except RefusedError:
            refused.append(case)
        else:
            accepted.append(case)
            wrong = wrong or counterexamples
    return accepted, refused, wrong


def check_no_reuse(
    subject: Subject,
    x: np.ndarray,
    other: np.ndarray,
    dtype: str,
    parts: Callable[[Any], dict[str, Any]] = lambda output: {"": output},
) -> None:
    """ConformanceError if a later call, of other numbers, overwrites these parts of an output."""

    def read(output: Any) -> list[np.ndarray]:
        return [array[0] for part in parts(output).values() if (array := read_array(part))]

    output = subject.ask(x, dtype)
    before = [part.copy() for part in read(output)]
    subject.ask(other, dtype)
    if any(a.tobytes() != b.tobytes() for a, b in zip(before, read(output), strict=True)):
        raise ConformanceError(
            f"{subject.name} overwrites its earlier output for "
            f"{describe(x, dtype, subject.framework)} when it is called again. Return a new "
            "array each time."
        )


def wrap(
    name: str,
    function: Callable[..., Any],
    *,
    framework: str | None = None,
    device: str = "cpu",
    shape: tuple[int, ...],
) -> Subject:
    """A function as a Subject of the framework named, else of the first imported one that it takes.

    Raises:   ValueError: an unknown framework, or a device that is not there; ImportError: the
              framework is not installed; RefusedError: it takes no arrays.
    """
    if not callable(function):
        raise ValueError(f"what is asked is a function of an array; got {type(function).__name__}.")
    if framework is not None:
        one_of("framework", framework, FRAMEWORKS)
    if framework is not None and importlib.util.find_spec(framework) is None:
        raise ImportError(
            f"arrays of {framework} need {framework}, which is not installed. Install "
            f"fp8ref[{framework}]."
        )
    _check_device(device, framework)
    if device != "cpu":
        framework = "torch"
    if framework is not None:
        return Subject(name=name, function=function, framework=framework, device=device)
    # A framework that nothing has imported cannot be the function's own, and is not imported here.
    refused = []
    x = np.ones(shape, np.float32)
    for tried in FRAMEWORKS:
        if tried != "numpy" and tried not in sys.modules:
            continue
        subject = Subject(name=name, function=function, framework=tried)
        for dtype in ("float32", "bfloat16"):
            try:
                output = subject.ask(x, dtype)
            except RefusedError as error:
                refused.append(str(error))
            else:
                return _in_framework_of_output(subject, output, x, dtype)
    raise RefusedError("\n".join(dict.fromkeys(refused)))


def _in_framework_of_output(subject: Subject, output: Any, x: np.ndarray, dtype: str) -> Subject:
    """The subject in the framework of its output, as JAX functions take NumPy arrays too."""
    inside: list[Any] = list(getattr(output, "__dict__", {}).values())
    if isinstance(output, tuple | list | dict):
        inside = list(output.values() if isinstance(output, dict) else output)
    modules = {type(part).__module__.partition(".")[0] for part in (output, *inside)}
    for framework, module in (("torch", "torch"), ("jax", "jaxlib"), ("jax", "jax")):
        if module in modules and framework != subject.framework:
            other = dataclasses.replace(subject, framework=framework)
            try:
                other.ask(x, dtype)
            except ConformanceError:
                return subject
            return other
    return subject


def kind_of(
    name: str, function: Callable[..., Any], *, framework: str | None = None, device: str = "cpu"
) -> Kind:
    """A GEMM takes two operands. In a cast no element changes another's code. Else a quantizer.

    Raises:   ValueError: as wrap.
    """
    if len(needed(function)) == 2:
        return "gemm"
    try:
        subject = wrap(name, function, framework=framework, device=device, shape=SHAPE)
    except RefusedError as error:
        try:
            # one that takes vectors alone, or nothing
            wrap(name, function, framework=framework, device=device, shape=(16,))
        except RefusedError as other:
            raise RefusedError(f"{error}\n{other}") from other
        return "cast"
    x = np.resize(np.array([1, 1.5, -2, 0.5], np.float32), SHAPE)  # numbers of every format
    changed = x.copy()
    changed[0, 0] = 2.0**40  # an amax that changes every other code under a shared scale
    source = first_dtype(subject, SHAPE)
    try:
        before, after = (read_array(subject.ask(tensor, source)) for tensor in (x, changed))
    except ConformanceError:  # such as an object whose parts alone are arrays
        return "quantizer"
    if before is None or after is None or before[0].shape != SHAPE or after[0].shape != SHAPE:
        return "quantizer"  # identify_quantizer reports it if it is not valid
    again = read_array(subject.ask(x, source))  # a remembered amax shows a call later
    assert again is not None
    others = np.arange(x.size).reshape(SHAPE) > 0
    alone = all(np.array_equal(before[0][others], other[0][others]) for other in (after, again))
    return "cast" if alone else "quantizer"


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The arguments of a callable by name; none of a builtin without a signature."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def needed(function: Callable[..., Any]) -> list[str]:
    """The names of the positional arguments without a default."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = parameters(function).items()
    return [name for name, p in named if p.default is p.empty and p.kind in positional]


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, for a report."""
    return str(getattr(function, "__qualname__", type(function).__name__))


def first_dtype(subject: Subject, shape: tuple[int, ...] = (16,)) -> str:
    """The dtype of most inputs: float32, else bfloat16. RefusedError if it takes neither."""
    refused = []
    for source in ("float32", "bfloat16"):
        try:
            subject.ask(np.ones(shape, np.float32), source)
        except RefusedError as error:
            refused.append(str(error))
        else:
            return source
    raise RefusedError("\n".join(refused))


def read_array(output: Any) -> tuple[np.ndarray, str] | None:
    """An array of any framework as NumPy's, and the name of its dtype; None if it is no array.

    float8 and e8m0 become uint8; bfloat16 and float16 become float32.
    """
    if not hasattr(output, "dtype") or not hasattr(output, "shape"):
        return None
    try:
        array, name = arrays.named(output)
    except Exception as error:  # lazy arrays may raise only here
        raise ConformanceError(
            f"its output cannot be read ({type(error).__name__}: {_first_lines(error)})."
        ) from error
    return array.astype(np.float32) if name in ("bfloat16", "float16") else array, name


def native_array(tested: Subject, codes: np.ndarray, fmt: Format) -> Any:
    """Codes as an array of the framework's own dtype, of their shape.

    PyTorch's float4_e2m1fn_x2 holds two codes of 4 bits, so that its last axis is half as long.
    """
    if tested.framework == "torch":
        import torch

        if fmt.bits == 4:
            return arrays.as_torch(packing.pack(codes), tested.device).view(torch.float4_e2m1fn_x2)
        return arrays.as_torch(codes, tested.device).view(getattr(torch, f"float8_{fmt}"))
    import ml_dtypes

    array = codes.view(getattr(ml_dtypes, f"float{fmt.bits}_{fmt}"))
    return array if tested.framework == "numpy" else arrays.as_jax(array)


def describe(x: np.ndarray, dtype: str, framework: str = "numpy") -> str:
    """An input as text: framework, dtype and shape, and the numbers if they are few."""
    shape = f"{framework} {dtype} {list(x.shape)}"
    if x.size > 4:
        return f"x {shape}"
    return f"x {shape} = {x.tolist()} (bits {', '.join(bits_of(v, dtype) for v in x.ravel())})"


def _check_device(device: str, framework: str | None) -> None:
    """ValueError unless torch has the device, or it is the CPU."""
    if device == "cpu":
        return
    if framework not in (None, "torch"):
        raise ValueError(
            f"a device applies to torch's arrays; got {device!r} with {framework}. Leave it "
            "out. For jax, set JAX_PLATFORMS."
        )
    import torch

    try:
        torch.empty(1, device=device)
    except Exception as error:  # torch raises several types for a missing device
        raise ValueError(
            f"device {device!r} is not available: {_first_lines(error)}. Leave it out to test "
            "on the CPU."
        ) from error


def _first_lines(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text[:300] + "...") if len(text) > 300 else text.rstrip(".") or "no message"


def smallest_refused(subject: Subject, x: np.ndarray, dtype: str) -> np.ndarray:
    """A part of a flat x that is refused too, halved as long as one of its halves is."""
    if x.ndim != 1 or x.size < 2:
        return x
    half = x.size // 2
    for part in (x[:half], x[half:]):
        try:
            subject.ask(part, dtype)
        except RefusedError:
            return smallest_refused(subject, part, dtype)
    return x
