"""What observers of PyTorch's attention are told: operands, products, passes (spec Q-13, B-10,
B-15).
"""

import torch

from fp8ref.spec.attention.products import PARTS, SHOWN
from fp8ref.spec.attention.variants import Mask
from fp8ref.torch.attention import attention
from fp8ref.torch.attention import observer as attention_observer
from fp8ref.torch.attention.observer import observe_attention

CAUSAL = Mask(causal=True)


class Layer(torch.nn.Module):
    def forward(self, q, k, v):
        assert attention_observer.layer() in ("layer", None)
        return attention.apply(q, k, v, variant="cudnn", mask=CAUSAL)


def given():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, h, 40, 32, generator=generator).bfloat16().requires_grad_()
        for h in (2, 1, 1)
    ]


def test_operands_are_reported_by_their_first_product():
    layer, seen = Layer(), []
    with observe_attention(
        {"layer": layer},
        lambda name, product, role, x, tensor: seen.append(
            (name, product, role, tensor.codes.shape)
        ),
    ):
        o = layer(*given())
        o.sum().backward()
    shapes = {"q": (1, 2, 40, 32), "k": (1, 1, 40, 32), "v": (1, 1, 40, 32), "do": (1, 2, 40, 32)}
    places = [("scores", "q"), ("scores", "k"), ("values", "v"), ("grad_v", "do")]
    assert seen == [("layer", product, role, shapes[role]) for product, role in places]
    layer(*given()).sum().backward()
    assert len(seen) == 4
    assert attention_observer.layer() is None


def test_a_watcher_is_shown_both_passes():
    layer, shown = Layer(), []
    with observe_attention({"layer": layer}, None, lambda *one: shown.append(one)):
        o = layer(*given())
        o.float().square().sum().backward()
    assert [one[:2] for one in shown] == [("layer", "forward"), ("layer", "backward")]
    for _, phase, arrays in shown:
        assert {key.partition("/")[0] for key in arrays} == set(SHOWN[phase])
        assert {key.partition("/")[2] for key in arrays} == {*PARTS, "amax", "counts"}
    assert torch.equal(shown[0][2]["o/value"], o.detach())


def test_a_counter_is_told_of_p_and_ds_once():
    layer, seen = Layer(), []
    with observe_attention({"layer": layer}, None, counter=lambda *one: seen.append(one)):
        torch.utils.checkpoint.checkpoint(layer, *given(), use_reentrant=False).float().pow(
            3
        ).sum().backward()
    assert [one[:3] for one in seen] == [("layer", "values", "p"), ("layer", "grad_q", "ds")]
    result = attention.forward(*given(), variant="cudnn", mask=CAUSAL)
    assert seen[0][4].tolist() == [2 * 40 * 41 // 2, 0, int(result.lost)]
    assert seen[0][3] == result.amaxes["s"]


def test_a_layer_that_runs_again_under_checkpointing_is_shown_once():
    layer, shown = Layer(), []
    with observe_attention({"layer": layer}, None, lambda *one: shown.append(one[1])):
        torch.utils.checkpoint.checkpoint(layer, *given(), use_reentrant=False).sum().backward()
    assert shown == ["forward", "backward"]


def test_a_product_has_its_name_while_it_is_multiplied():
    with attention_observer.multiplying("scores"):
        assert attention_observer.product() == "scores"
        with attention_observer.multiplying("values"):
            assert attention_observer.product() == "values"
        assert attention_observer.product() == "scores"
    assert attention_observer.product() is None
