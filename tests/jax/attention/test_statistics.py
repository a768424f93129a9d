"""Measurements of attention's operands in JAX: counts of ragged MX blocks, and scales of heads
(spec Q-13).
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from fp8ref.jax.attention import statistics as attention_stats
from fp8ref.jax.attention.operands import heads as head_scaling
from fp8ref.jax.quantize import stats
from fp8ref.selection.statistics import FIELDS
from fp8ref.spec.attention.products import RECORDED
from fp8ref.spec.attention.variants import VARIANTS


def measured(granularity: str, policy: str, *, role: str = "q") -> dict[str, float]:
    variant = (
        VARIANTS["mxfp8"]
        if granularity == "mx_1x32"
        else dataclasses.replace(VARIANTS["cudnn"], granularity=granularity)
    )
    x = (
        jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 50, 32)), jnp.float32)
        .at[1, 3, 49, 31]
        .set(jnp.inf)
    )
    along = role == "v"
    tensor = head_scaling.quantize(
        x.at[1, 3, 49, 31].set(0), variant.fmt, granularity, policy, heads=2, along_tokens=along
    )
    found = attention_stats.measure(x, tensor, "values" if along else "scores", role, variant)
    [(row, measurement)] = found.items()
    assert row == (("values", "v") if along else ("scores", "q"))
    return dict(zip(FIELDS, stats.parts(np.asarray(measurement)[None])[0], strict=True))


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("granularity", "policy", "role"),
    [("tensor", "te_current", "q"), ("head", "te_current", "q"), ("mx_1x32", "mx_rceil", "v")],
)
def test_elements_are_counted_once(granularity, policy, role):
    """50 tokens are no whole blocks of 32: zeros that fill the last one up are not counted."""
    found = measured(granularity, policy, role=role)
    assert (found["count"], found["non_finite"]) == (2 * 4 * 50 * 32, 1)
    assert found["noise"] / found["signal"] < 2.0**-8  # e4m3 rounds by 2^-4 of a number at most
    assert (found["scale_min"] < found["scale_max"]) == (granularity != "tensor")


def test_rows_are_in_the_order_of_the_products():
    one = jnp.ones(stats.LENGTH)
    found = np.asarray(attention_stats.rows({RECORDED[2]: one}))
    assert found.shape == (len(RECORDED), stats.LENGTH)
    assert found[2].all()
    assert not np.delete(found, 2, axis=0).any()
