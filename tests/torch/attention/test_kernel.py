"""FlashAttention-3's kernel: what it is called with, by a stand-in with its interface, and what is
refused (spec A-20).
"""

import sys
import types

import pytest
import torch

from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import Mask, differentiated
from fp8ref.torch.attention import attention
from fp8ref.torch.attention import kernel as attention_kernel


def given():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, h, t, 64, generator=generator).bfloat16()
        for h, t in ((4, 40), (2, 70), (2, 70))
    ]


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """FlashAttention-3's interface (commit 01afd16), of codes [B, T, heads, D] and descales [B,
    Hkv], computed by tiles.
    """
    assert {x.dtype for x in (q, k, v)} == {torch.float8_e4m3fn}
    assert return_attn_probs
    window = tuple(None if side < 0 else side for side in window_size)
    mask = Mask(causal=causal, window=None if window == (None, None) else window)
    heads, scales = [], {}
    for role, x, descale in zip("qkv", (q, k, v), (q_descale, k_descale, v_descale), strict=True):
        x, descale = x.transpose(1, 2).float(), descale[:, :, None, None]
        heads.append(x * descale.repeat_interleave(x.shape[1] // descale.shape[1], dim=1))
        scales[role] = 1 / descale
    call = Call(variant="fa3", mask=mask, scale=softmax_scale)
    result = attention.forward(*heads, variant=call, scales=scales)
    return result.o.bfloat16().transpose(1, 2), result.lse


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(window=(20, None))], ids=str)
def test_the_call_has_codes_descales_and_the_mask(mask, monkeypatch):
    monkeypatch.setattr(attention_kernel, "library", lambda device: flash_attn_func)
    q, k, v = given()
    call = Call(variant="fa3", mask=mask, scale=0.11)
    o, lse = attention_kernel.forward(q, k, v, variant=call)
    right = attention.forward(q, k, v, variant=call)
    # Codes are equal; the stand-in's scale_inv is 1 / (1 / scale_inv), two roundings to float32
    # away, which bfloat16 hides but for ties.
    assert (o == right.o.bfloat16()).float().mean() > 0.99
    assert torch.allclose(lse, right.lse, atol=2**-18)


def test_given_scales_replace_those_of_the_tensors(monkeypatch):
    monkeypatch.setattr(attention_kernel, "library", lambda device: flash_attn_func)
    q, k, v = given()
    scales = {"v": torch.full((2, 2, 1, 1), 2.0**-9)}
    assert not torch.equal(
        attention_kernel.forward(q, k, v)[0], attention_kernel.forward(q, k, v, scales=scales)[0]
    )


REFUSED = [
    ({}, r"needs a Hopper GPU; got tensors on the CPU. Use fp8ref.torch.attention"),
    ({"variant": "cudnn"}, r"FlashAttention-3 runs fa3 or fa3_promoted; got 'cudnn'"),
    ({"mask": Mask(causal=True, alignment="start")}, r"masks aligned to the end"),
    ({"scales": {"o": torch.ones(())}}, r"takes scales for q, k, v; got 'o'"),
    ({"variant": Call(variant="fa3", softcap=9.0)}, r"takes no softcap; got 9.0"),
]


@pytest.mark.parametrize(("how", "said"), REFUSED)
def test_what_it_does_not_take_is_refused(how, said):
    with pytest.raises(ValueError, match=said):
        attention_kernel.forward(*given(), **how)


def test_on_a_hopper_gpu_it_is_imported_or_its_lack_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(
        ImportError, match=r"not installed. Build hopper/ of Dao-AILab/flash-attention, or use"
    ):
        attention_kernel.library(torch.device("cuda"))
    monkeypatch.setitem(
        sys.modules, "flash_attn_interface", types.SimpleNamespace(flash_attn_func=flash_attn_func)
    )
    assert attention_kernel.library(torch.device("cuda")) is flash_attn_func


@pytest.mark.parametrize("mask", [Mask(causal=True), Mask()], ids=str)
def test_gradients_are_of_its_own_output_and_log_sum_exp(mask, monkeypatch):
    """By tiles o is the same but for ties (see above), and so are gradients: a tie moves o by 2^-8,
    and D of its row by less than 2^-8 of |do| |o|.
    """
    monkeypatch.setattr(attention_kernel, "library", lambda device: flash_attn_func)
    variant, do = (
        differentiated("fa3", "bf16"),
        torch.randn(2, 4, 70, 64, generator=torch.Generator().manual_seed(1)).bfloat16(),
    )
    q = torch.randn(2, 4, 70, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    _, k, v = given()
    found = []
    for of_kernel in (True, False):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        call = Call(variant=variant, mask=mask, scale=0.11, arithmetic="stated")
        o = (attention_kernel if of_kernel else attention).apply(*leaves, variant=call)
        o.backward(do)
        found.append([leaf.grad.float() for leaf in leaves])
    for mine, right in zip(*found, strict=True):
        assert (mine - right).norm() < 2**-9 * right.norm()
        assert (mine == right).float().mean() > 0.9
    changed = [x.clone().requires_grad_() for x in (q, k, v)]
    monkeypatch.setattr(
        attention_kernel,
        "library",
        lambda device: lambda *x, **how: (lambda o, lse: (o, lse + 1))(*flash_attn_func(*x, **how)),
    )
    call = Call(variant=variant, mask=mask, scale=0.11)
    attention_kernel.apply(*changed, variant=call).backward(do)
    # P is of the kernel's log-sum-exp
    assert (changed[2].grad.float() * 2.718 - found[0][2]).norm() < 2**-6 * found[0][2].norm()


def test_gradients_in_fp8_are_refused(monkeypatch):
    monkeypatch.setattr(attention_kernel, "library", lambda device: flash_attn_func)
    q, k, v = given()
    with pytest.raises(
        ValueError,
        match=r"no backward pass in FP8; got variant 'fa3' with backward None. Give "
        r"fp8ref.spec.attention.variants.differentiated",
    ):
        attention_kernel.apply(q.requires_grad_(), k, v, variant="fa3")
    with torch.no_grad():
        assert attention_kernel.apply(q, k, v, variant="fa3").shape == q.shape
