"""Tokens before heads, and padding, in the simulator and both backends (spec A-3)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers.attention import attention_cases as cases
from helpers.attention.attention_cases import backward_options, call_options

from fp8ref.jax.attention import attention as fj
from fp8ref.sim.attention import attention as sim
from fp8ref.sim.attention.gradients import gradients as sim_gradients
from fp8ref.spec.attention.variants import VARIANTS, differentiated
from fp8ref.torch.attention import attention as ft

F = np.float32
SINKS = np.array([0.5, -1, 2, 0], F)
ROLES = ("o", "dq", "dk", "dv")


def of_sim(arrays, documents, *, layout="bhtd", sinks=None, **how):
    q, k, v, do = arrays
    more = how | {"documents": documents, "layout": layout, "sinks": sinks}
    result = sim.forward(q, k, v, **call_options(**more))
    gradients = sim_gradients.backward(do, q, k, v, result, **backward_options(**more))
    return (result.o, *gradients[:3]), gradients.dsinks


def of_torch(arrays, documents, *, layout="bhtd", sinks=None, **how):
    *given, do = map(torch.tensor, arrays)
    of_sinks = None if sinks is None else torch.tensor(sinks).requires_grad_()
    given = [x.requires_grad_() for x in given]
    ids = documents and tuple(map(torch.tensor, documents))
    options = call_options(documents=ids, layout=layout, sinks=of_sinks, **how)
    o = ft.apply(*given, **options)
    o.backward(do)
    found = [x.detach().numpy() for x in (o, *(x.grad for x in given))]
    return found, None if of_sinks is None else of_sinks.grad.numpy()


def of_jax(arrays, documents, *, layout="bhtd", sinks=None, **how):
    *given, do = map(jnp.asarray, arrays)
    ids = documents and tuple(map(jnp.asarray, documents))

    def attend(q, k, v, sinks):
        return fj.apply(q, k, v, **call_options(layout=layout, documents=ids, sinks=sinks, **how))

    @jax.jit  # in one program: to compile each operation by itself takes three times as long
    def both(given, sinks, do):
        o, pull = jax.vjp(attend, *given, sinks)
        return o, pull(do)

    o, (*found, dsinks) = both(given, None if sinks is None else jnp.asarray(sinks), do)
    return [np.asarray(x) for x in (o, *found)], None if dsinks is None else np.asarray(dsinks)


ROOMS = {"sim": of_sim, "torch": of_torch, "jax": of_jax}


def padded(value):
    """q, k, v and do with ``value`` in padding, and documents with it in the middle and at the
    ends.
    """
    arrays = cases.normal(d=32)
    of_q, of_k = cases.documents()
    of_q[:, 60:], of_k[:, 130:], of_q[1, :4], of_k[1, 10:13] = -1, -1, -5, -7
    ids = of_q, of_k, of_k, of_q
    filled = [
        np.where((i < 0)[:, None, :, None], F(value), x) for x, i in zip(arrays, ids, strict=True)
    ]
    return filled, (of_q, of_k)


def bits(x):
    return np.asarray(x).view(np.uint32)


@pytest.mark.grid(3)
@pytest.mark.parametrize("arithmetic", ["fast", "stated"])
@pytest.mark.parametrize("name", ["cudnn", "mxfp8", "fa4", "bf16", "exact", "fa3_paper"])
@pytest.mark.parametrize("room", ROOMS)
def test_padding_is_not_read(room, name, arithmetic):  # A-3; TransformerEngine#2892
    """NaN in padding changes no bit, and its output and gradients are +0."""
    variant = VARIANTS[name] if VARIANTS[name].backward else differentiated(name, "bf16")
    how = {"variant": variant, "sinks": SINKS} | (
        {} if room == "sim" else {"arithmetic": arithmetic}
    )
    (zeros, ids), (nan, _) = padded(0), padded(np.nan)
    assert np.isnan(nan[0]).any()
    (wanted, of_sinks), (found, dsinks) = (
        ROOMS[room](zeros, ids, **how),
        ROOMS[room](nan, ids, **how),
    )
    for role, one, mine in zip(ROLES, wanted, found, strict=True):
        np.testing.assert_array_equal(bits(mine), bits(one), err_msg=role)
        padding = ids[0] if role in ("o", "dq") else ids[1]
        assert not bits(mine.swapaxes(1, 2)[padding < 0]).any(), role
        assert np.isfinite(mine).all()
    np.testing.assert_array_equal(dsinks, of_sinks)
    if room != "sim" and arithmetic == "stated" and name in ("cudnn", "exact"):
        for role, one, mine in zip(
            ROLES,
            ROOMS["sim"](nan, ids, **{k: x for k, x in how.items() if k != "arithmetic"})[0],
            found,
            strict=True,
        ):
            np.testing.assert_array_equal(mine, one, err_msg=role)


def test_tokens_of_one_negative_document_see_nothing():
    """-1 of a query and -1 of a key are no document that they share."""
    q, k, v, _ = cases.normal(b=1)
    found = sim.forward(
        q, k, v, variant="fa4", documents=(np.full((1, 70), -1), np.full((1, 150), -1))
    )
    assert not bits(found.o).any()
    assert (found.lse == -np.inf).all()


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("masked", ["causal", "window"])
def test_tokens_before_heads(room, masked):
    """The bits of the transpose, in q, k, v, o and gradients."""
    arrays = cases.normal(d=32)
    how = {"variant": "cudnn", "mask": cases.MASKS[masked], "sinks": SINKS}
    wanted, of_sinks = ROOMS[room](arrays, None, **how)
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays]
    found, dsinks = ROOMS[room](turned, None, layout="bthd", **how)
    for role, one, mine in zip(ROLES, wanted, found, strict=True):
        np.testing.assert_array_equal(mine.swapaxes(1, 2), one, err_msg=role)
    np.testing.assert_array_equal(dsinks, of_sinks)


def test_tokens_before_heads_without_autograd():
    """forward and backward of both backends, whose result has heads first but for o."""
    arrays = cases.normal(d=32)
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays]
    for room, make in ((ft, torch.tensor), (fj, jnp.asarray)):
        results = []
        for given, layout in ((arrays, "bhtd"), (turned, "bthd")):
            q, k, v, do = map(make, given)
            options = call_options(variant="cudnn", layout=layout)
            result = room.forward(q, k, v, **options)
            gradients = room.backward(do, q, k, v, result, **options)
            assert result.o.shape == q.shape
            results.append(
                [
                    np.asarray(x)
                    for x in (result.lse, result.tensors["q"].scale, result.o, *gradients[:3])
                ]
            )
        for i, (one, mine) in enumerate(zip(*results, strict=True)):
            np.testing.assert_array_equal(mine.swapaxes(1, 2) if i > 1 else mine, one)


@pytest.mark.parametrize("room", ROOMS)
def test_shapes_of_the_other_layout_only_are_refused(room):
    q, k, v, do = cases.normal(b=1, h=4, heads=2, tq=75, tk=60, d=32)
    turned = [x.swapaxes(1, 2) for x in (q, k, v, do)]
    with pytest.raises(
        ValueError,
        match=r"heads of k divide those of q; got .*75, 4, 32.* which are of layout 'bthd'. Pass "
        r"layout='bthd'",
    ):
        ROOMS[room](turned, None, variant="cudnn")
    with pytest.raises(ValueError, match=r"which are of layout 'bhtd'. Pass layout='bhtd'"):
        ROOMS[room]((q, k, v, do), None, variant="cudnn", layout="bthd")
    with pytest.raises(ValueError, match="layout is one of bhtd, bthd; got 'BTHD'"):
        ROOMS[room]((q, k, v, do), None, variant="cudnn", layout="BTHD")


@pytest.mark.parametrize("room", ROOMS)
def test_values_of_fewer_features_are_padded_by_the_caller(room):  # TransformerEngine#2868
    """The shapes of multi-head latent attention are refused with the remedy, which gives what it
    says.
    """
    q, k, v, do = cases.normal(b=1, h=2, heads=2, d=192)
    with pytest.raises(
        ValueError,
        match=r"192 of q and k, 128 of v. Pad v with zeros to 192 features, and cut the output: "
        r"o\[..., :128\]",
    ):
        ROOMS[room]((q, k, v[..., :128], do), None, variant="cudnn")
    v[..., 128:], do[..., 128:] = 0, 0
    (o, _, _, dv), _ = ROOMS[room]((q, k, v, do), None, variant="cudnn")
    assert not o[..., 128:].any()
    assert not dv[..., 128:].any()
    assert o[..., :128].any()
