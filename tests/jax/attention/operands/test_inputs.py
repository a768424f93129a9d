"""Masks of attention are the simulator's; test_attention has what is refused (spec A-3, A-4)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attention import attention_cases as cases

from fp8ref.jax.attention.operands import inputs as inputs
from fp8ref.sim.attention.operands import inputs as sim
from fp8ref.spec.attention import variants
from fp8ref.spec.attention.variants import VARIANTS

FA3 = inputs.DeviceCall(variant="fa3")


@pytest.mark.parametrize("mask", cases.MASKS)
@pytest.mark.parametrize(("tq", "tk"), [(70, 150), (150, 70), (1, 9)])
def test_keys_that_are_seen(mask, tq, tk):
    for mine, other in zip(
        inputs.visible(tq, tk, cases.MASKS[mask]),
        sim.visible(tq, tk, cases.MASKS[mask]),
        strict=True,
    ):
        keys = np.arange(tk)
        np.testing.assert_array_equal(keys < mine[:, None], keys < other[:, None])


def test_factors_of_scores():
    for name, wanted in (
        ("cudnn", np.float32(1 / np.sqrt(80))),
        ("fa3", np.float32(np.float64(np.float32(1 / np.sqrt(80))) * np.log2(np.e))),
    ):
        assert inputs.DeviceCall(variant=name).score_factor(80) == wanted
    assert hash(inputs.DeviceCall(variant="fa3")) == hash(inputs.DeviceCall.resolve("fa3"))


def test_roles_with_scales():
    roles = ("q", "s", "o", "ds")
    assert variants.check_scales(None, VARIANTS["bf16"], roles) == {}
    assert variants.check_scales({"q": 1}, VARIANTS["fa3"], roles) == {"q": 1}
    for role in ("s", "o", "ds"):
        with pytest.raises(ValueError, match=f"takes scales for q; got '{role}'"):
            variants.check_scales({role: 1}, VARIANTS["fa3"], roles)


def test_documents():
    x = jnp.ones((2, 1, 4, 64))
    given = inputs.prepare(x, x, x, FA3, np.zeros((2, 4), np.int64), None)
    assert [ids.dtype for ids in given.documents] == [jnp.int32] * 2
    far = np.full((2, 4), 1 << 32)  # cut to 32 bits, it would be document 0
    with pytest.raises(
        ValueError, match=r"documents have numbers below 2\^31 in 32-bit JAX; got 4294967296"
    ):
        inputs.prepare(x, x, x, FA3, (np.zeros((2, 4), int), far), None)
    given = inputs.prepare(x, x, x, FA3, -far, None)
    assert [ids.max() for ids in given.documents] == [-2, -1]  # padding
    with jax.enable_x64(True):
        given = inputs.prepare(x, x, x, FA3, far, None)
    assert np.asarray(given.documents[1]).min() == 1 << 32
    with pytest.raises(
        ValueError, match=r"documents are integers: .* got \[\('float32', \(2, 4\)\)"
    ):
        inputs.prepare(x, x, x, FA3, np.zeros((2, 4), np.float32), None)


def test_mesh_axes_are_a_tuple_whatever_holds_them():
    call = inputs.DeviceCall(variant="cudnn", over=["x", "y"])
    assert call.over == ("x", "y")
    assert hash(call) == hash(inputs.DeviceCall(variant="cudnn", over=("x", "y")))
