"""Softcap and sinks in both backends against the simulator: bits in the stated form, A-18's bound
in the fast one (spec A-22, A-23).
"""

import jax
import numpy as np
import pytest
import torch
from helpers.attention import attention_cases as cases
from helpers.attention.attention_cases import backward_options, call_options

from fp8ref.jax.attention import attention as jax_attention
from fp8ref.jax.attention import sinks as attention_sinks
from fp8ref.jax.attention.operands import inputs as attention_inputs
from fp8ref.sim.attention import attention as sim
from fp8ref.sim.attention import sinks as sim_sinks
from fp8ref.sim.attention.gradients import gradients as sim_gradients
from fp8ref.spec.attention.variants import VARIANTS
from fp8ref.torch.attention import attention as torch_attention
from fp8ref.torch.attention import sinks as torch_sinks

F = np.float32
NAMES = [name for name in VARIANTS if name != "exact"]
GRADIENTS = ("exact", "bf16", "cudnn", "mxfp8")
CAP = 3.0
SINKS = np.array([0.5, -1.0, 3.0, 300.0], F)
NEARER = np.array([0.5, -1.0, 3.0, 20.0], F)
"""Of which the last leaves the keys of its head so little that casts of dS lose it."""
H = 2.0**-20
"""A bound of the relative error of exponentials and tangents, of torch's and of XLA's: 8 units."""


class Torch:
    @staticmethod
    def forward(*tensors, sinks, **how):
        options = call_options(sinks=torch.from_numpy(sinks), **how)
        return torch_attention.forward(*map(torch.from_numpy, tensors), **options)

    @staticmethod
    def backward(do, q, k, v, result, *, sinks, **how):
        given = map(torch.from_numpy, (do, q, k, v))
        return torch_attention.backward(*given, result, **backward_options(sinks=sinks, **how))

    @staticmethod
    def by_autodiff(q, k, v, do, sinks, **how):
        leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v, sinks)]
        o = torch_attention.apply(*leaves[:3], **call_options(sinks=leaves[3], **how))
        return torch.autograd.grad(o, leaves, torch.from_numpy(do))


class Jax:
    """Each function in one program: to compile each operation by itself takes three times as
    long.
    """

    @staticmethod
    def forward(*tensors, sinks, **how):
        return jax.jit(
            lambda tensors, sinks: jax_attention.forward(
                *tensors, **call_options(sinks=sinks, **how)
            )
        )(tensors, sinks)

    @staticmethod
    def backward(*given, sinks, **how):
        return jax.jit(
            lambda given, sinks: jax_attention.backward(*given, **backward_options(**how))
        )(given, sinks)

    @staticmethod
    def by_autodiff(q, k, v, do, sinks, **how):
        return jax.jit(
            lambda do, *of: jax.vjp(
                lambda *x: jax_attention.apply(*x[:3], **call_options(sinks=x[3], **how)), *of
            )[1](do)
        )(do, q, k, v, sinks)


BACKENDS = {"torch": Torch, "jax": Jax}


@pytest.fixture(params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]


def numbers(x) -> np.ndarray:
    return (
        np.asarray(x, np.float32) if not isinstance(x, torch.Tensor) else x.detach().float().numpy()
    )


def bound_of(variant, q, k, v, tensors):
    how: dict = {
        "mask": cases.MASKS["causal"],
        "scale": None,
        "documents": None,
        "exponential_error": H,
    }
    return cases.bound(variant, q, k, v, tensors, **how, softcap=CAP, sinks=SINKS)


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    "name", [name for name in NAMES if VARIANTS[name].fmt.bits == 8 and name != "fa3_paper"]
)
def test_stated_probabilities_are_the_simulators_bits(name, backend):
    """Sums of integers are exact, so that t, P and the sums are one rounding an operation
    everywhere. A rotation gives no integers.
    """
    q, k, v, _ = cases.integers(b=1, tq=40)
    how = {
        "variant": cases.native(name),
        "mask": cases.MASKS["causal window"],
        "scale": 1 / 8,
        "softcap": CAP,
        "sinks": SINKS,
    }
    right, found = (
        sim.forward(q, k, v, **call_options(keep_p=True, **how)),
        backend.forward(q, k, v, keep_p=True, arithmetic="stated", **how),
    )
    np.testing.assert_array_equal(np.asarray(found.p_codes), right.p_codes)
    np.testing.assert_array_equal(numbers(found.lse), right.lse)
    np.testing.assert_array_equal(numbers(found.amaxes["s"]), right.amaxes["s"])
    assert (int(found.saturated), int(found.lost)) == (right.saturated, right.lost)
    assert len(np.unique(right.p_codes)) > 10
    assert not numbers(found.o)[:, 3].any()  # its sink lies far above


