"""docs/libraries.md is what docs/scripts/libraries.py writes: some of its rows, asked again in
full, and the rest of its text.
"""

import importlib.util
import re
from pathlib import Path

import pytest

from fp8ref.conformance.libraries import cuda_header

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "libraries.md").read_text(encoding="utf-8")
STRIDE = 5
OF_NO_POLICY = (
    "`transformers/weights_ue8m0/e4m3fn`",
    "`compressed-tensors/mx/e4m3fn`",
    "`ModelOpt/fake/e4m3fn`",
)
"""Scales that no policy says: each has a reason in docs/spec/profiles.md."""


@pytest.fixture(scope="module")
def libraries():
    spec = importlib.util.spec_from_file_location("libraries", DOCS / "scripts" / "libraries.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(kind: str) -> list[list[str]]:
    """The rows of the page, without those of a header of CUDA that is not here, or is of another
    version.
    """
    section = PAGE.split(f"## {kind.capitalize()}\n")[1].split("\n## ")[0]
    found = [
        line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")
    ]
    here = f"run: {cuda_header.version()} " if cuda_header.available() else None
    return [
        row
        for row in found
        if not row[0].startswith("`cuda_fp8.hpp") or (here is not None and row[2].startswith(here))
    ]


@pytest.fixture
def same_versions(libraries):
    if libraries.versions() not in PAGE:
        pytest.skip(f"the page is of other versions than {libraries.versions()}")


@pytest.mark.parametrize("kind", ["casts", "scales"])
def test_every_row_is_there_and_in_order(libraries, kind):
    written, asked = (
        [row[0] for row in rows(kind)],
        [f"`{function.row}`" for function in libraries.functions(kind)],
    )
    # CUDA's header has rows where the page's version is installed.
    assert written == [row for row in asked if row in written or "cuda_fp8.hpp" not in row]


@pytest.mark.parametrize("kind", ["casts", "scales"])
def test_some_rows_asked_again_are_the_same(libraries, kind, same_versions):
    written = rows(kind)[::STRIDE] + [
        row
        for row in rows(kind)
        if row[0]
        in ("`gfloat/compute_scale_amax/e4m3fn`", "`torchao/mx_even/e5m2`", "`qwix/mxfp8/e4m3fn`")
    ]
    asked = libraries.table(kind, libraries.COUNT, [row[0].strip("`") for row in written])
    asked = {row[0]: row for row in asked}
    for row in written:
        assert " | ".join(asked[row[0]]) == " | ".join(row)


def test_casts_to_e8m0_are_the_rows_of_the_page(libraries, same_versions):  # C-10
    asked = [" | ".join(cells) for cells in libraries.table("e8m0", 0) if "cuda" not in cells[0]]
    section = PAGE.split("## Casts to e8m0\n")[1].split("\n## ")[0]
    written = [line.strip("| ") for line in section.splitlines() if line.startswith("| `")]
    assert [row for row in written if not row.startswith("`cuda_fp8.hpp")] == asked


def test_the_text_is_the_scripts(libraries, same_versions, monkeypatch):
    monkeypatch.setattr(libraries, "table", lambda kind, count: [])
    without_rows = re.sub(r"^\| `.*\n", "", PAGE, flags=re.MULTILINE)
    assert libraries.page(0) == without_rows


def test_a_library_that_changes_its_mind_changes_its_row(libraries):
    """Of a cast that saturates, and of one that does not and flushes subnormals."""
    import ml_dtypes
    import numpy as np

    from fp8ref.formats import E4M3FN

    def changed(x):
        x = np.where(np.abs(x) < 2.0**-6, np.copysign(np.float32(0), x), x)
        return x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)

    row = dict(
        zip(
            libraries.CASTS,
            libraries.describe_cast(
                libraries.Function(library="ml_dtypes", call="b", fmt=E4M3FN, run=changed), 100
            ),
            strict=True,
        )
    )
    assert (row["rounding"], row["above max"], row["subnormals"]) == ("none", "NaN", "flushed")
    assert row["simplest that differs"] == "3C000000 (0.0078125): 0x00 (0) for 0x04 (0.0078125)"


@pytest.mark.parametrize("kind", ["casts", "scales"])
def test_what_is_transcribed_is_told_from_what_is_run(libraries, kind):
    for row, function in zip(rows(kind), libraries.functions(kind), strict=False):
        known = "transcribed: " if function.transcribed else "run: "
        assert row[2].startswith(known)
        # repository, file, and eight digits of a commit or a package on PyPI
        if function.transcribed:
            assert re.search(
                r"^transcribed: (\S+/\S+ \S+ [0-9a-f]{8}|\S+ [0-9.]+ \(PyPI\) \S+)$", row[2]
            ), row[2]


def test_every_transcription_is_a_policys(libraries):  # S-9, S-14, S-17, S-20
    written = [row for row in rows("scales") if row[2].startswith("transcribed")]
    assert len(written) == 2 * len(libraries.TRANSCRIPTIONS) + len(libraries.engines.ENGINES)
    assert {(row[5], row[6]) for row in written if row[0] not in OF_NO_POLICY} == {("0", "-")}
    assert all(row[3].startswith("nearest `") for row in written if row[0] in OF_NO_POLICY)


def test_one_row_alone_is_printed_by_its_command(libraries, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["libraries.py", "--only", "ml_dtypes/e5m2", "--count", "10"])
    libraries.main()
    said = capsys.readouterr().out
    assert re.search(r"^above max +Inf$", said, re.MULTILINE)
    monkeypatch.setattr("sys.argv", ["libraries.py", "--only", "nobody*"])
    with pytest.raises(SystemExit):
        libraries.main()
    assert "no row matches nobody*" in capsys.readouterr().err
