"""Softcap and sinks in both backends against the simulator: bits in the stated form, A-18's bound in the fast one (spec A-22, A-23)."""

import attention_cases as cases
import jax
import numpy as np
import pytest
import torch

from fp8ref.attention import VARIANTS
from fp8ref.jax import attention as jax_attention
from fp8ref.sim import attention as sim
from fp8ref.sim import attention_gradients as sim_gradients
from fp8ref.torch import attention as torch_attention

F = np.float32
NAMES = [name for name in VARIANTS if name != "exact"]
GRADIENTS = ("exact", "bf16", "cudnn", "mxfp8")
CAP = 3.0
SINKS = np.array([0.5, -1.0, 3.0, 300.0], F)
H = 2.0**-20
"""A bound of the relative error of exponentials and tangents, of torch's and of XLA's: 8 units."""


class Torch:
    @staticmethod
    def forward(*tensors, sinks, **how):
        return torch_attention.forward(*map(torch.from_numpy, tensors), sinks=torch.from_numpy(sinks), **how)

    @staticmethod
    def backward(do, q, k, v, result, *, sinks, **how):
        given = map(torch.from_numpy, (do, q, k, v))
        return torch_attention.backward(*given, result, sinks=torch.from_numpy(sinks), **how)

    @staticmethod
    def by_autodiff(q, k, v, do, sinks, **how):
        leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v, sinks)]
        o = torch_attention.apply(*leaves[:3], sinks=leaves[3], **how)
        return torch.autograd.grad(o, leaves, torch.from_numpy(do))


class Jax:
    forward, backward = jax_attention.forward, jax_attention.backward

    @staticmethod
    def by_autodiff(q, k, v, do, sinks, **how):
        return jax.vjp(lambda *x: jax_attention.apply(*x[:3], sinks=x[3], **how), q, k, v, sinks)[1](do)


BACKENDS = {"torch": Torch, "jax": Jax}


@pytest.fixture(params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]


def numbers(x) -> np.ndarray:
    return np.asarray(x, np.float32) if not isinstance(x, torch.Tensor) else x.detach().float().numpy()


@pytest.mark.grid(1)
@pytest.mark.parametrize("name", [name for name in NAMES if VARIANTS[name].fmt.bits == 8 and name != "fa3_paper"])
def test_stated_probabilities_are_the_simulators_bits(name, backend):
    """Sums of integers are exact, so that t, P and the sums are one rounding an operation everywhere. A rotation gives no integers."""
    q, k, v, _ = cases.integers(b=1, tq=40)
    how = {"variant": cases.native(name), "mask": cases.MASKS["causal window"], "scale": 1 / 8, "softcap": CAP, "sinks": SINKS}
    right, found = sim.forward(q, k, v, keep_p=True, **how), backend.forward(q, k, v, keep_p=True, arithmetic="stated", **how)
    np.testing.assert_array_equal(np.asarray(found.p_codes), right.p_codes)
    np.testing.assert_array_equal(numbers(found.lse), right.lse)
    np.testing.assert_array_equal(numbers(found.amaxes["s"]), right.amaxes["s"])
    assert len(np.unique(right.p_codes)) > 10
    assert not right.o[:, 3].any()  # its sink lies far above


@pytest.mark.grid(1)
@pytest.mark.parametrize("name", NAMES)
def test_fast_outputs_are_within_the_bound(name, backend):
    q, k, v, _ = cases.normal(b=1)
    variant, low = cases.native(name), VARIANTS[name].fmt.bits == 8
    how = {"variant": variant, "mask": cases.MASKS["causal"], "softcap": CAP, "sinks": SINKS}
    wanted = sim.forward(q, k, v, keep_p=low, **how)
    found = backend.forward(q, k, v, keep_p=low, arithmetic="fast", **how)
    bound = cases.bound(variant, q, k, v, wanted.tensors, mask=how["mask"], scale=None, documents=None, exponential_error=H)
    bound = bound._replace(exponent=bound.exponent + 2 * CAP * (H + 2.0**-22))  # A-18's term of a softcap
    differing = np.full(bound.weights.shape, 2.0**-4)
    if low:
        differing = np.asarray(found.p_codes) != wanted.p_codes
        assert differing.sum() <= bound.differing()
    # The weights of the bound are those without cap and sink. With them no weight is above e^(2 cap) times that of uniform keys.
    seen = (bound.weights > 0).sum(axis=-1, keepdims=True)
    bound = bound._replace(weights=np.where(bound.weights > 0, np.exp(2 * CAP) / np.maximum(seen, 1), 0))
    error = np.abs(numbers(found.lse).astype(float) - wanted.lse)
    assert (error <= 2 * bound.exponent[..., 0] + cases.gamma(3 * 150 + 8) + 2.0**-22 * np.abs(wanted.lse)).all()
    error = np.abs(numbers(found.o).astype(float) - wanted.o)
    smallest = float(wanted.tensors["o"].scale_inv) * 2.0**-9 if "o" in wanted.tensors else 0
    assert (error <= bound.output(wanted.o, differing, VARIANTS[name].out.mantissa_bits) + smallest).all()


@pytest.mark.grid(1)
@pytest.mark.parametrize("arithmetic", ["stated", "fast"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_the_simulators(name, arithmetic, backend):
    """As in test_attention_fast: a share of codes of P and dS differ, 32 E of them, by 2^-3 of them; in bfloat16 shares are 512 E. A
    sink's gradient has u, off by two exponents, and D, off by what o is, in the norm less than dq."""
    q, k, v, do = cases.normal(b=1)
    how = {"variant": cases.native(name), "mask": cases.MASKS["causal"], "softcap": CAP, "sinks": SINKS}
    result = sim.forward(q, k, v, **how)
    wanted = sim_gradients.backward(do, q, k, v, result, **how)
    found = backend.backward(do, q, k, v, backend.forward(q, k, v, arithmetic=arithmetic, **how), arithmetic=arithmetic, **how)
    tolerance = 2.0**-22  # exact: of numbers that are rounded once
    if name != "exact":
        bound = cases.bound(how["variant"], q, k, v, result.tensors, mask=how["mask"], scale=None, documents=None, exponential_error=H)
        exponent = float(bound.exponent.max()) + 2 * CAP * (H + 2.0**-22)
        tolerance = 3 * 2.0**-3 * np.sqrt(32 * exponent) + 4 * exponent
    for role in ("dq", "dk", "dv", "dsinks"):
        mine, right = numbers(getattr(found, role)), getattr(wanted, role)
        assert np.linalg.norm(mine - right) <= tolerance * np.linalg.norm(right), role
    by_autodiff = backend.by_autodiff(q, k, v, do, SINKS, arithmetic=arithmetic, **{key: x for key, x in how.items() if key != "sinks"})
    for mine, right in zip(by_autodiff, (*found[:3], found.dsinks), strict=True):
        np.testing.assert_array_equal(numbers(mine), numbers(right))


def test_what_is_refused(backend):
    q, k, v, _ = cases.normal(b=1, tq=4, tk=8)
    for cap in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="a softcap is"):
            backend.forward(q, k, v, variant="cudnn", softcap=cap, sinks=SINKS)
    with pytest.raises(ValueError, match="sinks are of float32, float16 or bfloat16, one for each of 4 query heads"):
        backend.forward(q, k, v, variant="cudnn", sinks=SINKS[:2])
