"""What a stored table says of libraries that changed, moved, came and went."""

import json

import ml_dtypes
import numpy as np
import pytest

from fp8ref import cli
from fp8ref.conformance import drift
from fp8ref.conformance.libraries import functions
from fp8ref.conformance.libraries.profiles import Function
from fp8ref.formats import E4M3FN, E5M2
from fp8ref.shared import extras
from fp8ref.sim.quantize import scales


def scale(amax):
    return scales.scale_from_amax(amax, E4M3FN, "torchao")


@pytest.fixture
def libraries(monkeypatch):
    """{row: Function} of two casts and a scale, which a test may change."""
    casts = [Function("ml_dtypes", f, functions.ml_dtypes_cast(f)) for f in (E4M3FN, E5M2)]
    scales = [Function("ml_dtypes", E4M3FN, scale, variant="scale", made="scale")]
    by_row = {function.row: function for function in (*casts, *scales)}
    monkeypatch.setattr(
        drift.profiles, "every_cast", lambda: [f for f in by_row.values() if not f.made]
    )
    monkeypatch.setattr(
        drift.profiles,
        "library_scales",
        lambda fmt: [f for f in by_row.values() if f.made and f.fmt is fmt],
    )
    return by_row


@pytest.fixture
def stored(libraries, tmp_path):
    """The file of a table of ``libraries``."""
    path = tmp_path / "stored.json"
    path.write_text(json.dumps({"answers": drift.installed()}))
    return path


def changed(libraries, row, run):
    libraries[row] = Function(
        *(libraries[row].library, libraries[row].fmt, run),
        variant=libraries[row].variant,
        made=libraries[row].made,
    )


def test_nothing_changed(stored, capsys):
    assert cli.main(["certify", "--against", str(stored)]) == 0
    assert "3 casts and scales, 0 changed" in capsys.readouterr().out


def test_another_version_alone_is_no_change(stored, monkeypatch, capsys):
    monkeypatch.setattr(extras, "versions", lambda name: {name: "9.9.9+cpu"})
    assert cli.main(["certify", "--against", str(stored)]) == 0
    out = capsys.readouterr().out
    assert "9.9.9 " in out
    assert "3 casts and scales, 0 changed" in out


def test_a_cast_that_changed_is_shown_with_its_simplest_input_and_clause(
    libraries, stored, tmp_path, capsys
):
    def through_bfloat16(x):
        with np.errstate(all="ignore"):
            return x.astype(ml_dtypes.bfloat16).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)

    changed(libraries, "ml_dtypes/e4m3fn", through_bfloat16)
    path = tmp_path / "drift.json"
    assert cli.main(["certify", "--against", str(stored), "--json", str(path)]) == 1
    out = capsys.readouterr().out
    version = ml_dtypes.__version__
    assert f"ml_dtypes/e4m3fn, {version} -> {version}: " in out
    assert (
        "254 of 1,562 answers changed; the simplest: float32 1.0625001, bits 3F880001 (next to a tie): "
        "was 0x39 (1.125), is 0x38 (1), specified 0x39 (1.125): rounded once, "
    ) in out
    assert "(C-1, C-2)" in out
    assert "3 casts and scales, 1 changed" in out
    written = json.loads(path.read_text())
    assert not written["ok"]
    assert [row["verdict"] for row in written["rows"]] == ["CHANGED", "same", "same"]


def test_a_deviation_that_is_gone_is_a_change(libraries, stored, capsys):
    def saturating(x):
        return functions.ml_dtypes_cast(E4M3FN)(np.clip(x, -448, 448))

    changed(libraries, "ml_dtypes/e4m3fn", saturating)
    assert cli.main(["certify", "--against", str(stored)]) == 1
    out = capsys.readouterr().out
    assert "float32 480, bits 43F00000 (above max): was 0x7F (NaN), is 0x7E (448), spec" in out
    assert "(C-3)" in out


def test_a_scale_that_changed_is_shown_with_its_policy(libraries, stored, capsys):
    def reciprocal(amax):
        with np.errstate(all="ignore"):
            twice = np.float32(448) * (np.float32(1) / amax)
        return np.where((amax > 1) & (amax < 4), twice, scale(amax))

    changed(libraries, "ml_dtypes/scale/e4m3fn", reciprocal)
    assert cli.main(["certify", "--against", str(stored)]) == 1
    out = capsys.readouterr().out
    assert "answers changed; the simplest: amax " in out
    assert "policy torchao: RN32(max / amax), amax at least 1e-12 (S-3)" in out


def test_rows_that_came_and_went_are_no_failure(libraries, stored, capsys):
    libraries["gfloat/e5m2"] = Function("gfloat", E5M2, functions.ml_dtypes_cast(E5M2))
    del libraries["ml_dtypes/e5m2"]
    assert cli.main(["certify", "--against", str(stored)]) == 0
    out = capsys.readouterr().out
    assert "not installed" in out
    assert "new" in out


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda table: "[1]", "it is no JSON object"),
        (lambda table: "{", "Expecting property name"),
        (lambda table: "{}", "has no 'answers': it is damaged"),
        (lambda table: '{"answers": 3}', "'int' object is not iterable"),
        (lambda table: '{"answers": {"ml_dtypes/e5m2": {}}}', "has no 'specified'"),
        (lambda table: table.replace('"7F', '"ZZ'), "invalid literal for int()"),
        (lambda table: table.replace('"specified": "', '"specified": "0'), "another simulator"),
        (lambda table: '{"answers": {}}', "none of its libraries is installed. Write"),
    ],
)
def test_a_file_that_is_no_table_is_an_error(stored, capsys, damage, says):
    stored.write_text(damage(stored.read_text()))
    assert cli.main(["certify", "--against", str(stored)]) == 2
    assert says in capsys.readouterr().err


def test_options_that_do_not_go_together_are_refused(stored, capsys):
    assert cli.main(["certify", "--against", str(stored), "--exhaustive"]) == 2
    assert "--against compares the edges alone; got --exhaustive too" in capsys.readouterr().err
    assert cli.main(["certify", "--against", str(stored), "--json", str(stored)]) == 2
    assert cli.main(["certify", "--against", str(stored.with_name("none.json"))]) == 2
