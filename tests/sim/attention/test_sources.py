"""Every variant against its source's formulas, one number at a time (spec A-2 to A-11)."""

import ml_dtypes
import numpy as np
import pytest
from helpers.attention import attention_sources as source
from helpers.attention.attention_cases import call_options

from fp8ref.sim.attention import attention
from fp8ref.sim.attention.operands import hadamard
from fp8ref.spec.attention.variants import VARIANTS, Mask

F = np.float32
# the columns of v are independent of each other: some are enough
QUERIES, COLUMNS = (2, (0, 1, 37, 62))
# of two queries, and of at most 300 keys
DOCUMENTS = (np.array([[1, 9]]), np.repeat([0, 1, 2], 100)[None])
MASKS = {
    "full": (Mask(), lambda i, j, t: True),
    "causal": (Mask(causal=True), lambda i, j, t: j <= i + t - QUERIES),
    "window": (
        Mask(causal=True, window=(100, None)),
        lambda i, j, t: i + t - QUERIES - 100 <= j <= i + t - QUERIES,
    ),
    "from the start": (Mask(causal=True, alignment="start"), lambda i, j, t: j <= i),
    # the second query sees no key
    "documents": (Mask(), lambda i, j, t: DOCUMENTS[0][0, i] == DOCUMENTS[1][0, j]),
}
CASES = [(64, "full"), (64, "from the start"), (64, "documents"), (128, "causal"), (256, "window")]


def inputs(d: int, keys: int, *, seed: int = 0):
    """(q [1, 2, 2, D], k, v [1, 1, Tk, D]) with features of different sizes."""
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.normal(size=d) / 2)
    q, k, v = (
        rng.normal(size=(1, h, t, d)) * spread for h, t in ((2, QUERIES), (1, keys), (1, keys))
    )
    return tuple((x * F(1.5)).astype(ml_dtypes.bfloat16).astype(F) for x in (q, k, v))


def seen_by(mask: str, keys: int):
    _, sees = MASKS[mask]
    return lambda i, j: sees(i, j, keys)


def of_head(x: np.ndarray):
    """(e4m3 numbers, scale_inv) of all of x, by te_current's rule."""
    scale = F(F(448) / np.abs(x).max())
    return np.vectorize(source.e4m3)(x * scale), F(F(1) / scale)


def run(name: str, q, k, v, mask: str, **kwargs):
    documents = (DOCUMENTS[0], DOCUMENTS[1][:, : k.shape[2]]) if mask == "documents" else None
    return attention.forward(
        q, k, v, **call_options(variant=name, mask=MASKS[mask][0], documents=documents, **kwargs)
    )


def check(found, j: int, o: np.ndarray, lse: np.ndarray) -> None:
    np.testing.assert_array_equal(found.o[0, j][:, COLUMNS], o.astype(ml_dtypes.bfloat16).astype(F))
    np.testing.assert_array_equal(found.lse[0, j].view(np.uint32), lse.view(np.uint32))


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("name", "d", "mask"),
    # the others differ from these in one decision or two
    [(name, *case) for name in ("fa3", "fa4") for case in CASES]
    + [
        (name, *case)
        for name in ("fa3_promoted", "fa4_threshold4", "bf16")
        for case in ((64, "full"), (128, "causal"))
    ],
)
def test_flash_attention(name, d, mask):
    tile = {
        "fa3": {64: 160, 128: 224, 256: 64 if mask == "window" else 128},
        "bf16": {
            64: 192 if mask in ("full", "documents") else 128,
            128: 176 if mask in ("full", "documents") else 128,
            256: 64 if mask == "window" else 80,
        },
    }.get(name.split("_")[0], {64: 128, 128: 128, 256: 128})[d]
    keys = tile + 21
    q, k, v = inputs(d, keys)
    found = run(name, q, k, v, mask)
    # q's heads share a scale: one head of keys uses them
    (dk, of_k), (dv, of_v), (dq, of_q) = (of_head(k), of_head(v), of_head(q))
    more = {"unit": source.HOPPER, "order": "quad"}
    if name.startswith("fa4"):
        more = {
            "unit": source.BLACKWELL,
            "order": "packed",
            "separate": True,
            "threshold": 4.0 if name == "fa4_threshold4" else 0.0,
        }
    if name == "fa3_promoted":
        more["promoted"] = True
    if name == "bf16":
        more |= {"unit": None, "offset": 0, "narrow": source.bfloat16}
        dq, dk, dv, of_q, of_k, of_v = q, k, v, F(1), F(1), F(1)
    largest = 0.0
    for j in range(2):
        given = {
            "scale": F(1 / np.sqrt(d)),
            "dq": of_q,
            "dk": of_k,
            "dv": of_v,
            "tile": tile,
            **more,
        }
        o, lse, most = source.flash_attention(
            dq[0, j], dk[0, 0], dv[0, 0][:, COLUMNS], seen_by(mask, keys), **given
        )
        largest = max(largest, most)
        check(found, j, o, lse)
    assert found.amaxes["s"] == F(largest)


