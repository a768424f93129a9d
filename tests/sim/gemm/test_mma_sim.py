"""Instructions against MMA-Sim itself, from the checkout that FP8REF_MMA_SIM names: 20,480 results
of each unit and more, bit for bit.

Passed with microsoft/MMA-Sim c785138, which G-10, G-23, G-24 and G-25 follow.
"""

import dataclasses
import os
import sys
from itertools import product

import numpy as np
import pytest

from fp8ref.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0FNU, FLOAT16
from fp8ref.sim.gemm import gemm, matrix_core, tensor_core
from fp8ref.sim.quantize import cast

CHECKOUT = os.environ.get("FP8REF_MMA_SIM")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not CHECKOUT, reason="FP8REF_MMA_SIM names no checkout of microsoft/MMA-Sim"
    ),
]

RESULTS = 20_000  # at least, of each unit
NAMES = {E4M3FN: "e4m3", E5M2: "e5m2", E4M3FNUZ: "fp8", E5M2FNUZ: "bf8"}
INSTRUCTIONS = {
    "hopper": ("nv_ptx", "wgmma", "Hopper", "m64n8k32.f32.{a}.{b}"),
    "ada": ("nv_ptx", "mma", "Ada Lovelace", "m16n8k32.f32.{a}.{b}.f32"),
    "blackwell": ("nv_ptx", "tcgen05mma", "Blackwell", "m64n8k32.f32.{a}.{b}"),
    "hopper_f16": ("nv_ptx", "wgmma", "Hopper", "m64n8k32.f16.{a}.{b}"),
    "ada_f16": ("nv_ptx", "mma", "Ada Lovelace", "m16n8k32.f16.{a}.{b}.f16"),
    "blackwell_mx": (
        "nv_ptx",
        "tcgen05mma_block_scale",
        "Blackwell",
        "m128n8k32.block32.f32.{a}.{b}.ue8m0",
    ),
    "cdna3": ("amd", "mfma", "CDNA3", "f32_16x16x32_{a}_{b}"),
    "cdna3, K = 16": ("amd", "mfma", "CDNA3", "f32_32x32x16_{a}_{b}"),
}


def instruction(name, pair):
    """MMA-Sim's object for an instruction: m, n, k, c_type, and a call of A [m, k], B [k, n], C [m,
    n].
    """
    module, form, architecture, qualifier = INSTRUCTIONS[name]
    if CHECKOUT not in sys.path:
        sys.path.insert(0, CHECKOUT)
    simulator = __import__(f"mmasim.simulator.{module}", fromlist=[form])
    return getattr(simulator, form)(
        architecture, qualifier.format(a=NAMES[pair[0]], b=NAMES[pair[1]])
    )


