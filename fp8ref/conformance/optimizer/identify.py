"""Identify an optimizer: the layout of its states and its form of AdamW, or the nearest (O)."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from fp8ref.conformance.kit import subject as subjects_of_arrays
from fp8ref.conformance.kit.subject import ConformanceError
from fp8ref.conformance.optimizer import causes, damage, forms, search, subjects
from fp8ref.conformance.optimizer.forms import Form, Numbers
from fp8ref.conformance.optimizer.outcome import (
    NAMED,
    OptimizerOutcome,
    counterexample,
    findings,
    summary,
)
from fp8ref.conformance.optimizer.search import PROBE, Departure, Search
from fp8ref.shared.errors import one_of
from fp8ref.spec.states import layouts as states
from fp8ref.spec.states.layouts import LAYOUTS, Layout, Moment


class FirstStep(NamedTuple):
    """The forms of the update that explain the first step of the probe, in which no layout has a
    part but by its master, "exact", and these masters; else the nearest form, "near" or "far", and
    the master of least precision that could hold the weights.
    """

    fit: str
    updates: list[Form]
    masters: list[Moment]


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
    if expect is not None:
        one_of("expect", expect, NAMED)
    settings = numbers or Numbers()
    name = name or subjects_of_arrays.name_of(optimizer)
    kind, form_search = _asked(optimizer, name, kind, settings, steps)
    searched, coupled, first_step = _explaining_first_step(form_search)
    layout, form, exact = _identified(searched, first_step)
    nearest, nearest_form = (layout, form) if layout else _nearest(searched, form, first_step)
    if coupled:
        form, nearest_form = (dataclasses.replace(f, decay="coupled") for f in (form, nearest_form))
    target = NAMED[expect] if expect else nearest
    first = None
    if not (exact and target == layout and form.sound):
        own = _averaging(form if form.sound else Form(), target.average)
        same = target == nearest and nearest_form.sound
        first = form_search.departure(target, nearest_form if same else own)
    hidden = {} if layout is None else damage.hidden(name, optimizer, kind, settings, layout)
    damages = "".join(f". {kind} gradients: {words}" for kind, words in hidden.items())
    has_form = first_step.fit != "far"
    compared = findings(searched, layout, nearest_form, exact, has_form=has_form)
    words = summary(layout, nearest_form, exact, nearest, has_form=has_form)
    late = (name, optimizer, kind, searched, nearest, form)
    faults = causes.late_steps(*late) if exact else causes.inexact(searched, nearest, nearest_form)
    return OptimizerOutcome(
        name=name,
        kind=kind,
        layout=None if layout is None else layout.name,
        form=nearest_form,
        known=has_form,
        exact=exact,
        shown=form_search.shown,
        findings=[*compared, *damage.findings(hidden, layout)],
        summary=words + "".join(f". Fault: {fault}" for fault in faults) + damages,
        faults=faults,
        damage=hidden,
        expected=expect,
        departure=None if first is None else counterexample(first, target),
    )


def _averaging(form: Form, average: str) -> Form:
    """The form with one average of both moments."""
    return dataclasses.replace(form, m=average, v=average)


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
    layout, settings = states.by_name(layout), numbers or Numbers()
    name = subjects_of_arrays.name_of(optimizer)
    kind, form_search = _asked(optimizer, name, kind, settings, steps)
    first = form_search.departure(layout, Form(m=layout.average, v=layout.average))
    if first is not None:
        raise AssertionError(
            f"{name} departs from layout {layout.name!r}: {counterexample(first, layout)}; "
            f"{first.differing} of {first.of} differ"
        )
    hidden = damage.hidden(name, optimizer, kind, settings, layout)
    if hidden:
        damages = "; ".join(f"{kind} gradients: {words}" for kind, words in hidden.items())
        raise AssertionError(f"{name} departs from layout {layout.name!r}: {damages} (O-2)")


def _asked(
    optimizer: Any, name: str, kind: str | None, settings: Numbers, steps: int = subjects.STEPS
) -> tuple[str, Search]:
    if kind is not None:
        one_of("kind", kind, subjects.KINDS)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps is an integer of at least 1; got {steps!r}.")
    states.scalars(steps, **dataclasses.asdict(settings))  # refuses numbers outside their ranges
    kind = kind or subjects.kind_of(optimizer)
    if kind is None:
        raise ValueError(
            f"{name} is no optimizer: neither a class of torch.optim or a function of params, "
            "an optax transformation or a function of learning_rate, nor step(p, g, state). "
            "Name one with --kind, or give its other arguments defaults."
        )
    if kind == "torch":  # whose root on a CPU is not rounded correctly
        import torch

        forms.ROOTS.setdefault(
            "torch's", lambda x: torch.from_numpy(np.ascontiguousarray(x)).sqrt().numpy()
        )
    asked = subjects.inputs(steps)
    snapshots = subjects.run(name, optimizer, kind, asked, settings)
    again = subjects.run(name, optimizer, kind, asked, settings)
    if any(
        snapshots[-1][t].weight.tobytes() != again[-1][t].weight.tobytes() for t in asked.weights
    ):
        why = causes.unrepeatable(Search(asked, snapshots, settings))
        raise ConformanceError(f"{name} does not repeat itself from the same start. {why}")
    return kind, Search(asked, snapshots, settings)


def _identified(form_search: Search, first_step: FirstStep) -> tuple[Layout | None, Form, bool]:
    """The layout, the form, and whether they explain every bit."""
    fit, updates, masters = first_step
    if form_search.shown:
        layout, m, v = _by_states(form_search, masters)
        if layout is None:
            return None, _averaging(updates[0], "products"), False
        if fit == "far":
            return layout, dataclasses.replace(updates[0], m=m, v=v), False
        every = [
            dataclasses.replace(update, m=m, v=v)
            for update in forms.updates(decays=_decays(form_search), count=updates[0].count)
        ]
        form, exact = _best_update(form_search, layout, every)
        # neither bound nor master is in the moments
        for other in () if exact else _equal_moment_layouts(layout, masters):
            other_form, explained = _best_update(form_search, other, every)
            if explained:
                return other, other_form, True
        return layout, form, exact
    if fit == "far":
        return None, updates[0], False
    named = search.named(masters)
    # A narrow master hides many forms of the first step: the layouts' own averages are tried before
    # others.
    for layout, averages in [(x, [(x.average, x.average)]) for x in named] + [
        (x, list(forms.averages())) for x in named
    ]:
        for form in _by_weights(form_search, layout, updates, averages):
            return layout, form, True
    for base in named:
        own = (base.average, base.average)
        for layout in search.variations(base):
            for form in _by_weights(form_search, layout, updates, [own]):
                return layout, form, True
    return None, updates[0], False


def _equal_moment_layouts(layout: Layout, masters: list[Moment]) -> list[Layout]:
    """The layouts with the same moments, and without the bound or with another of these masters."""
    layouts = [
        other
        for master in masters
        if master != layout.master and (other := search.with_master(layout, master)) is not None
    ]
    return [*layouts, *search.unbounded(layout)]


def _decays(form_search: Search) -> bool:
    return form_search.given.weight_decay > 0


def _explaining_first_step(form_search: Search) -> tuple[Search, bool, FirstStep]:
    """The search and its first step; if no form explains it, the search whose gradients have the
    decay in them, and True, or a count that is a step ahead; else clause O's form.
    """
    first_step = _first_step(form_search)
    if first_step.fit != "far":
        return form_search, False, first_step
    for fused in (False, True) if _decays(form_search) else ():
        other = form_search.coupled(fused=fused)
        other_step = _first_step(other)
        if other_step.fit == "exact":
            return other, True, other_step
    ahead = _first_step(form_search, count=2)
    if ahead.fit == "exact":
        return form_search, False, ahead
    return form_search, False, FirstStep("far", [Form()], [Moment()])


def _first_step(form_search: Search, *, count: int = 1) -> FirstStep:
    """The first step, under forms that count steps from a number."""
    every = [
        dataclasses.replace(u, v=v)
        for v in ("products", "products, (a g) g")
        for u in forms.updates(decays=_decays(form_search), count=count)
    ]
    possible = form_search.masters()
    fit: dict[Form, None] = {}
    masters = []
    for master in possible:
        plain = dataclasses.replace(
            LAYOUTS["float32"], master=master, bounded=master.amax == "predicted"
        )
        # a bound clips ratios whose bias is not corrected
        both = dict.fromkeys((plain, dataclasses.replace(plain, bounded=True)))
        fitting = (
            f
            for f in every
            if any(
                form_search.weight_departure(of, f, tensors=(PROBE,), steps=1) is None
                for of in both
            )
        )
        # A float16 weight has not the last places of forms: hundreds explain it, and the first is
        # taken.
        forms_of_it = list(fitting) if master == Moment() else list(itertools.islice(fitting, 1))
        if forms_of_it:
            masters.append(master)
            fit |= dict.fromkeys(_averaging(form, "products") for form in forms_of_it)
        if forms_of_it and master == Moment():
            break
    if fit:
        return FirstStep("exact", list(fit), masters)
    nearest_master = possible[1] if len(possible) > 1 else possible[0]
    layout = dataclasses.replace(LAYOUTS["float32"], master=nearest_master)
    theirs = form_search.made[0][PROBE].weight.reshape(-1).astype(np.float64)

    def far(form: Form) -> float:
        off = np.abs(form_search.weights(layout, form, PROBE, 1) - theirs).sum()
        return float(np.nan_to_num(off, nan=np.inf))

    nearest = min(every, key=far)
    before = form_search.asked.weights[PROBE].reshape(-1).astype(np.float64)
    change = np.abs(form_search.weights(LAYOUTS["float32"], nearest, PROBE, 1) - before).sum()
    # Other roundings, as of moments to bfloat16 before they are used, change a step by at most 2^-8
    # of it
    how_far = "near" if far(nearest) <= change / 64 else "far"
    return FirstStep(how_far, [nearest], [nearest_master])


def _by_states(form_search: Search, masters: list[Moment]) -> tuple[Layout | None, str, str]:
    """The first layout whose codes and scales are theirs at each step, and both averages."""

    def fits(layout: Layout, which: int) -> str | None:
        for order in _orders(layout)[which]:
            if form_search.state_departure(which, layout, order) is None:
                return order
        return None

    named = search.named(masters)
    for layouts in (named, (x for base in named for x in search.variations(base))):
        for layout in layouts:
            if (m := fits(layout, 0)) is not None and (v := fits(layout, 1)) is not None:
                return layout, m, v
    return None, "products", "products"


def _explains(form_search: Search, layout: Layout, form: Form) -> bool:
    """Whether they give every weight; the probe's first, which rules out most."""
    return (
        form_search.weight_departure(layout, form, tensors=(PROBE,)) is None
        and form_search.weight_departure(layout, form) is None
    )


