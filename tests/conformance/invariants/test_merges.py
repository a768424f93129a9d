"""Invariants of merges, and which libraries' maxima break each (spec P-28)."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from fp8ref.conformance.invariants import MERGES, broken, require_invariants
from fp8ref.sim import delayed
from fp8ref.sim.distributed.sharding import max_by_comparison

F32 = np.float32


def by_bits(a, b):
    """The maximum of bits as integers; a NaN's are the largest."""
    return np.maximum(a.view(np.int32), b.view(np.int32)).view(F32)


def of_observations(a, b):
    return delayed.merge(delayed.observe(a), delayed.observe(b)).amax


LIBRARIES = {
    "numpy maximum": (np.maximum, set()),
    "bits": (by_bits, set()),
    "fp8ref delayed.merge": (of_observations, set()),
    "torch maximum": (lambda a, b: torch.maximum(torch.tensor(a), torch.tensor(b)), set()),
    # XLA on a CPU flushes subnormal numbers (S-12)
    "jnp maximum": (jnp.maximum, {"idempotent", "identity", "largest"}),
    "fmax, as XLA's pmax on a CPU and TransformerEngine's fmaxf": (np.fmax, {"keeps_nan"}),
    "torch fmax": (lambda a, b: torch.fmax(torch.tensor(a), torch.tensor(b)), {"keeps_nan"}),
    "a comparison, as gloo's MAX": (max_by_comparison, {"associative", "commutative", "keeps_nan"}),
    "Python's max": (max, {"associative", "commutative", "keeps_nan"}),
    "mean": (lambda a, b: (a + b) / 2, {"associative", "idempotent", "identity", "largest"}),
    "sum": (lambda a, b: a + b, {"idempotent", "largest"}),
    "the last": (lambda a, b: b, {"commutative", "identity", "keeps_nan", "largest"}),
}


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries(name):  # P-28
    merge, breaks = LIBRARIES[name]
    assert set(broken(merge, MERGES, examples=150)) == breaks


@pytest.mark.parametrize("place", [0, 1], ids=["first", "second"])
def test_a_nan_that_is_lost_in_one_place_alone_is_seen(place):  # P-28
    """NaN wins in one argument and is dropped in the other: the maximum of a comparison that is
    written the other way round.
    """

    def merge(*amaxes):
        return amaxes[1 - place] if np.isnan(amaxes[place]) else np.maximum(*amaxes)

    assert "keeps_nan" in broken(merge, MERGES, examples=150)


def test_the_message():  # P-28
    with pytest.raises(AssertionError) as raised:
        require_invariants(np.fmax, MERGES)
    assert str(raised.value) == "fmax breaks:\n  keeps_nan: nan and 1 merge to 1 (P-28)"
    assert math.isnan(np.maximum(F32(1), F32("nan")))
