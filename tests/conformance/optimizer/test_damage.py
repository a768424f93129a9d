"""Gradients that are not finite make NaN of their weights, and an optimizer that hides them is
told.
"""

import numpy as np
import pytest
from helpers.conformance.optimizers import stepped

from fp8ref.conformance import optimizer as conformance
from fp8ref.conformance.optimizer import damage
from fp8ref.conformance.optimizer.forms import Numbers
from fp8ref.sim.states import states
from fp8ref.spec.states.layouts import LAYOUTS


def step_of(layout: str, *, change=lambda g: g, skip: bool = False, lone: bool = False):
    """A step of the simulator: of gradients that are changed first; none at all if one is not
    finite; or with NaN in one weight alone.
    """

    def step(p, g, state, **numbers):
        before = states.init(p.shape, layout) if state is None else state
        if skip and not np.isfinite(g).all():
            return p, before
        lost = np.isnan(p) | (np.isnan(g) if lone else False)
        given = np.where(lost, 0, p).astype(np.float32) if lone else p
        g = np.where(lost, 0, g).astype(np.float32) if lone else change(g)
        p, after = stepped(given, g, before, layout, **numbers)
        return np.where(lost, np.float32(np.nan), p), after

    return step


def hidden(step, layout: str) -> dict[str, str]:
    return damage.hidden("step", step, "function", Numbers(), LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["float32", "te", "msamp", "sqrt_e4m3", "torchao"])
def test_clause_o_hides_nothing(layout):  # O-2
    assert hidden(step_of(layout), layout) == {}


EVERY = dict.fromkeys(damage.DAMAGED, "replaced by 0")
FAULTS = {
    # the largest float32 is out of range too
    "nan_to_num": ({"change": np.nan_to_num}, {"NaN": "replaced by 0"}),
    "zeros": ({"change": lambda g: np.where(np.isfinite(g), g, np.float32(0))}, EVERY),
    "no lower bound": (
        {"change": lambda g: np.where(g == -np.inf, np.float32(0), g)},
        {"-Inf": "replaced by 0"},
    ),
    "skipped": ({"skip": True}, dict.fromkeys(damage.DAMAGED, "the step is skipped")),
    "an amax without NaN": (
        {"lone": True},
        {"NaN": "1 and 1 of 4096 weights are NaN after the first and the second step"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_becomes_of_a_gradient_is_named(fault):  # O-2
    changes, wanted = FAULTS[fault]
    assert hidden(step_of("te", **changes), "te") == wanted


def at_end(g):
    """Of the last 64 elements, a tail of a kernel."""
    g = g.copy()
    g.reshape(-1)[-64:] = np.nan_to_num(g.reshape(-1)[-64:])
    return g


def clipped(g):
    norm = np.sqrt((g.astype(np.float64) ** 2).sum())
    return g if not norm > 1e6 else (g * (1e6 / norm)).astype(np.float32)


def later(p, g, state, **numbers):
    """Gradients that are not finite become zeros from the second step on."""
    return step_of("torchao", change=np.nan_to_num if state is not None else lambda g: g)(
        p, g, state, **numbers
    )


def healed(p, g, state, **numbers):
    return step_of("torchao")(np.nan_to_num(p), g, state, **numbers)


@pytest.mark.parametrize(
    ("step", "wanted"),
    [
        (
            step_of("torchao", change=lambda g: np.nan_to_num(g) if g.ndim == 1 else g),
            {
                "NaN in a vector": "0 and 0 of 4096 weights are NaN after the first and the second step"
            },
        ),
        (
            step_of("torchao", change=lambda g: np.nan_to_num(g) if g.size > 10_000 else g),
            {
                "NaN in 131,072 elements": "0 and 0 of 131072 weights are NaN after the first and the second step"
            },
        ),
        (
            step_of("torchao", change=at_end),
            {
                "NaN last": "0 and 0 of 4096 weights are NaN after the first and the second step",
                "nothing but NaN": "4032 and 4096 of 4096 weights are NaN after the first and the second step",
            },
        ),
        (
            step_of(
                "torchao", change=lambda g: np.zeros_like(g) if np.isnan(g).mean() > 0.5 else g
            ),
            {
                "nothing but NaN": "0 and 0 of 4096 weights are NaN after the first and the second step"
            },
        ),
        (
            step_of("torchao", change=clipped),
            {"2^40": "one changes 4095 other weights, as clipping a norm does"},
        ),
        (
            later,
            {
                "NaN in the second step": "0 and 0 of 4096 weights are NaN after the first and the second step"
            },
        ),
        (healed, {"a weight of NaN": "replaced by a number"}),
    ],
    ids=["vector", "large", "tail", "all", "norm", "later", "weight"],
)
def test_other_places_steps_and_weights_are_asked(step, wanted):  # O-2
    found = hidden(step, "torchao")
    assert found.keys() == wanted.keys()
    if "2^40" in found:  # some of the products are equal
        assert found["2^40"].endswith("other weights, as clipping a norm does")
    else:
        assert found == wanted


def test_numbers_in_place_of_infinities_are_named():
    """Of an AdamW without a range of gradients: the squares of both numbers of nan_to_num are
    infinite, and no change is left.
    """

    def plain(p, g, state, learning_rate, b1, b2, eps):
        t, m, v = state or (1, np.float32(0), np.float32(0))
        with np.errstate(all="ignore"):
            g = np.nan_to_num(g)
            m, v = (
                np.float32(b) * x + np.float32(1 - b) * y
                for b, x, y in ((b1, m, g), (b2, v, g * g))
            )
            ratio = (
                m / (np.sqrt(v / np.float32(1 - b2**t)) + np.float32(eps)) / np.float32(1 - b1**t)
            )
        return p - np.float32(learning_rate) * ratio, (t + 1, m, v)

    assert hidden(plain, "float32") == {
        "NaN": "replaced by 0",
        "+Inf": "replaced by the largest float32 or the least float32",
        "-Inf": "replaced by the largest float32 or the least float32",
    }


def test_an_optimizer_that_hides_nan_is_not_the_layout():  # O-2
    subject = step_of("torchao", change=np.nan_to_num)
    found = conformance.identify_optimizer(subject, expect="torchao")
    assert (found.ok, found.exact, found.layout) == (False, True, "torchao")
    assert found.damage["NaN"] == "replaced by 0"
    assert "NaN gradients: replaced by 0" in found.message
    assert found.to_dict()["damage"] == found.damage
    assert not next(
        one for one in found.findings if one.what == "gradients that are not finite"
    ).value
    with pytest.raises(
        AssertionError, match=r"departs from layout 'torchao': NaN gradients: replaced by 0 \(O-2\)"
    ):
        conformance.require_optimizer(subject, "torchao")


def test_a_finding_says_that_nothing_is_hidden():
    (one,) = damage.findings({}, LAYOUTS["te"])
    assert one.value
    assert damage.findings({}, None) == []
