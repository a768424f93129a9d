"""Gradients summed over ranks in FP8 (spec P-21 to P-24)."""

import itertools

import numpy as np
import pytest

from fp8ref.formats import E2M1FN, E4M3FN, E5M2, E8M0FNU
from fp8ref.sim.distributed import gradient_reduction
from fp8ref.sim.quantize import cast, scaling
from fp8ref.spec import gradient_reduction as data
from fp8ref.spec.gradient_reduction import AutoScale


def grads_of(ranks, n=500, seed=0, spread=4):
    """Gradients whose magnitudes span decades, on the same elements of all ranks."""
    rng = np.random.default_rng(seed)
    return [
        (rng.standard_normal(n) * 10.0 ** rng.integers(-spread, 1, n)).astype(np.float32)
        for _ in range(ranks)
    ]


def bits(x):
    return [f"{word:08X}" for word in np.atleast_1d(np.float32(x)).view(np.uint32)]


def test_the_worked_example_of_the_shared_scale():  # P-21
    grads = [np.float32([1, 0.3]), np.float32([4, 0.3])]
    shared = gradient_reduction.share(grads)
    assert (bits(shared.scale), bits(shared.scale_inv)) == (["42E00000"], ["3C124925"])
    assert [c.tolist() for c in shared.codes] == [[0x6E, 0x60], [0x7E, 0x60]]
    assert gradient_reduction.add(shared).tolist() == [560, 64]
    assert bits(gradient_reduction.reduce(grads).value) == ["40200000", "3E924925"]
    codes = gradient_reduction.reduce(grads, result="codes")
    assert (codes.codes[0], codes.saturated, bits(codes.value)[0]) == (0x7E, 1, "40000000")
    root = gradient_reduction.reduce(grads, prescale="inverse_root", result="codes")
    assert (root.codes.tolist(), root.saturated, bits(root.value)) == (
        [0x7C, 0x64],
        0,
        ["401B28D0", "3E9B28D0"],
    )
    assert bits(gradient_reduction.reduce(grads, prescale="inverse_root").value) == [
        "40219FD9",
        "3E9B28D0",
    ]


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_sum_is_that_of_quantized_gradients_under_one_scale(ranks, fmt):  # P-21
    grads = grads_of(ranks)
    amax = np.float32(max(np.abs(g).max() for g in grads))
    scale = np.float32(fmt.max) / amax
    codes = [cast.encode(np.clip(g * scale, -fmt.max, fmt.max), fmt) for g in grads]
    total = np.float32(0)
    for c in codes:
        total = total + cast.decode(c, fmt)  # 0 + c_0 is c_0
    found = gradient_reduction.reduce(grads, fmt, mean=False)
    assert np.array_equal(found.value, total * (np.float32(1) / scale))
    assert found.saturated == 0


def test_a_mean_scales_scale_inv_and_no_code():  # P-21
    grads = grads_of(3)
    mean, total = (
        gradient_reduction.reduce(grads, mean=mean, result="codes", prescale="inverse")
        for mean in (True, False)
    )
    assert np.array_equal(mean.codes, total.codes)
    assert mean.scale_inv == total.scale_inv * np.float32(1 / 3)


def test_sums_of_e4m3_are_exact_in_any_order_up_to_73_ranks():  # P-21
    shared = gradient_reduction.share(grads_of(73, 64, spread=2))
    exact = np.sum([cast.decode(c, E4M3FN).astype(np.float64) for c in shared.codes], axis=0)
    assert np.array_equal(gradient_reduction.add(shared), exact)
    assert np.array_equal(gradient_reduction.add(shared._replace(codes=shared.codes[::-1])), exact)
    # 73 x 448 + 2^-9: the most that 24 bits hold
    largest = [np.uint8([E4M3FN.max_code])] * 73 + [np.uint8([1])]
    assert gradient_reduction.add(shared._replace(codes=largest[:73]))[0] == 73 * 448
    assert (
        gradient_reduction.add(shared._replace(codes=[*largest[:72], largest[-1]]))[0]
        == 72 * 448 + 2.0**-9
    )
    assert (
        float(gradient_reduction.add(shared._replace(codes=[*largest, largest[0]]))[0])
        != 74 * 448 + 2.0**-9
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, np.float32(2.0**91)])
@pytest.mark.parametrize("policy", ["torchao", "te_current", "msamp"])
def test_a_number_that_is_not_finite_makes_the_whole_result_nan(policy, bad):  # P-3, P-21
    for rank, element in itertools.product(range(3), (0, 7)):
        grads = grads_of(3, 8)
        grads[(rank + 1) % 3][:] = 0
        grads[rank][element] = bad
        for result in ("float32", "codes"):
            found = gradient_reduction.reduce(grads, policy=policy, result=result)
            assert np.isnan(found.value).all()
            assert found.saturated == 0


