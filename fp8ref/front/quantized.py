"""Quantize an array of NumPy, PyTorch or JAX, and measure what that cost.

``quantize`` calls the ``quantize.scaling`` of the array's framework: of ``fp8ref.sim`` for NumPy.
Codes and scales stay in the framework; errors are measured in NumPy.
"""

import functools
import math
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8ref import policy as policies
from fp8ref.formats import E4M3FN, NARROW_FORMATS, Format
from fp8ref.front import card
from fp8ref.policy import POLICIES, ScalePolicy
from fp8ref.recipe import RECIPES, CastSpec, Recipe
from fp8ref.shared import registry
from fp8ref.shared.errors import require
from fp8ref.sim.quantize import cast, scaling, stats
from fp8ref.spec import granularity as granularities

__all__ = ["Accuracy", "Quantized", "dequantize", "quantize"]

_CASTS: dict[str, CastSpec] = {
    "mx_32x32": CastSpec(fmt=E4M3FN, granularity="mx_32x32", policy=POLICIES["mx_rceil"]),
    **{s.granularity: s for r in reversed(RECIPES.values()) for s in reversed(r.casts)},
    **{name: recipe.output.a for name, recipe in RECIPES.items() if recipe.output.a},
}
"""{recipe: its cast of a linear's input; granularity: the first cast of a recipe that has it}."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Accuracy(card.Card):
    """What quantization cost a tensor.

    sqnr       10 log10(signal / noise) in dB, of all elements together (Q-1).
    zeroed     the share of all elements that became zero and were not (spec Q-3).
    clipped    the share of all elements that round beyond the format's range (C-4).
    rows       the SQNR of each row in dB, a row along the reduced axis; NaN for one of zeros. One
               large row can own the SQNR of the whole tensor: these show the others.
    median, worst, worst_row
               of the rows that are not zeros, inf if all are: the median, the lowest, and the index
               of that row without the reduced axis.
    bias       the sum of all errors over that of all magnitudes.
    exponents  histograms of the magnitudes, scaled, before and after (Q-5); None in a comparison.
    """

    sqnr: float
    zeroed: float
    clipped: float
    median: float
    worst: float
    worst_row: tuple[int, ...]
    rows: np.ndarray
    bias: float
    exponents: stats.Exponents | None
    fmt: Format

    def to_dict(self) -> dict[str, Any]:
        """The numbers, for JSON; None where one is not finite."""
        numbers = {name: getattr(self, name) for name in NUMBERS}
        finite = {name: x if math.isfinite(x) else None for name, x in numbers.items()}
        return {**finite, "worst_row": list(self.worst_row)}

    def _facts(self) -> tuple[str, dict[str, str]]:
        row = f" (row {', '.join(map(str, self.worst_row))})" if self.worst_row else ""
        return "Accuracy", {
            "SQNR": f"{self.sqnr:.1f} dB",
            "rows": f"median {self.median:.1f} dB, worst {self.worst:.1f} dB{row}",
            "became zero": f"{self.zeroed:.2%} of the elements",
            "clipped": f"{self.clipped:.2%}",
        }

    def _picture(self) -> str:
        if self.exponents is None:
            return ""
        return card.histogram(self.exponents.scaled, self.fmt, "elements by magnitude, scaled")


NUMBERS = ("sqnr", "zeroed", "clipped", "median", "worst")
"""The numbers of an Accuracy."""


_NO_DATA = (TypeError, RuntimeError)
"""The errors of reading a tensor that JAX traces, or that PyTorch has on its meta device."""


@dataclass(frozen=True, eq=False, repr=False)
class Quantized(card.Card):
    """A quantized tensor: x ~ dequantize() = decode(codes) * scale_inv.

    codes      of x's shape: uint8 in NumPy, native float8 in PyTorch and JAX; of e2m1fn uint8 in
               each, a code a byte.
    scale, scale_inv
               float32, one for each group of elements: the factor into the format, and out of it.
    fmt, granularity, policy, axis
               the format, which elements share a scale, what made it, and the reduced axis.
    operand    the ``Quantized`` of fp8ref's ``sim``, ``torch`` or ``jax``, for their GEMMs.
    """

    operand: Any
    policy: ScalePolicy
    axis: int
    codes = property(lambda self: _codes(self.operand))
    scale = property(lambda self: self.operand.scale)
    scale_inv = property(lambda self: self.operand.scale_inv)
    fmt = property(lambda self: self.operand.fmt)
    granularity = property(lambda self: self.operand.granularity)
    shape = property(lambda self: tuple(self.operand.codes.shape))

    @property
    def bits(self) -> float:
        """Bits an element, with its part of the scales as they are stored (8 for e8m0 and e4m3)."""
        policy, levels = self.policy, self.policy.two_level
        size = 8 if policy.e8m0 or levels else policy.scale_dtype.bits
        has_tensor = levels is not None and levels.tensor != "none"
        tensor_bits = 32 * math.prod(self.operand.tensor_scale_inv.shape) if has_tensor else 0
        scales = size * math.prod(self.scale.shape) + tensor_bits
        return self.fmt.bits + scales / math.prod(self.shape)

    def dequantize(self) -> Any:
        """RN32(decode(codes) * scale_inv), float32 of x's shape, in the codes' framework (S-8)."""
        return _backend(self.codes).dequantize(self.operand)

    def error(self, x: Any) -> Accuracy:
        """What became of x, the tensor that was quantized; of any framework.

        Raises:   ValueError: x of another shape, or of no numbers.
        """
        x, q = as_numpy(to_supported(x)), self._in_numpy()
        exponents = stats.exponents(x, q, lowest=card.lowest(q.fmt))
        return measure(x, q, self.axis, exponents)

    def _in_numpy(self) -> scaling.Quantized:
        """The simulator's Quantized of the same bits."""
        q = self.operand
        if isinstance(q, scaling.Quantized):
            return q
        whole = None if q.tensor_scale_inv is None else as_numpy(q.tensor_scale_inv)
        codes, scale, inv = map(as_numpy, (self.codes, q.scale, q.scale_inv))
        return scaling.Quantized(codes, scale, inv, q.fmt, q.granularity, self.axis, whole)

    def _facts(self) -> tuple[str, dict[str, str]]:
        title = f"Quantized {self.shape} {self.fmt}"
        facts = {"scales": self.granularity, "policy": self.policy.name}
        try:
            q = self._in_numpy()
        except _NO_DATA:
            return title, facts
        decoded = cast.decode(q.codes, q.fmt)
        first = [f"{x:g}" for x in decoded.flat[:6]] + ["..."] * (decoded.size > 6)
        ends = dict.fromkeys(f"{x:g}" for x in (np.min(q.scale), np.max(q.scale)))
        facts["scales"] = f"{q.scale.size:,} {q.granularity}, {' to '.join(ends)}"
        zeros = f"{np.mean(decoded == 0):.2%} are zero"
        facts["codes"] = f"{', '.join(first)} (decoded); {zeros}"
        return title, facts | {"bits": f"{self.bits:.4g} an element, with its scales"}

    def _picture(self) -> str:
        try:
            q = self._in_numpy()
        except _NO_DATA:
            return ""
        back, first = scaling.dequantize(q), card.lowest(q.fmt)
        return card.histogram(
            stats.exponents(back, q, lowest=first).codes, q.fmt, "codes by magnitude"
        )


