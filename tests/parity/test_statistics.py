"""What a run records of its operands, in either backend."""

import numpy as np
import pytest

from fp8ref.train import loop
from fp8ref.train.data import loader


@pytest.mark.slow
@pytest.mark.parametrize("backend", loop.BACKENDS)
def test_a_batch_in_parts_is_recorded_as_its_parts_are(backend, small):  # T-7, Q-8
    """The largest amax, the extreme scales and the mean rates of two halves, each of which is
    scaled by itself.
    """
    tokens = loader.open_batches(small).step(0)
    whole = loop.trainer(backend, small.replace(data={"microbatches": 2})).statistics(tokens)
    half = loop.trainer(backend, small.replace(data={"batch_size": 2}))
    first, second = half.statistics(tokens[:2]), half.statistics(tokens[2:])
    assert whole.keys() == first.keys() == second.keys()
    assert any(first[name]["amax"] != second[name]["amax"] for name in whole)
    for name, found in whole.items():
        pair = first[name], second[name]
        assert found["amax"] == max(p["amax"] for p in pair)
        assert (found["scale_min"], found["scale_max"]) == (
            min(p["scale_min"] for p in pair),
            max(p["scale_max"] for p in pair),
        )
        assert found["non_finite"] == 0
        for rate in ("underflow_rate", "saturation_rate", "overflow_rate"):
            # of sizes that are powers of two, so exact
            assert found[rate] == np.mean([p[rate] for p in pair])
