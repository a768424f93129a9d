import pytest
import torch
from torch import nn
from torch.nn import functional

from fp8ref import study
from fp8ref.study import torch_attention


class Attention(nn.Module):
    def __init__(self, **how) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x, x[:, :2], x[:, :2], enable_gqa=True, **self.how)


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


X = torch.randn(2, 8, 20, 32, generator=torch.Generator().manual_seed(0))
LOWER = torch.ones(20, 20, dtype=torch.bool).tril()


def test_calls_are_named_by_their_modules_and_keep_some_heads_and_tokens():
    model = Model(Attention(is_causal=True), Attention(attn_mask=LOWER, scale=0.5), Attention())
    before = {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()}
    calls, refused = torch_attention.record(model, lambda m: m(X), heads=4, tokens=16)
    assert [one.layer for one in calls] == ["layers.0", "layers.1", "layers.2"]
    assert [(one.causal, one.scale) for one in calls] == [(True, None), (True, 0.5), (False, None)]
    assert [tuple(x.shape) for x in calls[0][1:4]] == [(1, 4, 16, 32), (1, 1, 16, 32), (1, 1, 16, 32)]
    torch.testing.assert_close(torch.from_numpy(calls[0].q), X[:1, :4, :16], rtol=0, atol=0)
    assert not refused
    assert before == {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()}


@pytest.mark.parametrize("how", [{"attn_mask": torch.rand(20, 20) > 0.5}, {"dropout_p": 0.5}])
def test_what_a_study_does_not_take_is_said(how):
    calls, refused = torch_attention.record(Model(Attention(**how)), lambda m: m(X), heads=4, tokens=16)
    assert not calls
    assert "causal or full attention" in refused["layers.0"]


def test_a_model_is_judged_in_one_line():
    found = study.attention(Model(Attention(is_causal=True)), lambda m: m(X), ["fa3", "bf16"])
    errors = {row.variant: row.error for row in found.rows}
    assert 0 < errors["bf16"] < errors["fa3"] < 0.2


def test_a_pass_without_attention_is_refused():
    with pytest.raises(ValueError, match="got none"):
        study.attention(nn.Linear(32, 32), lambda m: m(X))
