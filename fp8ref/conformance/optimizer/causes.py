"""Why an optimizer's weights are those of no form: numbers of steps, betas, states of zeros."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from fp8ref.conformance.kit.subject import RefusedError
from fp8ref.conformance.optimizer import subjects
from fp8ref.conformance.optimizer.forms import Form
from fp8ref.conformance.optimizer.search import PROBE, Search
from fp8ref.conformance.optimizer.subjects import Inputs
from fp8ref.formats import BFLOAT16, FLOAT16
from fp8ref.sim.quantize import cast
from fp8ref.spec.states.layouts import LAYOUTS, Layout

LIMITS = (2**15 - 1, 2**16 - 1)
"""The counts of steps that a state is given then: counters of 16 bits end there."""

LATE = 300
"""The steps of a small tensor, more than a counter in bfloat16 counts: 256 + 1 is 256 there."""


def inexact(search: Search, layout: Layout, form: Form) -> list[str]:
    """What explains weights or states that no layout and form do, in sentences."""
    return [*_step_numbers(search, layout, form), *_betas(search), *_zeros(search)]


def _step_numbers(search: Search, layout: Layout, form: Form) -> Iterator[str]:
    steps = range(1, len(search.made) + 1)
    numbers = [search.number_of_step(layout, form, step) for step in steps]
    if None in numbers or numbers == list(steps):
        return
    if len(set(numbers)) == 1:
        yield f"biases are corrected as at step {numbers[0]} for ever: its step is never raised"
    else:
        listed = ", ".join(map(str, numbers))
        yield f"biases are corrected as at steps {listed}, not 1 to {len(numbers)}"


USUAL = (0.9, 0.95, 0.98, 0.99, 0.999)
"""Betas that a correction of biases may have in the place of the given ones."""


def _betas(search: Search) -> Iterator[str]:
    for b1, b2 in itertools.product((search.given.b1, *USUAL), (search.given.b2, *USUAL)):
        other = Search(search.asked, search.made, dataclasses.replace(search.given, b1=b1, b2=b2))
        own = other.with_betas(search.given.b1, search.given.b2)
        if own.weight_departure(LAYOUTS["float32"], Form(), tensors=(PROBE,)) is None:
            yield f"biases are corrected with betas {b1} and {b2}"
            return
    given = np.array([search.given.b1, search.given.b2], np.float64)
    for fmt in (BFLOAT16, FLOAT16):
        rounded = cast.round_to(given, fmt)
        cut = cast.round_to(given, fmt, rounding="toward_zero")
        for words, betas in (("rounded", rounded), ("cut", cut)):
            if betas.max() >= 1:  # bfloat16 has no 0.999
                continue
            own = search.with_betas(*map(float, betas))
            numbers = dataclasses.replace(search.given, b1=float(betas[0]), b2=float(betas[1]))
            both = Search(search.asked, search.made, numbers)
            for where, other in ((" in the averages", own), ("", both)):
                if other.weight_departure(LAYOUTS["float32"], Form(), tensors=(PROBE,)) is None:
                    yield f"betas are {words} to {fmt}{where}"
                    return


def _zeros(search: Search) -> Iterator[str]:
    zeros = search.made[0]["zeros"]
    for name, moment in (("m", zeros.m), ("v", zeros.v)):
        if moment is None:
            continue
        nan = (moment.codes & 0x7F) == 0x7F if moment.codes.dtype == np.uint8 else moment.codes
        scales = np.float32(1) if moment.scale_inv is None else moment.scale_inv
        if not np.isfinite(scales).all() or np.any(nan if nan.dtype == bool else np.isnan(nan)):
            yield f"{name} of a tensor without gradients is NaN, or has no finite scale"


def unrepeatable(search: Search) -> str:
    """In words, why a second run from the same start differs."""
    asked = [name for name in search.asked.weights if name != "zeros"]
    plain = LAYOUTS["float32"], Form()
    numbers = [search.number_of_step(*plain, 1, name) for name in asked]
    if None not in numbers and len(set(numbers)) == len(numbers):
        return f"One counter of steps serves all tensors: their first steps are {numbers}."
    return "Turn off random state, such as stochastic rounding."


def late_steps(
    name: str, optimizer: object, kind: str, search: Search, layout: Layout, form: Form
) -> list[str]:
    """What becomes of late steps, in a sentence: another number, or other weights. Powers of betas
    may round otherwise there. Not of optax, whose own counters are integers, nor of what is not
    AdamW.
    """
    if kind == "optax" or not form.sound:
        return []
    rng = np.random.default_rng(1)
    weights = {PROBE: (rng.standard_normal(64) / 1024).astype(np.float32)}
    early, raised = list(range(1, LATE + 1)), list[str]()
    counts = early + [limit + i for limit in LIMITS for i in range(3)]
    jumps = {LATE + 3 * i: limit - 1 for i, limit in enumerate(LIMITS)}
    if layout.keeps_master:  # whose amax is predicted from the number of the step
        counts, jumps = early, {}
    gradients = [{PROBE: rng.standard_normal(64).astype(np.float32)} for _ in counts]
    asked = Inputs(weights=weights, gradients=gradients, jumps=jumps)
    try:
        made = subjects.run(name, optimizer, kind, asked, search.given)
    except RefusedError as error:
        raised = [f"it raises at step {LIMITS[0]} or later: {error}"]
        counts, asked = early, Inputs(weights=weights, gradients=gradients[:LATE])
        made = subjects.run(name, optimizer, kind, asked, search.given)
    late = Search(asked, made, search.given)
    wrong = next((n for i, n in enumerate(counts, 1) if late.apart(layout, form, i, n)), None)
    steps = range(LATE - 3, LATE + 1)
    numbers = [late.number_of_step(layout, form, step) for step in steps]
    first, last, same = numbers[0], numbers[-1], len(set(numbers)) == 1
    if first is not None and last is not None and first != steps[0]:
        of = f"steps {steps[0]} to {LATE} are corrected as"
        if same and first <= LATE:
            return [f"its step stays {first}: {of} that one"]
        # powers that round otherwise make no run
        if numbers == list(range(first, last + 1)):
            return [f"its step begins again: {of} {first} to {last}"]
    if wrong is None:
        return raised
    return [f"its weights change at step {wrong}: those of earlier steps are of this form"]
