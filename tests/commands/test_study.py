"""fp8ref study: a table, JSON and a page of a file of tensors."""

import json

import numpy as np
import pytest

from fp8ref import cli


@pytest.fixture
def file(tmp_path):
    x = np.random.default_rng(0).standard_normal((512, 128)).astype(np.float32)
    x[7] *= 30_000
    np.savez(tmp_path / "acts.npz", **{"up.input": x, "up.bias": x[0], "down.input": x[:128]})
    return tmp_path / "acts.npz"


def test_it_prints_a_table_and_writes_json_and_a_page(file, tmp_path, capsys):
    words = ["study", str(file), "--recipes", "tensorwise,rowwise", "--tensors", "up.*"]
    assert cli.main([*words, "--json", str(tmp_path / "a.json"), "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("tensorwise zeroes 15 % of up.input because token 7 is 31,000x larger")
    assert "zeroed" in out
    assert "worst rows" in out
    assert "down" not in out
    assert "not judged: up.bias (shape (128,) is no matrix" in out
    kept = json.loads((tmp_path / "a.json").read_text())
    assert {row[0] for row in kept["rows"]} == {"tensorwise", "rowwise"}
    assert cli.main([*words, "--out", str(tmp_path / "study.html")]) == 0  # over its own page
    page = (tmp_path / "study.html").read_text()
    assert "<h1>What FP8 does to 1 tensor</h1>" in page
    assert "tensorwise zeroes 15 % of up.input because token 7" in page


def test_of_many_rows_it_prints_the_worst(file, capsys):
    arrays = {f"{i}.input": np.ones((2, 32), np.float32) for i in range(20)}
    np.savez(file, **arrays)
    assert cli.main(["study", str(file), "--recipes", "tensorwise, rowwise,"]) == 0
    out = capsys.readouterr().out
    assert "The worst 10:" in out
    assert out.count(" tensorwise ") < 20


def test_a_users_error_is_one_line_and_writes_nothing(file, tmp_path, capsys):
    page = tmp_path / "page.html"
    for words, text in (
        (["--recipes", "fp9"], "got 'fp9'"),
        (["--recipes", " ,"], "--recipes takes names of recipes, with commas; got ' ,'"),
        (["--tensors", "x*"], "no tensor of that name"),
        (["--out", "/nonexistent/a.html"], "/nonexistent is no directory. Make it, or name"),
        (["--out", str(tmp_path / "none")], "--out names a .html file, or a directory that exists"),
        (["--json", str(file)], "--json names a file that this command neither reads nor writes"),
        (["--json", str(tmp_path / "." / ".." / tmp_path.name / page.name)], "neither reads nor"),
    ):
        assert cli.main(["study", str(file), "--out", str(page), *words]) == 2
        error = capsys.readouterr().err
        assert text in error
        assert not page.exists()
    for name, why in (("nofile.npz", "No such file or directory"), (".", "Is a directory")):
        assert cli.main(["study", name, "--out", str(page)]) == 2
        assert f"{name}: cannot be read ({why}). Name a file" in capsys.readouterr().err
    page.write_text("mine")
    assert cli.main(["study", str(file), "--out", str(page)]) == 2
    assert "is no page of fp8ref study; it is left alone" in capsys.readouterr().err
    assert page.read_text() == "mine"


def test_its_help_has_three_examples_and_fits_a_screen(capsys):
    with pytest.raises(SystemExit):
        cli.main(["study", "--help"])
    text = capsys.readouterr().out
    assert text.count("\n  fp8ref study ") == 3
    assert len(text.splitlines()) <= 40
