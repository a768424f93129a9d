"""Recordings of hardware, computed again: every bit. ``make gpu`` adds those of a GPU; published outputs are in tests/sim/test_mma.py."""

from pathlib import Path

import pytest

from fp8ref.conformance.gemm import recording

RECORDINGS = sorted(Path(__file__).parent.rglob("*.json"))


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_a_recording_is_the_simulators(path):
    replayed = recording.verify(path)
    assert replayed.ok, f"{replayed.compared - replayed.equal} of {replayed.compared} results have other bits"
