"""The probe's command: from a file with somebody's function to a recording that is computed
again.
"""

import json

import pytest

from fp8ref import cli
from fp8ref.commands import probe
from fp8ref.conformance.gemm import wgmma
from fp8ref.sim.gemm import gemm

KERNELS = """
from fp8ref.spec.attention.variants import Mask
from fp8ref.sim.attention import attention
from fp8ref.sim.gemm import gemm


def slow(a, b):
    return gemm.matmul(a, b, accumulate="hopper_slow", epilogue="product_then_round")


def halves(a, b):
    total = 0
    for part in (slice(0, 48), slice(48, None)):
        total = total + gemm.matmul(*(q._replace(codes=q.codes[:, part]) for q in (a, b)), accumulate="f32")
    return total


def dropped(a, b):
    return gemm.matmul(*(q._replace(codes=q.codes[:, :-32]) for q in (a, b)))


def tile(a, b):
    out = gemm.matmul(a, b)
    out[16:, :16] = 0
    return out


def attend(q, k, v, causal=False):
    return attention.forward(q, k, v, variant="fa3", mask=Mask(causal=causal, alignment="start"))


def off_by_one(q, k, v, causal=False):
    return attention.forward(q, k, v, variant="fa3", mask=Mask(window=(None, 1)) if causal else Mask())
"""


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    (tmp_path / "kernels_under_test.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def test_from_a_function_to_a_recording(kernels, capsys):
    assert (
        cli.main(
            [
                "probe",
                "kernels_under_test:slow",
                "--shape",
                "32",
                "32",
                "512",
                "--json",
                "found.json",
                "--record",
                "evidence",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "identified: 4,096 of 4,096 random results have the simulator's bits under it" in said
    found = json.loads((kernels / "found.json").read_text())
    assert found["ok"]
    assert {
        key: found["plan"][key]
        for key in (
            "fraction_bits",
            "output_bits",
            "fused_width",
            "rounding",
            "promotion",
            "split_k",
            "epilogue",
        )
    } == {
        "fraction_bits": 13,
        "output_bits": 13,
        "fused_width": 32,
        "rounding": "toward_zero",
        "promotion": 128,
        "split_k": 1,
        "epilogue": "product_then_round",
    }
    recordings = [str(path) for path in (kernels / "evidence").glob("*.json")]
    assert len(recordings) == 1
    assert cli.main(["probe", "--replay", *recordings]) == 0
    assert "576 of 576 recorded results have the simulator's bits" in capsys.readouterr().out


def test_the_instruction_where_there_is_one(kernels, capsys, monkeypatch):
    """The simulator's in place of the GPU's: all pairings are asked, recorded, and computed
    again.
    """

    def simulated(a, b, c, fmt_a, fmt_b):
        return gemm.mma(a, b, c, fmt_a=fmt_a, fmt_b=fmt_b)

    monkeypatch.setattr(wgmma, "instruction", lambda: simulated)
    monkeypatch.setattr(wgmma, "device", lambda: {"device": "none", "cuda_driver": "0"})
    monkeypatch.setattr(probe, "INSTRUCTIONS", 1000)
    assert cli.main(["probe", "wgmma", "--json", "found.json", "--record", "evidence"]) == 0
    found = json.loads((kernels / "found.json").read_text())
    assert found["ok"]
    assert [pairing["formats"] for pairing in found["pairings"]] == [
        [a.name, b.name] for a, b in wgmma.PAIRS
    ]
    assert all(pairing["plan"]["fraction_bits"] == 13 for pairing in found["pairings"])
    assert all(pairing["about"]["device"] == "none" for pairing in found["pairings"])
    recordings = sorted(map(str, (kernels / "evidence").glob("*.json")))
    assert len(recordings) == 4
    capsys.readouterr()
    assert cli.main(["probe", "--replay", *recordings]) == 0
    assert sum(path.stat().st_size for path in (kernels / "evidence").iterdir()) < 2_000_000


@pytest.mark.slow
def test_the_decisions_of_attention(kernels, capsys):
    assert cli.main(["probe", "kernels_under_test:attend", "--json", "found.json"]) == 0
    said = capsys.readouterr().out
    for one in (
        "160 keys, descending",
        "13 fraction bits, as hopper and ada",
        "none: one chain over all tiles",
        "aligned to the start",
    ):
        assert one in said
    found = {
        finding["what"]: finding["value"]
        for finding in json.loads((kernels / "found.json").read_text())["findings"]
    }
    assert (found["threshold"], found["largest P"], found["denominator"], found["heads"]) == (
        0.0,
        256.0,
        "unrounded",
        "consecutive",
    )


def test_a_mask_at_fault_exits_with_1(kernels, capsys):
    assert cli.main(["probe", "kernels_under_test:off_by_one"]) == 1
    said = capsys.readouterr().out
    assert (
        "kernels_under_test:off_by_one has faults: causal mask: off by one: right edge +1, "
        "aligned to the end" in said
    )


def test_sums_that_are_no_plan_exit_with_1(kernels, capsys):
    assert cli.main(["probe", "kernels_under_test:halves", "--shape", "16", "16", "96"]) == 1
    said = capsys.readouterr().out
    assert "cannot tell" in said
    assert "no accumulation" in said
    assert "kernels_under_test:halves is right: " in said


def test_what_no_plan_explains_is_graded(kernels, capsys):  # B-14
    assert (
        cli.main(
            [
                "probe",
                "kernels_under_test:dropped",
                "--shape",
                "32",
                "32",
                "96",
                "--json",
                "found.json",
            ]
        )
        == 1
    )
    assert "wrong: the last 32 of K dropped" in capsys.readouterr().out
    assert json.loads((kernels / "found.json").read_text())["grade"]["verdict"] == "wrong"


def test_a_wrong_tile_is_graded(kernels, capsys):  # B-14
    assert (
        cli.main(
            [
                "probe",
                "kernels_under_test:tile",
                "--shape",
                "32",
                "32",
                "96",
                "--json",
                "found.json",
            ]
        )
        == 1
    )
    said = capsys.readouterr()
    assert "a wrong tile, rows 16 to 31, columns 0 to 15: zeros" in said.out
    assert "sums in different ways within one result" in said.err
    assert json.loads((kernels / "found.json").read_text())["verdict"] == "wrong"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "needs a SUBJECT, or --replay FILE; got none."),
        (["turing"], "got 'turing'"),
        (["kernels_under_test:missing"], "cannot be imported"),
        (["kernels_under_test:slow", "--fast-accum"], "kernels_under_test:slow has its own"),
        (
            ["kernels_under_test:slow", "--formats", "e4m3fn", "int8"],
            "--formats takes two of e4m3fn, e5m2, e4m3fnuz, e5m2fnuz; got int8",
        ),
        (
            ["kernels_under_test:slow", "--shape", "16", "16", "100"],
            "K that is a positive multiple of 32; got [16, 16, 100]",
        ),
        (["kernels_under_test:slow", "--seed", "-1"], "--seed is at least 0; got -1"),
        (
            ["kernels_under_test:slow", "--record", "kernels_under_test.py"],
            "--record names a directory that can be created and written; kernels_under_test.py: "
            "File exists",
        ),
        (
            ["kernels_under_test:slow", "--json", "missing/found.json"],
            "--json names a file in a directory that exists",
        ),
        (
            ["kernels_under_test:attend", "--shape", "16", "16", "64"],
            "the probe chooses the inputs of attention; got --shape too. Leave it out.",
        ),
        (
            ["kernels_under_test:attend", "--layout", "TBHD"],
            "layout is one of BHTD, BTHD; got 'TBHD'",
        ),
        (
            ["kernels_under_test:slow", "--layout", "BTHD"],
            "--layout and --framework are for attention; kernels_under_test:slow is none; got --layout",
        ),
        (
            ["wgmma", "--shape", "64", "8", "32"],
            "wgmma is one instruction, m64n8k32, probed in every pairing of formats; got --shape",
        ),
        (
            ["wgmma", "--replay", "x.json"],
            "--replay takes all settings from the recordings; got SUBJECT too. Leave it out.",
        ),
        (
            ["--replay", "x.json", "--seed", "3"],
            "from the recordings; got --seed too. Leave it out.",
        ),
        (["--replay", "x.json"], "x.json cannot be read as a recording of a probe"),
    ],
)
def test_what_a_user_can_do_wrong_exits_with_2(kernels, arguments, said, capsys):
    assert cli.main(["probe", *arguments]) == 2
    assert said in capsys.readouterr().err
