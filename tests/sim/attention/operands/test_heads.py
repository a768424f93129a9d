"""Which elements of q, k and v share a scale (spec A-2)."""

import numpy as np
import pytest

from fp8ref.formats import BFLOAT16, E4M3FN
from fp8ref.sim.attention.operands import heads as head_scaling
from fp8ref.sim.quantize import scaling

F = np.float32


def tensor(shape=(2, 4, 200, 64), seed=0) -> np.ndarray:
    return (
        np.random.default_rng(seed).normal(size=shape)
        * np.exp(np.random.default_rng(seed + 1).normal(size=(*shape[:2], 1, 1)))
    ).astype(F)


def groups(granularity: str, along_tokens: bool):
    """Slices of a tensor [2, 4, 200, 64] with 2 heads of keys, in the order of the scales."""
    if granularity == "tensor":
        return [(slice(None),)]
    if granularity == "head":
        return [(b, slice(2 * g, 2 * g + 2)) for b in range(2) for g in range(2)]
    if granularity == "rows_128":
        return [(b, h, slice(t, t + 128)) for b in range(2) for h in range(4) for t in (0, 128)]
    if along_tokens:
        return [
            (b, h, slice(t, t + 32), d)
            for b in range(2)
            for h in range(4)
            for t in range(0, 200, 32)
            for d in range(64)
        ]
    return [
        (b, h, t, slice(d, d + 32))
        for b in range(2)
        for h in range(4)
        for t in range(200)
        for d in (0, 32)
    ]


@pytest.mark.parametrize(
    ("granularity", "policy", "along_tokens"),
    [
        ("tensor", "te_current", False),
        ("head", "te_current", False),
        ("rows_128", "torchao", False),
        ("mx_1x32", "mx_rceil", False),
        ("mx_1x32", "mx_rceil", True),
    ],
)
def test_a_group_is_quantized_as_a_tensor(granularity, policy, along_tokens):
    x = tensor()
    found = head_scaling.quantize(
        x, E4M3FN, granularity, policy, heads=2, along_tokens=along_tokens
    )
    for n, group in enumerate(groups(granularity, along_tokens)[:600]):
        alone = scaling.quantize(x[group], E4M3FN, policy=policy)
        np.testing.assert_array_equal(found.codes[group], alone.codes)
        assert found.scale.reshape(-1)[n] == alone.scale
        assert found.scale_inv.reshape(-1)[n] == alone.scale_inv
    assert found.scale.size == len(groups(granularity, along_tokens))


def test_high_precision_is_rounded():
    x = tensor()
    found = head_scaling.quantize(x, BFLOAT16, None, "te_current", heads=2)
    assert found.codes is None
    assert (found.values != x).any()
    assert found.scale == 1


def test_a_given_scale_is_taken():  # H-1: of earlier steps
    x = tensor()
    found = head_scaling.quantize(x, E4M3FN, "tensor", "te_delayed", heads=2, scale=F(64))
    assert found.scale_inv == F(1 / 64)
    assert found.amax == np.abs(x).max()
    assert found.values.max() == 448  # clipped


@pytest.mark.parametrize(
    ("scale", "said"), [(np.ones(2, F), "shape"), (F(0), "positive"), (F(np.inf), "finite")]
)
def test_given_scales_that_are_refused(scale, said):
    with pytest.raises(ValueError, match=said):
        head_scaling.quantize(tensor(), E4M3FN, "tensor", "te_delayed", heads=2, scale=scale)


def test_features_that_blocks_do_not_divide():
    with pytest.raises(ValueError, match="divisible by 32"):
        head_scaling.quantize(tensor((1, 1, 4, 48)), E4M3FN, "mx_1x32", "mx_rceil", heads=1)
