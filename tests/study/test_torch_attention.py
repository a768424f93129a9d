import pytest
import torch
from torch import nn
from torch.nn import functional

from fp8ref import study
from fp8ref.study import torch_attention
from fp8ref.study.recording import Recording


class Attention(nn.Module):
    def __init__(self, **how) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            x, x[:, :2], x[:, :2], enable_gqa=True, **self.how
        )


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def recorded(model):
    found = Recording(framework="torch")
    with torch_attention.record(model, found, heads=4, tokens=16):
        model(X)
    return list(found.attention.values()), found.refused


X = torch.randn(2, 8, 20, 32, generator=torch.Generator().manual_seed(0))
LOWER = torch.ones(20, 20, dtype=torch.bool).tril()


def test_calls_are_named_by_their_modules_and_keep_some_heads_and_tokens():
    model = Model(Attention(is_causal=True), Attention(attn_mask=LOWER, scale=0.5), Attention())
    before = {
        name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()
    }
    calls, refused = recorded(model)
    assert [one.layer for one in calls] == ["layers.0", "layers.1", "layers.2"]
    assert [(one.causal, one.scale) for one in calls] == [(True, None), (True, 0.5), (False, None)]
    assert [tuple(x.shape) for x in (calls[0].q, calls[0].k, calls[0].v)] == [
        (1, 4, 16, 32),
        (1, 1, 16, 32),
        (1, 1, 16, 32),
    ]
    torch.testing.assert_close(torch.from_numpy(calls[0].q), X[:1, :4, :16], rtol=0, atol=0)
    assert not refused
    assert before == {
        name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()
    }


@pytest.mark.parametrize("how", [{"attn_mask": torch.rand(20, 20) > 0.5}, {"dropout_p": 0.5}])
def test_what_a_study_does_not_take_is_said(how):
    calls, refused = recorded(Model(Attention(**how)))
    assert not calls
    assert "causal or full attention" in refused["layers.0"]


def test_a_model_is_judged_in_one_line():
    found = study.attention(Model(Attention(is_causal=True)), lambda m: m(X), ["fa3", "bf16"])
    errors = {row.variant: row.error for row in found.rows}
    assert 0 < errors["bf16"] < errors["fa3"] < 0.2


def test_a_pass_without_attention_is_refused():
    with pytest.raises(ValueError, match="got none"):
        study.attention(nn.Linear(32, 32), lambda m: m(X))


def test_a_step_is_recorded_with_its_gradient_written_and_judged(tmp_path):
    model = Model(nn.Linear(32, 32), Attention(is_causal=True))
    x = X.clone().requires_grad_()
    with study.record(model, heads=4, tokens=16) as recording:
        out = model(x)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        out.backward(grad)
    recording.write(tmp_path / "step.npz")
    found = study.read(tmp_path / "step.npz")
    torch.testing.assert_close(
        torch.from_numpy(found.attention["layers.1"].do), grad[:1, :4, :16], rtol=0, atol=0
    )
    judged = study.judge_attention(found, ["cudnn", "fa3", "bf16"])
    rows = {row.variant: row for row in judged.rows}
    assert 0 < rows["bf16"].gradients < rows["cudnn"].gradients < 0.2
    assert rows["fa3"].gradients is None
    assert rows["cudnn"].error == study.judge_attention(recording, ["cudnn"]).rows[0].error
    with study.record(model, heads=0) as without:
        model(x)
    with pytest.raises(ValueError, match="the recording has attention; got none"):
        study.judge_attention(without)


def test_a_layer_s_first_call_decides():
    class Twice(nn.Module):
        def __init__(self, *dropouts):
            super().__init__()
            self.dropouts = dropouts

        def forward(self, x):
            for dropout in self.dropouts:
                x = functional.scaled_dot_product_attention(
                    x, x, x, is_causal=True, dropout_p=dropout
                )
            return x

    x = torch.randn(1, 4, 20, 8)
    first, second = (
        study.attention(Twice(*dropouts), lambda m: m(x), ["bf16"])
        for dropouts in ((0.0, 0.5), (0.5, 0.0))
    )
    assert ([len(first.rows), len(first.refused)], [len(second.rows), len(second.refused)]) == (
        [1, 0],
        [0, 1],
    )


@pytest.mark.parametrize("how", [{"heads": 0}, {"heads": -1}, {"tokens": 0}, {"tokens": 1.5}])
def test_heads_and_tokens_are_checked(how):
    with pytest.raises(
        ValueError,
        match=rf"^{next(iter(how))} of attention .*at least 1; got {next(iter(how.values()))}",
    ):
        study.attention(nn.Linear(4, 4), lambda m: m, **how)
    if how != {"heads": 0}:  # attention is not recorded
        with pytest.raises(ValueError, match=f"got {next(iter(how.values()))}"):
            study.record(nn.Linear(4, 4), **how)
