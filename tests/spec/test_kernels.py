import importlib.util

import pytest

from fp8ref.spec import kernels


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="kernels is one of auto, plain, triton; got 'cuda'"):
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
    assert plain.text == "plain operations (cpu has no FP8 instructions)"
    triton = kernels.Kernels(True, "asked for")
    assert triton.text == "Triton kernels (asked for)"
    for ran in (plain, triton):
        assert kernels.read(ran.manifest) == ran


def test_kernels_that_cast_a_part_say_so():
    triton = kernels.Kernels(True, "checked")
    assert triton.over_linears([], "auto") == triton
    assert triton.over_linears([("a", 1), ("b", 1)], "triton") == triton
    assert triton.over_linears(
        [("a", 1), ("b", 2 / 3), ("c", 0), ("b", 1)], "triton"
    ) == kernels.Kernels(True, "checked; b, c not in all operands")


def test_kernels_that_cast_nothing_are_plain_operations_or_refused():
    triton = kernels.Kernels(True, "checked")
    assert triton.over_linears([("mxfp8", 0)], "auto").text == (
        "plain operations (no kernel casts recipe mxfp8)"
    )
    with pytest.raises(ValueError, match=r"got recipe mxfp8\. Use 'auto' or 'plain'"):
        triton.over_linears([("mxfp8", 0)], "triton")
    plain = kernels.Kernels(False, "asked for")
    assert plain.over_linears([("mxfp8", 0)], "plain") == plain


def test_experts_beside_linears_of_one_recipe_are_a_part():
    triton = kernels.Kernels(True, "checked")
    part = kernels.Kernels(True, "checked; a not in all operands")
    assert triton.over_linears([("a", 1), ("a", 0)], "triton") == part
    assert triton.over_linears([("a", 0), ("a", 1)], "triton") == part
