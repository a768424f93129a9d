"""What a forward computes, read off its source."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

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


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotated_once(q, k, cos, sin):
    """Rounded to float32 until the end, of tokens before heads."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return [(x.float() * cos + rotate_half(x.float()) * sin).to(x.dtype) for x in (q, k)]


def rotated_in_part(q, k, cos, sin):
    """Of each head the first features, as many as the tables have."""
    q, k = (x.transpose(1, 2) for x in (q, k))
    width = cos.shape[-1]
    turned = apply_rotary_pos_emb(q[..., :width], k[..., :width], cos, sin)
    rest = q[..., width:], k[..., width:]
    return [torch.cat(each, -1).transpose(1, 2) for each in zip(turned, rest, strict=True)]


def only_queries(q, k, cos, sin):
    return rotated_once(q, k, cos, sin)[0], k


class Rotating(nn.Module):
    """Rotates heads [B, T, H, D] by tables of one argument."""

    head_dim = 32

    def forward(self, x, tables, positions=None):
        q, k = self.wq(x).view(1, 8, -1, 32), self.wk(x).view(1, 8, -1, 32)
        q, k = rotated_once(q, k, *tables)
        return q + k + self.wv(x)


class Once(Rotating):
    def forward(self, x, tables, positions=None):
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q = q.view(1, 8, -1, 32)
        k = k.view(1, 8, -1, 32)
        cos, sin = tables
        q, k = rotated_once(q, k, cos, sin)
        return q + k + v


class InPart(Rotating):
    def forward(self, x, tables):
        q = self.wq(x).view(1, 8, -1, 32)
        k = self.wk(x).view(1, 8, -1, 32)
        cos, sin = tables
        q, k = rotated_in_part(q, k, cos, sin)
        return q + k + self.wv(x)


class OnlyQueries(Rotating):
    def forward(self, x, tables):
        q = self.wq(x).view(1, 8, -1, 32)
        k = self.wk(x).view(1, 8, -1, 32)
        cos, sin = tables
        q, k = only_queries(q, k, cos, sin)
        return q + k + self.wv(x)


class Scaled(Rotating):
    def forward(self, x, tables):
        q = self.wq(x).view(1, 8, -1, 32)
        k = self.wk(x).view(1, 8, -1, 32)
        q = q * 0.5
        cos, sin = tables
        q, k = rotated_once(q, k, cos, sin)
        return q + k + self.wv(x)


class Twisted(Rotating):
    def forward(self, x, tables):
        q, k, v = self.wk(x), self.wq(x), self.wv(x)
        cos, sin = tables
        q, k = rotated_once(q, k, cos, sin)
        return q + k + v


class Again(Rotating):
    def forward(self, x, tables):
        q = self.wq(x).view(1, 8, -1, 32)
        k = self.wk(x).view(1, 8, -1, 32)
        cos, sin = tables
        q, k = rotated_once(q, k, cos, sin)
        return rotated_once(q, self.wv(x), cos, sin)


class Narrow(Once):
    head_dim = 24


class Wrapped(Once):
    @torch.no_grad()
    def forward(self, x, tables):
        cos, sin = tables
        return rotated_once(self.wq(x), self.wk(x), cos, sin) + self.wv(x)


class Elsewhere(Rotating):
    def forward(self, x):
        q = self.wq(x).view(1, 8, -1, 32)
        k = self.wk(x).view(1, 8, -1, 32)
        cos, sin = self.tables
        q, k = rotated_once(q, k, cos, sin)
        return q + k + self.wv(x)


QKV = ("wq", "wk", "wv")
CHANGE = "its query and key change before they are rotated"
OTHER = "rotates in another form, or a part of each head"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Once, ""),
        (Rotating, CHANGE),
        (InPart, f"rotated_in_part {OTHER}"),
        (OnlyQueries, f"only_queries {OTHER}"),
        (Elsewhere, f"rotated_once {OTHER}"),
        (Scaled, CHANGE),
        (Twisted, CHANGE),
        (Again, "no one call rotates its query and key"),
        (Attention, "no one call rotates its query and key"),
        (Narrow, "its head_dim is no power of two: 24"),
        (Wrapped, "its forward has no source of its own"),
    ],
)
def test_a_rotation_is_known_by_what_it_computes(kind, reason):  # M-3
    rotation, why = forms.rotation(kind(), QKV)
    assert why == reason
    if reason:
        assert rotation == forms.Rotation()
    else:
        parameters = ("x", "tables", "positions")
        expected = forms.Rotation("rotated_once", "halves", 32, ("tables",), parameters)
        assert rotation == expected


def apply_rotary_emb(xq, xk, freqs_cis, positions=None):
    """torchtitan's, by positions if there are any."""
    freqs_cis = freqs_cis[: xq.shape[1]] if positions is None else freqs_cis[positions]
    both = [torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) for x in (xq, xk)]
    turned = [torch.view_as_real(x * freqs_cis[:, None]).flatten(3) for x in both]
    return [y.type_as(x) for y, x in zip(turned, (xq, xk), strict=True)]


class Titan(nn.Module):
    head_dim = 32

    def forward(self, x, freqs_cis, attention_masks, positions=None):
        bs, seqlen, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = xq.view(bs, seqlen, -1, self.head_dim)
        xk = xk.view(bs, seqlen, -1, self.head_dim)
        xq, xk = apply_rotary_emb(xq, xk, freqs_cis=freqs_cis, positions=positions)
        return self.wo(xq.flatten(-2) * xk.flatten(-2) + xv)


def test_parameters_with_which_it_rotates_otherwise_are_named():
    rotation, why = forms.rotation(Titan(), QKV)
    parameters = ("x", "freqs_cis", "attention_masks", "positions")
    arguments = ("freqs_cis", "positions")
    assert not why
    assert rotation == forms.Rotation("apply_rotary_emb", "pairs", 32, arguments, parameters)


def test_transformers_rounds_both_products():
    names = ("q_proj", "k_proj", "v_proj")
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    llama = LlamaAttention(LlamaConfig(**sizes), 0)
    rotation, why = forms.rotation(llama, names)
    assert not why
    assert (rotation.form, rotation.arguments) == ("rounded halves", ("position_embeddings",))
    qwen = Qwen3Attention(Qwen3Config(**sizes, head_dim=32), 0)
    assert forms.rotation(qwen, names)[1] == CHANGE


@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), FakeTensorMode])
def test_a_rotation_is_known_where_tensors_have_no_numbers(mode):
    with mode():
        assert forms.rotation(Once(), QKV)[1] == ""
