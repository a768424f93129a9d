"""Attention in PyTorch against the simulator: codes, scales, probabilities, outputs and gradients
(spec A).
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from helpers.attention.attention_cases import backward_options, call_options

from fp8ref.conformance.gemm.bound import gamma
from fp8ref.formats import E5M2
from fp8ref.sim.attention import attention as sim
from fp8ref.sim.attention.gradients import gradients as sim_gradients
from fp8ref.sim.attention.operands import heads as head_scaling
from fp8ref.sim.gemm import hardware
from fp8ref.sim.quantize import cast
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import VARIANTS, Mask
from fp8ref.torch.attention import attention
from fp8ref.torch.gemm import hardware as simulated

F = np.float32
U = 2.0**-24
CAUSAL = Mask(causal=True)
MASKS = [
    Mask(),
    CAUSAL,
    Mask(window=(30, 5)),
    Mask(causal=True, window=(40, None)),
    Mask(causal=True, alignment="start"),
]
FP8 = [name for name, variant in VARIANTS.items() if variant.fmt.bits == 8]
E5M2_GRADIENTS = dataclasses.replace(VARIANTS["cudnn"], name="cudnn with e5m2", gradient_fmt=E5M2)


def inputs(b=1, h=4, heads=2, tq=70, tk=300, d=64, *, seed=0, integers=False):
    rng = np.random.default_rng(seed)
    shapes = ((b, h, tq, d), (b, heads, tk, d), (b, heads, tk, d), (b, h, tq, d))
    if integers:  # the amaxes are 7 in every group, so that scales are powers of two
        return [rng.choice([-7, -3, -1, 0, 1, 2, 5, 7], size=s).astype(F) for s in shapes]
    return [rng.normal(size=s).astype(F) for s in shapes]


def both(arrays, variant, **kwargs):
    """(the simulator's Result, PyTorch's)."""
    documents = kwargs.pop("documents", None)
    given = kwargs.pop("scales", None)
    options = call_options(
        variant=variant,
        documents=None if documents is None else tuple(map(torch.from_numpy, documents)),
        scales=given and {role: torch.from_numpy(np.asarray(x)) for role, x in given.items()},
        arithmetic="stated",
        **kwargs,
    )
    found = attention.forward(*map(torch.from_numpy, arrays[:3]), **options)
    return sim.forward(
        *arrays[:3], **call_options(variant=variant, documents=documents, scales=given, **kwargs)
    ), found


def both_gradients(arrays, results, variant, **kwargs):
    q, k, v, do = arrays
    right = sim_gradients.backward(
        do, q, k, v, results[0], **backward_options(variant=variant, **kwargs)
    )
    options = backward_options(variant=variant, arithmetic="stated", **kwargs)
    found = attention.backward(*map(torch.from_numpy, (do, q, k, v)), results[1], **options)
    return right, found


def check_operands(right, found, roles):
    for role in roles:
        mine, theirs = found.tensors[role], right.tensors[role]
        np.testing.assert_array_equal(
            mine.codes.view(torch.uint8).numpy(), theirs.codes, err_msg=role
        )
        for name in ("amax", "scale", "scale_inv"):
            np.testing.assert_array_equal(
                getattr(mine, name).numpy(), getattr(theirs, name), err_msg=f"{role} {name}"
            )


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("name", [*FP8, "exact"])
def test_integers_give_the_simulators_probabilities(name, mask):
    """Scores are integers times a power of two, which all plans sum exactly; exponentials are the
    simulator's.
    """
    variant = VARIANTS[name]
    arrays = inputs(integers=True, tk=240)
    rng = np.random.default_rng(1)
    documents = tuple(np.sort(rng.integers(0, 3, (1, n)), axis=1) for n in (70, 240))
    keep = {"keep_p": True} if name in FP8 else {}
    right, found = both(arrays, variant, mask=mask, documents=documents, **keep)
    check_operands(right, found, [role for role in ("q", "k", "v") if name in FP8])
    if variant.rotated:
        return  # whose features are no integers, and whose scores Hopper's tensor cores cut off
    if name in FP8:
        np.testing.assert_array_equal(found.p_codes.numpy(), right.p_codes)
    else:
        np.testing.assert_array_equal(found.o.numpy(), right.o)
    np.testing.assert_array_equal(found.lse.numpy(), right.lse)
    np.testing.assert_array_equal(found.amaxes["s"], right.amaxes["s"])
    assert int(found.saturated) == right.saturated


@pytest.mark.grid(6)
@pytest.mark.parametrize("mask", MASKS[:3], ids=str)
@pytest.mark.parametrize(
    ("name", "promotion", "plan"),
    [
        ("fa3", 1, "hopper_fast"),
        ("fa3_paper", 1, "hopper_fast"),
        ("fa4", 1, "blackwell"),
        ("fa4_threshold4", 1, "blackwell"),
        ("cudnn", 1, "exact"),
    ],
)
# B-12
def test_under_simulated_hardware_all_bits_are_the_simulators(name, promotion, plan, mask):
    """A GEMM begins at +0: the simulator's promotion after each tile."""
    variant = dataclasses.replace(VARIANTS[name], promotion=promotion)
    arrays = inputs(seed=2)
    with simulated.simulating(hardware.by_name(plan)):
        right, found = both(arrays, variant, mask=mask, keep_p=True)
    np.testing.assert_array_equal(found.p_codes.numpy(), right.p_codes)
    np.testing.assert_array_equal(found.lse.numpy(), right.lse)
    np.testing.assert_array_equal(found.o.numpy(), right.o)
    check_operands(right, found, right.tensors)
    for role, amax in right.amaxes.items():
        np.testing.assert_array_equal(found.amaxes[role].numpy(), amax, err_msg=role)
    assert int(found.saturated) == right.saturated