@pytest.mark.parametrize("policy", ["torchao", "te_current", "msamp"])
def test_zeros_and_amaxes_below_every_floor_stay_finite(policy):  # P-21
    for value in (0.0, 1e-40):
        found = gradient_reduction.reduce(
            [np.full(3, value, np.float32)] * 2, policy=policy, mu=2.0**24
        )
        assert np.array_equal(np.abs(found.value) <= value, [True] * 3)


def test_what_saturates_and_what_is_counted():  # P-21, P-22
    grads = [np.float32([1, 0.5, 0.25]), np.float32([-1, 0.5, 0.25])]
    # both of magnitude 1; 0.5 becomes 448
    assert gradient_reduction.reduce(grads, mu=2.0).saturated == 2
    assert gradient_reduction.reduce(grads, mu=2.0).value.tolist() == [0, 0.5, 0.25]
    # 461 is nearer to 448 than to the number that would follow it
    assert gradient_reduction.reduce(grads, mu=1.03).saturated == 0
    assert gradient_reduction.reduce(grads, mu=1.04).saturated == 2
    assert gradient_reduction.reduce(grads, result="codes").saturated == 0
    assert (
        gradient_reduction.reduce([np.float32([1]), np.float32([0.5])], result="codes").saturated
        == 1
    )
    assert (
        gradient_reduction.reduce(
            [np.float32([1]), np.float32([0.5])], result="codes", prescale="inverse"
        ).saturated
        == 0
    )
    assert (data.saturates_above(E4M3FN), data.saturates_above(E5M2)) == (464, 61440)


def test_mu_falls_at_once_and_rises_slowly():  # P-22
    auto = AutoScale(threshold=0.01, window=10)
    assert gradient_reduction.next_mu(1.0, 2, 100, auto) == 0.5
    mu = np.float32(1)
    for _ in range(10):
        mu = gradient_reduction.next_mu(mu, 1, 100, auto)  # 1 of 100 is not above the threshold
    assert abs(mu - 2) <= 2 * 11 * 2.0**-24  # the growth and each product are rounded once
    assert gradient_reduction.next_mu(2.0**-24, 9, 9, auto) == 2.0**-24
    assert gradient_reduction.next_mu(2.0**24, 0, 9, auto) == 2.0**24


def orders(ranks):
    rng = np.random.default_rng(1)
    return [(list(rng.permutation(ranks)), int(rng.integers(ranks))) for _ in range(6)]


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_no_ring_errs_by_more_than_the_bound(ranks, fmt):  # P-23
    for prescale, spread in itertools.product(("one", "inverse"), (2, 6)):
        codes = gradient_reduction.share(
            grads_of(ranks, 4000, seed=spread, spread=spread), fmt, prescale=prescale
        ).codes
        exact = np.sum([cast.decode(c, fmt).astype(np.float64) for c in codes], axis=0)
        bound = gradient_reduction.ring_bound(codes, fmt)
        for order, start in orders(ranks):
            error = np.abs(
                cast.decode(gradient_reduction.ring(codes, fmt, order=order, start=start), fmt)
                - exact
            )
            assert (error <= bound).all()
        # one rounding, of which the bound is nearly reached: u / (1 + u) of a sum at a tie, against
        # u of 1 / 16 or 1 / 8
        if ranks == 2:
            assert (error > 0.85 * bound)[bound > 0].any()


def test_a_ring_depends_on_its_order_and_a_sum_in_float32_does_not():  # P-21, P-23
    codes = gradient_reduction.share(grads_of(8, 2000, spread=0), prescale="inverse").codes
    rings = [gradient_reduction.ring(codes, start=start) for start in range(8)]
    assert np.mean(rings[0] != rings[1]) > 0.3
    # 16 elements a rank, each piece begins one place later: the first piece of start 1 is that of
    # an order that begins with 1
    assert np.array_equal(
        gradient_reduction.ring(codes, start=1)[:250],
        gradient_reduction.ring(codes, order=[1, 2, 3, 4, 5, 6, 7, 0], start=0)[:250],
    )


