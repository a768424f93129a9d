"""A query whose bits depend on what else a call has, and calls that do not repeat (spec A-17)."""

import functools

import numpy as np
import pytest

from fp8ref.conformance.attention import batch_bits, probe, subjects
from fp8ref.sim.attention import attention
from fp8ref.spec.attention.variants import FULL, VARIANTS

exact = functools.partial(attention.forward, variant="exact")


def in_parts(q, k, v, parts, documents=None):
    """Attention whose keys are added in so many parts."""
    q, k, v = (np.asarray(x, np.float32) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = np.einsum("bhqd,bhkd->bhqk", q, k) * np.float32(0.125)
    if documents is not None:
        of_q, of_k = documents
        s = np.where((of_q[:, :, None] == of_k[:, None])[:, None], s, -np.inf).astype(np.float32)
    p = np.exp(s - s.max(-1, keepdims=True))
    total, o = np.float32(0), np.float32(0)
    for part in np.array_split(np.arange(k.shape[2]), parts):
        total = total + p[..., part].sum(-1, keepdims=True)
        o = o + np.einsum("bhqk,bhkd->bhqd", p[..., part], v[:, :, part])
    return o / total


def by_queries(q, k, v):
    return in_parts(q, k, v, 4 if q.shape[2] < 16 else 1)


def by_sequences(q, k, v):
    return in_parts(q, k, v, 4 if q.shape[0] == 1 else 1)


def by_keys(q, k, v, documents=None):
    return in_parts(q, k, v, 4 if k.shape[2] > 300 else 1, documents)


def findings(function):
    return {one.what: one for one in batch_bits.findings(subjects.wrap(function))}


@pytest.mark.parametrize("name", list(VARIANTS))
def test_no_variant_depends_on_other_queries(name):
    found = findings(functools.partial(attention.forward, variant=name))
    assert found["batch invariance"].value == "the same bits"
    assert found["repeated calls"].value == "equal bits"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (by_queries, "a query's bits differ with 1 query, 2 queries"),
        (by_sequences, "a query's bits differ with one sequence"),
        (by_keys, "a query's bits differ with 60 keys of padding behind"),
    ],
)
def test_what_a_querys_bits_depend_on_is_named(function, words):
    found = findings(function)["batch invariance"]
    assert (found.value, found.text) == (None, words)
    assert found.witness is not None


def test_padding_is_asked_of_documents():
    def documents(q, k, v, documents=None):
        return attention.forward(q, k, v, variant="exact", mask=FULL, documents=documents).o

    evidence = findings(documents)["batch invariance"].evidence
    assert "257 queries" in evidence
    assert evidence.endswith("a document, 60 keys of padding behind")


def test_calls_that_differ_are_a_fault():
    rng = np.random.default_rng(0)

    def atomics(q, k, v):
        order = rng.permutation(k.shape[2]) if k.shape[2] == 300 else np.arange(k.shape[2])
        return in_parts(q, k[:, :, order], v[:, :, order], 4)

    found = probe(atomics)
    (fault,) = found.faults
    assert (fault.what, fault.text) == ("repeated calls", "does not repeat itself")
    assert not found.ok


@pytest.mark.parametrize(
    ("used", "words"),
    [
        (lambda j, h, kv: j // 2 * 2 * kv // h, "tiles of 2 or 4 query heads use one head"),
        (lambda j, h, kv: 0 * j, "every query head uses the first head"),
        (lambda j, h, kv: j // 16 * 16 * kv // h, "tiles of 8 or 16 query heads use one head"),
    ],
)
def test_heads_that_are_used_by_tiles_are_named(used, words):
    def tiled(q, k, v):
        h, kv = q.shape[1], k.shape[1]
        whole = words.startswith("tiles of 8") and h < 16
        heads = np.arange(h) * kv // h if whole else used(np.arange(h), h, kv)
        return exact(q, k[:, heads], v[:, heads]).o

    found = probe(tiled)
    assert found["heads"].text == words
    assert "heads" in [fault.what for fault in found.faults]


@pytest.mark.parametrize("role", ["q", "k", "q_descale and k"])
def test_sinks_under_a_descale_are_named(role):
    def scaled(q, k, v, q_descale, k_descale, v_descale, sinks=None):
        given = {"q": q_descale, "k": k_descale, "v": v_descale}
        x, y, z = (
            np.asarray(one).astype(np.float32) * np.asarray(given[name])[..., None, None]
            for name, one in (("q", q), ("k", k), ("v", v))
        )
        factors = [np.asarray(given[name[0]])[0] for name in role.split(" and ")]
        if sinks is not None:
            sinks = np.asarray(sinks) * np.prod(factors, axis=0, dtype=np.float32)
        return exact(x, y, z, sinks=sinks).o

    found = probe(scaled)["sinks argument"]
    assert (found.value, found.text) == (None, f"multiplied by {role}_descale")
