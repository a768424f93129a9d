"""fp8ref ablate, as far as its command line goes."""

import pytest

from fp8ref import cli


@pytest.mark.parametrize("options", [[], ["--data", "stdlib"]])
def test_a_name_of_no_directory_is_said(tmp_path, monkeypatch, capsys, options):
    monkeypatch.setenv("COLUMNS", "300")
    assert cli.main(["ablate", str(tmp_path / "typo"), *options]) == 2
    assert f"there is no directory {tmp_path / 'typo'}. Check its name" in capsys.readouterr().err


def test_the_learning_rate_has_two_bounds(tmp_path, capsys):
    for rate in ("5000", "0"):
        assert cli.main(["ablate", str(tmp_path), "--steps", "1", "--learning-rate", rate]) == 2
        said = f"--learning-rate is between 0 and 1000; got {float(rate)}."
        assert said in capsys.readouterr().err
