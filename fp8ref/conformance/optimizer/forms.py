"""The orders of operations that AdamW is written in, each rounded to float32 (spec O-5, O-6).

``Form()`` is clause O's. The others are libraries', and some mistakes: bits alone tell them apart.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8ref.shared import package_data
from fp8ref.spec.states import layouts as states

F32 = np.float32  # float32, in which every number of a form is rounded

_ORDERS = package_data.tables(__file__, "forms")

AVERAGES: dict[str, str] = _ORDERS["averages"]
"""The orders of a moving average x of y: of m, y is g, and of v it is g g."""

SQUARES: dict[str, str] = _ORDERS["squares"]
"""More of v alone; the second is torch's addcmul on a CPU."""

ROOTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"rounded correctly": np.sqrt}
"""The square roots that are tried; ``subjects`` adds torch's."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """An order of operations.

    m, v     the averages, of AVERAGES; of v also SQUARES.
    bias_m   of m: product (m i1), quotient (m / c1), rate (the learning rate / c1), none.
    bias_v   of v: product (sqrt(v) i2), quotient (sqrt(v) / r2), inside (sqrt(v / c2)),
             inside_product, none.
    numbers  float64 or float32: what the powers of the betas are computed in.
    eps      outside or inside of the root.
    decay    added (to the ratio), factor (p (1 - lr decay), before), subtracted (p - (lr decay) p,
             before), after (a factor, last), coupled (added to the gradient: Adam), none.
    change   ratio (lr (m / d)), numerator ((lr m) / d), fused (fma(-lr, ratio, p)).
    root     of ROOTS.
    count    the first step's number, which corrects biases: 1, or 2, a counter raised twice.
    """

    m: str = "products"
    v: str = "products"
    bias_m: str = "product"
    bias_v: str = "product"
    numbers: str = "float64"
    eps: str = "outside"
    decay: str = "added"
    change: str = "ratio"
    root: str = "rounded correctly"
    count: int = 1

    @property
    def sound(self) -> bool:
        """Whether it is AdamW: both moments corrected, at the step's number; a decoupled decay."""
        return (
            self.count == 1
            and "none" not in (self.bias_m, self.bias_v)
            and self.decay not in ("none", "coupled")
        )


def updates(*, decays: bool, count: int = 1) -> Iterator[Form]:
    """All forms of the update that count steps from this number, clause O's first."""
    choices: dict[str, Iterable[Any]] = {
        "decay": ("added", "factor", "subtracted", "after", "none") if decays else ("added",),
        "bias_m": ("product", "quotient", "rate", "none"),
        "bias_v": ("product", "quotient", "inside", "inside_product", "none"),
        "numbers": ("float64", "float32"),
        "eps": ("outside", "inside"),
        "change": ("ratio", "numerator", "fused"),
        "root": ROOTS,
    }
    for values in itertools.product(*choices.values()):
        form = Form(**dict(zip(choices, values, strict=True)), count=count)
        # the rate of the ratio is not that of the decay
        if (form.bias_m, form.decay) != ("rate", "added") or form.change == "numerator":
            yield form


def averages() -> Iterator[tuple[str, str]]:
    """All pairs of orders of m and v, clause O's two first."""
    yield from (("products", "products"), ("lerp", "lerp"))
    pairs = itertools.product(AVERAGES, (*AVERAGES, *SQUARES))
    yield from (pair for pair in pairs if pair not in (("products", "products"), ("lerp", "lerp")))


