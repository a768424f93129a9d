"""Grouped linears of both backends against the simulator: codes and scales bit for bit, GEMMs
within B-1, on integers equal (spec X).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers.gemm.grouped_cases import (
    DYNAMIC,
    EVERY,
    GEMMS,
    OFFS,
    SIZES,
    E,
    M,
    N,
    integers,
    name_of,
    of_group,
    operands,
    parts,
    simulated,
    tensors,
)

from fp8ref.conformance.gemm import bound
from fp8ref.formats import BFLOAT16, E4M3FN, E5M2
from fp8ref.jax import delayed as jax_delayed
from fp8ref.jax.experts import grouped as jax_grouped
from fp8ref.jax.experts import operands as jax_operands
from fp8ref.jax.quantize import cast as jax_cast
from fp8ref.recipe import OPERANDS, Recipe
from fp8ref.selection import grouped as recipes
from fp8ref.selection.grouped import GROUPED_RECIPES
from fp8ref.sim import delayed
from fp8ref.sim.experts import grouped as sim
from fp8ref.sim.gemm import hardware as sim_hardware
from fp8ref.sim.quantize import cast
from fp8ref.torch import delayed as torch_delayed
from fp8ref.torch.experts import grouped as torch_grouped
from fp8ref.torch.experts import operands as torch_operands
from fp8ref.torch.gemm import hardware as torch_hardware

every = pytest.mark.parametrize("recipe", EVERY, ids=name_of)
# of blocks in float32, sums on dequantized operands round
INTEGERS = [r for r in [*EVERY, "bf16"] if not str(r).startswith("blockwise")]


def jax_results(x, w, g, recipe, dtype=jnp.bfloat16):
    sizes = jnp.asarray(SIZES, jnp.int32)

    @jax.jit
    def run(x, w, g, sizes):
        y, vjp = jax.vjp(lambda x, w: jax_grouped.apply(x, w, sizes, recipe=recipe)[0], x, w)
        return y, *vjp(g)

    y, grad_input, grad_weight = run(
        jnp.asarray(x, dtype), jnp.asarray(w.swapaxes(1, 2), dtype), jnp.asarray(g, dtype), sizes
    )
    found = (y, grad_input, grad_weight.swapaxes(1, 2))
    return dict(zip(GEMMS, (np.asarray(v.astype(jnp.float32)) for v in found), strict=True))


def torch_results(x, w, g, recipe, dtype=torch.bfloat16):
    x, w = (torch.from_numpy(v).to(dtype).requires_grad_() for v in (x, w))
    y = torch_grouped.apply(x, w, torch.tensor(OFFS, dtype=torch.int32), recipe=recipe)
    y.backward(torch.from_numpy(g).to(dtype))
    return dict(zip(GEMMS, (v.detach().float().numpy() for v in (y, x.grad, w.grad)), strict=True))


def jax_operand(which, role, tensor, recipe, scale=None):
    """Codes and the table of scale_inv; weights back in [E, N, K]."""
    groups = jax_operands.groups_of(jnp.asarray(SIZES, jnp.int32), M)
    given = jnp.asarray(tensor.swapaxes(1, 2) if role == "weight" else tensor, jnp.bfloat16)
    given = given if role == "weight" else groups.only(given)
    q = jax_grouped.quantize_operand(which, role, given, groups, recipe, scale)
    codes, table = (np.asarray(jax_cast.code_bits(q.codes, q.fmt)), np.asarray(q.scale_inv))
    if role != "weight":
        return codes, table
    return codes.swapaxes(1, 2), table.swapaxes(1, 2) if table.ndim == 3 else table


def torch_operand(which, role, tensor, recipe, scale=None):
    groups = torch_operands.groups_of(torch.tensor(OFFS, dtype=torch.int32), M)
    given = torch.from_numpy(tensor).bfloat16()
    q = torch_grouped.quantize_operand(
        which, role, given if role == "weight" else groups.only(given), groups, recipe, scale
    )
    return q.code_bits.numpy(), q.scale_inv.numpy()


@pytest.mark.grid(2)
@every
@pytest.mark.parametrize("backend", [jax_operand, torch_operand], ids=["jax", "torch"])
def test_codes_and_scales_of_every_group(backend, recipe, rng):
    found = dict(zip(("input", "weight", "grad_output"), tensors(rng), strict=True))
    recipe = recipes.by_name(recipe)
    compared = 0
    for which, groups in operands(*found.values(), recipe).items():
        for at, role in enumerate(OPERANDS[which]):
            if not recipe.recipe.gemms[which].fp8:
                continue
            codes, table = backend(which, role, found[role], recipe)
            for e, pair in enumerate(groups):
                if pair is not None:
                    mine, scales = of_group(codes, table, pair[at], role, which, e)
                    np.testing.assert_array_equal(
                        mine, pair[at].codes, err_msg=f"{which} {role} {e}"
                    )
                    np.testing.assert_array_equal(
                        scales, pair[at].scale_inv, err_msg=f"{which} {role} {e}"
                    )
                    compared += 1
    assert compared == 3 * 2 * (2 if recipe.name == "rowwise_with_gw_hp" else 3)


def check_bounds(which, found, expected, groups, spec):
    """B-1 of a GEMM's groups that have rows."""
    for e, part in parts(which):
        out, mine = found[part], expected[part]
        if spec.fp8:
            limit = bound.bound(*groups[e], out, mine, out_dtype=BFLOAT16, epilogue=spec.epilogue)
        else:
            # as many float32 roundings as the reduced axis is long, and two, then one to bfloat16
            a, b = (np.abs(v).astype(np.float64) for v in groups[e])
            limit = bound.gamma(a.shape[1] + 2) * (a @ b.T) + bound.ulp(
                np.maximum(np.abs(out), np.abs(mine)), BFLOAT16
            )
        assert (np.abs(out - mine) <= limit).all(), (which, e)


