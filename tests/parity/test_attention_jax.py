"""Attention in JAX against the simulator (spec A): codes and scales bit for bit, all bits where
sums are exact, else bounds.
"""

import functools

import jax
import numpy as np
import pytest
from helpers.attention import attention_cases as cases
from helpers.attention.attention_cases import backward_options, call_options

from fp8ref.jax.attention import attention
from fp8ref.jax.gemm import hardware as jax_hardware
from fp8ref.sim.attention import attention as sim
from fp8ref.sim.attention.gradients import gradients as sim_gradients
from fp8ref.sim.gemm import hardware
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import VARIANTS

NAMES = [name for name in VARIANTS if name != "exact"]
GRADIENTS = [name for name, variant in VARIANTS.items() if variant.backward == "cast"]
OTHERS = [("fast", False), ("stated", True), ("stated", False)]
ALL = [(name, "full") for name in NAMES] + [
    (name, mask)
    for name in ("fa3", "fa4_threshold4", "cudnn")
    for mask in cases.MASKS
    if mask != "full"
]


@functools.cache
def forward(name: str, mask: str, arithmetic: str, with_documents: bool = False):
    kept = VARIANTS[name].fmt.bits == 8
    how = {"variant": name, "mask": cases.MASKS[mask], "keep_p": kept, "arithmetic": arithmetic}
    given = cases.documents() if with_documents else None

    @functools.partial(jax.jit, static_argnames="scale")
    def run(q, k, v, scale):
        return attention.forward(q, k, v, **call_options(scale=scale, documents=given, **how))

    return run


def same_tensors(found, wanted, roles):
    """Codes and scales, bit for bit."""
    for role in roles:
        mine, other = found.tensors[role], wanted.tensors[role]
        if other.codes is None:
            np.testing.assert_array_equal(np.asarray(mine.codes.astype(np.float32)), other.values)
            continue
        np.testing.assert_array_equal(
            np.asarray(mine.codes).view(np.uint8), other.codes, err_msg=role
        )
        for key in ("amax", "scale", "scale_inv"):
            np.testing.assert_array_equal(
                getattr(mine, key), getattr(other, key), err_msg=f"{role} {key}"
            )


@pytest.mark.grid(2)
@pytest.mark.parametrize(("name", "mask"), ALL)
def test_integers_have_the_simulators_bits(name, mask):
    """Sums of products are exact; so all that is left is attention's own order of operations."""
    q, k, v, _ = cases.integers()
    wanted = sim.forward(
        q,
        k,
        v,
        variant=Call(
            variant=cases.native(name),
            mask=cases.MASKS[mask],
            scale=cases.SCALE,
            keep_p=VARIANTS[name].fmt.bits == 8,
        ),
    )
    found = forward(name, mask, "stated")(q, k, v, cases.SCALE)
    same_tensors(found, wanted, wanted.tensors)
    for key in ("p_codes", "lse", "o", "scale_p", "scale_inv_p"):
        np.testing.assert_array_equal(getattr(found, key), getattr(wanted, key), err_msg=key)
    assert found.saturated == wanted.saturated
    assert found.amaxes["s"] == wanted.amaxes["s"]
    assert found.amaxes["o"] == wanted.amaxes["o"]


