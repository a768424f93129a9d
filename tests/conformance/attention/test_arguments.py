"""A fault of one argument is found in that argument alone, and does not rename the variant (spec
A-17).
"""

import functools
import inspect

import numpy as np
import pytest

from fp8ref.conformance.attention import (
    arguments,
    descales,
    identify_attention,
    require_attention,
    subjects,
)
from fp8ref.sim.attention import attention
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import VARIANTS, Mask

FA4 = VARIANTS["fa4"]
KEPT = ("q", "k", "v", "causal", "window", "documents", "softcap", "sinks", "scale")


def attend(
    q,
    k,
    v,
    causal=False,
    window=None,
    documents=None,
    softcap=None,
    sinks=None,
    scale=None,
    *,
    fault=None,
):
    """fa4 with one fault."""
    long = fault == "aligned to the start above 128 queries" and 128 < q.shape[2] < k.shape[2]
    alignment = "start" if long or fault == "aligned to the start" else "end"
    if window is not None:
        change = {"left edge": (1, 0), "right edge": (0, -1), "both edges": (1, 1)}.get(
            fault, (0, 0)
        )
        window = tuple(
            None if side is None else side + by for side, by in zip(window, change, strict=True)
        )
        window = None if fault == "no window" else window[::-1] if fault == "swapped" else window
    mask = Mask(causal=causal and fault != "not causal", window=window, alignment=alignment)
    if fault == "modulo heads" and q.shape[1] != k.shape[1]:
        k, v = (np.tile(x, (1, q.shape[1] // k.shape[1], 1, 1)) for x in (k, v))
    if fault == "as many keys as queries":
        k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
    if fault == "ragged end":
        whole = max(k.shape[2] // 128 * 128, min(k.shape[2], 128))
        k, v = k[:, :, :whole], v[:, :, :whole]
    if fault == "scale of 64 features":
        scale = scale or 1 / 8
    documents = documents and {
        "no documents": None,
        "one sequence's": tuple(np.broadcast_to(x[:1], x.shape) for x in documents),
    }.get(fault, documents)
    if fault == "padding is a document" and documents:
        documents = tuple(np.where(x < 0, 9, x) for x in documents)
        q, k, v = map(np.nan_to_num, (q, k, v))
    if fault == "padding without NaN is a document" and documents and not np.isnan(q).any():
        documents = tuple(np.where(x < 0, 9, x) for x in documents)
    if fault == "padding is read" and documents and np.isnan(q).any():
        rows = attention.forward(q, k, v, variant="fa4", documents=documents)
        return rows._replace(o=np.full_like(rows.o, np.nan))
    softcap = {"no softcap": None, "another softcap": softcap and 2 * softcap}.get(fault, softcap)
    sinks = (
        None
        if fault == "no sinks" or sinks is None
        else sinks[::-1]
        if fault == "sinks of other heads"
        else sinks
    )
    scale = None if fault == "no scale" else scale
    return attention.forward(
        q,
        k,
        v,
        variant=Call(variant="fa4", mask=mask, softcap=softcap, scale=scale),
        documents=documents,
        sinks=sinks,
    )


def planted(fault):
    function = functools.partial(attend, fault=fault)
    function.__signature__ = inspect.Signature(
        [one for name, one in inspect.signature(attend).parameters.items() if name in KEPT]
    )
    return function


def of_codes(q, k, v, q_descale, k_descale, v_descale, *, fault=None):
    """fa4 of codes and scale_inv [B, Hkv]."""
    given = {"q": q_descale, "k": k_descale, "v": v_descale}
    if fault in ("q ignored", "k ignored", "v ignored"):
        given[fault[0]] = np.ones_like(given[fault[0]])
    if fault == "q and v swapped":
        given["q"], given["v"] = given["v"], given["q"]
    if fault == "k of another head":
        given["k"] = given["k"][:, ::-1]
    if fault == "v of sequence 0":
        given["v"] = np.broadcast_to(given["v"][:1], given["v"].shape)
    if fault == "q divides":
        given["q"] = 1 / given["q"]
    x = [
        x.astype(np.float32) * np.repeat(one, x.shape[1] // one.shape[1], axis=1)[..., None, None]
        for x, one in zip((q, k, v), given.values(), strict=True)
    ]
    scales = {role: 1 / one[..., None, None] for role, one in given.items()}
    return attention.forward(*x, variant="fa4", scales=scales)


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("function", "named"),
    [
        (planted("left edge"), "window is not"),  # MSLK#263
        (functools.partial(of_codes, fault="v ignored"), "v_descale is not"),  # vLLM#51363
        (planted("aligned to the start"), "causal mask, window are not"),
        (planted("no sinks"), "sinks are not"),
        (planted("modulo heads"), "heads are not"),
        (planted("no documents"), "documents, padding are not"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_the_variant_keeps_its_name_under_a_fault_of_one_argument(function, named):
    found = identify_attention(function, name="mine", expect="fa4")
    assert (found.variant, found.ok, found.exact, found.agreement.exact) == (
        "fa4",
        False,
        False,
        True,
    )
    assert found.message.startswith(f"mine has every bit of 'fa4'; its {named}\n")


def test_an_alignment_is_asked_and_not_fitted():
    found = wrong(planted("aligned to the start"), alignment="start")
    assert found == {}
    with pytest.raises(ValueError, match="alignment is one of end, start; got 'top'"):
        identify_attention(planted(None), alignment="top")


def wrong(function, alignment="end"):
    checked = arguments.compare(
        subjects.wrap(function, name="mine"), FA4, 256, alignment, exact=True
    )
    assert all(one.agreements for one in checked)
    return {one.name: one.first(True) for one in checked if one.differing(True)}


@pytest.mark.parametrize(
    ("fault", "argument"),
    [
        (None, []),
        ("aligned to the start", ["causal mask", "window"]),  # SageAttention#131
        ("aligned to the start above 128 queries", ["causal mask"]),
        ("not causal", ["causal mask"]),
        ("left edge", ["window"]),  # MSLK#263
        ("right edge", ["window"]),
        ("both edges", ["window"]),
        ("swapped", ["window"]),
        ("no window", ["window"]),
        ("modulo heads", ["heads"]),
        ("as many keys as queries", ["lengths"]),
        ("ragged end", ["lengths"]),
        ("scale of 64 features", ["features"]),
        ("no documents", ["documents", "padding"]),
        ("one sequence's", ["documents", "padding"]),
        ("padding is a document", ["padding"]),  # TransformerEngine#2892
        ("padding without NaN is a document", ["padding"]),
        ("padding is read", ["padding"]),
        ("no softcap", ["softcap"]),
        ("another softcap", ["softcap"]),
        ("no sinks", ["sinks"]),
        ("sinks of other heads", ["sinks"]),
        ("no scale", ["scale"]),
    ],
)
def test_a_fault_shows_in_its_argument_alone(fault, argument):
    found = wrong(planted(fault))
    assert sorted(found) == sorted(argument)
    assert all("of variant 'fa4'" in first.expected for first in found.values())


def without(lost, *, where):
    """fa4 that loses an argument in one of its paths."""

    def function(
        q, k, v, causal=False, window=None, documents=None, softcap=None, sinks=None, scale=None
    ):
        given = {
            "causal": causal,
            "window": window,
            "documents": documents,
            "softcap": softcap,
            "sinks": sinks,
            "scale": scale,
        }
        if where(given, q, k):
            given |= dict.fromkeys(lost)
        return attend(q, k, v, **given)

    return function


def in_causal(given, q, k):
    return given["causal"]


def in_window(given, q, k):
    return given["window"] is not None


def of_shared_heads(given, q, k):
    return q.shape[1] != k.shape[1]


def of_one_query(given, q, k):
    return q.shape[2] == 1


def of_ragged_keys(given, q, k):
    return k.shape[2] % 128 > 0


@pytest.mark.parametrize(
    ("lost", "where", "named"),
    [
        (("sinks",), in_causal, ["causal mask with sinks"]),
        (("softcap",), in_causal, ["causal mask with softcap"]),
        (("scale",), in_window, ["window with scale"]),
        (("documents",), in_window, ["window with documents"]),
        (("documents",), of_shared_heads, ["heads with documents"]),
        (("softcap", "sinks"), of_one_query, ["one query with softcap", "one query with sinks"]),
        (("sinks",), of_ragged_keys, ["lengths with sinks"]),
        (("sinks",), lambda given, q, k: given["softcap"], ["softcap with sinks"]),
    ],
)
def test_an_argument_that_one_path_loses(lost, where, named):
    assert list(wrong(without(lost, where=where))) == named


def only(shape, axis, most):
    """fa4 that is right up to so many sequences, or keys."""

    def function(q, k, v):
        if shape(q, k) > most:
            v = np.take(v, np.arange(v.shape[axis]) % most, axis=axis)
        return attend(q, k, v)

    return function


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (only(lambda q, k: len(q), 0, 2), ["heads"]),
        (only(lambda q, k: k.shape[2], 2, 512), ["lengths"]),
    ],
)
def test_sequences_and_keys_are_more_than_two_tiles(function, named):
    assert list(wrong(function)) == named


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (None, {}),
        ("q ignored", {"q_descale": "ignored"}),  # vLLM#51363
        ("k ignored", {"k_descale": "ignored"}),
        ("v ignored", {"v_descale": "ignored"}),
        (
            "q and v swapped",
            {"q_descale": "doubles the outputs", "v_descale": "doubles the scores"},
        ),
        ("k of another head", {"k_descale": "of another sequence or head"}),
        ("v of sequence 0", {"v_descale": "of another sequence or head"}),
        ("q divides", {"q_descale": "halves the scores"}),
    ],
)
def test_each_descale_is_doubled(fault, words):
    function = functools.partial(of_codes, fault=fault)
    found = descales.findings(subjects.wrap(function, name="mine"))
    assert [one.what for one in found] == ["q_descale", "k_descale", "v_descale"]
    assert {one.what: one.words for one in found if one.value is None} == words


def in_float64(q, k, v, scale=None, *, of_features=None):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    s = q @ k.swapaxes(2, 3) * (scale or (of_features or q.shape[-1]) ** -0.5)
    p = np.exp(s - s.max(-1, keepdims=True))
    return ((p @ v) / p.sum(-1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("features", [72, 80, 96, 128])
def test_float64_may_have_a_softmax_scale_in_float64(features):
    require_attention(in_float64, "exact", features=features)
    almost = functools.partial(in_float64, of_features=features + 0.001)
    with pytest.raises(AssertionError, match="is not 'exact'"):
        require_attention(almost, "exact", features=features)


def test_float64_is_right_under_every_argument():
    outcome = identify_attention(in_float64)
    assert (outcome.ok, outcome.variant) == (True, "exact")
