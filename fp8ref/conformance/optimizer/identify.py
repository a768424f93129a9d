"""Identify an optimizer: the layout of its states and its form of AdamW, or where the nearest
departs (spec O).
"""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8ref.conformance.kit import subject as subjects_of_arrays
from fp8ref.conformance.kit.subject import ConformanceError
from fp8ref.conformance.optimizer import damage, forms, search, subjects
from fp8ref.conformance.optimizer.forms import Form, Numbers
from fp8ref.conformance.optimizer.outcome import (
    NAMED,
    OptimizerOutcome,
    counterexample,
    findings,
    summary,
)
from fp8ref.conformance.optimizer.search import PROBE, Departure, Search
from fp8ref.spec.states import layouts as states
from fp8ref.spec.states.layouts import LAYOUTS, Layout, Moment

if TYPE_CHECKING:
    pass


def identify_optimizer(
    optimizer: Any,
    *,
    name: str | None = None,
    expect: str | None = None,
    kind: str | None = None,
    numbers: Numbers | None = None,
    steps: int = subjects.STEPS,
) -> OptimizerOutcome:
    """Identify an optimizer by its weights, and by its codes and scales where its state shows them.

    optimizer  a class of torch.optim, an optax transformation, functions that make them, or
               step(p, g, state) -> (p, state); see ``subjects``.
    expect     a name in LAYOUTS or WITH_MASTERS that it must have.
    numbers    learning rate, betas, eps and decay: passed to what takes them by name, and assumed
               otherwise.
    steps      that are compared. A fault of a later step is not seen.
    Raises:    ValueError: an unknown name or kind; steps below 1; what is no optimizer.
               RefusedError: it raises. ConformanceError: it returns something else than it should,
               or does not repeat itself.
    Source:    spec O.
    """
    if expect is not None and expect not in NAMED:
        raise ValueError(f"expect is one of {', '.join(NAMED)}; got {expect!r}.")
    given = numbers or Numbers()
    name = name or subjects_of_arrays.name_of(optimizer)
    kind, found = _asked(optimizer, name, kind, given, steps)
    fit, updates, masters = _first_step(found)
    searched, coupled = found, False
    if fit == "far":
        searched, coupled, fit, updates, masters = _with_decay_in_gradients(found)
    if fit == "far":
        ahead = _first_step(found, count=2)
        fit, updates, masters = ahead if ahead[0] == "exact" else (fit, updates, masters)
    layout, form, exact = _identified(searched, updates, masters, known=fit != "far")
    nearest, of_nearest = (
        (layout, form)
        if layout is not None
        else _nearest(searched, form, masters, known=fit != "far")
    )
    if coupled:
        form, of_nearest = (dataclasses.replace(one, decay="coupled") for one in (form, of_nearest))
    wanted = NAMED[expect] if expect else nearest
    sound = form if form.sound else Form()
    same = wanted == nearest and of_nearest.sound
    compared = of_nearest if same else forms.with_averages(sound, wanted.average, wanted.average)
    first = None if exact and wanted == layout and form.sound else found.departure(wanted, compared)
    hidden = {} if layout is None else damage.hidden(name, optimizer, kind, given, layout)
    said = "".join(f". {kind} gradients: {words}" for kind, words in hidden.items())
    return OptimizerOutcome(
        name=name,
        kind=kind,
        layout=None if layout is None else layout.name,
        form=of_nearest,
        known=fit != "far",
        exact=exact,
        shown=found.shown,
        findings=[
            *findings(searched, layout, of_nearest, exact, known=fit != "far"),
            *damage.findings(hidden, layout),
        ],
        summary=summary(layout, of_nearest, exact, nearest, known=fit != "far") + said,
        damage=hidden,
        expected=expect,
        departure=None if first is None else counterexample(first, wanted),
    )


def require_optimizer(
    optimizer: Any,
    layout: str | Layout = "sqrt_e4m3",
    *,
    kind: str | None = None,
    numbers: Numbers | None = None,
    steps: int = subjects.STEPS,
) -> None:
    """Require every bit of clause O: the weights of a layout after each step, and codes and scales
    if the state shows them; else raise an AssertionError with the first difference.

    Raises:    as ``identify_optimizer``.
    Source:    spec O-2 to O-10, O-14, O-15.
    """
    layout, given = states.by_name(layout), numbers or Numbers()
    name = subjects_of_arrays.name_of(optimizer)
    kind, found = _asked(optimizer, name, kind, given, steps)
    first = found.departure(layout, Form(m=layout.average, v=layout.average))
    if first is not None:
        raise AssertionError(
            f"{name} departs from layout {layout.name!r}: {counterexample(first, layout)}; "
            f"{first.differing} of {first.of} differ"
        )
    hidden = damage.hidden(name, optimizer, kind, given, layout)
    if hidden:
        said = "; ".join(f"{gradients} gradients: {words}" for gradients, words in hidden.items())
        raise AssertionError(f"{name} departs from layout {layout.name!r}: {said} (O-2)")


