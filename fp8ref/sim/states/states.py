"""AdamW with moments in FP8 and other narrow formats (spec O), as pure functions of a tensor.

    state = states.init(p.shape, "sqrt_e4m3")
    p, state = states.step(p, g, state, states.AdamW(learning_rate=1e-3, layout="sqrt_e4m3"))
    m, v = states.decode(state, "sqrt_e4m3")

Order of a step: gradients out of range (O-2); the moments read back (O-4); their averages (O-5);
the weight (O-6); the scales of the new moments (O-7, O-9, O-10); their codes (O-8). Every operation
is one float32 operation, rounded to nearest even. A layout is a
``fp8ref.spec.states.layouts.Layout``. A step knows nothing of elements but their flat index and the
amaxes of their group, so that any cut of a tensor gives the same (O-11): ``cuts`` makes the step as
several ranks make it.

A layout with masters (O-14) takes and gives what is stored of the weight in its place:

    p = states.master(weights, "msamp_o2")
    p, state = states.step(p, g, state, states.AdamW(learning_rate=1e-3, layout="msamp_o2"))
    weights = states.weight(p, "msamp_o2")
"""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fp8ref import recipe as recipes
from fp8ref.formats import BFLOAT16, Format
from fp8ref.recipe import Recipe
from fp8ref.shared.errors import require
from fp8ref.sim import philox
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.sim.states import moments
from fp8ref.sim.states.moments import MomentState
from fp8ref.spec.states import layouts as states
from fp8ref.spec.states import saved as layout_decisions
from fp8ref.spec.states.layouts import Layout, Moment, Scalars

_NO_STEP = Scalars(*[0.0] * len(Scalars._fields))


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """The numbers and the layout of an AdamW, of which ``step`` makes a step.

    seed      keys the random numbers of a stochastic layout (O-8).
    Raises:   ValueError: an unknown layout; numbers outside their ranges (O-2); a seed out of
              range.
    """

    learning_rate: float
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    layout: str | Layout = "sqrt_e4m3"
    seed: int = 0

    def __post_init__(self) -> None:
        layout, decay = states.by_name(self.layout), self.weight_decay
        states.check(b1=self.b1, b2=self.b2, eps=self.eps, weight_decay=decay, layout=layout)
        self.scalars(1)
        _check_integer("seed", self.seed, 64)

    def scalars(self, number: int) -> Scalars:
        """The numbers of the step with that number, 1 for the first (O-3)."""
        return states.scalars(
            number,
            learning_rate=self.learning_rate,
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            weight_decay=self.weight_decay,
        )


class State(NamedTuple):
    """The state of one tensor: the steps that were made, both moments, in the tensor's shape, and
    the decisions of the layout, as text (spec O-17)."""

    step: int
    m: MomentState
    v: MomentState
    decisions: str


def init(shape: tuple[int, ...], layout: str | Layout = "sqrt_e4m3") -> State:
    """The state before the first step: zero codes, scales 1 (spec O-4).

    Shapes:   codes of that shape; scales () or [blocks of the flattened tensor].
    Raises:   ValueError: an unknown layout; what is no shape; a tensor without elements.
    """
    cast.check_shape(shape)
    layout, own = states.by_name(layout), _layout_of(layout, shape)
    m, v = (moments.zeros(shape, moment) for moment in (own.m, own.v))
    return State(0, m, v, layout_decisions.written(layout))


def decode(state: State, layout: str | Layout = "sqrt_e4m3") -> tuple[np.ndarray, np.ndarray]:
    """m and v as the next step reads them, float32 (spec O-4).

    Order:    RN32(decode(code) * scale_inv); the inverse of an expansion; RN32(x * x) of a root; a
              magnitude below ``layout.smallest_moment`` is +0.
    Raises:   ValueError: an unknown layout, or a state of another.
    """
    shape = state.m.codes.shape
    m, v = _read_both(state, _check_state(state, layout, shape), 0, None)
    return m.reshape(shape), v.reshape(shape)


