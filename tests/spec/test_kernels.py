import importlib.util

import pytest

from fp8ref.spec import kernels


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="one of auto, plain, triton; got 'cuda'"):
        kernels.check("cuda")


def test_triton_needs_its_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"not installed. Install it with: pip install 'fp8ref\[k"):
        kernels.check("triton")
    kernels.check("auto")
    kernels.check("plain")


def test_triton_is_taken_where_it_is_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton")
    kernels.check("triton")


def test_a_manifest_says_what_casts_and_why():
    plain = kernels.Kernels(False, "cpu has no FP8 instructions")
    assert plain.manifest == {"by": "plain", "reason": "cpu has no FP8 instructions"}
    assert kernels.Kernels(True, "asked for").manifest["by"] == "triton"
