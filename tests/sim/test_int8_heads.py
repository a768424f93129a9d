"""SageAttention's operands and softmax against a transcription of its kernel (spec A-26)."""

import dataclasses

import numpy as np
import pytest
import sage_source
from attention_sources import F, bfloat16

from fp8ref.attention import VARIANTS, Mask
from fp8ref.formats import BFLOAT16, E4M3FN
from fp8ref.sim import attention, cast, head_scaling, int8_heads

SAGE = VARIANTS["sage"]


def bf16(shape, seed, *, shift=0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return cast.round_to((rng.normal(size=shape) + shift).astype(F), BFLOAT16)


@pytest.mark.parametrize(
    ("tq", "tk", "d", "causal", "shift", "rows"),
    [
        (18, 150, 8, False, 0.0, range(18)),
        (3, 128, 16, False, 20.0, range(3)),
        (200, 200, 16, True, 3.0, [0, 63, 64, 127, 128, 199]),
        (5, 300, 64, False, 1.0, [4]),
        pytest.param(200, 200, 16, True, 3.0, range(200), marks=pytest.mark.slow),
    ],
)
def test_every_number_is_the_kernels(tq, tk, d, causal, shift, rows):
    """The mask under which both agree: the kernel's causal one begins at the first query. A row's last tile is that of its 64 queries."""
    q, k, v = (bf16((1, 1, t, d), seed, shift=shift * (seed == 2)) for seed, t in ((1, tq), (2, tk), (3, tk)))
    mask = Mask(causal=causal, alignment="start")
    found = attention.forward(q, k, v, variant=SAGE, mask=mask, keep_p=True)
    o, lse, operands, p = sage_source.sage(*(x[0, 0].tolist() for x in (q, k, v)), sage_source.scale_of(d), causal=causal, rows=rows)
    for role in ("q", "k"):
        codes, scales = operands[role]
        np.testing.assert_array_equal(found.tensors[role].codes[0, 0], codes, err_msg=role)
        spread = head_scaling.spread(found.tensors[role].scale_inv, found.tensors[role].values.shape, "int8_thread")
        np.testing.assert_array_equal(spread[0, 0, :, 0], scales, err_msg=role)
    np.testing.assert_array_equal(found.tensors["v"].values[0, 0], operands["v"][0])
    np.testing.assert_array_equal(found.tensors["v"].scale_inv[0, 0, 0], operands["v"][1])
    of_codes = cast.decode(found.p_codes[0, 0], E4M3FN)
    assert all(of_codes[place] == x for place, x in p.items() if not causal or place[1] <= place[0])
    rows = list(rows)
    np.testing.assert_array_equal(found.o[0, 0, rows], [[bfloat16(x) for x in o[n]] for n in rows])
    np.testing.assert_array_equal(found.lse[0, 0, rows], lse[rows])


def test_smoothing_leaves_the_softmax_as_it_is():
    """k with a large mean: without smoothing INT8 has no bits left for what differs between keys."""
    q, k, v = bf16((1, 2, 40, 64), 1), bf16((1, 2, 200, 64), 2, shift=30.0), bf16((1, 2, 200, 64), 3)
    exact = attention.forward(q, k, v, variant="exact")
    found = attention.forward(q, k, v, variant="sage")

    def error(o):
        return float(np.linalg.norm(o - exact.o) / np.linalg.norm(exact.o))

    # Of k and q codes are off by a two hundred and fiftieth of their amax at most, as P is by 2^-4 of itself; half of a tenth covers both.
    assert error(found.o) < 0.05
    assert error(found.o) < 0.25 * error(attention.forward(q, k, v, variant="fa3").o)
    # The correction is a bfloat16 number, off by 2^-9 of itself; codes move a score by 2^-7 of the product of amaxes, on average far less.
    bound = np.abs(int8_heads.taken(q, k)) / 8 * 2.0**-8 + 0.05
    assert (np.abs(found.lse - exact.lse) <= bound).all()


def test_rows_keys_and_features_share_scales():
    x = np.ones((1, 1, 256, 4), F)
    x[0, 0, 3], x[0, 0, 128 + 5] = 2, 4
    v = np.ones((1, 1, 256, 4), F)
    v[0, 0, 7, 2] = 8
    found = int8_heads.quantize(x, x, v, E4M3FN)
    amax = head_scaling.spread(found["q"].amax, x.shape, "int8_thread")[0, 0, :, 0]
    np.testing.assert_array_equal(np.flatnonzero(amax != 1), [3, 11, 133, 141])
    of_k = head_scaling.spread(found["k"].amax, x.shape, "int8_thread")[0, 0, :, 0]
    assert set(np.flatnonzero(of_k != of_k[0])) == {j for j in range(256) if j % 8 // 2 == (1 if j < 128 else 2)}
    np.testing.assert_array_equal(found["v"].amax[0, 0, 0], [1, 1, 8, 1])


def test_a_feature_of_zeros_has_scale_1():  # the kernel makes NaN of it
    q, k, v = bf16((1, 1, 4, 8), 1), bf16((1, 1, 20, 8), 2), bf16((1, 1, 20, 8), 3)
    v[..., 2] = 0
    found = attention.forward(q, k, v, variant="sage")
    assert found.tensors["v"].scale[0, 0, 0, 2] == 1
    assert not found.o[..., 2].any()


def test_rows_without_keys():
    q, k, v = bf16((1, 1, 4, 8), 1), bf16((1, 1, 2, 8), 2), bf16((1, 1, 2, 8), 3)
    found = attention.forward(q, k, v, variant="sage", mask=Mask(causal=True))
    assert not found.o[0, 0, :2].any()
    assert (found.lse[0, 0, :2] == -np.inf).all()
    assert np.isfinite(found.lse[0, 0, 2:]).all()


def test_what_is_refused():
    q = bf16((1, 1, 4, 8), 1)
    with pytest.raises(ValueError, match="takes no softcap and no sinks"):
        attention.forward(q, q, q, variant="sage", softcap=5.0)
    with pytest.raises(ValueError, match="takes no softcap and no sinks"):
        attention.forward(q, q, q, variant="sage", sinks=np.zeros(1, F))
    with pytest.raises(ValueError, match="takes scales for no role"):
        attention.forward(q, q, q, variant="sage", scales={"q": np.ones((), F)})
    with pytest.raises(ValueError, match="at most 128 features"):
        attention.forward(*[np.ones((1, 1, 2, 256), F)] * 3, variant="sage")
    with pytest.raises(ValueError, match="leaves bfloat16's range"):
        attention.forward(
            q, np.array([3e38, -3e38, -3e38], F).reshape(1, 1, 3, 1) * np.ones(8, F), np.ones((1, 1, 3, 8), F), variant="sage"
        )
    with pytest.raises(ValueError, match="granularity 'int8_thread'"):
        dataclasses.replace(SAGE, promotion=None)
    with pytest.raises(ValueError, match="are of granularity"):
        dataclasses.replace(VARIANTS["fa3"], smoothed=True)
