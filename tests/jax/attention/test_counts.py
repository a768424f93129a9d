"""Counts of P and dS, exact beyond 2^31 (Q-13)."""

import jax.numpy as jnp
import numpy as np

from fp8ref.jax.attention import counts as attention_counts
from fp8ref.jax.quantize import stats
from fp8ref.selection.statistics import FIELDS


def test_counts_are_exact_in_two_parts():
    counts = jnp.zeros((2, 2), jnp.int32)
    large = 2**31 - 2**16 - 1
    for _ in range(5):
        counts = attention_counts.add(counts, [jnp.int32(large), jnp.int32(3)])
    assert (np.asarray(counts).astype(np.int64) @ [2**16, 1]).tolist() == [5 * large, 15]
    assert int(attention_counts.numbers(counts)[1]) == 15
    found = attention_counts.measurement(
        jnp.float32(0.75), counts[0], counts[1], jnp.array([0, 7], jnp.int32)
    )
    assert found.shape == (stats.LENGTH,)
    decoded = dict(zip(FIELDS, stats.parts(np.asarray(found)[None])[0].tolist(), strict=True))
    expected = {
        "count": 5 * large,
        "overflows": 15,
        "underflows": 7,
        "amax": 0.75,
        "scale_min": 1,
        "scale_max": 1,
    }
    assert decoded == {name: expected.get(name, 0) for name in FIELDS}
