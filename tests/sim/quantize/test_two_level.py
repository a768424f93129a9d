"""Scales of two levels, against torchao's NVFP4 as it runs, and Transformer Engine's
transcribed.
"""

import numpy as np
import pytest
import torch
from helpers.quantize.fp4_libraries import (
    four_over_six,
    torchao_mx,
    torchao_nvfp4,
    torchao_nvfp4_one_level,
    transformer_engine,
)

from fp8ref.conformance.inputs import fp4_inputs
from fp8ref.formats import BFLOAT16, E2M1FN, E4M3FN
from fp8ref.policy import FP4_POLICIES, ScalePolicy, TwoLevel
from fp8ref.sim.gemm import gemm
from fp8ref.sim.quantize import cast, packing, scaling, stats, two_level

EXPONENTS = (-120, -40, -3, 0, 60, 118)


def tensors(rng, shape=(64, 128)):
    """Tensors of many sizes, with blocks of many sizes, of zeros, and one element that is much
    larger.
    """
    for exponent in EXPONENTS:
        x = (
            rng.standard_normal(shape)
            * np.exp2(rng.uniform(-8, 6, (shape[0], 1)))
            * np.exp2(rng.uniform(-8, 2, (1, shape[1])))
        )
        x[:16, 16:32], x[20, 3] = 0, 64 * (exponent % 2)
        yield np.ldexp(x, exponent - 6).astype(np.float32)
    ties = rng.choice(np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -5, 6, -0.0]), shape)
    ties[:, ::16] = 6
    yield ties


def assert_equal(x, q, pairs, scale_inv):
    """Equal scales; and codes, but where x * scale is NaN (a zero under an infinite scale), for
    which a format without NaN has no right code (C-9).
    """
    np.testing.assert_array_equal(q.scale_inv, scale_inv)
    with np.errstate(invalid="ignore", over="ignore"):
        number = ~np.isnan(x * scaling.spread(q.scale, x.shape, q.blocks))
    assert number.mean() > 0.5
    np.testing.assert_array_equal(q.codes[number], packing.unpack(pairs)[number])
    assert set(q.codes[~number]) <= {7}