def quantize(
    x: Any,
    fmt: str | Format | None = None,
    recipe: str | Recipe | CastSpec = "tensorwise",
    *,
    policy: str | ScalePolicy | None = None,
    axis: int = -1,
) -> Quantized:
    """Scale x into a format's range and round to nearest even, saturating.

    x         an array of NumPy, PyTorch or JAX, or what np.asarray takes. float64 and integers are
              rounded to float32 first; a warning says so once, if x is an array.
    fmt       such as "e4m3fn"; None: that of the recipe.
    recipe    how x is scaled: as a recipe casts a linear's input; or a granularity, as the first
              recipe that has it. A recipe with delayed scaling takes the amax of x itself.
    policy    the rule from amax to scale; None: that of the recipe.
    axis      the reduced one: rows and blocks run along it.

    Order:    as ``fp8ref.sim.quantize.scaling.quantize``, and the same bits in each framework.
    Raises:   ValueError: an unknown name, with the nearest; x of another dtype, or empty; an axis
              that x lacks, or that blocks do not divide; a cast that x's framework does not have.
    Source:   spec S-5.

    >>> q = quantize([[0.5, -3.0], [1.0, 7.0]], "e4m3fn", "rowwise")
    >>> q.dequantize()
    array([[ 0.5, -3. ],
           [ 1. ,  7. ]], dtype=float32)
    """
    x, spec = to_supported(x), cast_spec(recipe, fmt, policy)
    axis = granularities.normalize_axis(axis, max(x.ndim, 1))
    backend, kind, policy = _backend(x), spec.granularity, spec.policy
    got = f"{spec.fmt} for {_framework(x)}. Give x in NumPy"
    fits = backend is scaling or not spec.simulated
    text = "formats other than FP8's, and e2m1fn but as R-9 says, are simulated, in NumPy alone"
    require(fits, f"{text}; got {got}.")
    q = backend.quantize(x, spec.fmt, granularity=kind, policy=policy, axis=axis)
    return Quantized(q, spec.policy, axis)


def dequantize(q: Any) -> Any:
    """``q.dequantize()``; of what ``quantize`` returned, or the ``quantize`` of a backend.

    Raises:   ValueError: anything else.
    """
    operand, got = getattr(q, "operand", q), type(q).__name__
    require(hasattr(operand, "codes"), f"q is the result of quantize; got {got}.")
    return _backend(operand.codes).dequantize(operand)


