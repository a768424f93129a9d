"""Optimizers are named: layouts of both backends and of libraries, other forms, and planted faults
(spec O).
"""

import dataclasses
import json

import numpy as np
import optax
import pytest
import torch
from helpers.conformance.optimizers import stepped

from fp8ref.conformance import identify_optimizer
from fp8ref.conformance.kit.subject import ConformanceError, RefusedError
from fp8ref.conformance.optimizer import require_optimizer
from fp8ref.conformance.optimizer.forms import Form, Numbers
from fp8ref.conformance.optimizer.subjects import inputs, kind_of
from fp8ref.jax.states import states as fj
from fp8ref.sim.states import moments, states
from fp8ref.spec.states import layouts as data
from fp8ref.spec.states.layouts import LAYOUTS, WITH_MASTERS
from fp8ref.torch.states import states as ft

F32 = np.float32


def simulated(layout, *, shown: bool = True):
    def step(p, g, state, **numbers):
        p, after = stepped(p, g, state if shown else state and state[0], layout, **numbers)
        return p, after if shown else (after,)

    return step


def planted(layout, *, newer: bool = False, uncorrected: bool = False, guarded: bool = True):
    """Clause O by hand, of moments that are not shown, with a fault: codes are decoded with the
    scale of the step that reads them; v is not corrected; a scale of nothing but zeros is a
    quotient by zero."""
    layout = data.by_name(layout)

    def step(p, g, state, learning_rate, b1, b2, eps, weight_decay):
        own, g = layout.of(p.size), g.reshape(-1)
        both = (own.m, own.v)
        t, *old = state or (0, *(moments.zeros(p.shape, moment) for moment in both))
        at = data.scalars(
            t + 1, learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay
        )

        def new(stored):
            read = [
                moments.read(one, moment, one.codes.reshape(-1), 0, own)
                for one, moment in zip(stored, both, strict=True)
            ]
            return moments.averages(g, *read, at, own)

        def store(values):
            each = enumerate(zip(values, old, both, strict=True))
            return [
                moments.store([(0, g, x)], kept, moment, i, p.shape, at, None, own)
                for i, (x, kept, moment) in each
            ]

        m, v = new(old)
        if newer and t:
            scales = [one.scale_inv for one in store((m, v))]
            m, v = new(
                [one._replace(scale_inv=scale) for one, scale in zip(old, scales, strict=True)]
            )
        ratio = moments.ratio(m, v, at._replace(inverse2=1.0) if uncorrected else at)
        flat = p.reshape(-1)
        flat = flat - F32(learning_rate) * (ratio + F32(weight_decay) * flat)
        kept = store((m, v))
        if not guarded and not m.any():
            # 0 * infinity
            kept = [one._replace(codes=np.full_like(one.codes, 0x7F)) for one in kept]
        return flat.reshape(p.shape), (t + 1, *kept)

    return step


def of_torch(layout):
    return lambda params, lr, betas, eps, weight_decay: ft.AdamW(
        params, lr, betas, eps, weight_decay, layout=layout
    )


@pytest.mark.grid(3)
@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("name", ["sqrt_e4m3", "fishman", "te", "torchao"])
def test_layouts_are_named_by_states_or_by_weights_alone(name, shown):  # O-1 to O-10
    found = identify_optimizer(simulated(name, shown=shown), expect=name)
    assert (found.ok, found.layout, found.exact, found.shown, found.departure) == (
        True,
        name,
        True,
        shown,
        None,
    )
    assert found.form == Form(m=LAYOUTS[name].average, v=LAYOUTS[name].average)
    assert "bit for bit, in the order of clause O" in found.summary


