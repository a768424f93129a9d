"""Ragged last blocks: of tensors whose reduced axis no block divides, as if filled by zeros (S-6).

S-6 refuses them. A library that takes them is compared with the same tensor, padded with zeros to
whole blocks; the codes of the zeros are left out.
"""

from dataclasses import replace

import numpy as np

from fp8ref.conformance.inputs import quantizer_inputs
from fp8ref.conformance.quantizer.outputs import QuantizerOutput, ScaleLayout
from fp8ref.sim.quantize import cast, scaling
from fp8ref.spec.granularity import by_name


def shapes(scale_layout: ScaleLayout) -> list[tuple[int, int]]:
    """Shapes [M, K] with a ragged last block of K, odd and aligned lengths; [K, M] for axis 0.

    Empty for scales of lines and of whole tensors, whose K is free.
    """
    block = by_name(scale_layout.granularity).reduced
    if block is None:
        return []
    row_shapes = [
        (1, 3),
        (3, block // 2 + 1),
        (4, block + 1),
        (4, block + 16),
        (131, 2 * block - 1),
        (5, 3 * block - 8),
        (2, 8192 + block // 2),
    ]
    return [shape[::-1] if scale_layout.axis == 0 else shape for shape in row_shapes]


def is_ragged(shape: tuple[int, ...], scale_layout: ScaleLayout) -> bool:
    """Whether the last block along the reduced axis is shorter than the others."""
    block = by_name(scale_layout.granularity).reduced
    return block is not None and shape[scale_layout.axis] % block != 0


def padded(x: np.ndarray, scale_layout: ScaleLayout) -> np.ndarray:
    """x [M, K], with zeros up to whole blocks along the reduced axis."""
    if not is_ragged(x.shape, scale_layout):
        return x
    missing = -x.shape[scale_layout.axis] % (by_name(scale_layout.granularity).reduced or 1)
    return np.pad(x, ((0, missing), (0, 0)) if scale_layout.axis == 0 else ((0, 0), (0, missing)))


def groups(shape: tuple[int, int], scale_layout: ScaleLayout) -> np.ndarray:
    """Each element's group, as ``quantizer_inputs.groups`` counts whole blocks; int [M, K]."""
    whole = padded(np.zeros(shape, bool), scale_layout).shape
    return quantizer_inputs.groups(whole, scale_layout.granularity, scale_layout.axis)[
        : shape[0], : shape[1]
    ]


def padded_output(output: QuantizerOutput, expected: scaling.Quantized) -> QuantizerOutput:
    """An output for x, with the expected codes or values of the zeros behind x."""
    rows, columns = output.tensor.shape
    if output.tensor.shape == expected.codes.shape:
        return output
    if output.codes is not None:
        codes = expected.codes.copy()
        codes[:rows, :columns] = output.codes
        output = replace(output, codes=codes)
    else:
        with np.errstate(all="ignore"):
            spread = scaling.spread(expected.scale_inv, expected.codes.shape, expected.blocks)
            values = cast.decode(expected.codes, expected.fmt) * spread
        values[:rows, :columns] = output.values
        output = replace(output, values=values)
    missing = [(0, n - m) for n, m in zip(expected.codes.shape, (rows, columns), strict=True)]
    scales = {
        name: np.pad(s, missing, mode="edge") if s.shape == (rows, columns) else s
        for name, s in output.scales.items()
    }
    return replace(output, scales=scales)