def relative_error_of_p(right, shape, variant, scale):
    """How far a probability may be from the simulator's, relative to it, when each score is another
    float32 sum.

    A score and a maximum move by gamma(D) of the sum of magnitudes each, and an exponent is rounded
    twice, of numbers below twice the largest score and the offset; the same in the simulator.
    """
    group = shape[1] // right.tensors["k"].values.shape[1]
    granularity = variant.granularity or "tensor"
    q, k = (
        np.abs(x.values) * head_scaling.spread(x.scale_inv, x.values.shape, granularity)
        for x in (right.tensors["q"], right.tensors["k"])
    )
    largest = float(np.einsum("bhqd,bhkd->bhqk", q, k.repeat(group, axis=1)).max()) * scale
    return math.expm1(
        2 * gamma(shape[3] + 4) * largest + 8 * U * (2 * largest + variant.offset * math.log(2))
    )


@pytest.mark.parametrize("name", FP8)
def test_outputs_are_within_the_bound(name):
    """Sums are float32 in the library's order, where the simulator's are exact."""
    variant = dataclasses.replace(VARIANTS[name], plan="exact", promotion=1)
    arrays = inputs(seed=3)
    right, found = both(arrays, variant, mask=CAUSAL, keep_p=True)
    r = relative_error_of_p(right, arrays[0].shape, variant, 1 / 8)
    assert (np.abs(found.lse.numpy() - right.lse) <= r + 8 * U * np.abs(right.lse)).all()
    differ = found.p_codes.numpy() != right.p_codes
    # Midpoints between numbers of e4m3 are 1/16 of a number apart, or more. Of numbers without
    # preference at most a part 2 r / (1/16) is so near to one that r decides.
    assert differ.sum() <= 32 * r * np.count_nonzero(right.p_codes) + 1
    assert (np.abs(found.p_codes.numpy().astype(int) - right.p_codes)[differ] == 1).all()
    mine, theirs = (
        cast.decode(x, variant.fmt).astype(np.float64) / right.scale_p
        for x in (found.p_codes.numpy(), right.p_codes)
    )
    v = np.abs(arrays[2]).repeat(2, axis=1) * (1 + 2.0**-4)  # as cast
    # Probabilities that moved, and float32 sums: in units of a row's sum, which is at least the
    # largest probability, 2^offset. Factors of later tiles are at most 1.
    sums = np.einsum(
        "bhqk,bhkd->bhqd", np.abs(mine - theirs) + gamma(arrays[1].shape[2] + 8) * theirs, v
    )
    bound = 1.01 * sums / 2.0**variant.offset + r * np.abs(right.o)
    # Both are then rounded: neighbors if they straddle a midpoint, 2^-7 apart in bfloat16, 2^-3 in
    # e4m3.
    last = (
        2.0**-3 * np.abs(right.o) + right.tensors["o"].scale_inv * 2.0**-9
        if variant.out.bits == 8
        else 2.0**-7 * np.abs(right.o)
    )
    assert (np.abs(found.o.numpy() - right.o) <= bound + last + 2.0**-30).all()


def test_bf16_is_the_simulators_but_for_the_last_bit():
    """Two sums of 300 products in another order differ by less than 2^-14 of the output; where that
    decides a rounding, the output moves by 2^-8, in a part of about 2^-14 / 2^-8 of the elements.
    """
    right, found = both(inputs(seed=3), VARIANTS["bf16"], mask=CAUSAL)
    differ = found.o.numpy() != right.o
    assert differ.mean() < 2.0**-5
    np.testing.assert_allclose(found.o.numpy(), right.o, rtol=2.0**-7, atol=2.0**-12)


# ---- Gradients


