"""The orders of operations of AdamW (spec O-5, O-6)."""

from fractions import Fraction

import numpy as np

from fp8ref.conformance.optimizer import forms
from fp8ref.conformance.optimizer.forms import Form, Numbers
from fp8ref.sim.states import states as sim
from fp8ref.spec.states import layouts as states

F32 = np.float32


def rounded(value: Fraction) -> np.float32:
    """RN32 of a fraction, by its two neighbors."""
    near = F32(float(value))
    around = [np.nextafter(near, F32(-np.inf)), near, np.nextafter(near, F32(np.inf))]
    return min(around, key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(np.uint32)) & 1))


def test_fma_rounds_once():
    rng = np.random.default_rng(0)
    a, b = (
        (rng.standard_normal(400) * 2.0 ** rng.integers(-12, 12, 400)).astype(F32) for _ in range(2)
    )
    c = (rng.standard_normal(400) * 2.0 ** rng.integers(-40, 30, 400)).astype(F32)
    # ties of the sum in float32 that the rest of the product breaks, below what float64 holds
    a = np.append(a, F32([1 + 2.0**-12, 1 + 2.0**-12]))
    b = np.append(b, F32([2.0**-24 * (1 - 2.0**-12), 2.0**-24]))
    c = np.append(c, F32([1, 1]))
    found = forms.fma(a, b, c)
    for x, y, z, got in zip(a, b, c, found, strict=True):
        assert got == rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
    assert (found != a * b + c).any()


def test_the_first_form_is_clause_o():  # O-5, O-6
    rng = np.random.default_rng(1)
    p, g = (rng.standard_normal(200).astype(F32) for _ in range(2))
    given = Numbers()
    at = states.scalars(
        3,
        learning_rate=given.learning_rate,
        b1=given.b1,
        b2=given.b2,
        eps=given.eps,
        weight_decay=given.weight_decay,
    )
    state = sim.init((200,), "float32")._replace(step=2)
    expected, after = sim.step(
        p, g, state, sim.AdamW(learning_rate=1e-3, weight_decay=0.1, layout="float32")
    )
    m, v = (
        forms.average("products", np.zeros(200, F32), g, b, a, square=square)
        for b, a, square in ((at.b1, at.a1, False), (at.b2, at.a2, True))
    )
    np.testing.assert_array_equal(m, after.m.codes)
    np.testing.assert_array_equal(v, after.v.codes)
    first = next(iter(forms.updates(decays=True)))
    assert first == Form()
    np.testing.assert_array_equal(forms.update(first, p, m, v, 3, given, np.inf), expected)
    assert next(iter(forms.averages())) == ("products", "products")


def test_forms_differ_in_bits_alone():  # O-6
    """Sound forms are within rounding of clause O: ten operations of 2^-24 each, of what is at most
    1.01 here, and a decay of lr^2.
    """
    rng = np.random.default_rng(2)
    p = rng.uniform(0.5, 1, 100).astype(F32)
    g = (2.0 ** rng.uniform(-6, 0, 100)).astype(F32)
    m, v, given = F32(0.1) * g, F32(0.05) * g * g, Numbers()
    plain = forms.update(Form(), p, m, v, 1, given, np.inf)
    others = [form for form in forms.updates(decays=True) if form.sound and form != Form()]
    assert len(others) > 100
    for form in others:
        found = forms.update(form, p, m, v, 1, given, np.inf)
        # eps next to the smallest v, at t = 1
        inside = 1e-3 * 1e-8 / (2 * 2.0**-14) if form.eps == "inside" else 0
        np.testing.assert_allclose(
            found,
            plain,
            rtol=0,
            atol=10 * 2.0**-24 + 1e-3 * 1e-3 * 0.1 + inside + 1e-3 * 2.0**-20,
            err_msg=str(form),
        )
    uncorrected = forms.update(Form(bias_v="none"), p, m, v, 1, given, np.inf)
    assert np.abs(uncorrected - plain).min() > 1e-3
