"""What a forward computes, read off its source."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fp8ref.torch.blocks import forms

NAMES = ("w1", "w3", "w2")


class MLP(nn.Module):
    """SwiGLU, or another activation of its gate."""

    def __init__(self, act):
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(8, 8) for _ in NAMES)
        self.act = act

    def forward(self, x):
        """With a docstring, which computes nothing."""
        down = self.w2(self.act(self.w1(x)) * self.w3(x))
        return down


class ByName(MLP):
    def forward(self, hidden):
        return self.w2(functional.silu(self.w1(hidden)) * self.w3(hidden))


class Swapped(MLP):
    def forward(self, x):
        return self.w2(self.act(self.w3(x)) * self.w1(x))


class Clipped(MLP):
    def forward(self, x):
        return self.w2(self.act(self.w1(x)) * self.w3(x)).clamp(-1, 1)


@pytest.mark.parametrize(
    ("mlp", "name"),
    [
        (MLP(nn.SiLU()), "x"),
        (MLP(functional.silu), "x"),
        (ByName(None), "hidden"),
        (MLP(nn.GELU()), ""),
        (MLP(torch.sigmoid), ""),
        (Swapped(nn.SiLU()), ""),
        (Clipped(nn.SiLU()), ""),
        (nn.Linear(8, 8), ""),
    ],
    ids=lambda each: type(each).__name__,
)
def test_swiglus_input_is_named(mlp, name):  # M-11
    assert forms.swiglu_input(mlp, NAMES) == name


def test_a_forward_of_an_instance_has_no_form():
    mlp = MLP(nn.SiLU())
    mlp.forward = lambda x: x
    assert forms.swiglu_input(mlp, NAMES) == ""


class Attention(nn.Module):
    def forward(self, x, mask):
        shape = (*x.shape[:-1], -1)
        return self.wo(self.wq(x).view(shape) + self.wk(x) * self.wv(x))


class Residual(Attention):
    def forward(self, x, mask):
        return self.wq(x) + self.wk(x) + self.wv(x) + x


class Twice(Attention):
    def forward(self, x, mask):
        return self.wq(x) + self.wk(x) + self.wv(x) + self.wv(x)


@pytest.mark.parametrize(("kind", "name"), [(Attention, "x"), (Residual, ""), (Twice, "")])
def test_an_input_that_linears_alone_read_is_named(kind, name):
    assert forms.input_name(kind(), ("wq", "wk", "wv")) == name


class Block(nn.Module):
    def forward(self, x):
        h = x + self.attention(self.norm(x), None)
        y = self.second(h)
        y = self.mlp(y)
        return h + y


class Reading(Block):
    def forward(self, x):
        y = self.norm(x)
        return x + self.attention(y) + y + self.mlp(self.second(x)) + self.second(x)


def test_a_norm_that_one_child_reads_is_named():
    assert forms.norm_name(Block(), "attention") == "norm"
    assert forms.norm_name(Block(), "mlp") == "second"
    assert forms.norm_name(Reading(), "attention") == forms.norm_name(Reading(), "mlp") == ""


def test_norms_of_other_forms_have_no_constants():
    class Shifted(nn.RMSNorm):
        def forward(self, x):
            return super().forward(x) + 1

    assert forms.norm_constants(nn.RMSNorm(8, eps=1e-6)).eps == 1e-6
    assert not forms.norm_constants(nn.RMSNorm(8, eps=1e-6)).twice
    assert forms.norm_constants(LlamaRMSNorm(8)).twice
    for norm in (
        Shifted(8, eps=1e-6),
        nn.RMSNorm(8),
        nn.RMSNorm((2, 8), eps=1e-6),
        nn.RMSNorm(8, eps=1e-6, elementwise_affine=False),
        nn.LayerNorm(8),
    ):
        assert forms.norm_constants(norm) is None
