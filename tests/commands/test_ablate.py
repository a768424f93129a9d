"""fp8ref ablate, as far as its command line goes."""

import pytest

from fp8ref import cli


@pytest.mark.parametrize("options", [[], ["--data", "stdlib"]])
def test_a_name_of_no_directory_is_said(tmp_path, monkeypatch, capsys, options):
    monkeypatch.setenv("COLUMNS", "300")
    assert cli.main(["ablate", str(tmp_path / "typo"), *options]) == 2
    assert f"there is no directory {tmp_path / 'typo'}. Check its name" in capsys.readouterr().err
