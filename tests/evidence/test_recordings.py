"""Recordings of hardware have the simulator's bits.

``make gpu`` adds recordings of a GPU; published outputs are in tests/sim/gemm/test_mma.py.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from fp8ref.conformance.gemm import recording
from fp8ref.formats import BFLOAT16, FP8_FORMATS
from fp8ref.sim.quantize import cast

HERE = Path(__file__).parent
RECORDINGS = sorted(path for path in HERE.rglob("*.json") if path.parent.name != "xla-triton")


@pytest.mark.parametrize(
    "path",
    RECORDINGS,
    ids=lambda path: "-".join(path.relative_to(HERE).parts[:-1]) + "-" + path.stem[-12:],
)
def test_a_recording_is_the_simulators(path):
    verified = recording.verify(path)
    assert verified.ok, (
        f"{verified.compared - verified.equal} of {verified.compared} results have other bits"
    )


@pytest.mark.parametrize(
    "path", sorted(HERE.rglob("xla-triton/*.json")), ids=lambda path: path.stem[-12:]
)
def test_xlas_triton_gemms_multiply_dequantized_operands_in_bfloat16(path):  # G-22
    """Scales and scaled codes are rounded to bfloat16, which no plan of an FP8 unit does: a
    relative error of 2^-9 of each product.
    """
    metadata = json.loads(path.read_text())
    arrays = np.load(path.with_suffix(".npz"))
    operands, exact = [], []
    for side, fmt in zip("ab", metadata["formats"], strict=True):
        codes = cast.decode(arrays[side], FP8_FORMATS[fmt])
        scale_inv = np.float32(1) / arrays[f"scale_{side}"]
        exact.append(codes.astype(np.float64) * scale_inv)
        operands.append(
            cast.round_to(codes * cast.round_to(scale_inv, BFLOAT16), BFLOAT16).astype(np.float64)
        )
    out = arrays["out"].view(np.float32)
    magnitudes = np.abs(operands[0]) @ np.abs(operands[1]).T
    distance = np.abs(out - operands[0] @ operands[1].T)
    # 16 steps of 16 products, each of whose 17 terms is cut 25 bits below the largest and the sum
    # 23 below itself
    assert (distance <= 16 * (17 * 2.0**-25 + 2.0**-23) * magnitudes).all()
    assert (np.abs(out - exact[0] @ exact[1].T) / magnitudes).max() > 2.0**-10
