"""SageAttention's INT8 in both backends against the simulator: codes, scales, P and outputs bit for bit in the stated form (spec A-26)."""

import dataclasses

import attention_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from fp8ref.attention import VARIANTS, Mask, differentiated
from fp8ref.attention_products import planned
from fp8ref.formats import E4M3FN
from fp8ref.jax import attention as fj
from fp8ref.jax import attention_stats as attention_stats_jax
from fp8ref.jax import int8_heads as heads_jax
from fp8ref.jax import stats as stats_jax
from fp8ref.sim import attention as sim
from fp8ref.sim import attention_gradients as sim_gradients
from fp8ref.sim import hardware as sim_hardware
from fp8ref.sim import int8_heads
from fp8ref.stats import FIELDS
from fp8ref.torch import attention as ft
from fp8ref.torch import attention_fast_operands, hardware
from fp8ref.torch import attention_stats as attention_stats_torch
from fp8ref.torch import int8_heads as heads_torch

F = np.float32
NATIVE = dataclasses.replace(VARIANTS["sage"], plan="exact")


def to_numpy(x):
    return x.view(torch.uint8).numpy() if isinstance(x, torch.Tensor) and x.dtype == torch.float8_e4m3fn else np.asarray(x)


def run(backend, arrays, **how):
    if backend == "jax":  # in one program: to compile each operation by itself takes three times as long
        compiled = jax.jit(lambda arrays, documents: fj.forward(*arrays, documents=documents, **how))
        return compiled(tuple(map(jnp.asarray, arrays)), how.pop("documents", None))
    how["documents"] = how.get("documents") and tuple(map(torch.from_numpy, how["documents"]))
    return ft.forward(*map(torch.from_numpy, arrays), **how)


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize(
    "mask", ["causal", pytest.param("window", marks=pytest.mark.slow), pytest.param("from the start", marks=pytest.mark.slow)]
)
def test_the_stated_form_is_the_simulators(backend, mask):
    """Scores are integers that every sum has exactly, and exponentials are rounded: P and the log-sum-exp have the simulator's bits. o has
    them but for the order of a tile's sums."""
    q, k, v, _ = cases.normal(seed=3)
    k += 2
    how = {"variant": NATIVE, "mask": cases.MASKS[mask], "documents": cases.documents(), "keep_p": True, "keep_s": True}
    wanted, found = sim.forward(q, k, v, **how), run(backend, (q, k, v), **how, arithmetic="stated")
    for role, one in wanted.tensors.items():
        mine = found.tensors[role]
        codes = to_numpy(mine.codes)
        np.testing.assert_array_equal(codes.view(one.codes.dtype), one.codes, err_msg=role)
        for name in ("amax", "scale", "scale_inv"):
            np.testing.assert_array_equal(to_numpy(getattr(mine, name)), getattr(one, name), err_msg=f"{role} {name}")
    np.testing.assert_array_equal(to_numpy(found.scores), wanted.scores)
    np.testing.assert_array_equal(to_numpy(found.p_codes), wanted.p_codes)
    np.testing.assert_array_equal(to_numpy(found.lse), wanted.lse)
    np.testing.assert_array_equal(to_numpy(found.amaxes["s"]), wanted.amaxes["s"])
    assert (int(found.saturated), int(found.lost)) == (wanted.saturated, wanted.lost)
    # Two tiles' float32 sums of 128 products, then one rounding to bfloat16: a unit of it where the sums lie on both sides of a midpoint.
    np.testing.assert_allclose(to_numpy(found.o), wanted.o, rtol=2.0**-7, atol=2.0**-14)
    assert (to_numpy(found.o) != wanted.o).mean() < 2.0**-5


