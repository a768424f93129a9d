import importlib.util

import numpy as np
import pytest

from fp8ref.conformance.libraries import functions
from fp8ref.conformance.libraries import profiles as libraries
from fp8ref.formats import E4M3FN, E5M2
from fp8ref.sim.quantize import scales


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_every_cast_rounds_numbers_in_range(fmt):
    x = np.float32([0, -0.0, 1, 1.0625, -3.3, 200, 2.0**-9])
    found = {name: function.run(x) for name, function in libraries.casts(fmt).items()}
    assert set(found) == {"ml_dtypes", "torch", "jax", "fp8ref.torch", "fp8ref.jax"}
    for codes in found.values():
        assert codes.dtype == np.uint8
        np.testing.assert_array_equal(codes, found["ml_dtypes"])


@pytest.mark.parametrize("policy", ["torchao", "torchao_pow2", "torchao_mask"])
def test_every_scale(policy):
    amax = np.float32([0, 1e-40, 1e-13, 1, 3, 448, 1e30])
    found = libraries.scales(E4M3FN, policy)
    assert len(found) == 2
    for function in found.values():
        np.testing.assert_array_equal(
            function.run(amax), scales.scale_from_amax(amax, E4M3FN, policy)
        )


def test_without_any_library_there_is_nothing_to_certify(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"fp8ref\[all\]"):
        libraries.casts.__wrapped__(E4M3FN)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")
def test_compiled_is_eager():
    """How a GPU's compiled casts are examined, on a CPU."""
    import torch

    x = np.float32([0, -0.0, 1, 1.0625, -3.3, 200, 2.0**-9, 447.9])
    eager, compiled = (
        functions.on_torch("cpu", compiled=how)(functions.fp8ref_torch_cast(E4M3FN))
        for how in (False, True)
    )
    np.testing.assert_array_equal(compiled(x), eager(x))
    torch._dynamo.reset()
