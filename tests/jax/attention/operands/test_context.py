"""Attention of devices that have parts of the tokens, next to one device (spec A-21)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attention.attention_cases import call_options
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fp8ref.jax.attention import attention
from fp8ref.spec.attention.variants import Mask

TOKENS = 192  # of both devices: neither's part is a whole number of tiles of 128
CUT = P("data", None, "context")


def given() -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(2, h, TOKENS, 32)), jnp.bfloat16) for h in (4, 2, 2, 4)]


def gradients(**how):
    def run(q, k, v, do):
        o, vjp = jax.vjp(lambda *x: attention.apply(*x, **call_options(**how)), q, k, v)
        return o, *vjp(do)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "mask", "arithmetic"),
    [
        ("cudnn", Mask(causal=True), "stated"),
        ("cudnn", Mask(causal=True, window=(50, None)), "fast"),
        ("bf16", Mask(causal=True), "fast"),
    ],
)
def test_a_mesh_has_the_rows_of_one_device(variant, mask, arithmetic):
    """Rows of queries are computed alike. A gradient of a key is a sum of two parts in place of
    one: after two roundings, to 8 bits and to bfloat16, it is the same number, or next to it where
    a rounding falls either way."""
    how = {"variant": variant, "mask": mask, "arithmetic": arithmetic}
    mesh = jax.make_mesh(
        (2, 2), ("data", "context"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 2
    )
    cut = gradients(**how, over=("data", "context"), tokens="context")
    parallel = jax.jit(jax.shard_map(cut, mesh=mesh, in_specs=(CUT,) * 4, out_specs=(CUT,) * 4))
    one = jax.jit(gradients(**how))
    found, right = (
        jax.tree.map(lambda x: np.asarray(x, np.float32), run(*given())) for run in (parallel, one)
    )
    for name, mine, other in zip(("o", "dq"), found[:2], right[:2], strict=True):
        equal = (mine == other).mean()
        assert equal == 1 if arithmetic == "stated" else equal > 0.99, name
    unit = 2.0**-3 if variant == "cudnn" else 2.0**-7
    for mine, other in zip(found[2:], right[2:], strict=True):
        assert (mine == other).mean() > 0.98
        np.testing.assert_allclose(mine, other, rtol=1.01 * unit, atol=2**-9 * np.abs(other).max())
    gathered = parallel.lower(*given()).as_text().count("stablehlo.all_gather")
    assert gathered == 4  # k and v in each pass
    if variant == "cudnn":
        assert "ui8>) -> tensor<1x2x192x32xui8>" in parallel.lower(*given()).as_text()


REFUSED = [
    (
        {"variant": "mxfp8", "over": ("context",)},
        r"one scale for a tensor, or none; variant .* has scales of .* Use 'cudnn' or 'bf16'",
    ),
    (
        {"variant": "bf16", "over": ()},
        r"mesh axis of tokens; got tokens='context', over=\(\). Add it",
    ),
]


@pytest.mark.parametrize(("how", "said"), REFUSED)
def test_what_cannot_be_cut_is_refused(how, said):
    mesh = jax.make_mesh((2,), ("context",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    spec = P(None, None, "context")

    def run(q, k, v):
        return attention.apply(q, k, v, **call_options(tokens="context", **how))

    with pytest.raises(ValueError, match=said):
        jax.eval_shape(
            jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec), *given()[:3]
        )