@pytest.mark.grid(1)
@pytest.mark.parametrize("name", ["msamp", "sqrt_e5m2", "bfloat16"])
def test_fp8refs_own_torch_optimizer(name):  # O-13
    found = identify_optimizer(of_torch(name))
    assert (found.ok, found.layout, found.kind, found.shown) == (True, name, "torch", True)
    require_optimizer(of_torch(name), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sqrt_e5m2", "msamp_o2"])
def test_fp8refs_own_optax_transformation(name):
    """Weights are those of the master in the state, which a sum of updates may miss."""

    def made(learning_rate, b1, b2, eps, weight_decay):
        return fj.adamw(learning_rate, b1, b2, eps, weight_decay, layout=name)

    found = identify_optimizer(made)
    assert (found.ok, found.layout, found.kind, found.shown) == (True, name, "optax", True)


def with_masters(layout, *, shift: float = 1.0):
    """A step that keeps masters and shows nothing; from the third step on its weights are
    another's.
    """

    def step(p, g, state, **numbers):
        master, before = state or (states.master(p, layout), states.init(p.shape, layout))
        master, after = stepped(master, g, before, layout, **numbers)
        if after.step >= 3:
            master = master._replace(codes=master.codes * F32(shift))
        return states.weight(master, layout), (master, after)

    return step


@pytest.mark.grid(1)
@pytest.mark.parametrize("name", WITH_MASTERS)
def test_layouts_with_masters_are_named(name):  # O-14, O-15
    found = identify_optimizer(of_torch(name), expect=name)
    assert (found.ok, found.layout, found.exact, found.shown, found.form) == (
        True,
        name,
        True,
        True,
        Form(),
    )
    require_optimizer(of_torch(name), name)
    hidden = identify_optimizer(with_masters(name))
    assert (hidden.ok, hidden.layout, hidden.exact, hidden.shown) == (True, name, True, False)


@pytest.mark.slow
def test_a_layout_with_another_master_is_not_the_named_one():  # O-14
    exact = dataclasses.replace(
        LAYOUTS["sqrt_e5m2"], name="mine", master=WITH_MASTERS["msamp_o2"].master
    )
    found = identify_optimizer(of_torch(exact))
    assert (found.exact, found.layout) == (
        True,
        "sqrt_e5m2 with a master in float16, power_of_two, of exact amax",
    )
    assert not found.ok
    wide = identify_optimizer(of_torch("msamp"), expect="msamp_o2")
    assert (wide.ok, wide.layout) == (False, "msamp")
    assert wide.departure.input.startswith("step 1, tensor spread, weight[0, ")
    with pytest.raises(
        AssertionError, match="departs from layout 'sqrt_e4m3_f16': step 1, tensor spread, weight"
    ):
        require_optimizer(of_torch("sqrt_e4m3"), "sqrt_e4m3_f16")


def test_a_master_with_a_fault_is_the_nearest():  # O-15
    found = identify_optimizer(with_masters("msamp_o2", shift=1 + 2.0**-9), expect="msamp_o2")
    assert (found.ok, found.exact) == (False, False)
    assert found.departure.input.startswith("step 3, tensor spread, weight[0, ")


def test_torchs_adamw_is_another_form_of_float32():
    """Decay as a factor, lerp and addcmul with one rounding, a learning rate that corrects m, and
    its own root.
    """
    found = identify_optimizer(torch.optim.AdamW, expect="float32")
    assert (found.ok, found.layout, found.exact) == (True, "float32", True)
    assert (found.form.decay, found.form.bias_m, found.form.m, found.form.eps) == (
        "factor",
        "rate",
        "lerp, fused",
        "outside",
    )
    assert found.form != Form()
    with pytest.raises(
        AssertionError,
        match=r"AdamW departs from layout 'float32': step 1, tensor spread, weight\[0, \d+\]",
    ):
        require_optimizer(torch.optim.AdamW, "float32")


@pytest.mark.slow
def test_the_nearest_of_torchs_fused_adamw():
    """Its vector loop has the order of foreach's; the elements after it, here one of 257, are
    contracted in another way by some compilers.
    """
    found = identify_optimizer(
        lambda params, **numbers: torch.optim.AdamW(params, fused=True, **numbers)
    )
    assert (found.form.m, found.form.decay, found.form.bias_m) == ("lerp, fused", "factor", "rate")
    assert found.exact or found.departure.input.startswith("step 2, tensor small, codes of v[256]")
    assert "'float32'" in found.summary


@pytest.mark.slow
def test_optaxs_adamw_is_another_form_of_float32():
    found = identify_optimizer(optax.adamw, expect="float32")
    assert (found.ok, found.layout, found.exact, found.kind) == (True, "float32", True, "optax")
    assert (found.form.bias_v, found.form.decay, found.form.numbers) == (
        "inside",
        "added",
        "float32",
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")
def test_torchaos_adamw_in_fp8():  # O-13
    """Compiled, as it always is."""
    from torchao.optim import AdamWFp8

    found = identify_optimizer(AdamWFp8, expect="torchao")
    assert (found.ok, found.layout, found.shown) == (True, "torchao", True)
    assert (found.form.decay, found.form.numbers, found.form.m) == ("subtracted", "float32", "lerp")


def test_codes_that_are_decoded_with_a_newer_scale():
    """MS-AMP's issue 99, appendix: the factor of the step that reads."""
    found = identify_optimizer(planted("fishman", newer=True), expect="fishman")
    assert (found.ok, found.layout) == (False, None)
    assert found.departure.input.startswith("step 2, tensor spread, weight[0, ")
    assert found.departure.clause == "O-6"
    with pytest.raises(
        AssertionError, match=r"departs from layout 'fishman': step 2, tensor spread, weight"
    ):
        require_optimizer(planted("fishman", newer=True), "fishman")
    require_optimizer(planted("fishman"), "fishman")


def test_v_that_is_not_corrected():
    found = identify_optimizer(planted("fishman", uncorrected=True), expect="fishman")
    assert (found.ok, found.layout, found.form.bias_v) == (False, "fishman", "none")
    assert "It is not AdamW" in found.message
    assert found.departure.input.startswith("step 1, tensor spread, weight")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["float32", pytest.param("sqrt_e4m3", marks=pytest.mark.slow)])
def test_a_counter_that_is_a_step_ahead(layout):
    """Its biases are corrected by t + 1; it is no other optimizer."""

    def step(p, g, state, **numbers):
        before = states.init(p.shape, layout)._replace(step=1) if state is None else state
        return stepped(p, g, before, layout, **numbers)

    found = identify_optimizer(step, expect=layout)
    assert (found.ok, found.known, found.layout, found.exact, found.form.count) == (
        False,
        True,
        layout,
        True,
        2,
    )
    assert (
        "the number of the first step is 2. It is not AdamW: its counter is a step ahead, t + 1 "
        "at step t" in found.message
    )


def test_a_decay_in_the_gradient_is_adams():
    """The states are those of other gradients, and their layout is found all the same."""

    def adam(p, g, state, weight_decay, **numbers):
        return stepped(p, g + F32(weight_decay) * p, state, "fishman", **numbers)

    found = identify_optimizer(adam, expect="fishman")
    assert (found.ok, found.layout, found.exact, found.form.decay) == (
        False,
        "fishman",
        True,
        "coupled",
    )
    assert "It is Adam, not AdamW: the decay is added to the gradient" in found.message
    assert found.departure.input.startswith("step 1, tensor ")
    of_torch = identify_optimizer(torch.optim.Adam)
    assert (of_torch.ok, of_torch.layout, of_torch.exact, of_torch.form.decay) == (
        False,
        "float32",
        True,
        "coupled",
    )


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("subject", "numbers"),
    [
        (torch.optim.SGD, None),
        (lambda params: torch.optim.AdamW(params, lr=3e-4), None),
        (simulated("fishman", shown=False), Numbers(learning_rate=1.0, b1=0.0, weight_decay=0.0)),
    ],
)
def test_another_optimizer_or_other_numbers_have_no_form(subject, numbers):
    if numbers is not None:  # numbers that the subject is not given
        own = {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
        subject = (lambda step: lambda p, g, state: step(p, g, state, **own))(subject)
    found = identify_optimizer(subject, numbers=numbers)
    assert (found.ok, found.layout, found.known, found.exact) == (False, None, False, False)
    assert (
        "no layout explains it: its first step is that of no form of AdamW, nor of Adam, with "
        "these numbers" in found.message
    )
    assert [finding.what for finding in found.findings] == ["layout", "weights"]
    assert found.to_dict()["is"] == {"layout": None}
    assert found.departure.input.startswith("step 1, tensor ")


@pytest.mark.slow
def test_a_fault_of_a_later_step_needs_more_steps():
    def step(p, g, state, **numbers):
        p, after = stepped(p, g, state, "float32", **numbers)
        if after.step == 7 and p.size == 8192:
            p.reshape(-1)[1234] = np.nextafter(p.reshape(-1)[1234], F32(9))
        return p, after

    assert identify_optimizer(step).ok
    found = identify_optimizer(step, steps=8)
    assert (found.ok, found.layout, found.exact) == (False, "float32", False)
    assert found.departure.input == "step 7, tensor spread, weight[4, 210]"
    with pytest.raises(ValueError, match="steps is an integer of at least 1; got 0"):
        identify_optimizer(step, steps=0)


def test_another_block_is_named():
    own = LAYOUTS["torchao"]
    other = dataclasses.replace(
        own, m=dataclasses.replace(own.m, block=128), v=dataclasses.replace(own.v, block=128)
    )
    for subject in (planted(other), simulated(other)):
        found = identify_optimizer(subject, expect="torchao")
        assert (found.ok, found.layout) == (False, "torchao with block 128 of m and v")
        assert found.departure.input.startswith(
            ("step 2, tensor spread, weight[0, 128]", "step 1, tensor spread, codes of m[0, ")
        )


def test_a_missing_guard_of_zeros():
    found = identify_optimizer(planted("te", guarded=False), expect="te")
    assert not found.ok
    assert found.departure.input == "step 2, tensor zeros, weight[0, 0]"
    assert found.departure.got.startswith("nan")


def test_a_layout_without_its_bound_and_another_b2():
    free = dataclasses.replace(LAYOUTS["sqrt_e5m2"], bounded=False)
    numbers = Numbers(b2=0.999, weight_decay=0.0)
    found = identify_optimizer(simulated(free), numbers=numbers)
    # the first where no ratio is beyond the bound of b2
    assert found.layout in ("sqrt_e5m2", "sqrt_e5m2 without a bound")
    assert found.exact
    wrong = identify_optimizer(simulated("float32"), numbers=Numbers(b2=0.999))
    assert wrong.ok


def test_what_json_and_a_person_get(capsys):
    found = identify_optimizer(planted("fishman", uncorrected=True), name="mine", expect="te")
    written = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (written["ok"], written["kind"], written["is"]["layout"], written["is"]["bias_v"]) == (
        False,
        "optimizer",
        "fishman",
        "none",
    )
    assert written["departure"]["input"].startswith("step 1")
    found.print()
    said = capsys.readouterr().out
    assert "mine: an optimizer, taken as function" in said
    assert "mine is not 'te': layout 'fishman'" in said


def test_what_is_no_optimizer_is_refused():
    assert kind_of(lambda x: x) is None
    assert kind_of(optax.adamw(1e-3)) == "optax"
    assert kind_of(torch.optim.SGD) == "torch"
    with pytest.raises(ValueError, match="is no optimizer"):
        identify_optimizer(lambda x: x)
    with pytest.raises(ValueError, match="expect is one of float32, bfloat16"):
        identify_optimizer(torch.optim.AdamW, expect="adamw")
    with pytest.raises(ValueError, match="kind is one of torch, optax, function"):
        identify_optimizer(torch.optim.AdamW, kind="keras")
    with pytest.raises(RefusedError, match="raised ZeroDivisionError"):
        identify_optimizer(lambda p, g, state: 1 / 0)
    with pytest.raises(ConformanceError, match=r"returned a ndarray; step\(p, g, state\) returns"):
        identify_optimizer(lambda p, g, state: p)
    rng = np.random.default_rng()
    with pytest.raises(ConformanceError, match="does not repeat itself"):
        identify_optimizer(
            lambda p, g, state: (p + rng.standard_normal(p.shape).astype(F32), state)
        )


def test_inputs_have_what_tells_layouts_apart():
    asked = inputs()
    assert not any(g["zeros"].any() for g in asked.gradients)
    assert all(g["spread"].all() for g in asked.gradients)
    assert asked.weights["ragged"].size % 128
    assert asked.weights["small"].size < LAYOUTS["torchao"].smallest <= asked.weights["ragged"].size
