"""The fast form of attention against the simulator: codes and scales bit for bit, the rest within
its bound (spec A-18).

JAX's is held to the same bound in test_attention_jax.py, where ``fast`` is one of two forms.
"""

import jax
import numpy as np
import pytest
import torch
from helpers.attention import attention_cases as cases
from helpers.attention.attention_cases import backward_options, call_options

from fp8ref.jax.attention import DeviceCall
from fp8ref.jax.attention import attention as jax_attention
from fp8ref.sim.attention import attention as sim
from fp8ref.sim.attention.gradients import gradients as sim_gradients
from fp8ref.spec.attention.variants import VARIANTS
from fp8ref.torch.attention import attention
from fp8ref.torch.attention.fast import operands as attention_fast_operands

NAMES = [name for name in VARIANTS if name != "exact"]
GRADIENTS = [name for name, variant in VARIANTS.items() if variant.backward == "cast"]
H = 2.0**-22
"""The relative error of torch's exponentials: 2 units in the last place."""


def torch_forward(q, k, v, **how):
    given = how.pop("documents", None)
    documents = given and tuple(map(torch.from_numpy, given))
    options = call_options(documents=documents, arithmetic="fast", **how)
    return attention.forward(*map(torch.from_numpy, (q, k, v)), **options)


def check_tensors(found, wanted, roles):
    for role in roles:
        mine, other = found.tensors[role], wanted.tensors[role]
        if other.codes is None:
            np.testing.assert_array_equal(mine.codes.float().numpy(), other.values, err_msg=role)
            continue
        np.testing.assert_array_equal(
            mine.codes.view(torch.uint8).numpy(), other.codes, err_msg=role
        )
        for key in ("amax", "scale", "scale_inv"):
            np.testing.assert_array_equal(
                getattr(mine, key).numpy(), getattr(other, key), err_msg=f"{role} {key}"
            )


@pytest.fixture(params=["numbers", "codes"])
def operand(request, monkeypatch):
    """Both kinds of operands: dequantized, and codes for torch._scaled_mm, which a GPU takes."""
    if request.param == "codes":
        monkeypatch.setattr(
            attention_fast_operands,
            "takes_codes",
            lambda codes, variant: variant.granularity not in ("mx_1x32", None),
        )
    return request.param