def master(p, layout: str | Layout) -> MomentState:
    """The master of weights, before the first step: rounded to nearest, by its amax (O-14).

    Shapes:   p float32 of any shape; codes of that shape, scale_inv and amax ().
    Raises:   ValueError: an unknown layout, or one whose masters are the weights; p of another
              dtype, or without elements.
    """
    p = cast.array(p)
    layout = _layout_of(layout, p.shape)
    _check_keeps_master(layout)
    text = f"weights are float32; got {p.dtype}. Convert them with .astype(np.float32)."
    require(p.dtype == np.float32, text)
    of = dataclasses.replace(layout.master, amax="exact", rounding="nearest_even")
    with np.errstate(all="ignore"):
        flat = np.ascontiguousarray(p).reshape(-1)
        master_state = moments.store(
            [(0, flat, flat)], moments.zeros(p.shape, of), of, 2, p.shape, _NO_STEP, None, layout
        )
        if layout.master.amax == "predicted":
            kept = moments.read(master_state, of, master_state.codes.reshape(-1), 0, layout)
            master_state = master_state._replace(amax=np.abs(kept).max())
    return master_state


def weight(stored: MomentState, layout: str | Layout) -> np.ndarray:
    """The weight that a master holds, float32, as the next step reads it (spec O-14). What a model
    computes with is this, rounded once to its dtype.

    Raises:   ValueError: an unknown layout, or one whose masters are the weights; a master of
              another layout.
    """
    layout = _layout_of(layout, stored.codes.shape)
    _check_keeps_master(layout)
    _check_stored(stored, layout.master, "the master", layout, stored.codes.shape)
    w = moments.read(stored, layout.master, stored.codes.reshape(-1), 0, layout)
    return w.reshape(stored.codes.shape)


def copy(
    stored: MomentState, layout: str | Layout, recipe: str | Recipe, fmt: Format = BFLOAT16
) -> Quantized:
    """The FP8 copy of a master's weight, which linears of a recipe take as it is (O-16).

    fmt       that the model computes in.
    Order:    ``weight``, one rounding to fmt, then ``scaling.quantize`` by the cast that the recipe
              has for weights.
    Raises:   ValueError: as ``weight`` and ``recipe.weight_copy``.
    """
    spec = recipes.weight_copy(recipe)
    return scaling.quantize(
        cast.round_to(weight(stored, layout), fmt), spec.fmt, policy=spec.policy
    )


def step(
    p, g, state: State, optimizer: AdamW, *, tensor: int = 0, cuts: Sequence[int] = ()
) -> tuple[Any, State]:
    """One step of AdamW: the weight and the state after it (spec O).

    p         the weight; of a layout with masters the ``master``, and then the first result is the
              next master.
    tensor    the number of the tensor among those of the optimizer, which with its seed keys the
              random numbers of a stochastic layout (O-8).
    cuts      ascending flat indices at which ranks cut the tensor; the result is the same for any
              (O-11).
    Shapes:   p float32 of any shape; g of that shape, float32, float16 or bfloat16.
    Order:    O-2 to O-10, see the module.
    Specials: a gradient below 2^-56 counts as zero, one above 2^56 or not finite as NaN. A NaN
              makes its weight NaN, and both moments of all that share its scale.
    Raises:   ValueError: as ``decode``; p or g of another dtype or shape; cuts not ascending; a
              tensor out of range.
    """
    stored = p if isinstance(p, MomentState) else None
    p, g = _weight_and_gradient(p, g, states.by_name(optimizer.layout))
    layout = _check_state(state, optimizer.layout, p.shape)
    _check_integer("tensor", tensor, 31)
    edges = [0, *cuts, p.size]
    text = f"cuts ascend strictly between 0 and {p.size}, the tensor's size; got {list(cuts)}."
    require(sorted(set(edges)) == edges, text)
    number, flat_p, flat_g = state.step + 1, p.reshape(-1), g.reshape(-1)
    at, pieces, after = optimizer.scalars(number), [], []
    with np.errstate(all="ignore"):
        for start, stop in itertools.pairwise(edges):
            gradient = in_range(flat_g[start:stop])
            m, v = moments.averages(gradient, *_read_both(state, layout, start, stop), at, layout)
            w = _weight(flat_p[start:stop], m, v, at, layout)
            pieces.append((start, gradient, (m, v, w)))
        every = zip(layout.kept, (state.m, state.v, stored), strict=False)
        for i, (moment, old) in enumerate(every):
            assert old is not None
            key = None
            if moment.rounding == "stochastic":
                key = _key(optimizer.seed, number, 2 * tensor + i % 2, for_master=i == 2)
            values = [(start, gradient, new[i]) for start, gradient, new in pieces]
            after.append(moments.store(values, old, moment, i, p.shape, at, key, layout))
    weights = [new[2] for _, _, new in pieces]
    weight_after = after[2] if layout.keeps_master else np.concatenate(weights).reshape(p.shape)
    return weight_after, state._replace(step=number, m=after[0], v=after[1])