@pytest.mark.grid(1)
@pytest.mark.parametrize("name", NAMES)
def test_fast_outputs_are_within_the_bound(name, backend):
    q, k, v, _ = cases.normal(b=1)
    variant, low = cases.native(name), VARIANTS[name].fmt.bits == 8
    how = {"variant": variant, "mask": cases.MASKS["causal"], "softcap": CAP, "sinks": SINKS}
    wanted = sim.forward(q, k, v, **call_options(keep_p=low, **how))
    found = backend.forward(q, k, v, keep_p=low, arithmetic="fast", **how)
    bound = bound_of(variant, q, k, v, wanted.tensors)
    differing = np.full(bound.weights.shape, 2.0**-4)
    if low:
        differing = np.asarray(found.p_codes) != wanted.p_codes
        assert differing.sum() <= bound.differing()
    error = np.abs(numbers(found.lse).astype(float) - wanted.lse)
    assert (
        error
        <= 2 * bound.exponent[..., 0] + cases.gamma(3 * 150 + 8) + 2.0**-22 * np.abs(wanted.lse)
    ).all()
    error = np.abs(numbers(found.o).astype(float) - wanted.o)
    smallest = float(wanted.tensors["o"].scale_inv) * 2.0**-9 if "o" in wanted.tensors else 0
    allowed = bound.output(wanted.o, differing, VARIANTS[name].out.mantissa_bits) + smallest
    assert (error <= allowed).all()
    # the last head is all its sink's
    assert np.median(allowed[:, :3]) < np.median(np.abs(wanted.o[:, :3])) / 4


