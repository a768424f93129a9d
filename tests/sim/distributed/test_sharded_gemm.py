import numpy as np
import pytest
from helpers.gemm import exact

from fp8ref.formats import BFLOAT16, E4M3FN, E5M2, FLOAT32
from fp8ref.sim.distributed import sharded_gemm, sharding
from fp8ref.sim.distributed.mesh import Layout, Mesh, split
from fp8ref.sim.gemm import gemm
from fp8ref.sim.quantize import cast, scaling


def ranks(x, n, fmt=E4M3FN, *, scope="global", granularity="tensorwise", **options):
    """x [rows, K] quantized along K, which n ranks share: a list of operands."""
    layout = Layout(mesh=Mesh(axes={"data": n}), shape=x.shape, splits={1: ("data",)}, **options)
    return list(
        sharding.quantize(
            split(x, layout), layout, fmt, granularity=granularity, scope=scope
        ).values()
    )


def gradients(rng, M=1024, N=64, K=96):
    """grad_output [N, M] and input [K, M]: grad_weight [N, K] reduces M, the batch, which data
    parallelism splits.
    """
    return (rng.standard_normal((N, M)) * 1e-3).astype(np.float32), rng.standard_normal(
        (K, M)
    ).astype(np.float32)


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("out_dtype", [FLOAT32, BFLOAT16], ids=str)
def test_exact_is_one_device_bit_for_bit(granularity, out_dtype, rng):  # P-7
    g, x = gradients(rng)
    one = gemm.matmul(
        scaling.quantize(g, E5M2, granularity=granularity),
        scaling.quantize(x, E4M3FN, granularity=granularity),
        out_dtype=out_dtype,
    )
    for n, options in ((1, {}), (3, {}), (8, {}), (3, {"sizes": {1: (1000, 0, 24)}})):
        a, b = (
            ranks(g, n, E5M2, granularity=granularity, **options),
            ranks(x, n, granularity=granularity, **options),
        )
        np.testing.assert_array_equal(
            sharded_gemm.matmul(a, b, reduce="exact", out_dtype=out_dtype), one
        )


def test_accumulators_are_rounded_added_in_order_and_scaled_once(rng):  # P-7
    g, x = gradients(rng, M=60, N=3, K=4)
    a, b = ranks(g, 4, E5M2), ranks(x, 4)
    expected = np.zeros((3, 4), np.float32)
    for i, j in np.ndindex(3, 4):
        acc = None
        for qa, qb in zip(a, b, strict=True):
            left, right = (
                exact.fractions(cast.decode(v, f))
                for v, f in ((qa.codes[i], qa.fmt), (qb.codes[j], qb.fmt))
            )
            part = exact.rn32(sum(u * v for u, v in zip(left, right, strict=True)))
            acc = part if acc is None else np.float32(acc + part)
        expected[i, j] = np.float32(np.float32(acc * a[0].scale_inv) * b[0].scale_inv)
    np.testing.assert_array_equal(sharded_gemm.matmul(a, b), expected)


def test_how_many_outputs_differ_from_one_device(rng):
    """Scaling first rounds each rank's part twice more. Of 6,144 float32 outputs some 460 differ
    with the accumulators reduced and some 4,000 with scaled parts. Parts rounded to bfloat16 change
    some 2,500 of the bfloat16 outputs, accumulators hardly any (P-7, P-8)."""
    g, x = gradients(rng)
    a, b = ranks(g, 8, E5M2), ranks(x, 8)

    def differ(reduce, out_dtype):
        one = gemm.matmul(
            scaling.quantize(g, E5M2), scaling.quantize(x, E4M3FN), out_dtype=out_dtype
        )
        return int((sharded_gemm.matmul(a, b, reduce=reduce, out_dtype=out_dtype) != one).sum())

    assert 0 < differ("accumulators", FLOAT32) < differ("scaled", FLOAT32) / 3
    assert differ("scaled", FLOAT32) > 3000
    assert differ("accumulators", BFLOAT16) < 10
    assert differ("rounded", BFLOAT16) > 2000


