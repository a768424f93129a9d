"""Codes of a weight serve passes by that weight alone, as it was when it was cast."""

import pytest
import torch
from torch import nn

from fp8ref.torch.linear.weight_codes import WeightCodes


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 8))


def codes_of(w: torch.Tensor, scale: torch.Tensor | None = None) -> WeightCodes:
    """Seven tensors in place of codes, scales and partial amaxes."""
    return WeightCodes.of(tuple(torch.full((), i) for i in range(7)), w, scale)


def change(x: torch.Tensor) -> None:
    with torch.no_grad():
        x.add_(1)


def test_the_weight_is_served_the_tensors_themselves():
    w = weight()
    codes = codes_of(w)
    assert codes.serving(w, "fc") is codes.tensors
    codes.check("fc")


@pytest.mark.parametrize("other", [weight, lambda: weight().bfloat16()])
def test_another_weight_is_cast_by_its_pass(other):
    assert codes_of(weight()).serving(other(), "fc") == ()


def test_a_view_of_the_weight_is_another_weight():
    w = weight()
    assert codes_of(w).serving(w.detach(), "fc") == ()


@pytest.mark.parametrize("changed", ["weight", "scale"])
def test_a_change_of_weight_or_scale_is_refused_by_name(changed):
    w, scale = weight(), torch.ones(())
    codes = codes_of(w, scale)
    change(w if changed == "weight" else scale)
    for refused in (lambda: codes.serving(w, "fc"), lambda: codes.check("fc")):
        with pytest.raises(
            ValueError, match=r"fc.*, or its scale, has changed\. Leave the context"
        ):
            refused()


def test_a_change_through_a_view_counts():
    w = weight()
    codes = codes_of(w)
    change(w.detach()[0])
    with pytest.raises(ValueError, match="has changed"):
        codes.check("fc")


def test_a_change_of_another_weight_is_no_matter():
    w, other = weight(), weight()
    codes = codes_of(w)
    change(other)
    assert codes.serving(w, "fc") is codes.tensors


def test_changes_before_the_cast_count_no_longer():
    w, scale = weight(), torch.ones(())
    change(w)
    change(scale)
    codes_of(w, scale).check("fc")


def test_inference_tensors_have_no_counts():
    with torch.inference_mode():
        w = torch.ones(4, 8)
        codes = codes_of(w, torch.ones(()))
        w.add_(1)
        codes.check("fc")
    assert codes.versions == (0, 0)


def test_compiled_graphs_take_codes_without_a_check(monkeypatch):
    w = weight()
    codes = codes_of(w)
    change(w)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert codes.serving(w, "fc") is codes.tensors
    assert codes.serving(weight(), "fc") == ()


def test_a_cuda_graph_that_is_captured_keeps_no_codes(monkeypatch):
    class OnGPU(torch.Tensor):
        is_cuda = True

    w = torch.ones(4, 8).as_subclass(OnGPU)
    codes, capturing = codes_of(w), [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    assert codes.serving(w, "fc") is codes.tensors
    capturing[0] = True
    assert codes.serving(w, "fc") == ()