@pytest.mark.grid(1)
@pytest.mark.parametrize("arithmetic", ["stated", "fast"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_the_simulators(name, arithmetic, backend):
    """As in test_attention_fast: a share of codes of P and dS differ, 32 E of them, by 2^-3 of
    them; in bfloat16 shares are 512 E. A sink's gradient has u, off by two exponents, and D, off by
    what o is, in the norm less than dq."""
    q, k, v, do = cases.normal(b=1)
    how = {
        "variant": cases.native(name),
        "mask": cases.MASKS["causal"],
        "softcap": CAP,
        "sinks": NEARER,
    }
    result = sim.forward(q, k, v, **call_options(**how))
    wanted = sim_gradients.backward(do, q, k, v, result, **backward_options(**how))
    found = backend.backward(
        do,
        q,
        k,
        v,
        backend.forward(q, k, v, arithmetic=arithmetic, **how),
        arithmetic=arithmetic,
        **how,
    )
    tolerance = 2.0**-22  # exact: of numbers that are rounded once
    if name != "exact":
        bound = bound_of(how["variant"], q, k, v, result.tensors)
        exponent = float(bound.exponent.max())
        tolerance = 3 * 2.0**-3 * np.sqrt(32 * exponent) + 4 * exponent
    if name == "cudnn":
        # A share of dS, 2 E of a number below the least code's half, lies on the other side of it:
        # as test_attention_fast's codes.
        assert wanted.lost > 1000
        assert abs(int(found.lost) - wanted.lost) <= bound.differing()
    for role in ("dq", "dk", "dv", "dsinks"):
        mine, right = numbers(getattr(found, role)), getattr(wanted, role)
        assert np.linalg.norm(mine - right) <= tolerance * np.linalg.norm(right), role
    by_autodiff = backend.by_autodiff(
        q,
        k,
        v,
        do,
        NEARER,
        arithmetic=arithmetic,
        **{key: x for key, x in how.items() if key != "sinks"},
    )
    for mine, right in zip(by_autodiff, (*found[:3], found.dsinks), strict=True):
        np.testing.assert_array_equal(numbers(mine), numbers(right))


def of_sinks(d, lse, sinks):
    """The gradient of sinks in the stated form, in PyTorch and in JAX."""
    call = attention_inputs.DeviceCall(variant=VARIANTS["cudnn"], scale=0.125, arithmetic="stated")
    found = torch_sinks.gradient(*map(torch.from_numpy, (d, lse, sinks)), "stated")
    return numbers(found), np.asarray(attention_sinks.gradient(d, lse, sinks, call))


def test_stated_gradients_of_sinks_are_the_simulators_where_float64_holds_their_sums():
    """Products lie from 2^-13 to below 2^10, with 24 bits: 2^7 of them are multiples of 2^-36 below
    2^17, of 53 bits.
    """
    rng = np.random.default_rng(0)
    d = (rng.choice([-1, 1], (2, 3, 64)) * np.exp2(rng.uniform(-10, 10, (2, 3, 64)))).astype(F)
    lse, sinks = rng.uniform(0, 2, (2, 3, 64)).astype(F), np.zeros(3, F)
    right = sim_sinks.gradient(d, lse, sinks)
    for found in of_sinks(d, lse, sinks):
        np.testing.assert_array_equal(found, right)


def test_stated_gradients_of_sinks_otherwise_err_by_their_orders_roundings():
    """Beside 2^60 float64 loses a 1, which the exact sum keeps."""
    d, zeros = np.array([[[2.0**60, 1, -(2.0**60)]]], F), np.zeros((1, 1, 3), F)
    assert sim_sinks.gradient(d, zeros, zeros[0, 0, :1]) == -1
    for found in of_sinks(d, zeros, zeros[0, 0, :1]):
        assert abs(found[0] + 1) <= 3 * 2.0**-53 / (1 - 3 * 2.0**-53) * 2.0**61


def simulated(*tensors, **how):
    return sim.forward(*tensors, **call_options(**how))


def test_what_is_refused(backend):
    q, k, v, _ = cases.normal(b=1, tq=4, tk=8)
    for cap in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a softcap is positive"):
            backend.forward(q, k, v, variant="cudnn", softcap=cap, sinks=SINKS)
    with pytest.raises(
        ValueError, match=r"sinks are float32, float16 or bfloat16 .4., one for each query head"
    ):
        backend.forward(q, k, v, variant="cudnn", sinks=SINKS[:2])


@pytest.mark.parametrize(
    ("cap", "scale"),
    [(1e-39, 0.125), (3e38, 0.125), (2e38, 0.125), (1e10, 1e-30), (1e-10, 1e30), (1e39, 1e30)],
)
def test_softcaps_without_normal_factors_are_refused(cap, scale):
    """A cap that is subnormal, one whose product with log2(e) overflows, and some under which scale
    / cap is subnormal or overflows.
    """
    q, k, v, do = cases.normal(b=1, tq=4, tk=8)
    how = {"softcap": cap, "scale": scale, "sinks": SINKS}
    for name in ("exact", "cudnn", "fa3"):
        for forward in (simulated, Torch.forward, Jax.forward):
            with pytest.raises(
                ValueError, match=r"normal float32 numbers scale / cap and cap log2\(e\); got "
            ):
                forward(q, k, v, variant=name, **how)
    for backend in BACKENDS.values():
        with pytest.raises(ValueError, match="a softcap is positive, with normal float32"):
            backend.by_autodiff(q, k, v, do, SINKS, variant="cudnn", softcap=cap, scale=scale)


def test_extreme_softcaps_that_are_taken_give_numbers(backend):
    q, k, v, _ = cases.normal(b=1, tq=4, tk=8)
    for cap, name in ((1e-37, "cudnn"), (1e37, "fa4")):
        found = backend.forward(q, k, v, variant=name, softcap=cap, sinks=SINKS)
        assert np.isfinite(numbers(found.o)).all()
        assert np.isfinite(numbers(found.lse)).all()
