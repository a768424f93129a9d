"""Each policy against the library whose name it bears: run where it runs on a CPU, else transcribed
from its source.
"""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax.linen import fp8_ops

from fp8ref.formats import E4M3FN, E5M2, E8M0FNU
from fp8ref.policy import POLICIES
from fp8ref.sim.quantize import cast, scaling

SMALLEST_NORMAL = np.float32(2.0**-126)
# 0 to Inf, one NaN
AMAX_BF16 = np.arange(0x7F81, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
formats = pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)


@pytest.fixture(scope="module")
def amaxes():
    """Every bfloat16 amax; 2^21 float32 bit patterns; the 129 nearest to every max * 2^k of both
    formats.
    """
    rng = np.random.default_rng(7)
    k = np.arange(-126, 128)
    mantissas = [np.ldexp(1.75, k)[:, None].astype(np.float32).view(np.int32) + np.arange(-64, 65)]
    near = (
        np.clip(np.concatenate(mantissas).ravel(), 0, 0x7F800001).astype(np.int32).view(np.float32)
    )
    return np.concatenate(
        [AMAX_BF16, rng.integers(0, 0x7F800001, 1 << 21, dtype=np.uint32).view(np.float32), near]
    )


@pytest.fixture(scope="module")
def previous(amaxes):
    return np.exp2(np.random.default_rng(8).uniform(-60, 60, amaxes.shape)).astype(np.float32)


def assert_same_bits(found, expected):
    """Equal float32 bits, any NaN equal to any other."""
    found, expected = (
        np.where(np.isnan(v), np.float32(np.nan), v).astype(np.float32) for v in (found, expected)
    )
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def te_scale(amax, limit, *, eps=0.0, power_of_two=False):
    """TransformerEngine, recipe_common.cuh: compute_scale_from_amax with value_for_inf = FLT_MAX,
    in torch's float32.
    """
    amax = torch.where(amax < eps, torch.tensor(eps), amax)
    scale = (torch.tensor(limit) / amax).clamp(max=torch.finfo(torch.float32).max)
    if power_of_two:
        scale = (scale.view(torch.int32) & -(1 << 23)).view(torch.float32)
    ordinary = (amax > 0) & torch.isfinite(amax)
    return torch.where(ordinary, scale, torch.tensor(1.0)).numpy()


@formats
@pytest.mark.parametrize("eps", [0.0, 2.0**-40])
@pytest.mark.parametrize(("name", "power_of_two"), [("te_current", False), ("te_block", True)])
# S-9, S-10
def test_te_current_and_te_block_equal_their_source(fmt, name, power_of_two, eps, amaxes):
    policy = dataclasses.replace(POLICIES[name], eps=eps)
    expected = te_scale(torch.from_numpy(amaxes), fmt.max, eps=eps, power_of_two=power_of_two)
    assert_same_bits(scaling.scale_from_amax(amaxes, fmt, policy), expected)


@formats
@pytest.mark.parametrize("margin", [0, 1, 3])
def test_te_delayed_equals_its_source(fmt, margin, amaxes, previous):  # S-9, S-10, S-11
    """delayed_scaling.cu: scaled_max / amax if isfinite(amax) && amax > 0, else the previous; an
    infinite result becomes FLT_MAX.
    """
    amax = torch.from_numpy(amaxes)
    scale = torch.where(
        torch.isfinite(amax) & (amax > 0),
        torch.tensor(fmt.max * 2.0**-margin) / amax,
        torch.from_numpy(previous),
    )
    policy = dataclasses.replace(POLICIES["te_delayed"], margin=margin)
    found = scaling.scale_from_amax(amaxes, fmt, policy, previous=previous)
    assert_same_bits(found, torch.clamp(scale, max=torch.finfo(torch.float32).max).numpy())


@pytest.mark.parametrize("name", ["te_current", "te_delayed", "flax", "msamp"])
def test_subnormal_amaxes_count(name):  # S-12
    """2^-127 for e5m2 overflows; under a margin that leaves no overflow the quotient is what it is
    for any other amax.
    """
    policy = dataclasses.replace(POLICIES[name], margin=20)
    amax = np.float32(2.0**-127)
    assert scaling.scale_from_amax(amax, E5M2, policy) == np.float32(
        1.75 * 2.0**122 if name != "msamp" else 2.0**122
    )
    overflow = np.finfo(np.float32).max if name.startswith("te") else np.inf
    assert scaling.scale_from_amax(amax, E5M2, name) == overflow