def _asked(
    optimizer: Any, name: str, kind: str | None, given: Numbers, steps: int = subjects.STEPS
) -> tuple[str, Search]:
    if kind is not None and kind not in subjects.KINDS:
        raise ValueError(f"kind is one of {', '.join(subjects.KINDS)}; got {kind!r}.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps is an integer of at least 1; got {steps!r}.")
    states.scalars(steps, **dataclasses.asdict(given))  # refuses numbers outside their ranges
    kind = kind or subjects.kind_of(optimizer)
    if kind is None:
        raise ValueError(
            f"{name} is no optimizer: neither a class of torch.optim or a function of params, "
            "an optax transformation or a function of learning_rate, nor step(p, g, state). "
            "Name one with --kind, or give its other arguments defaults."
        )
    _add_roots(kind)
    asked = subjects.inputs(steps)
    made = subjects.run(name, optimizer, kind, asked, given)
    again = subjects.run(name, optimizer, kind, asked, given)
    if any(made[-1][t].weight.tobytes() != again[-1][t].weight.tobytes() for t in asked.weights):
        raise ConformanceError(
            f"{name} does not repeat itself from the same start. Turn off random state, such as "
            "stochastic rounding."
        )
    return kind, Search(asked, made, given)


def _add_roots(kind: str) -> None:
    """torch's root on a CPU is not rounded correctly."""
    if kind == "torch":
        import torch

        forms.ROOTS.setdefault(
            "torch's", lambda x: torch.from_numpy(np.ascontiguousarray(x)).sqrt().numpy()
        )


def _identified(
    found: Search, updates: list[Form], masters: list[Moment], *, known: bool
) -> tuple[Layout | None, Form, bool]:
    """The layout, the form, and whether they explain every bit; updates and masters are those of
    the first step.
    """
    if found.shown:
        layout, m, v = _by_states(found, masters)
        if layout is None:
            return None, forms.with_averages(updates[0], "products", "products"), False
        if not known:
            return layout, forms.with_averages(updates[0], m, v), False
        every = [
            forms.with_averages(update, m, v)
            for update in forms.updates(decays=_decays(found), count=updates[0].count)
        ]
        form, exact = _best_update(found, layout, every)
        # neither bound nor master is in the moments
        for other in () if exact else _of_equal_moments(layout, masters):
            of_other, explained = _best_update(found, other, every)
            if explained:
                return other, of_other, True
        return layout, form, exact
    if not known:
        return None, updates[0], False
    named = search.named(masters)
    # A narrow master hides many forms of the first step: the layouts' own averages are tried before
    # others.
    for layout, averages in [(x, [(x.average, x.average)]) for x in named] + [
        (x, list(forms.averages())) for x in named
    ]:
        for form in _by_weights(found, layout, updates, averages):
            return layout, form, True
    for base in named:
        own = (base.average, base.average)
        for layout in search.variations(base):
            for form in _by_weights(found, layout, updates, [own]):
                return layout, form, True
    return None, updates[0], False


def _of_equal_moments(layout: Layout, masters: list[Moment]) -> list[Layout]:
    """The layouts with the same moments, and without the bound or with another of these masters."""
    found = [
        other
        for master in masters
        if master != layout.master and (other := search.with_master(layout, master)) is not None
    ]
    if layout.bounded and layout.master.amax != "predicted":
        found.append(
            dataclasses.replace(layout, bounded=False, name=f"{layout.name} without a bound")
        )
    return found


def _decays(found: Search) -> bool:
    return found.given.weight_decay > 0


def _with_decay_in_gradients(found: Search) -> tuple[Search, bool, str, list[Form], list[Moment]]:
    """The search whose gradients have the decay in them, True, and its ``_first_step``, if that
    explains it; else the search as it was, and clause O's form."""
    for fused in (False, True) if _decays(found) else ():
        other = found.coupled(fused=fused)
        fit, fitting, masters = _first_step(other)
        if fit == "exact":
            return other, True, fit, fitting, masters
    return found, False, "far", [Form()], [Moment()]