def _weight_and_gradient(p, g, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """The float32 weight, read from its master if it has one, and its float32 gradient."""
    is_master = isinstance(p, MomentState)
    if layout.keeps_master != is_master:
        raise ValueError(
            f"layout {layout.name!r} takes "
            f"{'masters: states.master(p, layout)' if layout.keeps_master else 'weights'}; got "
            f"{type(p).__name__}."
        )
    p, g = cast.array(weight(p, layout) if is_master else p), cast.array(g)
    if p.dtype != np.float32:
        raise ValueError(f"weights are float32; got {p.dtype}. Keep float32 masters.")
    if g.shape != p.shape or g.dtype.name not in ("float32", "float16", "bfloat16"):
        raise ValueError(
            f"a gradient is float32, float16 or bfloat16 {p.shape}; got {g.dtype} {g.shape}."
        )
    return p, cast.exact(np.asarray(g, order="C")).astype(np.float32)


def in_range(g: np.ndarray) -> np.ndarray:
    """Gradients below 2^-56 as +0, above 2^56 and not finite as NaN (spec O-2); float32."""
    magnitude = np.abs(g)
    kept = np.where(magnitude < np.float32(states.GRADIENT_MIN), np.float32(0), g)
    return np.where(magnitude <= np.float32(states.GRADIENT_MAX), kept, np.float32(np.nan))


def _weight(p: np.ndarray, m: np.ndarray, v: np.ndarray, at: Scalars, layout: Layout) -> np.ndarray:
    """The new weight (O-6)."""
    ratio = moments.ratio(m, v, at)
    if layout.bounded:
        ratio = np.clip(ratio, -np.float32(at.bound), np.float32(at.bound))
    return p - moments.change(ratio, p, at)


def _read_both(
    state: State, layout: Layout, start: int, stop: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """m and v of elements start to stop, or to the last, flat."""
    m, v = (
        moments.read(stored, moment, stored.codes.reshape(-1)[start:stop], start, layout)
        for stored, moment in ((state.m, layout.m), (state.v, layout.v))
    )
    return m, v


def _key(seed: int, step: int, stream: int, *, for_master: bool = False) -> int:
    """The seed of one moment of a tensor at one step (O-8), or of its master (O-15)."""
    words = [int(word) for word in philox.words(np.array([step], np.uint64), stream, seed)[0]]
    low, high = words[2:] if for_master else words[:2]
    return low | high << 32


def _check_integer(name: str, value: int, bits: int) -> None:
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or not 0 <= value < 1 << bits:
        raise ValueError(f"{name} is an integer in [0, 2^{bits}); got {value!r}.")


def _layout_of(layout: str | Layout, shape: tuple[int, ...]) -> Layout:
    size = int(np.prod(shape, dtype=np.int64))
    text = f"states need tensors with at least one element; got shape {shape}. Leave it out."
    require(size != 0, text)
    return states.by_name(layout).of(size)


def _check_state(state: State, layout: str | Layout, shape: tuple[int, ...]) -> Layout:
    """The layout, if a state is of this layout and shape."""
    if not isinstance(state, State):
        raise ValueError(f"a state is a states.State; got {type(state).__name__}. Use states.init.")
    own = _layout_of(layout, shape)
    for name, stored, moment in (("m", state.m, own.m), ("v", state.v, own.v)):
        _check_stored(stored, moment, name, own, shape)
    layout_decisions.check(states.by_name(layout), state.decisions)
    return own


def _check_stored(
    stored: MomentState, moment: Moment, name: str, layout: Layout, shape: tuple[int, ...]
) -> None:
    for field, has, needs in zip(
        MomentState._fields, stored, moments.zeros(shape, moment), strict=True
    ):
        described = [
            None if a is None else (np.asarray(a).dtype.name, np.shape(a)) for a in (has, needs)
        ]
        if described[0] != described[1]:
            raise ValueError(
                f"a state of layout {layout.name!r} and shape {shape} has {field} of {name} = "
                f"{described[1]}; got {described[0]}. States of another layout are not converted: "
                "use states.init."
            )


def _check_keeps_master(layout: Layout) -> None:
    text = f"the masters of layout {layout.name!r} are the float32 weights. Use the weights."
    require(layout.keeps_master, text)
