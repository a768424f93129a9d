"""Why an optimizer's weights are those of no form: numbers of steps, betas, states of zeros."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from fp8ref.conformance.optimizer import subjects
from fp8ref.conformance.optimizer.forms import Form
from fp8ref.conformance.optimizer.search import PROBE, Search
from fp8ref.conformance.optimizer.subjects import Inputs
from fp8ref.formats import BFLOAT16, FLOAT16
from fp8ref.sim.quantize import cast
from fp8ref.spec.states.layouts import LAYOUTS, Layout

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


def _betas(search: Search) -> Iterator[str]:
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
    """That late steps are counted as another, in a sentence; powers of betas may round otherwise
    there. Not of optax, whose own counters are integers, nor of what is not AdamW.
    """
    if kind == "optax" or not form.sound:
        return []
    rng = np.random.default_rng(1)
    weights = {PROBE: (rng.standard_normal(64) / 1024).astype(np.float32)}
    gradients = [{PROBE: rng.standard_normal(64).astype(np.float32)} for _ in range(LATE)]
    asked = Inputs(weights=weights, gradients=gradients)
    late = Search(asked, subjects.run(name, optimizer, kind, asked, search.given), search.given)
    steps = range(LATE - 3, LATE + 1)
    numbers = [late.number_of_step(layout, form, step) for step in steps]
    first, last, same = numbers[0], numbers[-1], len(set(numbers)) == 1
    if first is None or last is None or first == steps[0]:
        return []
    of = f"steps {steps[0]} to {LATE} are corrected as"
    if same:
        return [f"its step stays {first}: {of} that one"]
    begins = numbers == list(range(first, last + 1))  # powers that round otherwise make no run
    return [f"its step begins again: {of} {first} to {last}"] if begins else []