def _first_step(found: Search, *, count: int = 1) -> tuple[str, list[Form], list[Moment]]:
    """The forms of the update that explain the first step of the probe, in which no layout has a
    part but by its master, "exact", and these masters; else the nearest form, "near" or "far", and
    the master of least precision that could hold the weights."""
    every = [
        forms.with_averages(u, "products", v)
        for v in ("products", "products, (a g) g")
        for u in forms.updates(decays=_decays(found), count=count)
    ]
    possible = found.masters()
    fit: dict[Form, None] = {}
    masters = []
    for master in possible:
        plain = dataclasses.replace(
            LAYOUTS["float32"], master=master, bounded=master.amax == "predicted"
        )
        # a bound clips ratios whose bias is not corrected
        both = dict.fromkeys((plain, dataclasses.replace(plain, bounded=True)))
        of_it = (
            f
            for f in every
            if any(found.weight_departure(of, f, tensors=(PROBE,), steps=1) is None for of in both)
        )
        # A float16 weight has not the last places of forms: hundreds explain it, and the first is
        # taken.
        forms_of_it = list(of_it) if master == Moment() else list(itertools.islice(of_it, 1))
        if forms_of_it:
            masters.append(master)
            fit |= dict.fromkeys(
                forms.with_averages(form, "products", "products") for form in forms_of_it
            )
        if forms_of_it and master == Moment():
            break
    if fit:
        return "exact", list(fit), masters
    nearest_master = possible[1] if len(possible) > 1 else possible[0]
    layout = dataclasses.replace(LAYOUTS["float32"], master=nearest_master)
    theirs = found.made[0][PROBE].weight.reshape(-1).astype(np.float64)

    def far(form: Form) -> float:
        return float(
            np.nan_to_num(np.abs(found.weights(layout, form, PROBE, 1) - theirs).sum(), nan=np.inf)
        )

    nearest = min(every, key=far)
    before = found.asked.weights[PROBE].reshape(-1).astype(np.float64)
    change = np.abs(found.weights(LAYOUTS["float32"], nearest, PROBE, 1) - before).sum()
    # Other roundings, as of moments to bfloat16 before they are used, change a step by at most 2^-8
    # of it
    return "near" if far(nearest) <= change / 64 else "far", [nearest], [nearest_master]


def _by_states(found: Search, masters: list[Moment]) -> tuple[Layout | None, str, str]:
    """The first layout whose codes and scales are theirs at each step, and the averages of both
    moments.
    """

    def fits(layout: Layout, which: int) -> str | None:
        return next(
            (
                order
                for order in _orders(layout)[which]
                if found.state_departure(which, layout, order) is None
            ),
            None,
        )

    named = search.named(masters)
    for layouts in (named, (x for base in named for x in search.variations(base))):
        for layout in layouts:
            if (m := fits(layout, 0)) is not None and (v := fits(layout, 1)) is not None:
                return layout, m, v
    return None, "products", "products"


def _best_update(found: Search, layout: Layout, updates: Iterable[Form]) -> tuple[Form, bool]:
    """The first form that explains every weight, and True; else the nearest, and False."""
    every = list(updates)
    for form in every:
        if (
            found.weight_departure(layout, form, tensors=(PROBE,)) is None
            and found.weight_departure(layout, form) is None
        ):
            return form, True
    return min(every, key=lambda form: found.far(layout, form)), False


def _by_weights(
    found: Search, layout: Layout, updates: list[Form], averages: Iterable[tuple[str, str]]
) -> Iterable[Form]:
    """The forms that explain every weight under a layout."""
    for m, v in averages:
        for update in updates:
            form = forms.with_averages(update, m, v)
            if (
                found.weight_departure(layout, form, tensors=(PROBE,)) is None
                and found.weight_departure(layout, form) is None
            ):
                yield form


def _nearest(
    found: Search, form: Form, masters: list[Moment], *, known: bool
) -> tuple[Layout, Form]:
    """The named layout from which it departs last, by the states that are shown, or else by
    weights; and the form that it is compared in."""

    def late(first: Departure | None) -> tuple[int, float]:
        return (
            (len(found.made) + 1, 0.0)
            if first is None
            else (first.step, -first.differing / first.of)
        )

    if not known:
        return LAYOUTS["float32"], form
    if not found.shown:
        pairs = [
            (layout, forms.with_averages(form, layout.average, layout.average))
            for layout in search.named(masters)
        ]
        return max(pairs, key=lambda one: late(found.weight_departure(*one)))
    best = []
    for layout in search.named(masters):
        ranked = [
            {order: late(found.state_departure(i, layout, order)) for order in orders}
            for i, orders in enumerate(_orders(layout))
        ]
        m, v = (max(of_each, key=of_each.__getitem__) for of_each in ranked)
        ends = sorted((ranked[0][m], ranked[1][v]))
        best.append((ends, layout, m, v))
    _, layout, m, v = max(best, key=lambda one: one[0])
    every = (
        forms.with_averages(update, m, v)
        for update in forms.updates(decays=_decays(found), count=form.count)
    )
    return layout, _best_update(found, layout, every)[0]


def _orders(layout: Layout) -> tuple[list[str], list[str]]:
    """The orders of the averages of m and of v, the layout's own first."""
    m, v = (list(forms.AVERAGES), [*forms.AVERAGES, *forms.SQUARES])
    return [layout.average, *(x for x in m if x != layout.average)], [
        layout.average,
        *(x for x in v if x != layout.average),
    ]
