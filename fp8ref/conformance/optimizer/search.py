"""What layouts and forms give, compared with what an optimizer made (spec O)."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fp8ref.conformance.optimizer import forms
from fp8ref.conformance.optimizer.forms import Form, Numbers
from fp8ref.conformance.optimizer.subjects import Inputs, Snapshot
from fp8ref.formats import BFLOAT16, E4M3FN, E5M2, FLOAT16
from fp8ref.sim.states import moments
from fp8ref.sim.states import states as sim
from fp8ref.sim.states.moments import MomentState
from fp8ref.spec.states import layouts as states
from fp8ref.spec.states import saved as layout_decisions
from fp8ref.spec.states.layouts import LAYOUTS, WITH_MASTERS, Layout, Moment

PROBE = "spread"  # the tensor that is asked first


class Departure(NamedTuple):
    """The first difference: step from 1, tensor, what of it, the element's index, both numbers; and
    how many elements of that tensor differ."""

    step: int
    tensor: str
    what: str
    at: tuple[int, ...]
    got: Any
    expected: Any
    differing: int
    of: int

    def __str__(self) -> str:
        place = f"[{', '.join(map(str, self.at))}]" if self.at else ""
        return f"step {self.step}, tensor {self.tensor}, {self.what}{place}"


class Search:
    """What layouts and forms would make of the inputs, computed as it is asked for."""

    def __init__(
        self, asked: Inputs, snapshots: list[dict[str, Snapshot]], settings: Numbers
    ) -> None:
        self.asked, self.made = asked, snapshots
        self.given, self.averaged = settings, settings
        self._chains: dict[tuple, list[tuple[np.ndarray, MomentState]]] = {}
        every = [snapshot for step in snapshots for snapshot in step.values()]
        self.shown = all(None not in (snapshot.m, snapshot.v) for snapshot in every)

    def chain(
        self, which: int, layout: Layout, average: str, tensor: str, steps: int
    ) -> list[tuple[np.ndarray, MomentState]]:
        """(new moment before it is stored, what is stored), flat, of each of so many steps."""
        p = self.asked.weights[tensor]
        own = layout.of(p.size)
        moment = (own.m, own.v)[which]
        chain = self._chains.setdefault((which, moment, average, own.average, tensor), [])
        with np.errstate(all="ignore"):
            while len(chain) < steps:
                step = len(chain) + 1
                at = states.scalars(step, **dataclasses.asdict(self.averaged))
                g = sim.in_range(self.asked.gradients[step - 1][tensor].reshape(-1))
                old = chain[-1][1] if chain else moments.zeros(p.shape, moment)
                x = moments.read(old, moment, old.codes.reshape(-1), 0, own)
                b, a = ((at.b1, at.a1), (at.b2, at.a2))[which]
                new = moments.not_tiny(forms.average(average, x, g, b, a, square=which == 1), own)
                stored = moments.store([(0, g, new)], old, moment, which, p.shape, at, None, own)
                chain.append((new, stored))
        return chain[:steps]

    def coupled(self, *, fused: bool) -> "Search":
        """A search whose gradients have the decay in them, g + decay p, rounded once or twice."""
        decay = np.float32(self.given.weight_decay)

        def coupled_gradients(step: int) -> dict[str, np.ndarray]:
            if step == 0:
                before = self.asked.weights
            else:
                snapshots = self.made[step - 1].items()
                before = {name: snapshot.weight for name, snapshot in snapshots}
            gradients = self.asked.gradients[step]
            if fused:
                return {k: forms.fma(decay, p, gradients[k]) for k, p in before.items()}
            return {k: gradients[k] + decay * p for k, p in before.items()}

        with np.errstate(all="ignore"):
            gradients = [coupled_gradients(step) for step in range(len(self.made))]
        asked = dataclasses.replace(self.asked, gradients=gradients)
        return Search(asked, self.made, dataclasses.replace(self.given, weight_decay=0.0))

    def with_betas(self, b1: float, b2: float) -> "Search":
        """A search whose averages have other betas; biases are corrected by those asked for."""
        other = Search(self.asked, self.made, self.given)
        other.averaged = dataclasses.replace(self.given, b1=b1, b2=b2)
        return other

    def number_of_step(
        self, layout: Layout, form: Form, step: int, tensor: str = PROBE
    ) -> int | None:
        """The number of a step that explains a tensor's weights: its own if it does; or None."""
        theirs = self.made[step - 1][tensor].weight.reshape(-1)
        for number in dict.fromkeys((step, *range(1, 2 * len(self.made) + 2))):
            counted = dataclasses.replace(form, count=number - step + 1)
            mine = self.weights(layout, counted, tensor, step)
            if np.array_equal(mine.view(np.uint32), theirs.view(np.uint32)):
                return number
        return None

    def apart(self, layout: Layout, form: Form, step: int, number: int) -> bool:
        """Whether the probe's change in a step is another by 2^-9 of it than that of a number,
        beside one rounding of weights: powers of betas in float32 err by less.
        """
        counted = dataclasses.replace(form, count=number - step + 1)
        before = self._before(PROBE, step).astype(np.float64)
        mine = self.weights(layout, counted, PROBE, step)
        theirs = self.made[step - 1][PROBE].weight.reshape(-1)
        with np.errstate(all="ignore"):
            bound = 2.0**-9 * np.abs(mine - before) + 2 * np.spacing(np.abs(mine))
            return not (np.abs(theirs.astype(np.float64) - mine) <= bound).all()

    def state_departure(self, which: int, layout: Layout, average: str) -> Departure | None:
        """Where codes or scales of m (0) or v (1) first differ."""
        for step in range(1, len(self.made) + 1):
            for tensor, snapshot in self.made[step - 1].items():
                theirs = (snapshot.m, snapshot.v)[which]
                assert theirs is not None
                mine = self.chain(which, layout, average, tensor, step)[-1][1]
                pairs = [("codes", mine.codes, theirs.codes, snapshot.weight.shape)]
                if theirs.scale_inv is not None and mine.scale_inv is not None:
                    scales = (mine.scale_inv, theirs.scale_inv)
                    pairs.append(("scale_inv", *scales, mine.scale_inv.shape))
                for what, own, other, shape in pairs:
                    name = f"{what} of {'mv'[which]}"
                    departure = _differs(own, other, name, step, tensor, shape)
                    if departure is not None:
                        return departure
        return None

    def weights(self, layout: Layout, form: Form, tensor: str, step: int) -> np.ndarray:
        """The weights of a step, from theirs of the step before, flat."""
        if not layout.keeps_master:
            return self._updated(layout, form, tensor, step, self._before(tensor, step))
        stored = self.master(layout, form, tensor, step)
        return moments.read(stored, layout.master, stored.codes, 0, layout)

    def master(self, layout: Layout, form: Form, tensor: str, step: int) -> MomentState:
        """What is stored of the weights of a step under a layout with masters, flat (O-15)."""
        before = self._before(tensor, step)
        if step == 1:
            before = sim.weight(sim.master(before, layout), layout)
        new = self._updated(layout, form, tensor, step, before)
        old, at = MomentState(before, amax=np.abs(before).max()), self._scalars(step)
        parts, master = [(0, new, new)], layout.master
        with np.errstate(all="ignore"):
            return moments.store(parts, old, master, 2, new.shape, at, None, layout)

    def _scalars(self, step: int) -> states.Scalars:
        return states.scalars(step, **dataclasses.asdict(self.given))

    def _before(self, tensor: str, step: int) -> np.ndarray:
        first = step == 1
        weight = self.asked.weights[tensor] if first else self.made[step - 2][tensor].weight
        return weight.reshape(-1)

    def _updated(
        self, layout: Layout, form: Form, tensor: str, step: int, before: np.ndarray
    ) -> np.ndarray:
        m, v = (
            self.chain(i, layout, average, tensor, step)[-1][0]
            for i, average in enumerate((form.m, form.v))
        )
        bound = forms.bound_of(layout, step - 1 + form.count, self.given)
        return forms.update(form, before, m, v, step, self.given, bound)

    def masters(self) -> list[Moment]:
        """Float32's, and those of named layouts that could hold every weight after a step."""
        weights = [snapshot.weight.reshape(-1) for snapshot in self.made[0].values()]
        after = np.concatenate(weights).view(np.uint32)
        narrow = dict.fromkeys(layout.master for layout in WITH_MASTERS.values())
        lost = {moment: (1 << 23 - moment.fmt.mantissa_bits) - 1 for moment in narrow}
        holding = [moment for moment in narrow if not (after & lost[moment]).any()]
        return [Moment(), *holding]

    def weight_departure(
        self, layout: Layout, form: Form, *, tensors: tuple[str, ...] = (), steps: int | None = None
    ) -> Departure | None:
        """Where weights first differ."""
        for step in range(1, (steps or len(self.made)) + 1):
            for tensor in tensors or self.asked.weights:
                theirs = self.made[step - 1][tensor]
                mine = self.weights(layout, form, tensor, step)
                shape = theirs.weight.shape
                departure = _differs(mine, theirs.weight, "weight", step, tensor, shape)
                shown = None
                if layout.keeps_master and theirs.master:
                    shown = theirs.master.scale_inv
                if departure is None and shown is not None:
                    scale = self.master(layout, form, tensor, step).scale_inv
                    if scale is not None:
                        what = "scale_inv of the master"
                        departure = _differs(scale, shown, what, step, tensor, ())
                if departure is not None:
                    return departure
        return None

    def departure(self, layout: Layout, form: Form) -> Departure | None:
        """The first difference from a layout and a form, of weights or of states."""
        departures = [self.weight_departure(layout, form)]
        for i, average in enumerate((form.m, form.v) if self.shown else ()):
            departures.append(self.state_departure(i, layout, average))
        first = filter(None, departures)
        return min(first, key=lambda departure: departure.step, default=None)

    def far(self, layout: Layout, form: Form) -> tuple[int, float]:
        """(how many weights of the probe differ, the largest difference in ulps) over all steps."""
        count, most = 0, 0.0
        for step in range(1, len(self.made) + 1):
            theirs = self.made[step - 1][PROBE].weight.reshape(-1)
            mine = self.weights(layout, form, PROBE, step)
            with np.errstate(all="ignore"):
                error = np.abs(mine.astype(np.float64) - theirs) / np.spacing(np.abs(theirs))
            count += int((mine.view(np.uint32) != theirs.view(np.uint32)).sum())
            most = max(most, float(np.nan_to_num(error, nan=np.inf).max()))
        return count, most