@pytest.mark.parametrize("accumulate", ["exact", "f32"])
def test_integers_below_2_to_24_are_one_device_in_any_order(accumulate, rng):
    """No accumulator is rounded: sums of 1,024 products of integers up to 8 are below 2^24, and the
    scales are powers of two (P-7).
    """
    g, x = (rng.integers(-8, 9, (n, 1024)).astype(np.float32) for n in (16, 24))
    whole = [scaling.quantize(v, E4M3FN, policy="torchao_mask") for v in (g, x)]
    assert all(
        set(np.unique(abs(cast.decode(q.codes, q.fmt) / q.scale))) <= set(range(9)) for q in whole
    )
    one = gemm.matmul(*whole)
    np.testing.assert_array_equal(one, g @ x.T)
    for n in (2, 3, 8):
        layout = Layout(mesh=Mesh(axes={"data": n}), shape=(0, 1024), splits={1: ("data",)})
        parts = [
            [q._replace(codes=q.codes[:, layout.index(d)[1]]) for d in layout.mesh.devices]
            for q in whole
        ]
        for reduce in ("accumulators", "scaled"):
            np.testing.assert_array_equal(
                sharded_gemm.matmul(*parts, reduce=reduce, accumulate=accumulate), one
            )


@pytest.mark.parametrize("n", [2, 4, 8])
def test_tensor_parallel_sums_are_bounded_not_equal(n, rng):
    """P-8. Against the exact sum of the parts p_r: each is rounded to bfloat16 (u = 2^-8 of it),
    after three float32 roundings; n - 1 float32 additions; the total is rounded to bfloat16, and so
    is one device's. In all u * (sum |p_r| + 2 |total|), plus (n + 8) 2^-24 sum |p_r| for every
    float32 rounding, all enlarged by 1 % for second-order terms. sum |p_r| bounds the total."""
    x, w = (
        rng.standard_normal((32, 256)).astype(np.float32),
        rng.standard_normal((48, 256)).astype(np.float32),
    )
    a, b = ranks(x, n), ranks(w, n)
    one = gemm.matmul(scaling.quantize(x, E4M3FN), scaling.quantize(w, E4M3FN), out_dtype=BFLOAT16)
    out = sharded_gemm.matmul(a, b, reduce="rounded", out_dtype=BFLOAT16)
    parts = [gemm.matmul(qa, qb).astype(np.float64) for qa, qb in zip(a, b, strict=True)]
    magnitude, total = sum(abs(p) for p in parts), abs(sum(parts))
    bound = 1.01 * (2.0**-8 * (magnitude + 2 * total) + (n + 8) * 2.0**-24 * magnitude)
    assert (abs(out.astype(np.float64) - one) <= bound).all()
    assert (out != one).mean() > 0.2


def test_local_scales_need_scaled_parts(rng):
    """Under local scope ranks have scales of their own: their accumulators count different units
    (P-7).
    """
    g, x = gradients(rng, M=64)
    a, b = ranks(g, 2, scope="local"), ranks(x, 2, scope="local")
    with pytest.raises(ValueError, match=r"equal scales.*those of a differ.*'scaled'"):
        sharded_gemm.matmul(a, b)
    dequantized = [
        (scaling.dequantize(qa).astype(np.float64), scaling.dequantize(qb).astype(np.float64))
        for qa, qb in zip(a, b, strict=True)
    ]
    expected, magnitude = (
        sum(op(u) @ op(v).T for u, v in dequantized) for op in (np.asarray, np.abs)
    )
    # dequantizing rounds each factor once, a rank's GEMM three times, the sum once: 2^-24 each
    assert (
        abs(sharded_gemm.matmul(a, b, reduce="scaled") - expected) <= 6.01 * 2.0**-24 * magnitude
    ).all()