# G-19, B-12
@pytest.mark.parametrize(
    ("name", "plan"), [("fa3", "hopper"), ("cudnn", "hopper"), ("cudnn", "exact")]
)
def test_under_simulated_hardware_all_bits_are_the_simulators(name, plan):
    """Forward and backward, whose products are all of the plan; outside the context they are XLA's
    again.
    """
    q, k, v, do = cases.normal(1, 2, 1, 40, 40)
    how = {"variant": VARIANTS[name], "mask": cases.MASKS["causal"], "arithmetic": "stated"}
    planned = hardware.attending(VARIANTS[name], hardware.by_name(plan))
    backward_too = planned.backward == "cast"

    @jax.jit
    def passes(q, k, v, do):
        result = attention.forward(q, k, v, **call_options(keep_p=True, **how))
        return result, attention.backward(do, q, k, v, result, **backward_options(**how))[
            :3
        ] if backward_too else ()

    own, _ = passes(q, k, v, do)
    with jax_hardware.simulating(hardware.by_name(plan)):
        found, gradients = passes(q, k, v, do)
    stated = how | {"variant": planned}
    wanted = sim.forward(q, k, v, **call_options(keep_p=True, **stated))
    for key in ("p_codes", "lse", "o"):
        np.testing.assert_array_equal(getattr(found, key), getattr(wanted, key), err_msg=key)
    if backward_too:
        others = sim_gradients.backward(do, q, k, v, wanted, **backward_options(**stated))
        for role, mine in zip(("dq", "dk", "dv"), gradients, strict=True):
            np.testing.assert_array_equal(mine, getattr(others, role), err_msg=role)
    again, _ = passes(q, k, v, do)
    np.testing.assert_array_equal(own.lse, again.lse)
    if plan == "hopper":
        assert (own.lse != found.lse).any()


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("arithmetic", "with_documents"),
    [("fast", True), *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)],
)
@pytest.mark.parametrize("name", NAMES)
def test_numbers_within_bounds(name, arithmetic, with_documents):  # B-1
    q, k, v, _ = cases.normal()
    low, given = VARIANTS[name].fmt.bits == 8, cases.documents() if with_documents else None
    how = {
        "variant": cases.native(name),
        "mask": cases.MASKS["causal"],
        "scale": None,
        "documents": given,
    }
    wanted = sim.forward(q, k, v, **call_options(keep_p=low, **how))
    found = forward(name, "causal", arithmetic, with_documents)(q, k, v, None)
    same_tensors(found, wanted, [role for role in wanted.tensors if role != "o"])
    # fast: test_elementary has 2 + |x| / 2 units of 2^-23, with |x| below 32 where P is no zero of
    # e4m3.
    bound = cases.bound(
        q=q,
        k=k,
        v=v,
        tensors=wanted.tensors,
        exponential_error=2.0**-50 if arithmetic == "stated" else 18 * 2.0**-23,
        **how,
    )
    differing = np.zeros(bound.weights.shape, bool)
    if low:
        mine, other = np.asarray(found.p_codes), wanted.p_codes
        differing = mine != other
        assert differing.sum() <= bound.differing()
        assert (np.abs(mine.astype(int) - other.astype(int)) <= 1).all()
        assert abs(int(found.saturated) - wanted.saturated) <= bound.differing()
    else:  # codes of P in bfloat16 are not kept: any may be a neighbor, 2^-7 of it
        differing = np.full(bound.weights.shape, 2.0**-4)
    # A row's sum errs as its probabilities do, and the sum of 150 of them is rounded as often on
    # either side.
    seen = np.isfinite(wanted.lse)
    np.testing.assert_array_equal(np.isfinite(found.lse), seen)
    error = np.abs(found.lse - wanted.lse, where=seen, out=np.zeros_like(wanted.lse))
    assert (
        error
        <= bound.exponent[..., 0]
        + cases.gamma(400)
        + 2.0**-22 * np.abs(wanted.lse, where=seen, out=np.zeros_like(wanted.lse))
    ).all()
    # its scale may be a neighbor's: values are compared, rounded to 3 bits
    if "o" in wanted.tensors:
        assert found.amaxes["o"] == pytest.approx(wanted.amaxes["o"], rel=2.0**-8)
    error = np.abs(np.asarray(found.o, np.float64) - wanted.o)
    smallest = float(found.tensors["o"].scale_inv) * 2.0**-9 if "o" in wanted.tensors else 0
    assert (
        error <= bound.output(wanted.o, differing, VARIANTS[name].out.mantissa_bits) + smallest
    ).all()


@pytest.mark.grid(1)
@pytest.mark.parametrize("mask", cases.MASKS)
def test_real_arithmetic(mask):
    """Both compute in float64, and round once: they differ where a midpoint lies within 2^-45 of a
    result, which none of these has.
    """
    q, k, v, do = cases.normal()
    how = {"variant": "exact", "mask": cases.MASKS[mask], "documents": cases.documents()}
    wanted = sim.forward(q, k, v, **call_options(**how))
    found = jax.jit(lambda q, k, v: attention.forward(q, k, v, **call_options(**how)))(q, k, v)
    np.testing.assert_array_equal(found.o, wanted.o)
    np.testing.assert_array_equal(found.lse, wanted.lse)
    gradients = jax.jit(
        lambda do, q, k, v, result: attention.backward(
            do, q, k, v, result, **backward_options(**how)
        )
    )(do, q, k, v, found)
    for mine, other in zip(
        gradients[:3],
        sim_gradients.backward(do, q, k, v, wanted, **backward_options(**how))[:3],
        strict=True,
    ):
        # Sums of 150 float64 terms of a size of at most 64 err by 2^-40.
        np.testing.assert_allclose(mine, other, rtol=2.0**-23, atol=2.0**-40)