def test_te_bounds_a_previous_scale_too():  # S-10
    assert (
        scaling.scale_from_amax(np.float32(0), E4M3FN, "te_delayed", previous=np.float32(np.inf))
        == np.finfo(np.float32).max
    )


@formats
def test_msamp_equals_its_source(fmt, amaxes, previous):  # S-4, S-10, S-15
    """ScalingMeta.compute_scaling_factor: the order of its selections is what makes an infinite
    amax invert the scale.
    """
    amax, before = torch.from_numpy(amaxes), torch.from_numpy(previous)
    exponent = (fmt.max / amax).log2().floor()
    ordinary = (amax > 0) & torch.isfinite(amax)
    scale = torch.where(ordinary, exponent.abs().exp2(), before)
    scale = torch.where(exponent < 0, scale.reciprocal(), scale)
    assert_same_bits(
        scaling.scale_from_amax(amaxes, fmt, "msamp", previous=previous), scale.numpy()
    )


def test_msamp_divides_by_way_of_a_reciprocal():  # S-15
    """An amax at which RN32(448 * RN32(1 / amax)) lies on the other side of a power of two, to
    RN32(log2), than RN32(448 / amax).
    """
    amax = np.float32(1.75 + 2.0**-22)
    quotient = dataclasses.replace(POLICIES["msamp"], ratio="max/amax")
    assert (
        scaling.scale_from_amax(amax, E4M3FN, "msamp"),
        scaling.scale_from_amax(amax, E4M3FN, quotient),
    ) == (128, 256)


def flushed(values):
    """Subnormals as XLA on a CPU takes them: zeros."""
    return np.where(np.abs(values) < SMALLEST_NORMAL, np.float32(0), values)


@formats
def test_flax_equals_flax(fmt, amaxes, previous):  # S-9, S-10, S-11, S-12, S-13
    """flax stores 1 / scale, and reads the previous scale as 1 / stored.

    Equal up to XLA's flushing of subnormals, on a CPU.
    """
    stored = flushed(np.float32(1) / previous)
    found = fp8_ops.compute_scale(jnp.asarray(amaxes), jnp.asarray(stored), jnp.float32(fmt.max))
    ours = scaling.scales_from_amax(flushed(amaxes), fmt, "flax", previous=np.float32(1) / stored)
    assert_same_bits(np.asarray(found), flushed(ours.scale_inv))
    subnormal = (ours.scale_inv > 0) & (ours.scale_inv < SMALLEST_NORMAL)
    assert 0 < subnormal.sum() < 0.01 * len(amaxes)


def test_what_flax_stores_is_not_kept_verbatim():  # S-13
    """A kept scale passes through 1 / (1 / stored), which is another number for one float32 in
    seven, once: then it stays.
    """
    stored = np.linspace(1, 2, 1 << 16, dtype=np.float32)
    kept = [stored]
    for _ in range(2):
        one = np.float32(1)
        kept.append(
            scaling.scales_from_amax(
                np.zeros_like(stored), E4M3FN, "flax", previous=one / kept[-1]
            ).scale_inv
        )
    found = fp8_ops.compute_scale(jnp.zeros_like(stored), jnp.asarray(stored), jnp.float32(448))
    np.testing.assert_array_equal(kept[1], found)
    assert 0.1 < (kept[0] != kept[1]).mean() < 0.2
    np.testing.assert_array_equal(kept[1], kept[2])
    every = np.arange(0x3F800000, 0x40000000, dtype=np.uint32).view(np.float32)
    again = 1 / (1 / every)
    np.testing.assert_array_equal(1 / (1 / again), again)


TENSORS = [2.0**-30, 1.0, 3e5, 1e-36, 0.0, np.inf, np.nan]


@pytest.mark.parametrize(
    ("fmt", "dtype"), [(E4M3FN, jnp.float8_e4m3fn), (E5M2, jnp.float8_e5m2)], ids=["e4m3fn", "e5m2"]
)
@pytest.mark.parametrize(
    ("policy", "compute"), [("flax", jnp.float32), ("flax_bf16", jnp.bfloat16)]
)
@pytest.mark.parametrize("largest", TENSORS, ids=str)
def test_flax_quantizes_by_dividing(fmt, dtype, policy, compute, largest, rng):  # S-13
    """fp8_ops.quantize, primitive by primitive: jitted, XLA on a CPU makes the division a product
    with RN32(1 / scale_inv).
    """
    x = (rng.uniform(-1, 1, (64, 256)) * (largest if 0 < largest < np.inf else 1)).astype(
        np.float32
    )
    x[3, 5] = largest
    x = flushed(x)
    x = np.asarray(jnp.asarray(x, compute)).astype(np.float32)
    q = scaling.quantize(x, fmt, policy=policy)
    codes = np.asarray(
        fp8_ops.quantize(jnp.asarray(x, compute), dtype, jnp.asarray(q.scale_inv[None]), compute)
    ).view(np.uint8)
    np.testing.assert_array_equal(
        cast.canonical_nans(codes, fmt), cast.canonical_nans(q.codes, fmt)
    )


