"""A project's tests of its casts and of a quantizer against the specification. No conftest.py is
needed: fp8ref's pytest plugin brings fp8ref_kit. `make ci-example` runs them in an empty folder.
"""

import jax.numpy as jnp
import ml_dtypes
import pytest
import torch

FORMATS = ("e4m3fn", "e5m2")


@pytest.mark.parametrize("fmt", FORMATS)
def test_torch(fp8ref_kit, fmt):
    dtype = getattr(torch, f"float8_{fmt}")
    fp8ref_kit.require_cast(lambda x: x.to(dtype), fmt, expect="torch", framework="torch")


@pytest.mark.parametrize("fmt", FORMATS)
def test_jax(fp8ref_kit, fmt):
    dtype = getattr(jnp, f"float8_{fmt}")
    fp8ref_kit.require_cast(lambda x: x.astype(dtype), fmt, expect="jax", framework="jax")


@pytest.mark.parametrize("fmt", FORMATS)
def test_ml_dtypes(fp8ref_kit, fmt):
    dtype = getattr(ml_dtypes, f"float8_{fmt}")
    fp8ref_kit.require_cast(lambda x: x.astype(dtype), fmt, expect="ml_dtypes", framework="numpy")


def quantize(x):  # [M, K] -> codes [M, K], scale [M, 1]
    amax = x.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-12)
    scale = (448 / amax.double()).float()
    return (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def test_quantizer(fp8ref_kit):
    fp8ref_kit.require_quantizer(quantize, expect="torchao", granularity="rowwise")
