"""The compiled epilogue gives the definition's bits."""

import numpy as np
import pytest

from fp8ref.epilogue import EPILOGUES
from fp8ref.formats import BFLOAT16
from fp8ref.sim import gemm

SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-45, 3.4e38, 1.00390625, 1.01171875], np.float32)  # the last two are ties


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("name", ["scale_then_round", "product_then_round", "unit_round_scale_round"])
@pytest.mark.parametrize("shape", [(1, 1), (33, 70), (64, 32), (600, 5)])
def test_equals_the_definition(rng, name, rows, turned, shape):
    m, n = shape
    acc = rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)  # of every exponent
    acc.ravel()[: min(acc.size, SPECIAL.size)] = SPECIAL[: acc.size]
    acc = np.asfortranarray(acc) if turned else acc
    scales = np.exp2(rng.uniform(-20, 20, (m + n))).astype(np.float32)
    a, b = (scales[:m, None], scales[None, m:]) if rows else (scales[:1].reshape(()), scales[1:2].reshape(()))
    given = {"epilogue": EPILOGUES[name], "out_dtype": BFLOAT16}
    found, expected = gemm.finish(acc, a, b, **given), gemm.finish_plain(acc, a, b, **given)
    assert found.shape == shape
    equal = (found.view(np.uint32) == np.ascontiguousarray(expected).view(np.uint32)) | (np.isnan(found) & np.isnan(expected))
    assert equal.all()