@pytest.mark.grid(2)
@pytest.mark.parametrize("mask", MASKS[:3], ids=str)
@pytest.mark.parametrize("variant", [VARIANTS["cudnn"], E5M2_GRADIENTS], ids=lambda v: v.name)
def test_under_simulated_hardware_gradients_are_the_simulators(variant, mask):  # A-15, B-12
    """All bits but those of dq, whose sum over keys is one of tiles, in float32: exact of one
    tile.
    """
    for tk in (120, 300):
        arrays = inputs(b=2, tk=tk, seed=4)
        with simulated.simulating(hardware.by_name("exact")):
            results = both(arrays, variant, mask=mask)
            right, found = both_gradients(arrays, results, variant, mask=mask)
        roles = ("do", "dk", "dv") if tk > 128 else ("do", "dq", "dk", "dv")
        check_operands(right, found, roles)
        for role in ("ds", *roles):
            np.testing.assert_array_equal(
                found.amaxes[role].numpy(), right.amaxes[role], err_msg=role
            )
        for name in ("scale", "scale_inv"):
            np.testing.assert_array_equal(
                getattr(found.scale_ds, name).numpy(), getattr(right.scale_ds, name)
            )
        assert int(found.saturated) == right.saturated
        # dq: three tiles, two scales, and then a code of e4m3, which may be the neighbor
        step = np.abs(right.dq) * 2.0**-3 + right.tensors["dq"].scale_inv * 2.0**-9
        np.testing.assert_array_less(np.abs(found.dq.numpy() - right.dq), step * 1.001)
        assert (found.dq.numpy() != right.dq).mean() < 2.0**-10  # of sums that differ by some 2^-23


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", ["bf16", "cudnn", "mxfp8"])
@pytest.mark.parametrize("mask", MASKS[:3], ids=str)
def test_gradients_are_within_the_bound(name, mask):
    """P and dS move by r, and by 2^-3 (in bfloat16 2^-8) where that decides a rounding: of a part
    of 32 r of them (512 r), without preference, so that the norm of a sum of them moves by 2^-3
    sqrt(32 r) of it; twice that leaves room for dS's own rounding."""
    variant, arrays = VARIANTS[name], inputs(seed=5)
    results = both(arrays, variant, mask=mask)
    right, found = both_gradients(arrays, results, variant, mask=mask)
    if name == "cudnn":
        check_operands(right, found, ("do",))
    if name == "mxfp8":
        np.testing.assert_array_equal(
            found.tensors["do"].codes.view(torch.uint8).numpy(), right.tensors["do"].codes
        )
    part = 512 if name == "bf16" else 32
    r = (
        2.0**-14
        if name == "mxfp8"
        else relative_error_of_p(results[0], arrays[0].shape, variant, 1 / 8)
    )
    bound = 2 * math.sqrt(part * r) * (2.0**-8 if name == "bf16" else 2.0**-3)
    for role in ("dq", "dk", "dv"):
        mine, theirs = getattr(found, role).numpy(), getattr(right, role)
        assert np.linalg.norm(mine - theirs) <= bound * np.linalg.norm(theirs), role
        assert (
            np.abs(found.amaxes[role].numpy() - right.amaxes[role]) <= 2.0**-6 * right.amaxes[role]
        )


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_exact_is_exact(mask):
    arrays = inputs(seed=6)
    results = both(arrays, VARIANTS["exact"], mask=mask)
    right, found = both_gradients(arrays, results, VARIANTS["exact"], mask=mask)
    for role in ("dq", "dk", "dv"):  # float64, and its rounding to float32
        np.testing.assert_allclose(
            getattr(found, role).numpy(), getattr(right, role), rtol=2.0**-23, atol=2.0**-40
        )


def test_given_scales_are_taken():
    variant, arrays = VARIANTS["cudnn"], inputs(seed=7)
    given = {role: F(x) for role, x in (("q", 100), ("k", 90), ("v", 110), ("s", 300), ("o", 200))}
    of_gradients = {
        role: F(x) for role, x in (("do", 100), ("ds", 5000), ("dq", 300), ("dk", 300), ("dv", 30))
    }
    with simulated.simulating(hardware.by_name("exact")):
        right, found = both(arrays, variant, mask=CAUSAL, scales=given)
        q, k, v, do = arrays
        wanted = sim_gradients.backward(
            do, q, k, v, right, variant=variant, mask=CAUSAL, scales=of_gradients
        )
        tensors = {role: torch.tensor(x) for role, x in of_gradients.items()}
        call = Call(variant=variant, mask=CAUSAL, arithmetic="stated")
        got = attention.backward(
            *map(torch.from_numpy, (do, q, k, v)), found, variant=call, scales=tensors
        )
    check_operands(right, found, right.tensors)
    check_operands(wanted, got, ("do", "dk", "dv"))
    assert int(got.saturated) == wanted.saturated > 0
    np.testing.assert_array_equal(got.amaxes["ds"].numpy(), wanted.amaxes["ds"])
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    with simulated.simulating(hardware.by_name("exact")):
        everything = {role: torch.tensor(x) for role, x in (given | of_gradients).items()}
        o = attention.apply(*leaves, variant=call, scales=everything)
        o.backward(torch.from_numpy(do))
    np.testing.assert_array_equal(o.detach().numpy(), right.o)
    for leaf, role in zip(leaves, ("dq", "dk", "dv"), strict=True):
        np.testing.assert_array_equal(leaf.grad.numpy(), getattr(got, role).numpy())