def variations(layout: Layout) -> Iterator[Layout]:
    """The layout with one decision of m, of v or of both changed; its name says which."""
    fields: dict[str, tuple] = {
        "block": (None, 128, 256),
        "scaling": ("multiply", "reciprocal", "divide", "power_of_two"),
        "fmt": (E4M3FN, E5M2, FLOAT16, BFLOAT16),
        "keep": (True, False),
        "root": (True, False),
        "expansion": (False,),
    }
    for field, values in fields.items():
        for value in values:
            for of in (("m", "v"), ("m",), ("v",)):
                if any(getattr(getattr(layout, key), field) == value for key in of):
                    continue
                name = f"{layout.name} with {field} {value} of {' and '.join(of)}"
                try:
                    m, v = (
                        dataclasses.replace(moment, **({field: value} if key in of else {}))
                        for key, moment in (("m", layout.m), ("v", layout.v))
                    )
                    ragged = layout.ragged or all(
                        moment.block is None for key, moment in (("m", m), ("v", v)) if key in of
                    )
                    yield dataclasses.replace(layout, m=m, v=v, ragged=ragged, name=name)
                except ValueError:  # a contradiction, which no layout has
                    continue
    yield from unbounded(layout)


def unbounded(layout: Layout) -> list[Layout]:
    """The layout without its bound, if it has one that its master does not need."""
    if not layout.bounded or layout.master.amax == "predicted":
        return []
    name = f"{layout.name} without a bound"
    return [dataclasses.replace(layout, bounded=False, name=name)]