@pytest.mark.parametrize("backend", ["jax", "torch", "torch's codes"])
@pytest.mark.parametrize("mask", ["full", pytest.param("causal window", marks=pytest.mark.slow)])
def test_the_fast_form_is_within_its_bound(backend, mask, monkeypatch):
    if backend == "torch's codes":  # of v and P, which a GPU takes
        monkeypatch.setattr(attention_fast_operands, "takes_codes", lambda codes, variant: True)
    q, k, v, _ = cases.normal(seed=4)
    wanted = sim.forward(q, k, v, variant=NATIVE, mask=cases.MASKS[mask], keep_p=True)
    found = run(backend, (q, k, v), variant=NATIVE, mask=cases.MASKS[mask], keep_p=True)
    # XLA's 2^x on a CPU is e^(x ln 2): h = 2^-23 (2 + |x| / 2), of exponents below 32.
    bound = cases.bound(
        NATIVE, q, k, v, wanted.tensors, mask=cases.MASKS[mask], scale=None, documents=None, exponential_error=18 * 2.0**-23
    )
    differing = to_numpy(found.p_codes) != wanted.p_codes
    assert differing.sum() <= bound.differing()
    assert (np.abs(to_numpy(found.p_codes).astype(int) - wanted.p_codes) <= 1).all()
    error = np.abs(to_numpy(found.o) - wanted.o)
    assert (error <= bound.output(wanted.o, differing, 7)).all()
    taken = np.abs(int8_heads.taken(q, k)) / 8
    allowed = 2 * bound.exponent[..., 0] + 2.0**-22 * (np.abs(wanted.lse) + 2 * taken) + 2.0**-20
    assert (np.abs(to_numpy(found.lse) - wanted.lse) <= allowed).all()


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_hardware_multiplies_p_and_v_in_the_fast_form(mask):  # B-12
    """Rows with the simulator's codes of P have its o, but for roundings of c and of 1 / l that bfloat16 shows in few elements."""
    q, k, v, _ = cases.normal(seed=8)
    arrays, how = (q, k, v), {"mask": cases.MASKS[mask], "keep_p": True}
    native = run("torch", arrays, variant="sage", **how)
    for plan, variant in (("hopper", VARIANTS["sage"]), ("exact", NATIVE)):
        wanted = sim.forward(*arrays, variant=variant, **how)
        with hardware.simulating(sim_hardware.by_name(plan)):
            found = run("torch", arrays, variant="sage", **how)
        same = (to_numpy(found.p_codes) == wanted.p_codes).all(-1)
        assert same.mean() > 0.9
        # each a few units of 2^-24 apart, of 2^-9 to the next midpoint of bfloat16: one in 2^11 or so
        assert (to_numpy(found.o) == wanted.o)[same].mean() > 0.99
        assert torch.equal(found.lse, native.lse)
        # Hopper's accumulator keeps 13 bits below a step's largest product: without it more o differ than that
        assert ((to_numpy(native.o) == wanted.o)[same].mean() < 0.97) == (plan == "hopper")


@pytest.mark.slow
def test_gradients_in_bfloat16():
    """The backward pass has the log-sum-exp of the smoothed pass, and scores of k itself."""
    q, k, v, do = cases.normal(seed=5)
    k += 1
    variant, how = differentiated(NATIVE, "bf16"), {"mask": Mask(causal=True)}
    result = sim.forward(q, k, v, variant=variant, **how)
    wanted = sim_gradients.backward(do, q, k, v, result, variant=variant, **how)
    of_jax = [jnp.asarray(x) for x in (q, k, v)]
    found = fj.backward(
        jnp.asarray(do),
        *of_jax,
        fj.forward(*of_jax, variant=variant, arithmetic="stated", **how),
        variant=variant,
        arithmetic="stated",
        **how,
    )
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    o = ft.apply(*leaves, variant=variant, arithmetic="stated", **how)
    o.backward(torch.from_numpy(do))
    for name, leaf in zip(("dq", "dk", "dv"), leaves, strict=True):
        # P and dS in bfloat16: 2^-8 where a rounding goes the other way, in few elements, and the roundings of o and of sums.
        right = getattr(wanted, name)
        for mine in (np.asarray(getattr(found, name)), leaf.grad.numpy()):
            assert np.linalg.norm(mine - right) <= 2.0**-8 * np.linalg.norm(right), name


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_statistics_of_v_are_by_feature(backend):
    _, _, v, _ = cases.normal(seed=7)
    v[:, :, :, 3] *= 2.0**-12  # which its own scale brings back
    v[0, 1, 5, 3] *= 2.0**-30
    wanted = int8_heads.quantize(v, v, v, E4M3FN)["v"]
    lost = int(((wanted.values == 0) & (v != 0)).sum())
    if backend == "jax":

        @jax.jit
        def measured(v):
            tensor = heads_jax.quantize(v, v, v, E4M3FN)["v"]
            return attention_stats_jax.measure(v, tensor, "values", "v", NATIVE)[("values", "v")]

        one = dict(zip(FIELDS, stats_jax.parts(np.asarray(measured(v))[None])[0], strict=True))
    else:
        x = torch.from_numpy(v)
        one = dict(
            zip(FIELDS, attention_stats_torch.measure(x, heads_torch.quantize(x, x, x, E4M3FN)["v"], E4M3FN, NATIVE).tolist(), strict=True)
        )
    assert (one["count"], one["underflows"]) == (v.size, lost)
    assert lost >= 1
    assert one["amax"] == np.abs(v).max()
    assert (one["scale_min"], one["scale_max"]) == (wanted.scale.min(), wanted.scale.max())
    assert [row.name for row in planned(["layer"], NATIVE)] == ["layer/values/v", "layer/values/p"]


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_softcap_and_sinks_are_refused(backend):
    q, k, v, _ = cases.normal(seed=6)
    with pytest.raises(ValueError, match="takes no softcap and no sinks"):
        run(backend, (q, k, v), variant="sage", softcap=5.0)
    sinks = np.zeros(4, F)
    with pytest.raises(ValueError, match="takes no softcap and no sinks"):
        run(backend, (q, k, v), variant="sage", sinks=jnp.asarray(sinks) if backend == "jax" else torch.from_numpy(sinks))
