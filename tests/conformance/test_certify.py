import json
from itertools import pairwise
from pathlib import Path

import pytest

from fp8ref import cli
from fp8ref.conformance import certify as certificates
from fp8ref.conformance.certify import certify

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks/results/certificate.json"


@pytest.fixture(scope="module")
def strided():
    """One float32 input in 1009, all float16, all bfloat16, every tie and its neighbors, through
    every installed library.
    """
    return certify()


def test_every_library_agrees_in_range_and_fp8ref_everywhere(strided):  # C-1 to C-5, S-3, S-4
    report = strided.report()
    assert report.ok, [c.detail for c in report.failures]
    names = set(report.checks)
    for fmt in ("e4m3fn", "e5m2"):
        assert {
            f"{fmt}/cast/{s}" for s in ("ml_dtypes", "torch", "jax", "fp8ref.torch", "fp8ref.jax")
        } <= names
        assert {f"{fmt}/scale.torchao/torchao", f"{fmt}/scale.torchao/fp8ref.jax"} <= names
    assert {"e4m3fn/scale.torchao_pow2/torchao", "e4m3fn/scale.torchao_mask/fp8ref.torch"} <= names
    own = {c.compared for name, c in report.checks.items() if "fp8ref" in name and "cast" in name}
    assert min(own) > (1 << 32) // certificates.STRIDE + 2 * (1 << 16)


def test_what_libraries_decide_otherwise_is_overflow_and_nan(strided):  # C-4, C-5
    rows = strided.disagreements()
    assert {row["inputs"] for row in rows} == {"above max", "infinite", "NaN"}
    ml_dtypes = {
        (r["format"], r["inputs"]): r["found"] for r in rows if r["library"] == "ml_dtypes"
    }
    assert ml_dtypes == {("e4m3fn", k): ["0xFF"] for k in ("above max", "infinite", "NaN")} | {
        ("e5m2", "NaN"): ["0x7E", "0xFE"]
    }
    assert not any(r["library"].startswith("fp8ref") for r in rows)


def test_the_record_that_is_kept_is_of_every_input_and_finds_the_same_classes(strided):
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert record["ok"]
    assert record["exhaustive"]
    own = {c["name"]: c["compared"] for c in record["checks"] if "fp8ref" in c["name"]}
    assert own == {name: 1 << (32 if "cast" in name else 31) for name in own}
    assert {c["name"] for c in record["checks"]} == set(strided.report().checks)
    columns = ("format", "what", "library", "inputs", "specified", "found")
    found, kept = (
        [[row[c] for c in columns] for row in rows]
        for rows in (strided.disagreements(), record["disagreements"])
    )
    assert found == kept


def test_the_table_of_the_example_is_of_the_libraries_that_the_tests_run_with(strided):
    table, header = (
        json.loads((ROOT / "examples/ci/libraries.json").read_text())["answers"],
        "cuda_fp8.hpp",
    )
    answers = {row: own for row, own in strided.answers.items() if not row.startswith(header)}
    assert {row: table.get(row) for row in answers} == answers
    libraries = {row.split("/")[0] for row in answers}
    assert libraries == {"ml_dtypes", "torch", "jax", "torchao", "flax", "gfloat"}


@pytest.mark.parametrize("exhaustive", [True, False])
def test_tasks_cover_the_inputs(exhaustive):
    tasks = list(certificates._tasks(exhaustive))
    for kind, fmt, size in (
        ("cast", "e4m3fn", 1 << 32),
        ("cast", "e5m2", 1 << 32),
        ("torchao", "e4m3fn", 1 << 31),
    ):
        named = [t for t in tasks if (t.kind, t.fmt) == (kind, fmt)]
        parts = [t for t in named if not t.special]
        # which the exhaustive inputs hold, each counted once
        assert len(named) - len(parts) == (not exhaustive)
        assert (parts[0].begin, parts[-1].end) == (0, size)
        assert all(a.end == b.begin for a, b in pairwise(parts))
        assert {t.stride for t in parts} == {1 if exhaustive else certificates.STRIDE}
        assert all(t.begin % t.stride == 0 for t in parts)


def test_the_command_writes_json_and_refuses_what_it_does_not_know(
    strided, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(certificates, "certify", lambda **_: strided)
    path = tmp_path / "certificate.json"
    assert cli.main(["certify", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "e4m3fn/cast" in out
    assert "above max" in out
    written = json.loads(path.read_text())
    assert written["ok"] is True
    assert all(
        {"name", "compared", "equal", "worst", "bound", "ok"} <= set(c) for c in written["checks"]
    )
    assert written["disagreements"]
    assert cli.main(["certify", "--json", str(tmp_path)]) == 2
    with pytest.raises(SystemExit) as stop:
        cli.main(["certify", "--everything"])
    assert stop.value.code == 2


@pytest.mark.exhaustive
def test_all_float32_inputs():  # C-1 to C-5, S-3, S-4
    certificate = certify(exhaustive=True)
    report = certificate.report()
    assert report.ok, [c.detail for c in report.failures]
    casts = [c for name, c in report.checks.items() if "/cast/fp8ref" in name]
    assert all(c.compared >= 1 << 32 for c in casts)
