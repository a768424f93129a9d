"""Test vectors as pytest parameters: inputs with their specified results.

@pytest.mark.parametrize(("x", "codes"), parameters.casts(E4M3FN))
def test_my_cast(x, codes):
    require.require_cast(x, my_cast(x), E4M3FN)
"""

import numpy as np

from fp8ref import formats
from fp8ref.conformance.inputs import dtypes, kinds
from fp8ref.conformance.kit import arrays
from fp8ref.conformance.kit.explain import Rules
from fp8ref.conformance.vectors import scale as scales_asked
from fp8ref.conformance.vectors.cast import Cast
from fp8ref.conformance.vectors.quantize import Quantize
from fp8ref.formats import Format
from fp8ref.shared import extras
from fp8ref.sim.quantize import scaling

__all__ = ["casts", "quantizers", "scales"]

try:
    import pytest
except ImportError:
    extras.require("conformance", "fp8ref.conformance.parameters", "pytest")
    raise


def casts(
    fmt: Format | str,
    *,
    source: str = "float32",
    rounding: str = "nearest_even",
    saturate: bool = True,
    count: int = 1000,
    seed: int = 0,
) -> list:
    """pytest parameters (x [n], codes uint8 [n]) by kind of input, as ``e4m3fn-float32-tie``.

    count     how many inputs are random, from ``seed``; the others are the edges of the format.
    source    the dtype of x: float32, bfloat16 (ml_dtypes' dtype), float16 or float64.
    Specials: NaNs of x become fmt.nan_code (C-5): canonicalise a library's before comparing.
    Raises:   ValueError: a fmt that is not of 8 bits, an unknown source, stochastic or unknown
              rounding, a seed or count out of range; ImportError: bfloat16 without ml_dtypes.
    Source:   spec C-1 to C-7.
    """
    fmt = formats.by_name(fmt)
    rules = Rules(rounding=rounding, saturate=saturate)
    question = Cast(format=fmt.name, source=source, count=count, seed=seed)
    bits = question.inputs()
    kind_indices, x = question.kinds(bits), _array(bits, source)
    codes = rules.encode(x, fmt)
    return _of_kinds(f"{fmt}-{source}", kinds.CASTS, kind_indices, x, codes)


def scales(
    fmt: Format | str,
    policy: str = "torchao",
    *,
    made: str = "scale",
    count: int = 1000,
    seed: int = 0,
) -> list:
    """pytest parameters (amax float32 [n], its scale [n]), one for every kind of amax, such as
    ``e4m3fn-torchao-power_of_two``.

    count     how many amaxes are random, from ``seed``; the others are the edges of the policy.
    made      ``scale`` or ``scale_inv``, float32, or ``e8m0``, the uint8 code of scale_inv.
    Specials: zero, Inf and NaN are among the amaxes; a previous scale is 1 (S-11).
    Raises:   ValueError: a fmt that is not FP8, an unknown policy or made, e8m0 of a policy without
              e8m0 scales, a seed or count out of range.
    Source:   spec S-3, S-4, S-9 to S-15.
    """
    fmt = formats.by_name(fmt)
    question = scales_asked.Scale(format=fmt.name, policy=policy, count=count, seed=seed)
    bits = question.inputs()
    kind_indices, amax = question.kinds(bits), bits.astype(np.uint32).view(np.float32)
    expected = scales_asked.expected_bits(amax, fmt, policy, made)
    expected = expected if made == "e8m0" else expected.view(np.float32)
    return _of_kinds(f"{fmt}-{policy}", kinds.AMAXES, kind_indices, amax, expected)


def quantizers(
    fmt: Format | str,
    *,
    source: str = "float32",
    policy: str = "torchao",
    granularity: str = "tensorwise",
    axis: int = -1,
    shape: tuple[int, ...] = (4, 128),
    count: int = 10,
    seed: int = 0,
) -> list:
    """pytest parameters (x of the shape, its ``sim.scaling.Quantized``), such as
    ``e4m3fn-rowwise-zero_lines-5``.

    count     how many tensors; the patterns of ``inputs.quantizer_inputs`` take turns.
    source    the dtype of x: float32, bfloat16 (ml_dtypes' dtype) or float16.
    Raises:   ValueError: a fmt not of FP8, an unknown source or policy, a shape that does not fit,
              a seed or count out of range; ImportError: bfloat16 without ml_dtypes.
    Source:   spec S-5, S-6.
    """
    fmt = formats.by_name(fmt)
    question = Quantize(
        format=fmt.name,
        source=source,
        policy=policy,
        granularity=granularity,
        axis=axis,
        shape=",".join(map(str, shape)),
        count=count,
        seed=seed,
    )
    parameters = []
    for i, (kind, bits) in enumerate(question.tensors()):
        x = _array(bits, source)
        q = scaling.quantize(x, fmt, granularity=granularity, policy=policy, axis=axis)
        title = f"{fmt}-{granularity}-{kind.replace(' ', '_')}-{i}"
        parameters.append(pytest.param(x, q, id=title))
    return parameters


def _of_kinds(
    name: str, names: tuple[str, ...], kind: np.ndarray, inputs: np.ndarray, results: np.ndarray
) -> list:
    """A parameter for each kind that inputs have; kind: of each input, an index of names."""
    parameters = []
    for i in np.unique(kind):
        own, title = kind == i, f"{name}-{names[i].replace(' ', '_')}"
        parameters.append(pytest.param(inputs[own], results[own], id=title))
    return parameters


def _array(bits: np.ndarray, source: str) -> np.ndarray:
    if source != "bfloat16":
        return dtypes.values(bits, dtypes.by_name(source))
    return bits.astype(np.uint16).view(arrays.numpy_dtype(source))