def _best_update(form_search: Search, layout: Layout, updates: Iterable[Form]) -> tuple[Form, bool]:
    """The first form that explains every weight, and True; else the nearest, and False."""
    every = list(updates)
    for form in every:
        if _explains(form_search, layout, form):
            return form, True
    return min(every, key=lambda form: form_search.far(layout, form)), False


def _by_weights(
    form_search: Search, layout: Layout, updates: list[Form], averages: Iterable[tuple[str, str]]
) -> Iterable[Form]:
    """The forms that explain every weight under a layout."""
    for m, v in averages:
        for update in updates:
            form = dataclasses.replace(update, m=m, v=v)
            if _explains(form_search, layout, form):
                yield form


def _nearest(form_search: Search, form: Form, first_step: FirstStep) -> tuple[Layout, Form]:
    """The named layout from which it departs last, by the states that are shown, or else by
    weights; and the form that it is compared in."""

    def late(first: Departure | None) -> tuple[int, float]:
        if first is None:
            return (len(form_search.made) + 1, 0.0)
        return (first.step, -first.differing / first.of)

    if first_step.fit == "far":
        return LAYOUTS["float32"], form
    named = search.named(first_step.masters)
    if not form_search.shown:
        pairs = [(layout, _averaging(form, layout.average)) for layout in named]
        return max(pairs, key=lambda one: late(form_search.weight_departure(*one)))
    best = []
    for layout in named:
        ranked = [
            {order: late(form_search.state_departure(i, layout, order)) for order in orders}
            for i, orders in enumerate(_orders(layout))
        ]
        m, v = (max(lateness, key=lateness.__getitem__) for lateness in ranked)
        ends = sorted((ranked[0][m], ranked[1][v]))
        best.append((ends, layout, m, v))
    _, layout, m, v = max(best, key=lambda one: one[0])
    every = (
        dataclasses.replace(update, m=m, v=v)
        for update in forms.updates(decays=_decays(form_search), count=form.count)
    )
    return layout, _best_update(form_search, layout, every)[0]


def _orders(layout: Layout) -> tuple[list[str], list[str]]:
    """The orders of the averages of m and of v, the layout's own first."""
    m = list(dict.fromkeys([layout.average, *forms.AVERAGES]))
    return m, [*m, *forms.SQUARES]