@pytest.mark.grid(2)
@pytest.mark.parametrize("mask", ["full", "causal window"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_integers(name, mask):
    """D, P, dP and dS have all bits: so has the scale of dS. Sums of dS are not exact: of 150 terms
    of either sign they err by gamma(150) of the sum of their magnitudes, which is far below a unit
    of e4m3 or bfloat16, so that one code in a thousand may differ by one."""
    q, k, v, do = cases.integers()
    how = {"mask": cases.MASKS[mask], "scale": cases.SCALE, "documents": cases.documents()}
    result = sim.forward(q, k, v, **call_options(variant=cases.native(name), **how))
    wanted = sim_gradients.backward(
        do, q, k, v, result, **backward_options(variant=cases.native(name), **how)
    )

    @jax.jit
    def run(do, q, k, v):
        of_forward = attention.forward(
            q, k, v, **call_options(variant=name, arithmetic="stated", **how)
        )
        return attention.backward(
            do, q, k, v, of_forward, **backward_options(variant=name, arithmetic="stated", **how)
        )

    found = run(do, q, k, v)
    same_tensors(found, wanted, ["do"])
    assert found.saturated == wanted.saturated
    assert found.scale_ds[0] == wanted.scale_ds.scale
    np.testing.assert_array_equal(found.amaxes["ds"], wanted.amaxes["ds"])
    unit = 2.0 ** -VARIANTS[name].out.mantissa_bits
    for role in ("dq", "dk", "dv"):
        assert found.amaxes[role] == pytest.approx(wanted.amaxes[role], rel=2.0**-16)
        mine, other = np.asarray(getattr(found, role)), getattr(wanted, role)
        # A sum near zero errs by as much as a large one: gamma(160) < 2^-16 of the largest
        # magnitude's 150 terms.
        near = unit * np.abs(other) + 2.0**-16 * 150 * np.abs(other).max()
        assert (np.abs(mine - other) <= near).all(), role
        assert (mine != other).mean() < 2e-3, role


@pytest.mark.grid(1)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_numbers(name):
    """A share of codes of P and dS differ, 32 E of them, by 2^-3 of them: in the norm a gradient
    differs by 2^-3 of the root of that share, twice (P and dS), beside two exponents, and a share
    of codes of its own."""
    q, k, v, do = cases.normal()
    how = {"mask": cases.MASKS["causal"]}
    result = sim.forward(q, k, v, **call_options(variant=cases.native(name), **how))
    wanted = sim_gradients.backward(
        do, q, k, v, result, **backward_options(variant=cases.native(name), **how)
    )
    bound = cases.bound(
        cases.native(name),
        q,
        k,
        v,
        result.tensors,
        mask=how["mask"],
        scale=None,
        documents=None,
        exponential_error=18 * 2.0**-23,
    )

    def run(q, k, v, do):
        return jax.vjp(
            lambda *given: attention.apply(*given, **call_options(variant=name, **how)), q, k, v
        )[1](do)

    exponent = float(bound.exponent.max())
    for mine, other in zip(
        jax.jit(run)(q, k, v, do), (wanted.dq, wanted.dk, wanted.dv), strict=True
    ):
        apart = np.linalg.norm(np.asarray(mine) - other) / np.linalg.norm(other)
        assert apart <= 3 * 2.0**-3 * np.sqrt(32 * exponent) + 4 * exponent


@pytest.mark.slow
def test_delayed_scales():
    q, k, v, do = cases.integers()
    scales = {
        "q": 32.0,
        "k": 16.0,
        "v": 64.0,
        "s": 200.0,
        "o": 64.0,
        "do": 32.0,
        "ds": 3000.0,
        "dq": 128.0,
        "dk": 64.0,
        "dv": 8.0,
    }
    scales = {role: np.float32(x) for role, x in scales.items()}
    first = {role: scales[role] for role in ("q", "k", "v", "s", "o")}
    second = {role: scales[role] for role in ("s", "do", "ds", "dq", "dk", "dv")}
    wanted = sim.forward(q, k, v, variant=Call(variant="cudnn", scale=cases.SCALE), scales=first)
    gradients = sim_gradients.backward(
        do, q, k, v, wanted, variant=Call(variant="cudnn", scale=cases.SCALE), scales=second
    )

    @jax.jit
    def run(q, k, v, do):
        how = {"variant": "cudnn", "scale": cases.SCALE, "arithmetic": "stated"}
        o, vjp = jax.vjp(
            lambda *given: attention.apply(*given, **call_options(scales=scales, **how)), q, k, v
        )
        result = attention.forward(q, k, v, **call_options(scales=first, **how))
        return (
            o,
            vjp(do),
            result,
            attention.backward(do, q, k, v, result, **backward_options(scales=second, **how)),
        )

    o, of_apply, result, found = run(q, k, v, do)
    same_tensors(result, wanted, wanted.tensors)
    same_tensors(found, gradients, ["do"])
    np.testing.assert_array_equal(o, wanted.o)
    assert found.saturated == gradients.saturated
    assert found.scale_ds.scale == np.float32(3000)
    for role, mine in zip(("dq", "dk", "dv"), of_apply, strict=True):
        np.testing.assert_array_equal(mine, getattr(found, role))
        assert (np.asarray(mine) != getattr(gradients, role)).mean() < 2e-3
