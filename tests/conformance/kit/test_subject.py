"""A function is classified as cast, quantizer or GEMM from its arguments and outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers.quantize import planted_casts, planted_quantizers

from fp8ref.conformance.kit import subject as subjects
from fp8ref.conformance.kit.subject import RefusedError
from fp8ref.formats import E4M3FN
from fp8ref.sim.gemm import gemm
from fp8ref.sim.quantize import cast, scaling


def of_one_axis(x):
    if x.ndim != 1:
        raise ValueError("one axis")
    return planted_casts.saturating(x)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (planted_casts.saturating, "cast"),
        (planted_casts.no_saturation, "cast"),
        (planted_casts.fnuz, "cast"),
        (of_one_axis, "cast"),
        (lambda x: cast.decode(cast.encode(x, E4M3FN), E4M3FN), "cast"),
        (lambda x: cast.encode(x, E4M3FN, rounding="stochastic", seed=1), "cast"),
        (lambda x: x.to(torch.float8_e4m3fn), "cast"),
        (jax.jit(lambda x: x.astype(jnp.float8_e5m2)), "cast"),
        (planted_quantizers.torchao, "quantizer"),
        (planted_quantizers.stale(), "quantizer"),
        (lambda x: scaling.quantize(x, E4M3FN), "quantizer"),
        (lambda x: scaling.dequantize(scaling.quantize(x, E4M3FN)), "quantizer"),
        (lambda x: scaling.quantize(x, E4M3FN, granularity="rowwise").codes, "quantizer"),
        (lambda x: None, "quantizer"),
        (gemm.matmul, "gemm"),
        (lambda a, b, bias=None: np.zeros((2, 2)), "gemm"),
    ],
)
def test_kinds(function, kind):
    assert subjects.kind_of("mine", function) == kind


def test_what_takes_no_array_is_of_no_kind():
    with pytest.raises(RefusedError, match="mine raised ZeroDivisionError"):
        subjects.kind_of("mine", lambda x: 1 / 0)


def test_every_reason_is_given_where_it_takes_neither():
    def function(x):
        assert x.shape[1] % 256 == 0, "K in 256s"

    with pytest.raises(RefusedError, match=r"(?s)\[256, 384\]: K in 256s.*\[16\]"):
        subjects.kind_of("mine", function)