@pytest.mark.grid(2)
@every
@pytest.mark.parametrize("backend", [jax_results, torch_results], ids=["jax", "torch"])
def test_gemms_are_within_their_bound(backend, recipe, rng):  # B-1
    """NaN and infinity in rows of no group, which reach nothing."""
    x, w, g = tensors(rng)
    found, expected, groups = (
        backend(x, w, g, recipe),
        simulated(x, w, g, recipe),
        operands(x, w, g, recipe),
    )
    for which, spec in recipes.by_name(recipe).recipe.gemms.items():
        assert np.isfinite(found[which]).all()
        check_bounds(which, found[which], expected[which], groups[which], spec)
    for which in ("output", "grad_input"):
        assert not found[which][OFFS[-1] :].view(np.uint32).any()
    assert not found["grad_weight"][1].view(np.uint32).any()


@pytest.mark.grid(2)
@pytest.mark.parametrize("recipe", INTEGERS, ids=name_of)
@pytest.mark.parametrize("backend", [jax_results, torch_results], ids=["jax", "torch"])
def test_the_same_bits_on_integers(backend, recipe, rng):
    x, w, g = integers(rng)
    found = backend(x, w, g, recipe)
    for which, expected in simulated(x, w, g, recipe).items():
        np.testing.assert_array_equal(found[which], expected, err_msg=which)


def test_delayed_scaling_over_steps(rng):  # X-9, H-3
    """States of four steps, one of them without rows, in both backends and the simulator; and GEMMs
    by their scales.
    """
    recipe = recipes.by_name("delayed")
    formats = {"input": E4M3FN, "weight": E4M3FN, "grad_output": E5M2}
    states = {role: delayed.init("delayed") for role in formats}
    jax_state = jax_delayed.init("delayed")
    torch_states = torch.nn.ModuleDict(
        {
            role: torch_delayed.RoleState(fmt, config, torch.device("cpu"))
            for role, (fmt, config) in torch_delayed.casts("delayed").items()
        }
    )

    @jax.jit
    def jax_step(x, w, g, sizes, state):
        seen = jax_delayed.unseen("delayed")
        (y, forward), vjp = jax.vjp(
            lambda *a: jax_grouped.apply(*a[:2], sizes, recipe="delayed", state=state, seen=a[2]),
            x,
            w,
            seen,
        )
        *grads, backward = vjp((g, seen))
        return (y, *grads), jax_delayed.merge(forward, backward)

    for step, sizes in enumerate([SIZES, SIZES, (0,) * E, SIZES]):
        x, w, g = (cast.round_to(v * np.float32(3.0**-step), BFLOAT16) for v in tensors(rng))
        offs, found = np.cumsum(sizes), {"input": x, "weight": w, "grad_output": g}
        scales = {
            role: delayed.scales(states[role], "delayed", fmt) for role, fmt in formats.items()
        }
        results, seen = jax_step(
            *(jnp.asarray(v, jnp.bfloat16) for v in (x, w.swapaxes(1, 2), g)),
            jnp.asarray(sizes, jnp.int32),
            jax_state,
        )
        jax_state = jax_delayed.update(jax_state, seen, recipe="delayed")
        tx, tw = (torch.from_numpy(v).bfloat16().requires_grad_() for v in (x, w))
        y = torch_grouped.apply(
            tx, tw, torch.from_numpy(offs), recipe="delayed", states=torch_states
        )
        y.backward(torch.from_numpy(g).bfloat16())
        torch_delayed.update(torch_states)
        if sizes == SIZES:
            expected, groups = (
                simulated(x, w, g, recipe, scales=scales),
                operands(x, w, g, recipe, scales),
            )
            for at, (which, spec) in enumerate(recipe.recipe.gemms.items()):
                of_jax = np.asarray(
                    (results[at].swapaxes(1, 2) if which == "grad_weight" else results[at]).astype(
                        jnp.float32
                    )
                )
                check_bounds(which, of_jax, expected[which], groups[which], spec)
                check_bounds(
                    which,
                    (y, tx.grad, tw.grad)[at].detach().float().numpy(),
                    expected[which],
                    groups[which],
                    spec,
                )
        for role, fmt in formats.items():
            states[role] = delayed.update(
                states[role], sim.observe(role, found[role], offs), config="delayed", fmt=fmt
            )
            of_jax, of_torch = jax_state[role], torch_states[role]
            assert (
                int(states[role].step)
                == int(of_jax.step)
                == int(of_torch.step)
                == step + (step < 2)
            )
            for mine, theirs in (
                (of_jax.stored, of_jax.amax_history),
                (of_torch.scale, of_torch.amax_history),
            ):
                np.testing.assert_array_equal(np.asarray(mine), states[role].stored)
                np.testing.assert_array_equal(np.asarray(theirs), states[role].amax_history)