def test_a_rank_with_nothing_adds_nothing(rng):
    g, x = gradients(rng, M=64)
    layout = {"sizes": {1: (0, 40, 0, 24)}}
    for reduce, out_dtype in (
        ("accumulators", FLOAT32),
        ("scaled", FLOAT32),
        ("rounded", BFLOAT16),
    ):
        with_empty = sharded_gemm.matmul(
            ranks(g, 4, **layout), ranks(x, 4, **layout), reduce=reduce, out_dtype=out_dtype
        )
        two = {"sizes": {1: (40, 24)}}
        np.testing.assert_array_equal(
            with_empty,
            sharded_gemm.matmul(
                ranks(g, 2, **two), ranks(x, 2, **two), reduce=reduce, out_dtype=out_dtype
            ),
        )


def test_specials_meet_across_ranks():
    """Inf on one rank and -Inf on another: NaN, whichever way it is reduced (G-6)."""
    one, codes = np.ones((), np.float32), np.uint8([[0x7C, 0xFC], [0x3C, 0x7C]])
    a = [scaling.Quantized(codes[:, k : k + 1], one, one, E5M2, "tensorwise", -1) for k in (0, 1)]
    b = [scaling.Quantized(np.uint8([[0x3C]]), one, one, E5M2, "tensorwise", -1)] * 2
    for reduce in ("exact", "accumulators", "scaled", "rounded"):
        np.testing.assert_array_equal(
            sharded_gemm.matmul(a, b, reduce=reduce), np.float32([[np.nan], [np.inf]])
        )


def test_a_nan_scale_is_equal_to_itself():
    """Under global scope a NaN anywhere is every rank's NaN scale: the result is NaN, not a refusal
    (P-3, P-7).
    """
    x = np.ones((2, 8), np.float32)
    x[0, 1] = np.nan
    for reduce in ("exact", "accumulators"):
        assert np.isnan(
            sharded_gemm.matmul(ranks(x, 2), ranks(np.ones((3, 8), np.float32), 2), reduce=reduce)
        ).all()


def test_the_last_axis_is_1(rng):
    x = ranks(rng.standard_normal((4, 8)).astype(np.float32), 2, granularity="rowwise")
    last = [q._replace(axis=1) for q in x]
    np.testing.assert_array_equal(sharded_gemm.matmul(last, last), sharded_gemm.matmul(x, x))


ONES = ranks(np.ones((128, 256), np.float32), 2)
BLOCKS = ranks(np.ones((128, 256), np.float32), 2, granularity="blockwise_1x128")
NOTHING = [q._replace(codes=q.codes[:, :0]) for q in ONES]
LINES = ranks(np.ones((128, 256), np.float32), 2, granularity="rowwise")


@pytest.mark.parametrize(
    ("a", "b", "options", "message"),
    [
        (ONES, ONES[:1], {}, "one a and b per rank, not all empty"),
        ([], [], {}, "one a and b per rank, not all empty"),
        (NOTHING, NOTHING, {}, "one a and b per rank, not all empty"),
        (ONES, BLOCKS, {}, "are constant along K; got b blockwise_1x128.*'scaled'"),
        (
            ONES,
            [q._replace(axis=0, scale_inv=np.ones((1, 128), np.float32)) for q in LINES],
            {},
            "got b rowwise, axis=0",
        ),
        (ONES, [ONES[0], ONES[1]._replace(fmt=E5M2)], {}, "those of b differ"),
        (ONES, ONES, {"reduce": "mean"}, "rounded; got 'mean'"),
        (ONES, ONES, {"reduce": "exact", "accumulate": "f32"}, "accumulate 'exact'; got 'f32'"),
        (ONES, ONES, {"out_dtype": E5M2}, "out_dtype is one of.*got e5m2"),
        (ONES, [q._replace(scale_inv=np.float32(-1)) for q in ONES], {}, "not negative"),
        (ONES, [ONES[0], ONES[1]._replace(codes=ONES[1].codes[:5])], {}, "same M and N"),
        (ONES, [ONES[0], NOTHING[1]], {}, "same K"),
    ],
)
def test_errors(a, b, options, message):
    with pytest.raises(ValueError, match=message):
        sharded_gemm.matmul(a, b, **options)
