"""Which inputs attention takes, and which keys a query sees (spec A-3, A-12)."""

import numpy as np
import pytest
from helpers.attention.attention_cases import call_options

from fp8ref.sim.attention import attention
from fp8ref.sim.attention.operands.inputs import visible
from fp8ref.spec.attention.variants import Mask

F = np.float32


def inputs(b=1, h=4, heads=2, tq=70, tk=150, d=64):
    rng = np.random.default_rng(0)
    return tuple(
        rng.normal(size=(b, n, t, d)).astype(F) for n, t in ((h, tq), (heads, tk), (heads, tk))
    )


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (Mask(), [(0, 5), (0, 5), (0, 5)]),
        (Mask(causal=True), [(0, 3), (0, 4), (0, 5)]),
        (Mask(causal=True, alignment="start"), [(0, 1), (0, 2), (0, 3)]),
        (Mask(window=(1, 0)), [(1, 3), (2, 4), (3, 5)]),
        (Mask(window=(None, 1)), [(0, 4), (0, 5), (0, 5)]),
        (Mask(causal=True, window=(0, 9)), [(2, 3), (3, 4), (4, 5)]),
    ],
    ids=str,
)
def test_three_queries_of_five_keys(mask, expected):
    low, high = visible(3, 5, mask)
    assert [(int(a), int(min(b, 5))) for a, b in zip(low, high, strict=True)] == expected


def test_what_is_refused():
    q, k, v = inputs()
    for given, said in [
        ({"variant": "fa5"}, "variant is a Variant or"),
        ({"mask": "causal"}, "mask is a Mask"),
        ({"scale": -1.0}, "softmax scale"),
        ({"seed": 3}, "has no rotation"),
        ({"variant": "bf16", "keep_p": True}, "codes of FP8 probabilities"),
        ({"scales": {"o": F(1)}}, "takes scales for q, k, v; got 'o'"),
        ({"scales": {"q": F(1)}}, "the shape of a passed scale"),
        ({"documents": np.zeros((1, 3), int)}, "documents are integers"),
        ({"documents": (np.zeros((1, 70)), np.zeros((1, 150)))}, "documents are integers"),
    ]:
        with pytest.raises(ValueError, match=said):
            attention.forward(q, k, v, **call_options(**{"variant": "fa3"} | given))
    with pytest.raises(ValueError, match="finite tensors; got NaN or infinity in k"):
        attention.forward(q, np.where(k > 2, np.inf, k).astype(F), v, variant="fa3")
    with pytest.raises(ValueError, match="with Hkv dividing H"):
        attention.forward(q[:, :3], k, v, variant="fa3")
    with pytest.raises(ValueError, match=r"q is non-empty .* got float32 \(0,"):
        attention.forward(q[:0], k, v, variant="fa3")
    with pytest.raises(ValueError, match="float32, float16 or bfloat16"):
        attention.forward(q.astype(np.float64), k, v, variant="fa3")
    with pytest.raises(ValueError, match="power of two"):
        attention.forward(*(x[..., :48] for x in (q, k, v)), variant="fa3_paper")
    with pytest.raises(ValueError, match="takes scales for no role"):
        attention.forward(q, k, v, variant="bf16", scales={"q": F(1)})