def test_a_jitted_flax_division_is_a_product(rng):  # S-13
    x = rng.standard_normal(1 << 16).astype(np.float32)
    scale_inv = np.float32(0.0123)
    jitted = jax.jit(lambda x, s: x / jnp.broadcast_to(s, x.shape))(x, scale_inv)
    np.testing.assert_array_equal(jitted, x * (np.float32(1) / scale_inv))
    assert (np.asarray(jitted) != x / scale_inv).mean() > 0.5


def test_flax_bf16_rounds_tensor_scale_and_quotient(rng):  # S-13
    x = rng.standard_normal((4, 64)).astype(np.float32)
    q = scaling.quantize(x, E4M3FN, policy="flax_bf16")
    rounded = x.astype(ml_dtypes.bfloat16)
    assert q.scale_inv == np.float32(1) / (
        np.float32(448) / np.abs(rounded).max().astype(np.float32)
    )
    quotient = (
        rounded.astype(np.float32) / q.scale_inv.astype(ml_dtypes.bfloat16).astype(np.float32)
    ).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(
        q.codes,
        np.clip(quotient.astype(np.float32), -448, 448)
        .astype(ml_dtypes.float8_e4m3fn)
        .view(np.uint8),
    )


def to_mx(x, fmt, mode):
    """codes [M, K], NaNs canonical, and e8m0 codes [M, K / 32] of torchao's own."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    dtype = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[fmt.name]
    scale, data = to_mx(torch.from_numpy(x), dtype, 32, ScaleCalculationMode(mode))
    return cast.canonical_nans(data.view(torch.uint8).numpy(), fmt), scale.view(torch.uint8).numpy()


def assert_mx_equals_torchao(x, fmt, mode):
    codes, scale_codes = to_mx(x, fmt, mode)
    q = scaling.quantize(x, fmt, granularity="mx_1x32", policy=f"mx_{mode}")
    np.testing.assert_array_equal(cast.encode(q.scale_inv, E8M0FNU), scale_codes)
    np.testing.assert_array_equal(q.codes, codes)


def blocks_of(amax, rng):
    """[n, 32] blocks with these amaxes, at any place, the other elements below them."""
    with np.errstate(invalid="ignore"):
        x = amax[:, None] * np.where(
            np.isinf(amax[:, None]), 1, rng.uniform(-1, 1, (len(amax), 32))
        ).astype(np.float32)
    x[np.arange(len(amax)), rng.integers(0, 32, len(amax))] = amax
    return np.where(np.isnan(amax)[:, None] & (rng.random(x.shape) < 0.9), np.float32(1.5), x)


modes = pytest.mark.parametrize("mode", ["floor", "rceil"])


@formats
@modes
def test_mx_equals_torchao_for_every_bf16_amax_and_many_more(fmt, mode, amaxes, rng):  # S-14
    some = amaxes[len(AMAX_BF16) : len(AMAX_BF16) + (1 << 15)]
    boundaries = amaxes[len(AMAX_BF16) + (1 << 21) :]
    assert_mx_equals_torchao(
        blocks_of(np.concatenate([AMAX_BF16, some, boundaries]), rng), fmt, mode
    )


@pytest.mark.slow
@formats
@modes
def test_mx_scales_equal_torchao_for_millions_of_amaxes(fmt, mode, amaxes):  # S-14
    x = np.zeros((len(amaxes), 32), np.float32)
    x[:, 0] = amaxes
    _, scale_codes = to_mx(x, fmt, mode)
    scale_inv = scaling.scales_from_amax(amaxes, fmt, f"mx_{mode}").scale_inv
    np.testing.assert_array_equal(cast.encode(scale_inv, E8M0FNU), scale_codes[:, 0])


@formats
@modes
def test_mx_equals_torchao_on_special_blocks(fmt, mode):  # S-14
    rows = [
        [0.0, -0.0],
        [np.inf, 1, -3],
        [-np.inf, 0.0, np.nan],
        [np.nan, 1, -2, 0],
        [1e-45, -1e-40],
        [2.0**-119],
        [2.0**-118],
    ]
    rows += [[fmt.max * 2.0**k, 2.0**k] for k in (-128, -127, -126)] + [
        [np.finfo(np.float32).max, 1]
    ]
    x = np.zeros((len(rows), 32), np.float32)
    for i, row in enumerate(rows):
        x[i, : len(row)] = row
    assert_mx_equals_torchao(x, fmt, mode)


def test_where_torchaos_mx_is_not_that_of_the_specification():  # S-14
    """Code 0: the block is scaled by another factor than its scale_inv says, and reads back half,
    or as zeros. Inf: a finite scale.
    """
    tiny = np.full((1, 32), 2.0**-119, np.float32)
    floor, rceil = (
        scaling.quantize(tiny, E4M3FN, granularity="mx_1x32", policy=p)
        for p in ("mx_floor", "mx_rceil")
    )
    assert floor.scale_inv == rceil.scale_inv == np.float32(2.0**-127)
    assert (floor.scale, rceil.scale) == (np.float32(2.0**126), np.float32(1))
    assert (scaling.dequantize(floor) == 2.0**-120).all()
    assert (scaling.dequantize(rceil) == 0).all()
    scale_inv = [
        scaling.scales_from_amax(np.float32(np.inf), E4M3FN, p).scale_inv
        for p in ("mx_floor", "mx_rceil")
    ]
    assert scale_inv == [2.0**120, 2.0**127]


def test_mx_scales_are_their_own_e8m0_codes(amaxes):  # S-14
    for policy in ("mx_floor", "mx_rceil", "te_mxfp8"):
        scale_inv = scaling.scales_from_amax(amaxes, E4M3FN, policy).scale_inv
        np.testing.assert_array_equal(
            cast.decode(cast.encode(scale_inv, E8M0FNU), E8M0FNU), scale_inv
        )


@formats
def test_te_mxfp8_is_the_exact_round_up(fmt):  # S-14
    amax = AMAX_BF16[1:-2][::7]
    scale_inv = scaling.scales_from_amax(amax, fmt, "te_mxfp8").scale_inv
    for a, s in zip(amax, scale_inv, strict=True):
        quotient, s = Fraction(float(a)) / Fraction(fmt.max), Fraction(float(s))
        assert quotient <= s
        assert s < 2 * quotient or s == Fraction(2) ** -127


@formats
def test_te_mxfp8_equals_its_source(fmt, amaxes):  # S-14
    """ptx.cuh, float_to_e8m0(amax * max_norm_rcp): the exponent field, plus one if the mantissa is
    not zero.
    """
    finite = amaxes[np.isfinite(amaxes)]
    bits = (finite * np.float32(1 / fmt.max)).view(np.uint32)
    mantissa, field = bits & 0x7FFFFF, bits >> 23
    code = field + np.where((field == 0) & (mantissa <= 0x400000), 0, mantissa > 0)
    scale_inv = scaling.scales_from_amax(finite, fmt, "te_mxfp8").scale_inv
    np.testing.assert_array_equal(cast.encode(scale_inv, E8M0FNU), code)


def test_te_mxfp8_specials():  # S-14
    amax = np.array([0, 2.0**-149, np.inf, np.nan], np.float32)
    scale, scale_inv = scaling.scales_from_amax(amax, E4M3FN, "te_mxfp8")
    np.testing.assert_array_equal(scale, np.float32([1, 1, 2.0**-127, np.nan]))
    np.testing.assert_array_equal(scale_inv, np.float32([2.0**-127, 2.0**-127, 2.0**127, np.nan]))


def test_torchaos_rceil_rounds_down_a_few_ulps_above_a_power_of_two():  # S-14
    """RN32(log2(amax / max)) is an integer there, for up to 39 amaxes: the largest element exceeds
    max, and is clipped.
    """
    k = np.arange(-127, 120)  # amax from 448 * 2^-127 upwards
    near = (
        (np.ldexp(448.0, k)[:, None].astype(np.float32).view(np.int32) + np.arange(1, 64))
        .astype(np.int32)
        .view(np.float32)
    )
    torchao, te = (
        scaling.scales_from_amax(near, E4M3FN, p).scale_inv for p in ("mx_rceil", "te_mxfp8")
    )
    assert set((te / torchao).ravel()) == {1, 2}
    # the integer's magnitude, but for the half spacing below a power of two
    sizes = np.where(k < 0, -k - 1, k)
    expected = np.select(
        [sizes >= 64, sizes >= 32, sizes >= 16, sizes >= 8, sizes >= 4], [39, 20, 9, 4, 2]
    )
    np.testing.assert_array_equal((torchao < te).sum(1), expected)
    assert expected.sum() == 6289