@pytest.mark.parametrize("backend", [jax_operand, torch_operand], ids=["jax", "torch"])
def test_codes_under_delayed_scales(backend, rng):
    found = dict(zip(("input", "weight", "grad_output"), tensors(rng), strict=True))
    recipe = recipes.by_name("delayed")
    values = {"input": np.float32(11.7), "weight": np.float32(83.1), "grad_output": np.float32(3e4)}
    scales = {
        role: delayed.scales(delayed.init("delayed")._replace(stored=value), "delayed", E4M3FN)
        for role, value in values.items()
    }
    for which, groups in operands(*found.values(), recipe, scales).items():
        for at, role in enumerate(OPERANDS[which]):
            scale = (
                jnp.asarray(values[role]) if backend is jax_operand else torch.tensor(values[role])
            )
            codes, table = backend(which, role, found[role], recipe, scale)
            for e, pair in enumerate(groups):
                if pair is not None:
                    mine, inverse = of_group(codes, table, pair[at], role, which, e)
                    np.testing.assert_array_equal(mine, pair[at].codes)
                    np.testing.assert_array_equal(inverse, pair[at].scale_inv)


@pytest.mark.grid(3)
@every
def test_on_simulated_hardware(recipe, rng):  # G-19, X-10
    """PyTorch's, group by group on a simulated Hopper: the simulator's bits."""
    if recipes.by_name(recipe).recipe.emulated:
        pytest.skip("tensor cores' plans take no e2m1fn (R-9)")
    x, w, g = tensors(rng)
    with torch_hardware.simulating(sim_hardware.by_name("hopper")):
        found = torch_results(x, w, g, recipe)
    for which, expected in simulated(x, w, g, recipe, accumulate="hopper").items():
        if recipes.by_name(recipe).recipe.gemms[which].fp8:
            np.testing.assert_array_equal(found[which], expected, err_msg=which)


def test_all_recipes_are_compared():
    assert {*DYNAMIC, "delayed", "bf16"} == set(recipes.GROUPED_RECIPES)
    assert N % 128 == 0


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "mxfp8"])
def test_one_operand_alone_is_cast_dequantized_and_multiplied(backend, name, rng):  # L-4
    """The product in high precision, of a group's operand as the simulator dequantizes it."""
    x, w, g = tensors(rng)
    base = GROUPED_RECIPES[name].recipe
    gemms = {
        "output": dataclasses.replace(base.output, b=None, accumulate=None),
        "grad_input": dataclasses.replace(base.grad_input, a=None, accumulate=None),
        "grad_weight": dataclasses.replace(base.grad_weight, a=None, accumulate=None),
    }
    recipe = Recipe(name=f"{name} of one operand", **gemms)
    # the dtype that dequantized operands are rounded to
    narrow = [v.astype(jnp.bfloat16) for v in (x, w, g)]
    expected, sizes = simulated(*narrow, recipe), simulated(*map(np.abs, narrow), recipe)
    found = {"torch": torch_results, "jax": jax_results}[backend](x, w, g, recipe)
    for which in GEMMS:
        # Both sum at most 256 products, each sum within 256 x 2^-24 of the products' magnitudes,
        # and round it once to bfloat16: by 2^-8 of it.
        allowed = 2 * 256 * 2**-24 * sizes[which] + 2 * 2**-8 * np.abs(expected[which])
        assert (np.abs(found[which] - expected[which]) <= allowed).all(), which
