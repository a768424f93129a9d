"""Somebody's attention is called with arrays of its framework, dtype, layout and names, and
checked.
"""

import functools

import ml_dtypes
import numpy as np
import pytest

from fp8ref.conformance.attention import subjects
from fp8ref.conformance.attention.subjects import Question, wrap
from fp8ref.conformance.kit.subject import ConformanceError, RefusedError
from fp8ref.sim.attention import attention
from fp8ref.sim.attention.operands import heads as head_scaling
from fp8ref.spec.attention.variants import FULL, Mask

RNG = np.random.default_rng(0)
Q, K, V = (
    RNG.standard_normal((2, heads, n, 64)).astype(np.float32)
    for heads, n in ((4, 5), (2, 7), (2, 7))
)


def fa4(q, k, v, mask=FULL):
    return attention.forward(q, k, v, variant="fa4", mask=mask)


def of_torch(query, key, value, is_causal=False):
    import torch

    if not isinstance(query, torch.Tensor):
        raise TypeError("a tensor is needed")
    found = fa4(*(x.float().numpy() for x in (query, key, value)), mask=Mask(causal=is_causal))
    return torch.tensor(found.o).bfloat16(), torch.tensor(found.lse)


def of_jax(q, k, v, *, causal=False, window=None):
    import jax.numpy as jnp

    found = fa4(
        *(np.asarray(x, np.float32) for x in (q, k, v)), mask=Mask(causal=causal, window=window)
    )
    return {"out": jnp.asarray(found.o)}


def tokens_first(q, k, v, causal=False, window_size=(-1, -1)):
    window = (
        None
        if window_size == (-1, -1)
        else tuple(None if side == -1 else side for side in window_size)
    )
    found = fa4(
        *(x.transpose(0, 2, 1, 3) for x in (q, k, v)), mask=Mask(causal=causal, window=window)
    )
    return found.o.transpose(0, 2, 1, 3), found.lse


def of_jax_nn(query, key, value, *, mask=None, is_causal=False, local_window_size=None):
    """Named as jax.nn.dot_product_attention: ``mask`` is an array."""
    assert mask is None
    window = local_window_size and tuple(
        None if side >= key.shape[2] else side for side in local_window_size
    )
    return fa4(query, key, value, mask=Mask(causal=is_causal, window=window)).o


def of_codes(q, k, v, q_descale, k_descale, v_descale):
    """float8_e4m3fn and scale_inv [B, Hkv]."""
    x = []
    for codes, inverse in ((q, q_descale), (k, k_descale), (v, v_descale)):
        assert codes.dtype == ml_dtypes.float8_e4m3fn
        heads = np.repeat(inverse, codes.shape[1] // inverse.shape[1], axis=1)[:, :, None, None]
        x.append(codes.astype(np.float32) * heads)
    return attention.forward(*x, variant="fa4").o


@pytest.mark.parametrize(
    ("function", "layout", "framework", "dtype"),
    [
        (fa4, "BHTD", "numpy", "float32"),
        (of_torch, "BHTD", "torch", "float32"),
        (of_jax, "BHTD", "jax", "float32"),
        (tokens_first, "BTHD", "numpy", "float32"),
        (of_jax_nn, "BHTD", "numpy", "float32"),
        (functools.partial(attention.forward, variant="fa4"), "BHTD", "numpy", "float32"),
    ],
)
def test_arrays_layouts_and_masks(function, layout, framework, dtype):
    found = wrap(function, layout=layout, framework=framework)
    assert (found.subject.framework, found.dtype, found.layout) == (framework, dtype, layout)
    for mask in (FULL, Mask(causal=True), Mask(window=(2, None)), Mask(causal=True, window=(1, 1))):
        if found.takes(mask):
            expected = fa4(Q, K, V, mask=mask)
            answer = found.ask(Question(Q, K, V, mask))
            np.testing.assert_array_equal(answer.o, expected.o)
            if answer.lse is not None:
                np.testing.assert_array_equal(answer.lse, expected.lse)
    assert found.takes(Mask(causal=True))
    assert found.takes(Mask(window=(1, 1))) == (function is not of_torch)
    assert found.takes_documents == isinstance(function, functools.partial)


def test_the_framework_is_that_of_the_output():
    assert wrap(of_torch).subject.framework == "torch"
    assert wrap(of_jax).subject.framework == "jax"


def test_codes_and_their_scales():
    found = wrap(of_codes)
    assert found.takes_codes
    x = [Q * 100, K, V / 7]
    heads = [head_scaling.quantize(one, found.fmt, "head", "te_current", heads=2) for one in x]
    dequantized = [
        one.values * head_scaling.spread(one.scale_inv, one.values.shape, "head") for one in heads
    ]
    np.testing.assert_array_equal(
        found.ask(Question(*x)).o, attention.forward(*dequantized, variant="fa4").o
    )


def test_documents_are_passed():
    found = wrap(functools.partial(attention.forward, variant="exact"))
    documents = np.repeat([[0, 1]], 2, axis=0).repeat([3, 4], axis=1)
    question = Question(K, K, V, documents=(documents, documents))
    np.testing.assert_array_equal(
        found.ask(question).o, attention.forward(K, K, V, variant="exact", documents=documents).o
    )


def test_bfloat16_alone():
    import torch

    def narrow(q, k, v):
        assert q.dtype == torch.bfloat16
        return of_torch(q, k, v)

    found = wrap(narrow, framework="torch")
    assert found.dtype == "bfloat16"
    rounded = [x.astype(ml_dtypes.bfloat16).astype(np.float32) for x in (Q, K, V)]
    np.testing.assert_array_equal(found.ask(Question(*rounded)).o, fa4(*rounded).o)


def test_which_functions_are_attention():
    assert all(
        subjects.is_attention(function)
        for function in (fa4, of_torch, of_jax, functools.partial(attention.forward, variant="fa4"))
    )
    assert not any(
        subjects.is_attention(function)
        for function in (lambda x: x, lambda a, b: a, lambda p, g, state: p, np.add)
    )


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (
            lambda q, k, v: 1,
            ConformanceError,
            "returned a int; o, \\(o, lse\\), or an object with o is needed",
        ),
        (lambda q, k, v: q[:, :, :1], ConformanceError, "it has q's shape"),
        (
            lambda q, k, v: q + np.random.default_rng().random(),
            ConformanceError,
            "does not repeat itself",
        ),
        (lambda q, k, v: 1 / 0, RefusedError, "ZeroDivisionError"),
    ],
)
def test_what_is_no_attention_is_refused(function, error, message):
    with pytest.raises(error, match=message):
        wrap(function, framework="numpy")


def test_a_changed_input_is_refused():
    found = wrap(fa4)

    def changes(q, k, v):
        k += 1
        return v

    import dataclasses

    changed = dataclasses.replace(
        found, subject=dataclasses.replace(found.subject, function=changes)
    )
    with pytest.raises(ConformanceError, match="changed its input"):
        changed.ask(Question(K, K, V))


def test_an_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="layout is one of BHTD, BTHD; got 'TBHD'"):
        wrap(fa4, layout="TBHD")
