"""What grouped GEMMs report: to an observer as linears' GEMMs, group by group, and as
statistics.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from fp8ref.formats import E4M3FN
from fp8ref.jax import delayed
from fp8ref.jax.experts import grouped
from fp8ref.jax.experts import operands as grouped_operands
from fp8ref.jax.experts import reports as grouped_reports
from fp8ref.jax.linear import linear
from fp8ref.jax.quantize import stats
from fp8ref.recipe import CastSpec
from fp8ref.selection.statistics import FIELDS
from fp8ref.sim.experts import grouped as sim
from fp8ref.torch.experts import operands as torch_operands
from fp8ref.torch.observe import statistics as torch_stats

SIZES = (12, 0, 20)


def _observed(recipe, x, w, g, **state):
    found = []

    def run(x, w, g):
        y, vjp = jax.vjp(
            lambda x, w: grouped.apply(x, w, jnp.array(SIZES), recipe=recipe, name="up", **state)[
                0
            ],
            x,
            w,
        )
        return y, vjp(g)

    with linear.observing(lambda *gemm: found.append(gemm)):
        results = jax.jit(run)(*(jnp.asarray(v, jnp.bfloat16) for v in (x, w.swapaxes(1, 2), g)))
        jax.block_until_ready(results)
        jax.effects_barrier()
    return found, results


def _tensors(rng):
    return [
        rng.standard_normal(s).astype(jnp.bfloat16).astype(np.float32)
        for s in ((40, 32), (3, 16, 32), (40, 16))
    ]


@pytest.mark.grid(1)
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "mxfp8"])
def test_each_group_with_rows_reports_three_gemms_in_a_linears_layout(recipe, rng):
    x, w, g = _tensors(rng)
    if recipe == "mxfp8":
        w, g = (np.concatenate([v, v], axis=1) for v in (w, g))
    found, (y, _) = _observed(recipe, x, w, g)
    assert (
        sorted(which for _, which, *_ in found)
        == ["grad_input"] * 2 + ["grad_weight"] * 2 + ["output"] * 2
    )
    tensors = {"input": x, "weight": w, "grad_output": g}
    for which, roles in (
        ("output", ("input", "weight")),
        ("grad_input", ("grad_output", "weight")),
        ("grad_weight", ("grad_output", "input")),
    ):
        expected = [
            pair
            for pair in sim.quantize_operands(
                which, {r: tensors[r] for r in roles}, np.cumsum(SIZES), recipe
            )
            if pair
        ]
        for (name, _, *operands, out), pair in zip(
            [o for o in found if o[1] == which], expected, strict=True
        ):
            assert name == "up"
            for (hp, codes, scale), q, turned in zip(
                operands, pair, (which == "grad_weight", which != "output"), strict=True
            ):
                codes, scale = (codes.T, scale.T) if turned else (codes, scale)
                np.testing.assert_array_equal(codes, q.codes)
                np.testing.assert_array_equal(scale, q.scale)
                assert hp.shape == (codes.T if turned else codes).shape
            assert out.shape == (len(pair[0].codes), len(pair[1].codes))
    np.testing.assert_array_equal(np.concatenate([o[4] for o in found if o[1] == "output"]), y[:32])


@pytest.mark.slow
def test_under_delayed_scaling_an_empty_groups_weight_is_seen_too(rng):
    x, w, g = _tensors(rng)
    w[1] *= 128
    state = delayed.init("delayed")
    found, _ = _observed("delayed", x, w, g, state=state, seen=delayed.unseen("delayed"))
    weights = [operands[1][0] for _, which, *operands, _ in found if which == "output"]
    assert len(weights) == 3
    assert max(np.abs(v).max() for v in weights) == np.abs(w).max()


@pytest.mark.parametrize("role", ["input", "weight"])
def test_statistics_are_those_of_torch(role, rng):
    x, w, _ = _tensors(rng)
    x[5, 3], x[33:] = 0, np.nan  # rows of no group count nothing
    spec, ends = CastSpec(fmt=E4M3FN, granularity="rowwise"), np.cumsum(SIZES)
    groups = grouped_operands.groups_of(jnp.array(SIZES), len(x))
    of_torch = torch_operands.groups_of(torch.from_numpy(ends), len(x))
    if role == "input":
        given = groups.only(jnp.asarray(x, jnp.bfloat16))
        q = grouped_operands.quantize_rows(given, spec, -2, groups, "group")
        hp = of_torch.only(torch.from_numpy(x).bfloat16())
        theirs = torch_stats.measure_groups(
            hp, torch_operands.quantize_rows(hp, spec, -2, of_torch, "group"), ends.tolist()
        )
    else:
        given = jnp.asarray(w.swapaxes(1, 2), jnp.bfloat16)
        q = grouped_operands.quantize_weights(given, spec, -2, "group")
        hp = torch.from_numpy(w).bfloat16()
        theirs = torch_stats.measure_groups(
            hp, torch_operands.quantize_weights(hp, spec, -1, "group"), ends.tolist()
        )
    found = stats.parts(np.asarray(jax.jit(lambda x: grouped_reports.measure(x, q, groups))(given)))
    for name, mine, other in zip(FIELDS, found, theirs.tolist(), strict=True):
        # Sums of 1,536 squares in float32, by JAX; everything else is exact.
        assert mine == pytest.approx(other, rel=1e-4 if name in ("signal", "noise") else 0), name
    assert found[0] == (32 * 32 if role == "input" else w.size)
