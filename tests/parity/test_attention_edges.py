"""Clauses of attention at their edges, in the simulator and in the stated form of both backends."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers.attention import attention_cases as cases
from helpers.attention.attention_cases import call_options

from fp8ref.jax.attention import attention as fj
from fp8ref.sim.attention import attention as sim
from fp8ref.spec.attention.variants import VARIANTS
from fp8ref.torch.attention import attention as ft

F = np.float32
LOG2E, LN2 = F(math.log2(math.e)), F(math.log(2))


def of_jax(arrays, **how):
    for key in ("sinks", "documents", "scales"):
        if how.get(key) is not None:
            given = how[key]
            how[key] = (
                {k: jnp.asarray(x) for k, x in given.items()}
                if key == "scales"
                else (tuple(map(jnp.asarray, given)) if key == "documents" else jnp.asarray(given))
            )
    return fj.forward(*map(jnp.asarray, arrays), **call_options(arithmetic="stated", **how))


def of_torch(arrays, **how):
    for key in ("sinks", "documents", "scales"):
        if how.get(key) is not None:
            given = how[key]
            how[key] = (
                {k: torch.tensor(x) for k, x in given.items()}
                if key == "scales"
                else (
                    tuple(map(torch.tensor, given)) if key == "documents" else torch.tensor(given)
                )
            )
    return ft.forward(*map(torch.tensor, arrays), **call_options(arithmetic="stated", **how))


ROOMS = {
    "sim": lambda arrays, **how: sim.forward(*arrays, **call_options(**how)),
    "jax": of_jax,
    "torch": of_torch,
}


def fused(a: np.float32, b: np.float32) -> np.float32:
    return F(float(a) * float(b))  # a product of two float32 numbers is exact in float64


@pytest.mark.grid(4)
@pytest.mark.parametrize("name", ["cudnn", "fa3", "fa4", "fa3_paper", "bf16"])
@pytest.mark.parametrize("room", ROOMS)
def test_the_log_sum_exp_of_a_row_without_keys_under_a_sink(room, name):
    """It is A-11's of m and l of step 2: the sink, divided by the factor of scores and multiplied
    again.
    """
    q, k, v, _ = cases.normal(b=1, h=64, heads=1, tq=2, tk=3, d=64)
    sinks = np.random.default_rng(5).normal(size=64).astype(F) * 7
    ids = np.array([[0, -1]]), np.zeros((1, 3), int)
    found = ROOMS[room]((q, k, v), variant=name, sinks=sinks, documents=ids)
    lse, variant = np.asarray(found.lse)[0, :, 1], VARIANTS[name]
    if variant.base == "e":
        wanted = sinks
    elif variant.scores == "scaled":
        wanted = (sinks * LOG2E) * LN2
    else:
        scale = F(np.float64(F(1 / 8)) * math.log2(math.e))
        inverse = [np.asarray(found.tensors[role].scale_inv).reshape(-1)[0] for role in "qk"]
        factor = F(scale * F(inverse[0] * inverse[1]))
        m = sinks * F(LOG2E / factor)
        wanted = (
            np.array([fused(x, F(factor * LN2)) for x in m])
            if variant.lse == "fused"
            else (m * factor) * LN2
        )
    np.testing.assert_array_equal(lse, wanted)
    assert (np.abs(lse - sinks) <= 2 * np.spacing(np.abs(sinks))).all()
    assert name in ("cudnn", "bf16") or (lse != sinks).any()


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(
    ("scale", "clipped"), [(448.0, 0), (460.0, 0), (464.0, 0), (464.00003, 6), (500.0, 6)]
)
def test_a_number_that_is_rounded_to_max_is_not_clipped(room, scale, clipped):
    """e4m3fn's max is 448, and the next number would be 480: 464 is a tie, and goes to 448."""
    q, k, v = (np.zeros((1, 2, 3, 32), F) for _ in range(3))
    v[..., 0] = 1
    found = ROOMS[room](
        (q, k[:, :, :1], v[:, :, :1]), variant="cudnn", scales={"s": F(scale)}, keep_p=True
    )
    assert int(found.saturated) == clipped
    assert (np.asarray(found.p_codes) == 0x7E).all()