def test_a_ring_of_exact_sums_is_their_sum():  # P-23
    codes = [cast.encode(np.float32([1, 2, 3, -4]), E4M3FN)] * 4
    assert cast.decode(gradient_reduction.ring(codes), E4M3FN).tolist() == [4, 8, 12, -16]
    assert (
        cast.decode(gradient_reduction.ring([cast.encode(np.float32([448]), E4M3FN)] * 2), E4M3FN)
        == 448
    )
    assert cast.decode(
        gradient_reduction.ring([np.uint8([E4M3FN.nan_code]), np.uint8([0])]), E4M3FN
    ).tolist() != [0]


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_a_hop_through_float16_as_nccl_adds_gives_the_same_code(fmt):  # P-23
    every = np.arange(256, dtype=np.uint8)
    pairs = [x.reshape(-1) for x in np.meshgrid(every, every)]
    a, b = (cast.decode(x, fmt) for x in pairs)
    with np.errstate(over="ignore", invalid="ignore"):
        # __hadd(__half(x), __half(y))
        half = (a.astype(np.float16) + b.astype(np.float16)).astype(np.float32)
    assert np.array_equal(
        cast.canonical_nans(cast.encode(half, fmt), fmt),
        cast.canonical_nans(gradient_reduction.ring(pairs, fmt), fmt),
    )


def test_microbatches_are_accumulated_in_fp8():  # P-24
    parts = grads_of(4, 300)
    total = None
    for g in parts:
        before = total
        total = gradient_reduction.accumulate(total, g)
        y = g if before is None else scaling.dequantize(before) + g
        plain = scaling.quantize(y, E4M3FN)
        assert np.array_equal(total.codes, plain.codes)
        assert total.scale == plain.scale
    for bad in (np.inf, np.nan):
        broken = gradient_reduction.accumulate(
            gradient_reduction.accumulate(total, np.full(300, bad, np.float32)), parts[0]
        )
        assert np.isnan(scaling.dequantize(broken)).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gradient_reduction.share([]), "have one shape; got no ranks"),
        (lambda: gradient_reduction.share([np.float32([1]), np.float32([1, 2])]), "one shape"),
        (
            lambda: gradient_reduction.share([np.float32([1])], prescale="half"),
            "prescale is one of one, inverse_root, inverse; got 'half'",
        ),
        (
            lambda: gradient_reduction.share([np.float32([1])], policy="flax"),
            "has a policy of torchao, .*; got 'flax'",
        ),
        (lambda: gradient_reduction.share([np.float32([1])], policy="mx_floor"), "has a policy of"),
        (
            lambda: gradient_reduction.share([np.float32([1])], mu=0.0),
            r"mu is in \[2\^-24, 2\^24\] \(P-22\); got 0.0",
        ),
        (
            lambda: gradient_reduction.reduce([np.float32([1])], result="fp8"),
            "result is one of float32, codes; got 'fp8'",
        ),
        (
            lambda: gradient_reduction.ring([np.uint8([1])] * 3, order=[0, 1, 1]),
            "a ring visits each of 3 ranks once",
        ),
        (
            lambda: gradient_reduction.accumulate(
                gradient_reduction.accumulate(None, np.float32([1])), np.float32([1, 2])
            ),
            "one shape",
        ),
        (
            lambda: gradient_reduction.accumulate(None, np.float64([1])),
            "quantize takes float32, float16 or bfloat16; got float64",
        ),
        (
            lambda: gradient_reduction.accumulate(
                gradient_reduction.accumulate(None, np.float32([1])), np.float64([1])
            ),
            "bfloat16; got float64",
        ),
        (lambda: gradient_reduction.accumulate(None, np.int32([1])), "got int32"),
        (
            lambda: gradient_reduction.accumulate(None, np.float32([1]), E8M0FNU),
            "quantized to FP8: .* got e8m0fnu",
        ),
        (
            lambda: gradient_reduction.share([np.float32([1])], E8M0FNU),
            "quantized to FP8: .* got e8m0fnu",
        ),
        (
            lambda: gradient_reduction.share([np.float32([1])], E2M1FN),
            "quantized to FP8: .* got e2m1fn",
        ),
        (
            lambda: gradient_reduction.accumulate(
                gradient_reduction.accumulate(None, np.float32([1]), E5M2), np.float32([1])
            ),
            "cannot change: it is e5m2; got e4m3fn",
        ),
        (lambda: AutoScale(threshold=1.0), r"threshold is in \[0, 1\); got 1.0"),
        (lambda: AutoScale(window=0), "window is an integer of at least 1; got 0"),
    ],
)
def test_what_cannot_be_summed_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