@pytest.mark.grid(1)
@pytest.mark.parametrize("mask", ["causal", "window"])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_within_the_bound(name, mask, operand):
    q, k, v, _ = cases.normal()
    low, variant = VARIANTS[name].fmt.bits == 8, cases.native(name)
    how = {"variant": variant, "mask": cases.MASKS[mask], "documents": cases.documents()}
    wanted = sim.forward(q, k, v, **call_options(keep_p=low, **how))
    found = torch_forward(q, k, v, keep_p=low, **how)
    check_tensors(found, wanted, [role for role in wanted.tensors if role != "o"])
    bound = cases.bound(
        q=q, k=k, v=v, tensors=wanted.tensors, scale=None, exponential_error=H, **how
    )
    # in bfloat16 codes of P are not kept: any may be a neighbor, 2^-7 of it
    differing = np.full(bound.weights.shape, 2.0**-4)
    if low:
        differing = found.p_codes.numpy() != wanted.p_codes
        assert differing.sum() <= bound.differing()
        assert (np.abs(found.p_codes.numpy().astype(int) - wanted.p_codes) <= 1).all()
        assert abs(int(found.saturated) - wanted.saturated) <= bound.differing()
    seen = np.isfinite(wanted.lse)
    np.testing.assert_array_equal(np.isfinite(found.lse.numpy()), seen)
    error = np.abs(np.where(seen, found.lse.numpy(), 0) - np.where(seen, wanted.lse, 0))
    # 4 u of both
    assert (
        error
        <= 2 * bound.exponent[..., 0]
        + cases.gamma(3 * 150 + 8)
        + 2.0**-22 * np.abs(np.where(seen, wanted.lse, 0))
    ).all()
    np.testing.assert_allclose(
        found.amaxes["s"].numpy(),
        wanted.amaxes["s"],
        rtol=float(np.expm1(2 * bound.exponent.max())),
    )
    error = np.abs(found.o.numpy().astype(np.float64) - wanted.o)
    smallest = float(found.tensors["o"].scale_inv) * 2.0**-9 if "o" in wanted.tensors else 0
    assert (
        error <= bound.output(wanted.o, differing, VARIANTS[name].out.mantissa_bits) + smallest
    ).all()


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_within_the_bound(name, operand):
    """A share of codes of P and dS differ, 32 E of them, by 2^-3 of them: in the norm a gradient
    differs by 2^-3 of the root of that share, twice (P and dS), beside two exponents, and a share
    of codes of its own. In bfloat16 shares are 512 E, and units 2^-7."""
    q, k, v, do = cases.normal()
    variant, how = cases.native(name), {"mask": cases.MASKS["causal"]}
    result = sim.forward(q, k, v, **call_options(variant=variant, **how))
    wanted = sim_gradients.backward(do, q, k, v, result, **backward_options(variant=variant, **how))
    mine = torch_forward(q, k, v, variant=variant, **how)
    found = attention.backward(
        *map(torch.from_numpy, (do, q, k, v)), mine, **backward_options(variant=variant, **how)
    )
    if name != "bf16":
        check_tensors(found, wanted, ["do"])
    bound = cases.bound(
        variant,
        q,
        k,
        v,
        result.tensors,
        mask=how["mask"],
        scale=None,
        documents=None,
        exponential_error=H,
    )
    exponent = float(bound.exponent.max())
    for role in ("dq", "dk", "dv"):
        apart = np.linalg.norm(
            getattr(found, role).numpy() - getattr(wanted, role)
        ) / np.linalg.norm(getattr(wanted, role))
        assert apart <= 3 * 2.0**-3 * np.sqrt(32 * exponent) + 4 * exponent, role
        np.testing.assert_allclose(found.amaxes[role].numpy(), wanted.amaxes[role], rtol=2.0**-6)


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", NAMES)
def test_exact_sums_have_the_stated_bits(name, operand):  # A-18, item 5
    """Scores are 0; 256 keys and two tiles or three, so that P is 1 or 2^8, their sum a power of
    two, and sums of integers exact.
    """
    *_, v, _ = cases.integers(tq=8, tk=256)
    v[:, :, ::128, 0] = 7  # so that the scales of blocks of rows are powers of two
    q, k = np.zeros((2, 4, 8, 64), np.float32), cases.integers(tq=8, tk=256, seed=1)[1]
    variant = cases.native(name)
    wanted = sim.forward(q, k, v, variant=variant)
    found = torch_forward(q, k, v, variant=variant)
    np.testing.assert_array_equal(found.o.numpy(), wanted.o)
    in_jax = jax.jit(
        lambda *given: jax_attention.forward(
            *given, variant=DeviceCall(variant=variant, arithmetic="fast")
        )
    )(q, k, v)
    if variant.base == "e":  # XLA's e^(x ln 2) of 2^8 is rounded
        np.testing.assert_array_equal(in_jax.o, wanted.o)


def test_the_rescale_rule_is_kept():
    """fa4_threshold4's fault is its own in either form: as many probabilities are clipped."""
    rng = np.random.default_rng(3)
    q, k, v = ((rng.normal(size=(1, 2, 300, 64)) * size).astype(np.float32) for size in (3, 1, 1))
    counts = {
        name: int(torch_forward(q, k, v, variant=name).saturated)
        for name in ("fa4", "fa4_threshold4")
    }
    wanted = sim.forward(q, k, v, variant="fa4_threshold4").saturated
    assert counts["fa4"] == 0
    assert wanted > 100
    assert abs(counts["fa4_threshold4"] - wanted) <= 0.02 * wanted