def operand(rng, rows, k, fmt):
    """Codes of rows of seven kinds: any, finite, few that are not zero, none, subnormal, near 1,
    and halves that cancel.
    """
    any_code = rng.integers(0, 256, (rows, k), dtype=np.uint8)
    finite = np.where(np.isfinite(cast.decode(any_code, fmt)), any_code, np.uint8(1))
    special = np.where(rng.random((rows, k)) < 0.05, any_code, finite)
    few = np.where(rng.random((rows, k)) < 0.1, finite, np.uint8(0))
    # the sign and the mantissa alone; fnuz's 0x80 is NaN, which finite has none of
    subnormal = finite & np.uint8(0x80 | (1 << fmt.mantissa_bits) - 1)
    subnormal = np.where(np.isfinite(cast.decode(subnormal, fmt)), subnormal, np.uint8(0))
    near = cast.encode(rng.standard_normal((rows, k)).astype(np.float32), fmt)
    half = np.abs(rng.standard_normal((rows, k // 2))).astype(np.float32) + np.float32(0.5)
    cancels = cast.encode(np.concatenate([half, -half], axis=1), fmt)
    kinds = [special, finite, few, np.zeros_like(finite), subnormal, near, cancels]
    return np.choose(rng.integers(0, len(kinds), (rows, 1)), kinds)


@np.errstate(invalid="ignore")  # signalling NaNs
def accumulator(rng, shape, half):
    """Zeros, subnormal, tiny, ordinary and huge numbers, any bits, infinities and NaN."""
    ordinary = rng.standard_normal(shape) * 2.0 ** rng.integers(-24, 15, shape)
    if half:
        bits = rng.integers(0, 1 << 16, shape, dtype=np.uint16)
        drawn = np.where(
            rng.random(shape) < 0.4,
            bits.view(np.float16).astype(np.float32),
            cast.round_to(ordinary.astype(np.float32), FLOAT16),
        )
    else:
        bits = rng.integers(0, 1 << 32, shape, dtype=np.uint32).view(np.float32)
        tiny = rng.standard_normal(shape) * 2.0 ** rng.integers(-149, -90, shape)
        drawn = np.choose(rng.integers(0, 4, shape), [bits, tiny, ordinary, ordinary]).astype(
            np.float32
        )
    special = rng.choice(np.float32([0, -0.0, np.inf, -np.inf, np.nan]), shape)
    return np.where(rng.random(shape) < 0.1, special, drawn).astype(np.float32)


def both(rng, name, pair, units):
    """One instruction's operands, MMA-Sim's result and that of each unit: (a, b, c, theirs, [ours,
    ...]).
    """
    torch = pytest.importorskip("torch")
    theirs = instruction(name, pair)
    a, b = (
        operand(rng, rows, theirs.k, fmt)
        for rows, fmt in zip((theirs.m, theirs.n), pair, strict=True)
    )
    c = accumulator(rng, (theirs.m, theirs.n), theirs.c_type == torch.float16)
    # the second half of b repeats the first: halves of a that cancel meet it
    if pair[1] is E4M3FN and rng.random() < 0.5:
        b[:, theirs.k // 2 :] = b[:, : theirs.k // 2]
    given = [
        torch.from_numpy(a).view(theirs.a_type),
        torch.from_numpy(b).view(theirs.b_type).T,
        torch.from_numpy(c).to(theirs.c_type),
    ]
    scales = {}
    if hasattr(theirs, "s_type"):
        of_a, of_b = (_scales(rng, rows) for rows in (theirs.m, theirs.n))
        given += [
            torch.from_numpy(of_a).view(theirs.s_type),
            torch.from_numpy(of_b).view(theirs.s_type).T,
        ]
        scales = {
            "scale_inv_a": cast.decode(of_a, E8M0FNU),
            "scale_inv_b": cast.decode(of_b, E8M0FNU),
        }
    ours = [gemm.mma(a, b, c, fmt_a=pair[0], fmt_b=pair[1], unit=unit, **scales) for unit in units]
    return a, b, c, theirs(*given).numpy(), ours


def _scales(rng, rows):
    """e8m0 codes [rows, 1]: half near 1, half any, NaN among them."""
    drawn = np.where(
        rng.random((rows, 1)) < 0.5,
        rng.integers(107, 148, (rows, 1)),
        rng.integers(0, 256, (rows, 1)),
    )
    return np.where(rng.random((rows, 1)) < 0.02, 255, drawn).astype(np.uint8)


def bits(values, dtype=np.float32):
    """The bits of values that dtype holds: a result of float16 is carried in float32, its NaN,
    7FFF, as 7FFFFFFF.
    """
    return np.ascontiguousarray(values, dtype).view(np.dtype(dtype).str.replace("f", "u"))


def calls(name, pairs):
    """Every pairing, as often as gives RESULTS results and more."""
    size = instruction(name, pairs[0])
    return [pair for pair in pairs for _ in range(-(-RESULTS // (size.m * size.n * len(pairs))))]


@pytest.mark.parametrize("name", ["hopper_f16", "ada_f16", "blackwell_mx"])
def test_an_instruction_is_mma_sims(name, rng):  # G-23, G-24
    for pair in calls(name, list(product((E4M3FN, E5M2), repeat=2))):
        _, _, _, theirs, (ours,) = both(rng, name, pair, [name])
        np.testing.assert_array_equal(bits(ours, theirs.dtype), bits(theirs, theirs.dtype))


@pytest.mark.parametrize("name", ["hopper", "ada", "blackwell"])
def test_only_zeros_next_to_a_tiny_accumulator_differ(name, rng):  # G-10, G-11
    """With ``zeros`` of ``least``, MMA-Sim's, every bit is equal; with a unit's own, only what G-11
    says differs.
    """
    unit = tensor_core.by_name(name)
    differing = found = 0
    for pair in calls(name, list(product((E4M3FN, E5M2), repeat=2))):
        a, b, c, theirs, (excluded, least) = both(
            rng, name, pair, [unit, dataclasses.replace(unit, zeros="least")]
        )
        np.testing.assert_array_equal(bits(least), bits(theirs))
        other = bits(excluded) != bits(theirs)
        zero = (cast.decode(a, pair[0]) == 0)[:, None, :] | (cast.decode(b, pair[1]) == 0)[
            None, :, :
        ]
        of_steps = zero.reshape(*zero.shape[:2], -1, unit.fused_width).all(axis=-1).any(axis=-1)
        # -126 and 15, e5m2's largest exponent
        assert not (other & ~(of_steps & (c != 0) & (np.abs(c) < 2.0**-111))).any()
        differing, found = differing + int(other.sum()), found + other.size
    print(f"{name}: {differing} of {found} results differ")
    assert differing  # the operands do ask the question


@pytest.mark.parametrize("name", ["cdna3", "cdna3, K = 16"])
def test_a_matrix_cores_instruction_is_mma_sims(name, rng):  # G-25
    torch = pytest.importorskip("torch")
    for pair in calls(name, list(product((E4M3FNUZ, E5M2FNUZ), repeat=2))):
        theirs = instruction(name, pair)
        a, b = (
            operand(rng, rows, theirs.k, fmt)
            for rows, fmt in zip((theirs.m, theirs.n), pair, strict=True)
        )
        c = accumulator(rng, (theirs.m, theirs.n), half=False)
        left, right = (
            torch.from_numpy(a).view(theirs.a_type),
            torch.from_numpy(b).view(theirs.b_type).T,
        )
        expected = theirs(left, right, torch.from_numpy(c)).numpy()
        found = matrix_core.mfma(a, b, c, fmt_a=pair[0], fmt_b=pair[1])
        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(found), nan)  # MMA-Sim gives a NaN any bits
        np.testing.assert_array_equal(bits(found)[~nan], bits(expected)[~nan])