def named(masters: Sequence[Moment]) -> list[Layout]:
    """The layouts whose master is one of these: named ones, then LAYOUTS with such a master."""
    every = (LAYOUTS | WITH_MASTERS).values()
    layouts = [layout for layout in every if layout.master in masters]
    written = {layout_decisions.written(layout) for layout in layouts}
    for layout, master in itertools.product(LAYOUTS.values(), masters):
        other = with_master(layout, master)
        if other is not None and layout_decisions.written(other) not in written:
            layouts.append(other)
    return layouts


def with_master(layout: Layout, master: Moment) -> Layout | None:
    """The layout with another master, named so; None without a bound to predict an amax of."""
    if master.amax == "predicted" and not layout.bounded:
        return None
    kind = f"{master.fmt}, {master.scaling or 'no scale'}, of {master.amax} amax"
    name = f"{layout.name} with a master in {kind}"
    return dataclasses.replace(layout, master=master, name=name)


def _differs(
    mine: np.ndarray, theirs: np.ndarray, what: str, step: int, tensor: str, shape: tuple[int, ...]
) -> Departure | None:
    mine, theirs = np.atleast_1d(mine).reshape(-1), np.atleast_1d(theirs).reshape(-1)
    if mine.dtype != theirs.dtype or mine.size != theirs.size:
        got, expected = (f"{x.size} of {x.dtype}" for x in (theirs, mine))
        size = max(mine.size, theirs.size)
        return Departure(step, tensor, what, (), got, expected, size, size)
    word = f"u{mine.dtype.itemsize}"
    differ = mine.view(word) != theirs.view(word)
    if mine.dtype.kind == "f":  # no clause has a NaN's bits, or the sign of a stored zero
        differ &= ~(np.isnan(mine) & np.isnan(theirs)) & ~((mine == 0) & (theirs == 0))
    if not differ.any():
        return None
    i = int(np.argmax(differ))
    at = tuple(int(x) for x in np.unravel_index(i, shape)) if shape else ()
    got, expected, count = theirs[i].item(), mine[i].item(), int(differ.sum())
    return Departure(step, tensor, what, at, got, expected, count, mine.size)