@pytest.mark.parametrize("policy", ["torchao_nvfp4", "torchao_nvfp4_one_level"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchao_nvfp4_is_the_simulators(policy, dtype, rng):  # S-22, F-5
    run = {"torchao_nvfp4": torchao_nvfp4, "torchao_nvfp4_one_level": torchao_nvfp4_one_level}[
        policy
    ]
    for x in tensors(rng):
        x = cast.round_to(x, BFLOAT16) if dtype is torch.bfloat16 else x
        theirs, q = (
            run(torch.from_numpy(x).to(dtype)),
            scaling.quantize(x, E2M1FN, granularity="nvfp4_1x16", policy=policy),
        )
        assert_equal(x, q, theirs.qdata.numpy(), theirs.scale.float().numpy())
        if np.isfinite(q.scale).all():
            np.testing.assert_array_equal(
                scaling.dequantize(q), theirs.dequantize(torch.float32).numpy()
            )
        assert (q.tensor_scale_inv is None) == (theirs.per_tensor_scale is None)
        assert q.tensor_scale_inv is None or q.tensor_scale_inv == theirs.per_tensor_scale.numpy()


@pytest.mark.parametrize(("granularity", "rows"), [("nvfp4_1x16", 1), ("nvfp4_16x16", 16)])
def test_te_nvfp4_is_its_sources(granularity, rows, rng):  # S-22
    for x in (*tensors(rng), np.zeros((16, 32), np.float32)):
        codes, scale, amax = transformer_engine(torch.from_numpy(x), rows)
        q = scaling.quantize(x, E2M1FN, granularity=granularity, policy="te_nvfp4")
        assert_equal(
            x,
            q._replace(
                scale_inv=np.repeat(q.scale_inv, rows, axis=0),
                scale=np.repeat(q.scale, rows, axis=0),
                granularity="nvfp4_1x16",
            ),
            codes.numpy(),
            scale.float().numpy(),
        )
        if amax > 2.0**-110:
            # S_enc is below float32's max: 1 / S_enc is two roundings, of 2^-24 each, and the
            # quotient by 2688 one
            np.testing.assert_allclose(
                q.tensor_scale_inv, amax.numpy() / np.float32(2688), rtol=2.0**-22, atol=0
            )


@pytest.mark.parametrize("axis", [-1, 0])
def test_rows_with_a_scale_each_are_transformer_engines(axis, rng):  # S-22
    for x in (*tensors(rng), np.zeros((16, 32), np.float32)):
        codes, scale, amax = transformer_engine(torch.from_numpy(x), row_scaled=True)
        q = scaling.quantize(
            x if axis else x.T, E2M1FN, granularity="nvfp4_1x16", policy="te_nvfp4_row", axis=axis
        )
        if axis == 0:
            fields = {name: getattr(q, name).T for name in ("codes", "scale", "scale_inv")}
            q = q._replace(axis=-1, tensor_scale_inv=q.tensor_scale_inv.T, **fields)
        assert_equal(x, q, codes.numpy(), scale.float().numpy())
        assert q.tensor_scale_inv.shape == (len(x), 1)
        for i in (0, 20 % len(x)):  # a row alone is a tensor
            alone = scaling.quantize(
                x[i : i + 1], E2M1FN, granularity="nvfp4_1x16", policy="te_nvfp4"
            )
            np.testing.assert_array_equal(q.codes[i : i + 1], alone.codes)
            np.testing.assert_array_equal(q.tensor_scale_inv[i, 0], alone.tensor_scale_inv)
            np.testing.assert_array_equal(
                scaling.dequantize(q)[i : i + 1], scaling.dequantize(alone)
            )
        large = amax.numpy() > 2.0**-110  # as of one amax, above
        np.testing.assert_allclose(
            q.tensor_scale_inv[large, 0],
            amax.numpy()[large] / np.float32(2688),
            rtol=2.0**-22,
            atol=0,
        )


@pytest.mark.parametrize("policy", ["te_nvfp4_row", "te_nvfp4_row_4over6"])
@pytest.mark.parametrize("axis", [-1, 1, 0])
def test_a_row_of_a_batch_has_the_scales_that_it_has_alone(policy, axis, rng):  # S-6, S-22
    x = rng.standard_normal((48, 32, 16)) * np.exp2(rng.integers(-9, 9, (1, 1, 16)))
    x = x.astype(np.float32)
    options = {"granularity": "nvfp4_1x16", "policy": policy}
    q = scaling.quantize(x, E2M1FN, axis=axis, **options)
    assert q.tensor_scale_inv.shape == x.max(axis=axis, keepdims=True).shape
    alone = scaling.quantize(np.moveaxis(x, axis, -1)[2, 5], E2M1FN, **options)
    np.testing.assert_array_equal(np.moveaxis(q.codes, axis, -1)[2, 5], alone.codes)
    np.testing.assert_array_equal(
        np.moveaxis(q.tensor_scale_inv, axis, -1)[2, 5], alone.tensor_scale_inv
    )


@pytest.mark.parametrize("axis", [-1, 0])
def test_statistics_in_slabs_of_rows(axis, rng, monkeypatch):  # Q-1, S-22
    x = (rng.standard_normal((48, 32)) * np.exp2(rng.integers(-9, 9, (48, 1)))).astype(np.float32)
    x = x if axis else np.ascontiguousarray(x.T)
    q = scaling.quantize(x, E2M1FN, granularity="nvfp4_1x16", policy="te_nvfp4_row", axis=axis)
    noise = ((scaling.dequantize(q).astype(float) - x) ** 2).sum()
    for elements in (stats.SLAB, 64):
        monkeypatch.setattr(stats, "SLAB", elements)
        assert stats.statistics(x, q).noise == pytest.approx(noise)


@pytest.mark.parametrize("unit", ["input", "block"])
@pytest.mark.parametrize("error", ["mae", "mse"])
@pytest.mark.parametrize(("rows", "row_scaled"), [(1, False), (16, False), (1, True)])
def test_fast_mathematics_and_rows_of_four_over_six(rows, row_scaled, error, unit, rng):  # S-22
    of_rows = {"tensor_granularity": "rowwise"} if row_scaled else {}
    levels = TwoLevel(tensor="encode", error=error, largest=256, error_unit=unit, **of_rows)
    policy = ScalePolicy(name="mine", two_level=levels)
    if not row_scaled:
        name = "te_nvfp4_4over6" + "_mse" * (error == "mse") + "_fast" * (unit == "block")
        assert FP4_POLICIES[name].two_level == levels
    options = {"fast_math": unit == "block", "row_scaled": row_scaled}
    for x in (*tensors(rng), fp4_inputs.tensors("float32")["fours"]):
        x[3] = 0
        codes, scale, four = four_over_six(torch.from_numpy(x), rows, error, 256, **options)
        q = scaling.quantize(x, E2M1FN, granularity=f"nvfp4_{rows}x16", policy=policy)
        q = q._replace(
            scale_inv=np.repeat(q.scale_inv, rows, axis=0),
            scale=np.repeat(q.scale, rows, axis=0),
            granularity="nvfp4_1x16",
        )
        assert_equal(x, q, codes.numpy(), scale.numpy())
    # of ``fours`` the last: errors are equal in the input's unit, to 6
    assert (four.float().mean() > 0.1) == (unit == "block")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("largest", [256, 448])
@pytest.mark.parametrize("error", ["mae", "mse"])
@pytest.mark.parametrize(("granularity", "rows"), [("nvfp4_1x16", 1), ("nvfp4_16x16", 16)])
def test_four_over_six_is_its_sources(granularity, rows, error, largest, axis, dtype, rng):  # S-22
    policy = ScalePolicy(
        name="mine", two_level=TwoLevel(tensor="encode", error=error, largest=largest)
    )
    if largest == 256:
        name = "te_nvfp4_4over6" + "_mse" * (error == "mse")
        assert policy.two_level == FP4_POLICIES[name].two_level
    chosen = []
    for x in tensors(rng):
        x = cast.round_to(x, BFLOAT16) if dtype == "bfloat16" else x
        codes, scale, four = four_over_six(torch.from_numpy(x), rows, error, largest)
        q = scaling.quantize(
            x.T if axis == 0 else x, E2M1FN, granularity=granularity, policy=policy, axis=axis
        )
        if axis == 0:
            q = q._replace(codes=q.codes.T, scale=q.scale.T, scale_inv=q.scale_inv.T, axis=-1)
        assert_equal(
            x,
            q._replace(
                scale_inv=np.repeat(q.scale_inv, rows, axis=0),
                scale=np.repeat(q.scale, rows, axis=0),
                granularity="nvfp4_1x16",
            ),
            codes.numpy(),
            scale.numpy(),
        )
        chosen.append(four.float().mean())
    assert 0 < np.mean(chosen) < 1


def test_the_order_of_a_sum_of_errors():  # S-22
    """1s that 2^24 absorbs one by one: rows 8 apart are added first; elements of a row in order."""
    e = np.zeros((16, 1, 16), np.float32)
    e[0, 0, 0], e[8:10, 0, 0] = 2.0**24, 1
    assert two_level._sum_of_blocks(e) == 2.0**24
    e[8, 0, 0], e[9, 0, 0], e[1, 0, 0] = 0, 1, 1
    assert two_level._sum_of_blocks(e) == 2.0**24 + 2
    e[:] = 0
    e[0, 0, :] = 1
    e[0, 0, 0] = 2.0**24
    assert two_level._sum_of_blocks(e) == 2.0**24


def test_four_over_six_of_batches_and_ragged_rows(rng):  # S-6, S-22
    """Each matrix has the choice that it has alone under the batch's amax; missing rows are zeros."""
    x = rng.standard_normal((3, 40, 32)).astype(np.float32)
    x[:, 0, 0] = 9  # the amax of each
    options = {"granularity": "nvfp4_16x16", "policy": "te_nvfp4_4over6"}
    q = scaling.quantize(x, E2M1FN, **options)
    alone = [scaling.quantize(part, E2M1FN, **options) for part in x]
    np.testing.assert_array_equal(q.codes, [part.codes for part in alone])
    padded = scaling.quantize(np.pad(x[0], [(0, 8), (0, 0)]), E2M1FN, **options)
    np.testing.assert_array_equal(padded.scale_inv, alone[0].scale_inv)
    line = scaling.quantize(x[0, 0], E2M1FN, granularity="nvfp4_1x16", policy="te_nvfp4_4over6")
    rows = scaling.quantize(x[0, :1], E2M1FN, granularity="nvfp4_1x16", policy="te_nvfp4_4over6")
    np.testing.assert_array_equal(line.codes, rows.codes[0])


@pytest.mark.parametrize("mode", ["floor", "ceil", "even", "rceil"])
def test_torchao_mxfp4_is_the_simulators(mode, rng):  # S-14, F-5
    for x in tensors(rng):
        codes, scale = torchao_mx(mode)(torch.from_numpy(x))
        q = scaling.quantize(x, E2M1FN, granularity="mx_1x32", policy=f"mx_{mode}")
        assert_equal(x, q, codes.numpy(), scale.float().numpy())


def test_a_block_that_is_too_small_gets_scale_0_or_the_smallest():  # S-22
    x = np.zeros((1, 32), np.float32)
    x[0, 0], x[0, 16] = 6, 6 * 2.0**-20
    te, torchao = (
        scaling.quantize(x, E2M1FN, granularity="nvfp4_1x16", policy=p)
        for p in ("te_nvfp4", "torchao_nvfp4")
    )
    assert te.scale_inv[0, 1] == 0
    assert te.scale[0, 1] == np.finfo(np.float32).max
    assert te.codes[0, 16] == 7
    assert torchao.scale_inv[0, 1] == 2.0**-6
    assert torchao.codes[0, 16] == 0
    assert scaling.dequantize(te)[0, 16] == 0


def test_an_infinite_tensor_has_the_block_scales_of_its_policy():  # S-22
    blocks = np.float32([np.inf, 6])
    te = two_level.scales_from_amaxes(blocks, np.float32(np.inf))
    np.testing.assert_array_equal(te.scale_inv, [448, 1])
    assert te.tensor_scale_inv == 1
    named = two_level.scales_from_amaxes(blocks, np.float32(np.inf), "e2m1fn", "te_nvfp4")
    np.testing.assert_equal(named, te)
    torchao = two_level.scales_from_amaxes(blocks, np.float32(np.inf), policy="torchao_nvfp4")
    np.testing.assert_array_equal(torchao.scale_inv, [np.nan, 2.0**-6])
    assert (
        scaling.quantize(
            np.full((1, 16), np.nan, np.float32),
            E2M1FN,
            granularity="nvfp4_1x16",
            policy="te_nvfp4",
        ).codes[0, 0]
        == 7
    )


@pytest.mark.parametrize("policy", FP4_POLICIES)
def test_a_gemm_scales_each_block_and_last_the_tensors(policy, rng):  # G-13, S-22
    a, b = (
        scaling.quantize(
            rng.standard_normal((n, 64)).astype(np.float32),
            E2M1FN,
            granularity="nvfp4_1x16",
            policy=policy,
        )
        for n in (5, 7)
    )
    total = np.zeros((5, 7), np.float32)
    for i in range(4):
        part = slice(16 * i, 16 * i + 16)
        # exact: below 2^24 quarters
        acc = (
            cast.decode(a.codes[:, part], E2M1FN) @ cast.decode(b.codes[:, part], E2M1FN).T
        ).astype(np.float32)
        total = total + acc * a.scale_inv[:, i : i + 1] * b.scale_inv[:, i : i + 1].T
    left, right = a.tensor_scale_inv, b.tensor_scale_inv
    if left is None:
        expected = total
    elif not np.ndim(left):
        expected = total * (left * right)
    else:  # of rows [5, 1] and [7, 1]: one after the other
        expected = total * left * right.T
        one = np.float32(0.3)  # a scale of the tensor is multiplied first
        mixed = gemm.matmul(a, b._replace(tensor_scale_inv=one))
        np.testing.assert_array_equal(mixed, total * (left * one))
        mixed = gemm.matmul(a._replace(tensor_scale_inv=one), b)
        np.testing.assert_array_equal(mixed, total * (one * right).T)
        alone = gemm.matmul(a._replace(tensor_scale_inv=None), b)
        np.testing.assert_array_equal(alone, total * right.T)
    np.testing.assert_array_equal(gemm.matmul(a, b), expected)
    with pytest.raises(ValueError, match="tensor cores multiply e4m3fn and e5m2; got e2m1fn"):
        gemm.matmul(a, b, accumulate="hopper_fast")
    whole = scaling.quantize(
        np.ones((2, 32), np.float32), E2M1FN, granularity="rowwise", policy="te_nvfp4"
    )
    with pytest.raises(ValueError, match="two-level scales need blocks along K"):
        gemm.matmul(whole, whole)


def test_statistics_of_a_tensor_in_two_levels(rng):
    x = rng.standard_normal((32, 64)).astype(np.float32)
    q = scaling.quantize(x, E2M1FN, granularity="nvfp4_1x16", policy="te_nvfp4")
    found = stats.statistics(x, q)
    assert found.sqnr == pytest.approx(
        10
        * np.log10(
            (x.astype(float) ** 2).sum() / ((scaling.dequantize(q).astype(float) - x) ** 2).sum()
        )
    )


def test_errors():  # S-22
    with pytest.raises(
        ValueError, match=r"policy 'te_nvfp4' needs amaxes of blocks and of the tensor"
    ):
        scaling.scale_from_amax(np.float32(1), E2M1FN, "te_nvfp4")
    with pytest.raises(ValueError, match=r"two-level scales need e2m1fn.*got e4m3fn"):
        scaling.quantize(
            np.ones((1, 16), np.float32), E4M3FN, granularity="nvfp4_1x16", policy="te_nvfp4"
        )
    with pytest.raises(ValueError, match=r"two-level scales need e2m1fn.*policy 'torchao'"):
        two_level.scales_from_amaxes(np.float32([1]), np.float32(1), policy="torchao")
    with pytest.raises(ValueError, match=r"^tensorwise amaxes .* shape \(\); got \(1,\)"):
        two_level.scales_from_amaxes(np.float32([1]), np.float32([1]))
    for wrong in (np.float32(1), np.ones((3, 2), np.float32), np.ones(3, np.float32)):
        with pytest.raises(ValueError, match=r"^rowwise amaxes .* \(1, 2\) or \(3, 1\); got"):
            two_level.scales_from_amaxes(np.ones((3, 2), np.float32), wrong, policy="te_nvfp4_row")
    with pytest.raises(ValueError, match=r"with two_level .* takes no other decision; got margin"):
        ScalePolicy(name="mine", margin=1, two_level=TwoLevel(tensor="none"))
    for wrong in (
        {"tensor": "both"},
        {"tensor": "none", "smallest": 1.0},
        {"tensor": "none", "block_fmt": E2M1FN},
    ):
        with pytest.raises(ValueError, match=r"encode, decode, none|smallest is in \[0, 1\)"):
            TwoLevel(**wrong)
    for wrong, message in (
        ({"tensor": "encode", "error": "max"}, "error is one of , mae, mse"),
        ({"tensor": "decode", "error": "mae"}, "error is one of"),
        ({"tensor": "encode", "largest": 240}, "largest is one of 448, 256"),
        ({"tensor": "none", "largest": 256}, "largest is one of 448"),
        ({"tensor": "encode", "error_unit": "block"}, "error_unit is one of input; got 'block'"),
        (
            {"tensor": "decode", "tensor_granularity": "rowwise"},
            "tensor_granularity is one of tensorwise; got 'rowwise'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            TwoLevel(**wrong)
    for policy, granularity in (("te_nvfp4_4over6", "rowwise"), ("te_nvfp4_row", "nvfp4_16x16")):
        with pytest.raises(ValueError, match=f"granularity of {policy} is one of nvfp4_1x16"):
            scaling.quantize(
                np.ones((16, 16), np.float32), E2M1FN, granularity=granularity, policy=policy
            )
    q = scaling.quantize(
        np.ones((1, 16), np.float32), E2M1FN, granularity="nvfp4_1x16", policy="te_nvfp4"
    )
    with pytest.raises(
        ValueError, match=r"tensor_scale_inv has shape \(\) or \(1, 1\); got \(1,\)"
    ):
        scaling.dequantize(q._replace(tensor_scale_inv=np.ones(1, np.float32)))