def cast_spec(
    recipe: str | Recipe | CastSpec,
    fmt: str | Format | None = None,
    policy: str | ScalePolicy | None = None,
) -> CastSpec:
    """The cast that ``quantize`` makes of these arguments.

    Raises:   ValueError: an unknown name; a recipe that casts no input; a cast that rotates or
              rounds stochastically.
    """
    recipe_name = isinstance(fmt, str) and fmt in RECIPES
    require(not recipe_name, f"fmt is a format; got a recipe. Use recipe={fmt!r}.")
    named = recipe.output.a if isinstance(recipe, Recipe) else recipe
    what, which = "recipe is a Recipe, a CastSpec or", "fmt is a Format or"
    spec: Any = registry.lookup(what, _CASTS, named, CastSpec)
    require(
        spec.rotation is None and spec.rounding == "nearest_even",
        "quantize neither rotates nor rounds stochastically. Use fp8ref.sim.linear.",
    )
    return CastSpec(
        fmt=registry.lookup(which, NARROW_FORMATS, spec.fmt if fmt is None else fmt, Format),
        granularity=spec.granularity,
        policy=policies.by_name(spec.policy if policy is None else policy),
    )


def measure(
    x: np.ndarray, q: scaling.Quantized, axis: int, exponents: stats.Exponents | None = None
) -> Accuracy:
    """The accuracy of q, quantized from x; exponents: histograms of both.

    Raises:   ValueError: x of another shape.
    """
    statistics = stats.statistics(x, q)
    pair = (np.moveaxis(np.atleast_1d(v), axis, -1) for v in (x, scaling.dequantize(q)))
    rows = np.asarray(stats.sqnr_by_row(*pair))
    ordered = np.where(np.isnan(rows), np.inf, rows)  # a row of zeros loses nothing
    counted = rows[~np.isnan(rows)] if np.any(rows == rows) else ordered
    worst_row = np.unravel_index(np.argmin(ordered), rows.shape)
    return Accuracy(
        sqnr=float(statistics.sqnr),
        zeroed=float(statistics.underflow_rate),
        clipped=float(statistics.overflow_rate),
        median=float(np.percentile(counted, 50, method="lower")),
        worst=float(ordered[worst_row]),
        worst_row=tuple(map(int, worst_row)),
        rows=rows,
        bias=float(statistics.relative_bias),
        exponents=exponents,
        fmt=q.fmt,
    )


def to_supported(x: Any) -> Any:
    """x as an array of its framework, of float32, float16 or bfloat16; wider ones become float32.

    Raises:   ValueError: another dtype, such as bool, complex numbers or objects.
    """
    array: Any = cast.array(x) if _framework(x) == "numpy" else x
    name = str(array.dtype).removeprefix("torch.")
    if name in ("float32", "float16", "bfloat16"):
        return array
    use = "x.float()" if _framework(x) == "torch" else "x.astype(np.float32)"
    require(
        name.startswith(("float64", "float128", "int", "uint")),
        "quantize takes float32, float16 or bfloat16, and rounds float64 and integers to float32; "
        f"got {name}. Use {'x.real' if 'complex' in name else use}.",
    )
    if hasattr(x, "dtype"):
        _say_rounded(name, use)
    return array.float() if _framework(x) == "torch" else array.astype("float32")


@functools.cache
def _say_rounded(name: str, use: str) -> None:
    """Warn, once for each dtype."""
    note = f"x is {name}, and is rounded to float32 first. {use} does so without this warning."
    warnings.warn(note, stacklevel=4)


def as_numpy(x: Any) -> np.ndarray:
    """An array of any framework in NumPy: FP8 as uint8 codes, PyTorch's bfloat16 as float32."""
    if _framework(x) == "torch":
        torch, x = sys.modules["torch"], x.detach().cpu()
        if "float8" in str(x.dtype):
            return x.view(torch.uint8).numpy()
        return (x.float() if x.dtype == torch.bfloat16 else x).numpy()
    x = np.asarray(x)
    return x.view(np.uint8) if x.dtype.name.startswith("float8") else x


def _codes(q: Any) -> Any:
    """What ``Quantized.codes`` shows of a room's Quantized."""
    return q.codes if q.fmt.bits == 8 or isinstance(q, scaling.Quantized) else q.code_bits


def _backend(x: Any) -> Any:
    """The module ``quantize.scaling`` for x's framework."""
    if _framework(x) == "torch":
        import fp8ref.torch.quantize.scaling as torch_scaling

        return torch_scaling
    if _framework(x) == "jax":
        import fp8ref.jax.quantize.scaling as jax_scaling

        return jax_scaling
    return scaling


def _framework(x: Any) -> str:
    """What x is an array of. A framework that nobody imported has none."""
    for name, kind in (("torch", "Tensor"), ("jax", "Array")):
        if isinstance(x, getattr(sys.modules.get(name), kind, ())):
            return name
    return "numpy"
