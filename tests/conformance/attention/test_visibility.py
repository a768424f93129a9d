"""Masks and heads that are mistaken in ways that have names (spec A-3)."""

import functools

import numpy as np
import pytest
from museum import attention as museum

from fp8ref.conformance.attention import probe


def masked(q, k, v, causal=False, window=None, *, mistake=""):
    """Attention whose mask has a mistake."""
    i, j = museum.places(q, k)
    left, right = window or (None, None)
    if mistake == "causal" and causal and window:
        causal, right = False, left
    if mistake == "window":
        left = right = None
    low = -1 if left is None else i - left
    high = k.shape[2] if right is None else i + right
    high = np.minimum(high, i) if causal else high
    low = low // 32 * 32 if mistake == "left" else low
    high = high // 16 * 16 + 15 if mistake == "right" else high
    if mistake == "span" and window:
        high = np.minimum(high, i // 16 * 16 + 15)
    return museum.attend(q, k, v, (j >= low) & (j <= high))


def findings(function):
    return {finding.what: finding for finding in probe(function).findings}


@pytest.mark.parametrize(
    ("mistake", "what", "words"),
    [
        ("left", "window", "unmasked in tiles of 32 keys: the left edge"),
        ("span", "window", "keys behind those of a tile of 16 queries are missing"),
        ("right", "causal mask", "unmasked in tiles of 16 keys: the right edge"),
    ],
)
def test_a_mistaken_mask(mistake, what, words):
    assert words in findings(functools.partial(masked, mistake=mistake))[what].text


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("causal", "the causal mask is forgotten: a window of (64, 64)"),
        ("window", "no mask of A-3"),  # of other windows too
        ("", "aligned to the end"),
    ],
)
def test_a_mask_beside_a_window(mistake, words):
    assert words in findings(functools.partial(masked, mistake=mistake))["window"].text


def test_heads_by_the_number_of_kv_heads():
    def by_kv_heads(q, k, v):
        used = np.minimum(np.arange(q.shape[1]) // k.shape[1], k.shape[1] - 1)
        return museum.attend(q, k[:, used], v[:, used])

    assert findings(by_kv_heads)["heads"].text == "query head j uses head j // Hkv"


def test_sinks_in_another_base():
    def in_base_2(q, k, v, sinks=None):
        other = None if sinks is None else np.asarray(sinks) / np.log(2)
        return museum.attend(q, k, v, sinks=other)

    assert findings(in_base_2)["sinks argument"].text == "multiplied by log2(e)"


def test_an_output_times_a_constant_has_no_sink():
    text = findings(lambda q, k, v: museum.attend(q, k, v) / np.float32(4))["sinks"].text
    assert text == "none: o is 0.25 times what it is"