def average(
    name: str, x: np.ndarray, g: np.ndarray, beta: float, rest: float, *, square: bool
) -> np.ndarray:
    """The new moment of an old one; rest is 1 - beta."""
    b, a = F32(beta), F32(rest)
    if name in SQUARES:
        if name == "products, fused (a g) g":
            return fma(a * g, g, b * x)
        return fma(b, x, (a * g) * g) if "old" in name else b * x + (a * g) * g
    y = g * g if square else g
    if name == "products":
        return b * x + a * y
    if name == "lerp":
        return x + a * (y - x)
    if name == "lerp, fused":
        return fma(a, y - x, x)
    return fma(b, x, a * y) if name.endswith("old") else fma(a, y, b * x)


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What a step is given: as float64, rounded where a form rounds it."""

    learning_rate: float = 1e-3
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1


def update(
    form: Form,
    p: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    step: int,
    settings: Numbers,
    bound: float,
) -> np.ndarray:
    """The new weight of new moments; bound is that of a bounded layout, else infinite."""
    c1, c2 = (_lacking(b, step - 1 + form.count, form.numbers) for b in (settings.b1, settings.b2))
    lr, decay = F32(settings.learning_rate), F32(settings.weight_decay)
    rate = lr
    with np.errstate(all="ignore"):
        denominator = _denominator(form, v, c2, F32(settings.eps))
        numerator = m
        if form.bias_m == "product":
            numerator = m * F32(F32(1) / c1 if form.numbers == "float32" else 1 / c1)
        elif form.bias_m == "quotient":
            numerator = m / F32(c1)
        elif form.bias_m == "rate":
            rate = F32(lr / c1) if form.numbers == "float32" else F32(settings.learning_rate / c1)
        if form.decay == "factor":
            p = p * F32(1 - settings.learning_rate * settings.weight_decay)
        elif form.decay == "subtracted":
            p = p - (F32(settings.learning_rate) * decay) * p
        if form.change == "numerator":
            added = lr * (decay * p) if form.decay == "added" else F32(0)
            new = p - ((rate * numerator) / denominator + added)
        else:
            ratio = np.clip(numerator / denominator, -F32(bound), F32(bound))
            ratio = ratio + decay * p if form.decay == "added" else ratio
            new = fma(-rate, ratio, p) if form.change == "fused" else p - rate * ratio
        if form.decay == "after":
            return new * F32(1 - settings.learning_rate * settings.weight_decay)
        return new


def _denominator(form: Form, v: np.ndarray, c2, eps: np.float32) -> np.ndarray:
    one: Any = F32(1) if form.numbers == "float32" else 1
    inside = form.eps == "inside"
    if form.bias_v == "inside":
        v = v / F32(c2)
    elif form.bias_v == "inside_product":
        v = v * F32(one / c2)
    denominator = ROOTS[form.root](v + eps if inside else v)
    if form.bias_v == "product":
        denominator = denominator * F32(one / np.sqrt(c2))
    elif form.bias_v == "quotient":
        denominator = denominator / F32(np.sqrt(c2))
    return denominator if inside else denominator + eps


def _lacking(beta: float, step: int, numbers: str) -> Any:
    """1 - beta^step."""
    if numbers == "float32":
        return F32(1) - F32(float(F32(beta)) ** step)
    power = 1.0
    for _ in range(step):
        power *= beta
    return np.float64(1 - power)


def fma(a: Any, b: Any, c: np.ndarray) -> np.ndarray:
    """RN32(a b + c), rounded once."""
    product = np.float64(1) * a * np.float64(1) * b  # exact: 48 bits
    wide = np.asarray(c, np.float64)
    total = product + wide
    kept = total - product
    error = (product - (total - kept)) + (wide - kept)
    # Rounded to odd in float64, so that the second rounding does not see a tie that is none.
    bits = np.atleast_1d(total).view(np.int64)
    odd = np.where(
        (error != 0) & (bits & 1 == 0),
        np.nextafter(total, np.where(error > 0, np.inf, -np.inf)),
        total,
    )
    return odd.reshape(np.shape(total)).astype(np.float32)


def bound_of(layout: states.Layout, step: int, settings: Numbers) -> float:
    """The bound of O-6 at a step, infinite of a layout without."""
    if not layout.bounded:
        return np.inf
    table = states.corrections(settings.b1, settings.b2)
    return table[min(step, len(table)) - 1][2]
