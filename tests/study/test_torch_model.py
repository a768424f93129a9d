import numpy as np
import pytest
import torch
from torch import nn

from fp8ref import study


class Net(nn.Module):
    """Two linears, one of them called twice, and one that is never called."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.unused = nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(2):
            x = x + self.down(torch.relu(self.up(x)))
        return x


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().bfloat16()


@pytest.fixture
def x():
    return torch.randn(2, 160, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def loss(net, x):
    return net(x).float().square().mean()


def test_operands_are_those_of_the_first_call_and_no_bit_changes(net, x):
    loss(net, x).backward()
    before = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    with study.record(net, rows=256) as found:
        loss(net, x).backward()
    for name, p in net.named_parameters():
        assert p.grad is None or torch.equal(p.grad, before[name])
    assert not any(module._forward_hooks for module in net.modules())
    assert (found.layers, found.uncalled) == (["up", "down"], ["unused"])
    kept = np.r_[0:128, 256:320]  # of 320 rows the first and the last block
    rows = x.reshape(-1, 64).float().numpy()
    operand = found.operands["up/input"]
    np.testing.assert_array_equal(operand.kept, rows[kept])
    np.testing.assert_array_equal(operand.columns, np.abs(rows).max(axis=0))
    assert (operand.amax, operand.rows) == (np.abs(rows).max(), 320)
    np.testing.assert_array_equal(
        found.operands["up/weight"].kept, net.up.weight.detach().float().numpy()
    )
    # grad_output of the first call: what autograd gives of its output
    h = x
    first = net.down(torch.relu(net.up(h)))
    h = h + first
    y = h + net.down(torch.relu(net.up(h)))
    (gradient,) = torch.autograd.grad(y.float().square().mean(), first)
    np.testing.assert_array_equal(
        found.operands["down/grad_output"].kept, gradient.reshape(-1, 64).float().numpy()[kept]
    )


def test_without_a_backward_pass_gradients_are_absent(net, x):
    with torch.no_grad(), study.record(net, layers="u*") as found:
        net(x)
    assert list(found.operands) == ["up/input", "up/weight"]
    assert study.judge(found, ["tensorwise"]).absent == ("up/grad_output",)


def test_a_checkpointed_block_is_recorded_once(net, x):
    with study.record(net, rows=256) as plain:
        loss(net, x).backward()
    with study.record(net, rows=256) as found:
        torch.utils.checkpoint.checkpoint(
            net, x.requires_grad_(), use_reentrant=False
        ).float().square().mean().backward()
    assert set(found.operands) == set(plain.operands)
    for name, operand in plain.operands.items():
        np.testing.assert_array_equal(found.operands[name].kept, operand.kept, err_msg=name)


def test_a_reentrant_checkpoint_has_gradients_too(net, x):
    """Its first pass is without gradients; the same call runs again with them."""
    with study.record(net, rows=256) as plain:
        loss(net, x).backward()
    with study.record(net, rows=256) as found:
        torch.utils.checkpoint.checkpoint(
            net, x.requires_grad_(), use_reentrant=True
        ).float().square().mean().backward()
    for name, operand in plain.operands.items():
        np.testing.assert_array_equal(found.operands[name].kept, operand.kept, err_msg=name)


def test_an_input_by_keyword_is_recorded(net, x):
    with study.record(net, layers="up") as found:
        net.up(input=x)
    assert found.operands["up/input"].rows == 320


def test_another_conv1d_is_none_of_transformers():
    class Conv1D(nn.Conv1d):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Conv1D(3, 3, 1))
    with study.record(model) as found:
        model(torch.ones(2, 3, 4))
    assert found.layers == ["0"]


def test_a_compiled_model_is_refused(net):
    net.up.compile(backend="eager")
    with pytest.raises(ValueError, match=r"runs eagerly; up is compiled"), study.record(net):
        pass


def test_conv1d_of_transformers_has_the_weight_of_a_linear():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D(3, 5)
    with study.record(nn.Sequential(conv1d)) as found:
        conv1d(torch.ones(2, 5))
    np.testing.assert_array_equal(
        found.operands["0/weight"].kept, conv1d.weight.detach().t().numpy()
    )


def test_depth_is_the_error_of_the_converted_model(net, x):
    found = study.depth(net, lambda net: net(x), ["tensorwise", "delayed"], filter_fqns=["unused"])
    from fp8ref.torch.model import convert

    with torch.no_grad():
        plain = net(x).float()
        fp8 = convert.convert(net, "tensorwise", filter_fqns=["unused"])(x).float()
    one = found.outcomes["tensorwise"]
    assert one.output == pytest.approx(
        float((fp8 - plain).double().norm() / plain.double().norm()), rel=1e-12
    )
    assert (one.in_fp8, list(one.inputs), one.inputs["up"]) == (2, ["up", "down"], 0.0)
    assert 0 < one.inputs["down"] < 0.1
    # e4m3 and scales of the same amaxes, but powers of two: its states were updated once
    assert 0 < found.outcomes["delayed"].output < 2 * one.output


def test_depth_leaves_the_model_alone(net, x):
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    study.depth(net, lambda net: net(x), ["rowwise"], filter_fqns=["unused"])
    assert type(net.up) is nn.Linear
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


def test_what_cannot_be_compared_is_refused(net, x):
    with pytest.raises(ValueError, match="run gives a tensor of floats, such as logits; got tuple"):
        study.depth(net, lambda net: (net(x),), ["tensorwise"])
    with pytest.raises(ValueError, match="two runs differed"):
        study.depth(net, lambda net: net(x) + torch.rand(()), ["tensorwise"])
    with pytest.raises(ValueError, match="blockwise"):
        study.depth(net, lambda net: net(x), ["blockwise"])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["LlamaConfig", "Qwen3Config", "GPT2Config"])
def test_models_of_transformers(family):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 512,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if family == "GPT2Config":
        sizes = {
            "vocab_size": 512,
            "n_embd": 128,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "loss_type": "ForCausalLM",
        }
    config = getattr(transformers, family)(
        **sizes, **({"head_dim": 32} if family == "Qwen3Config" else {})
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    tokens = torch.randint(0, 512, (2, 64))
    with study.record(model, rows=128) as found:
        model(input_ids=tokens, labels=tokens).loss.backward()
    judged = study.judge(found)
    assert (len(found.layers), found.uncalled, judged.absent) == (
        9 if family == "GPT2Config" else 15,
        [],
        (),
    )
    depth = study.depth(model, lambda model: model(input_ids=tokens).logits, rows=128)
    # GPT-2's linears are Conv1D, which no recipe converts, and lm_head
    assert {one.in_fp8 for one in depth.outcomes.values()} <= (
        {1} if family == "GPT2Config" else {11, 15}
    )
    assert depth.refused == {}
    assert all(0 < one.output < 0.2 for one in depth.outcomes.values())
