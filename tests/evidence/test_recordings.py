"""Recordings of hardware have the simulator's bits.

``make gpu`` adds recordings of a GPU; published outputs are in tests/sim/test_mma.py.
"""

from pathlib import Path

import pytest

from fp8ref.conformance.gemm import recording

RECORDINGS = sorted(Path(__file__).parent.rglob("*.json"))


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_a_recording_is_the_simulators(path):
    verified = recording.verify(path)
    assert verified.ok, f"{verified.compared - verified.equal} of {verified.compared} results have other bits"
