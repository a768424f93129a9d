"""Scores, P and dS that PyTorch's attention keeps if asked (spec A-4, A-8, A-15), next to the
simulator's.
"""

import numpy as np
import pytest
import torch
from helpers.attention.attention_cases import SCALE, backward_options, call_options, integers

from fp8ref.sim.attention import attention as simulator
from fp8ref.sim.attention.gradients import gradients as attention_gradients
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import Mask
from fp8ref.torch.attention import attention
from fp8ref.torch.attention.operands.kept import Kept
from fp8ref.torch.attention.operands.problem import Shape

MASK = Mask(causal=True, window=(40, None))


@pytest.mark.parametrize("arithmetic", ["fast", "stated"])
def test_of_integers_all_matrices_are_the_simulators(arithmetic):
    arrays = integers(b=1, h=2, heads=1, tq=70, tk=150, d=32)
    q, k, v, do = map(torch.from_numpy, arrays)
    how = {"variant": "cudnn", "mask": MASK, "scale": SCALE}
    right = simulator.forward(*arrays[:3], **call_options(keep_p=True, keep_s=True, **how))
    found = attention.forward(
        q, k, v, **call_options(keep_p=True, keep_s=True, arithmetic=arithmetic, **how)
    )
    np.testing.assert_array_equal(found.scores.numpy(), right.scores)
    names = ["p_codes", "ds", "ds_codes"]
    how["keep_ds"] = True
    of_sim = attention_gradients.backward(
        arrays[3], *arrays[:3], right, **backward_options(**how)
    ).matrices
    call = Call(arithmetic=arithmetic, **how)
    mine = attention.backward(do, q, k, v, found, variant=call).matrices
    assert list(mine) == names
    if arithmetic == "stated":
        np.testing.assert_array_equal(found.p_codes.numpy(), right.p_codes)
        np.testing.assert_array_equal(mine["p_codes"].numpy(), of_sim["p_codes"])
    # dP is a sum of products of up to 9 bits over 32 features: its float32 sum is exact.
    # Exponentials are two units off, log-sum-exps one of 8.
    np.testing.assert_allclose(
        mine["ds"].numpy(), of_sim["ds"], rtol=2**-18, atol=2**-18 * np.abs(of_sim["ds"]).max()
    )


def test_what_a_variant_has_not_is_refused():
    q, k, v, do = map(torch.from_numpy, integers(b=1, h=1, heads=1, tq=4, tk=4, d=32))
    result = attention.forward(q, k, v, variant="mxfp8")
    call = Call(variant="mxfp8", keep_ds=True)  # of blocks dS has no one code
    assert list(attention.backward(do, q, k, v, result, variant=call).matrices) == ["p_codes", "ds"]
    call = Call(variant="exact", keep_ds=True)
    result = attention.forward(q, k, v, variant="exact")
    with pytest.raises(ValueError, match=r"variant 'exact' keeps nothing; got keep_ds"):
        attention.backward(do, q, k, v, result, variant=call)


def test_parts_are_put_where_they_belong_and_others_are_not_computed():
    kept, shape = Kept(["scores"], (2, 6, 4), torch.device("cpu")), Shape(1, 4, 2, 3, 4, 8)
    kept.put("scores", (slice(0, 1), slice(2, 4), slice(0, 2)), torch.ones(1, 2, 2))
    kept.put("ds", (slice(0, 1),), torch.ones(1, 6, 4))
    assert "ds" not in kept
    (found,) = kept.whole(shape).values()  # [B, H, Tq, Tk] of [B x Hkv, Tq x G, Tk]
    assert found.shape == (1, 4, 3, 4)
    assert (found[0, :2, 1, :2] == 1).all()
    assert found.isneginf().sum() == found.numel() - 4
    assert list(kept.whole(shape)) == ["scores"]