@pytest.mark.grid(2)
@pytest.mark.parametrize(("d", "mask"), CASES)
# the factors attn_scale, descale_q, descale_k; o in e4m3
def test_cudnn(d, mask):
    keys = 149
    q, k, v = inputs(d, keys)
    found = run("cudnn", q, k, v, mask)
    (dq, of_q), (dk, of_k), (dv, of_v) = of_head(q), of_head(k), of_head(v)
    factors, inverse_s = (F(1 / np.sqrt(d)), of_q, of_k), F(F(1) / F(448))

    def values(p, start, n):
        return F(F(source.exact_sum(p, dv[0, 0, start : start + len(p), n]) * of_v) * inverse_s)

    tensors, scale = found.tensors["o"], F(F(448) / found.amaxes["o"])
    assert tensors.scale == scale
    for j in range(2):
        given = {
            "factors": lambda i, j: factors,
            "s_scale": 448,
            "of_values": values,
            "columns": COLUMNS,
        }
        o, lse = source.cudnn(dq[0, j], dk[0, 0], seen_by(mask, keys), **given)
        np.testing.assert_array_equal(
            tensors.values[0, j][:, COLUMNS], np.vectorize(source.e4m3)(o * scale)
        )
        np.testing.assert_array_equal(found.lse[0, j].view(np.uint32), lse.view(np.uint32))


def mx(x: np.ndarray):
    """(e4m3 numbers, scales 2^n) of blocks of 32 along the last axis: amax / 448 rounded up to a
    power of two.
    """
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    power = 2.0 ** np.ceil(np.log2((amax / F(448)).astype(np.float64)))
    return np.vectorize(source.e4m3)(blocks / power).reshape(x.shape), power[..., 0]


@pytest.mark.parametrize(("d", "mask"), CASES)
def test_mxfp8(d, mask):  # blocks of 32 along the contracted axis, P times 16
    keys = 149
    q, k, v = inputs(d, keys)
    found = run("mxfp8", q, k, v, mask)
    (nq, sq), (nk, sk) = mx(q), mx(k)
    nv, sv = mx(np.pad(v, ((0, 0), (0, 0), (0, -keys % 32), (0, 0))).swapaxes(2, 3)[:, :, COLUMNS])

    def values(p, start, column):
        total, n = F(0), COLUMNS.index(column)
        for block in range(0, len(p), 32):
            numbers = p[block : block + 32]
            of_block = source.exact_sum(
                numbers, nv[0, 0, n, start + block : start + block + len(numbers)]
            )
            total = F(total + F(F(of_block * F(sv[0, 0, n, (start + block) // 32])) * F(1 / 16)))
        return total

    for j in range(2):

        def score(i, key, j=j):
            total = F(0)
            for n in range(d // 32):
                part = slice(n * 32, n * 32 + 32)
                total = F(
                    total
                    + F(
                        F(
                            source.exact_sum(nq[0, j, i, part], nk[0, 0, key, part])
                            * F(sq[0, j, i, n])
                        )
                        * F(sk[0, 0, key, n])
                    )
                )
            return total

        given = {
            "factors": lambda i, j: (F(1 / np.sqrt(d)),),
            "s_scale": 16,
            "of_values": values,
            "columns": COLUMNS,
            "score": score,
        }
        check(found, j, *source.cudnn(nq[0, j], nk[0, 0], seen_by(mask, keys), **given))


@pytest.mark.grid(2)
@pytest.mark.parametrize(("d", "mask"), CASES)
# scales of 128 rows, q and k rotated
def test_the_paper_of_flash_attention_3(d, mask):
    keys = 149
    q, k, v = inputs(d, keys)
    found = run("fa3_paper", q, k, v, mask, seed=5)
    signs = hadamard.signs(d, 5)
    rq, rk = rotated(q, signs), rotated(k, signs)
    (nk, of_k), (nv, of_v) = of_blocks(rk), of_blocks(v)
    scale = F(float(F(1 / np.sqrt(d))) * np.log2(np.e))
    for h in range(2):
        nq, of_q = of_head(rq[:, h])

        def values(p, start, n):
            column = nv[0, 0, start : start + len(p), n]
            return F(
                F(source.tensor_core(source.padded(p), source.padded(column), 0.0, source.HOPPER))
                * of_v[start // 128]
            )

        def factors(i, j, of_q=of_q):
            return F(of_q * of_k[j // 128]), scale

        def score(i, j, nq=nq):
            return F(source.tensor_core(nq[0, i], nk[0, 0, j], 0.0, source.HOPPER))

        given = {
            "factors": factors,
            "s_scale": 1,
            "of_values": values,
            "columns": COLUMNS,
            "score": score,
        }
        check(
            found,
            h,
            *source.cudnn(
                nq[0], nk[0, 0], seen_by(mask, keys), **given, order=-1, base="2", offset=8
            ),
        )


def of_blocks(x: np.ndarray):
    """(e4m3 numbers, scale_inv of each 128 tokens)."""
    numbers, inverses = zip(
        *(of_head(x[:, :, n : n + 128]) for n in range(0, x.shape[2], 128)), strict=True
    )
    return np.concatenate(numbers, axis=2), inverses


def rotated(x: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """x times signs, then the fast transform, the lowest bit of the index first, one number at a
    time.
    """
    n = len(signs)
    rows = [list(row) for row in (x * signs).reshape(-1, n)]
    for row in rows:
        for h in (2**bit for bit in range(n.bit_length() - 1)):
            for i in range(n):
                if not i & h:
                    row[i], row[i + h] = F(row[i] + row[i + h]), F(row[i] - row[i + h])
    return (np.array(rows, F) * F(1 / np.sqrt(n))).reshape(x.shape)


def test_every_variant_has_a_source_here():
    assert set(VARIANTS) == {
        "exact",
        "bf16",
        "fa3",
        "fa3_promoted",
        "fa4",
        "fa4_threshold4",
        "cudnn",
        "mxfp8",
        "fa3_paper",
    }
