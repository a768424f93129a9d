"""Recordings are verified bit for bit, and a changed one is found."""

import json

import numpy as np
import pytest
from helpers.gemm.planted_gemms import planted_gemm

from fp8ref.conformance.gemm import identify_gemm, instruction, recording
from fp8ref.formats import BFLOAT16, E4M3FN, E5M2
from fp8ref.sim.gemm import gemm


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    found = identify_gemm(
        planted_gemm("hopper_slow", out=BFLOAT16, granularity="rowwise"), shape=(64, 48, 512)
    )
    return recording.record_gemm(found, tmp_path_factory.mktemp("recorded"))


def simulated(a, b, c, fmt_a, fmt_b):
    return gemm.mma(a, b, c, fmt_a=fmt_a, fmt_b=fmt_b)


def test_a_gemm(recorded):
    verified = recording.verify(recorded)
    assert verified.ok
    assert verified.compared == 24 * 24
    said = json.loads(recorded.read_text())
    assert (said["format"], said["kind"], said["subject"]) == (recording.FORMAT, "gemm", "planted")
    assert recorded.stat().st_size + recorded.with_suffix(".npz").stat().st_size < 100_000


@pytest.mark.parametrize("name", ["f32", "exact"])
def test_sums_that_are_no_tensor_cores(name, tmp_path):
    found = identify_gemm(planted_gemm(name), shape=(16, 16, 64))
    assert recording.verify(recording.record_gemm(found, tmp_path)).ok


@pytest.mark.parametrize("pair", [(E4M3FN, E4M3FN), (E5M2, E4M3FN)], ids=lambda p: f"{p[0]}-{p[1]}")
def test_an_instruction(pair, tmp_path):
    found = instruction.identify(simulated, *pair, name="wgmma", about={"device": "none"}, count=0)
    path = recording.record_instruction(found, simulated, tmp_path, count=300)
    verified = recording.verify(path)
    assert verified.ok
    assert verified.compared >= 300 + sum(len(group.d) for group in found.groups)
    with np.load(path.with_suffix(".npz")) as file:
        assert (file["c"] != 0).sum() > 1000


def test_a_changed_bit_is_found(recorded, tmp_path):
    path = tmp_path / recorded.name
    path.write_bytes(recorded.read_bytes())
    with np.load(recorded.with_suffix(".npz")) as file:
        arrays = dict(file)
    del arrays["sha256"]  # with it, the change is refused
    arrays["out"][3, 4] ^= 1 << 16
    np.savez(path.with_suffix(".npz"), **arrays)
    verified = recording.verify(path)
    assert not verified.ok
    assert verified.compared - verified.equal == 1


def test_another_plan_is_found(recorded, tmp_path):
    said = json.loads(recorded.read_text())
    said["plan"]["fraction_bits"] = 9
    path = tmp_path / recorded.name
    path.write_text(json.dumps(said))
    path.with_suffix(".npz").write_bytes(recorded.with_suffix(".npz").read_bytes())
    assert not recording.verify(path).ok


@pytest.mark.parametrize("damage", ["no json", "another format", "no arrays"])
def test_what_is_no_recording(damage, recorded, tmp_path):
    path = tmp_path / "recording.json"
    path.write_text(
        {
            "no json": "{",
            "another format": '{"format": "other"}',
            "no arrays": recorded.read_text(),
        }[damage]
    )
    with pytest.raises(
        ValueError, match=r"recording.json is not a complete recording of a probe .*Record it again"
    ):
        recording.verify(path)


@pytest.mark.parametrize(
    "damage",
    [
        "cut",
        "flipped",
        "empty",
        "text",
        "fewer rows",
        "no out",
        "other kind",
        "no plan",
        "other format",
        "plan of a list",
    ],
)
def test_a_damaged_recording_is_said_to_be_so(damage, recorded, tmp_path):
    path = tmp_path / "recording.json"
    said, whole = json.loads(recorded.read_text()), recorded.with_suffix(".npz").read_bytes()
    with np.load(recorded.with_suffix(".npz")) as file:
        arrays = dict(file)
    if damage in ("cut", "flipped", "empty", "text"):
        middle = len(whole) // 2
        changed = {
            "cut": whole[:middle],
            "flipped": whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :],
            "empty": b"",
            "text": b"no",
        }
        path.with_suffix(".npz").write_bytes(changed[damage])
    else:
        if damage == "fewer rows":
            arrays["out"] = arrays["out"][:1]
        if damage == "no out":
            del arrays["out"]
        np.savez(path.with_suffix(".npz"), **arrays)
        said |= {
            "other kind": {"kind": "foo"},
            "no plan": {"plan": None},
            "other format": {"formats": ["zzz", "e5m2"]},
            "plan of a list": {"plan": [1]},
        }.get(damage, {})
    path.write_text(json.dumps(said))
    with pytest.raises(
        ValueError, match=r"recording.json is not a complete recording of a probe .*Record it again"
    ) as error:
        recording.verify(path)
    assert "pickle" not in str(error.value)
