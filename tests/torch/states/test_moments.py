"""Moments in PyTorch: guards of their arithmetic (spec O)."""

import pytest
import torch
from helpers.states.state_layouts import NEAREST
from helpers.states.torch_states import trained

from fp8ref.torch.states import moments


def test_torchs_own_root_is_another(monkeypatch):
    """The guard of O's correctly rounded square root, against its removal."""
    monkeypatch.setattr(moments, "sqrt", torch.sqrt)
    x = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0))
    if (x.sqrt() == x.double().sqrt().float()).all():
        pytest.skip("this torch rounds square roots correctly here")
    assert trained(NEAREST["sqrt_e4m3"], 8) > 0
