"""Delayed scales of attention in PyTorch: states observe a step's amaxes, and give the next step's
scales (spec A-12, A-19, H).
"""

import pytest
import torch
from torch import nn

from fp8ref.spec.attention.variants import GRADIENT_ROLES, ROLES, Mask
from fp8ref.torch import delayed
from fp8ref.torch.attention import attention
from fp8ref.torch.attention import delayed as attention_delayed

CAUSAL = Mask(causal=True)
UNSET = "^attention scales by earlier steps under delayed scaling, and no update has set its scales"


def given(seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(2, h, 40, 32, generator=generator).bfloat16() for h in (4, 2, 2, 4))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def model() -> nn.Module:
    made = nn.Module()
    made.states = attention_delayed.states("cudnn", "cpu")
    return made


def step(made, seed=0):
    q, k, v, do = given(seed)
    o = attention_delayed.apply(q, k, v, states=made.states, variant="cudnn", mask=CAUSAL)
    o.backward(do)
    return o, (q, k, v, do)


def test_scales_of_the_first_step_are_one_and_the_next_are_of_its_amaxes():  # H-2, H-3
    made = model()
    o, (q, k, v, do) = step(made)
    one = torch.ones(())
    result = attention.forward(
        q, k, v, variant="cudnn", mask=CAUSAL, scales=dict.fromkeys(ROLES, one)
    )
    gradients = attention.backward(
        do, q, k, v, result, variant="cudnn", mask=CAUSAL, scales=dict.fromkeys(GRADIENT_ROLES, one)
    )
    assert torch.equal(o, result.o.bfloat16())
    assert torch.equal(q.grad, gradients.dq.bfloat16())
    delayed.update(made)
    amaxes = result.amaxes | gradients.amaxes
    for role, state in made.states.items():
        assert state.amax_history[0] == amaxes[role], role
        assert state.scale == (448 / amaxes[role].double()).float(), role
    o, (q, k, v, _) = step(made, seed=1)
    scales = {role: made.states[role].scale for role in ROLES}
    assert torch.equal(
        o, attention.forward(q, k, v, variant="cudnn", mask=CAUSAL, scales=scales).o.bfloat16()
    )


def test_a_pass_without_gradients_observes_nothing():  # H-4
    made = model()
    q, k, v, _ = given()
    with torch.no_grad(), pytest.warns(UserWarning, match=UNSET):
        attention_delayed.apply(q, k, v, states=made.states, variant="cudnn", mask=CAUSAL)
    assert not any(state.seen.any() for state in made.states.values())


def test_microbatches_merge_in_any_order():  # H-4
    histories = []
    for seeds in ((0, 1), (1, 0)):
        made = model()
        for seed in seeds:
            step(made, seed)
        delayed.update(made)
        histories.append(torch.stack([state.amax_history[0] for state in made.states.values()]))
    assert torch.equal(*histories)


def test_states_are_saved_and_loaded():
    made, other = model(), model()
    step(made)
    delayed.update(made)
    other.load_state_dict(made.state_dict())
    assert torch.equal(step(made, 1)[0], step(other, 1)[0])


def test_other_states_are_refused():
    with pytest.raises(ValueError, match=r"variant 'mxfp8' has scales of mx_1x32. Use 'cudnn'"):
        attention_delayed.states("mxfp8", "cpu")
    q, k, v, _ = given()
    with pytest.raises(
        ValueError, match=r"variant 'mxfp8' has states of no role; got q, k, v, s, o"
    ):
        attention_delayed.apply(q, k, v, states=model().states, variant="mxfp8")
    with pytest.raises(
        ValueError,
        match=r"variant 'cudnn' has states of q, .*; got none. Use attention_delayed.states",
    ):
        attention_delayed.apply(q, k, v, states=None, variant="cudnn")


@pytest.mark.parametrize("case", ["frozen", "evaluated"])
def test_a_pass_that_nobody_differentiates_observes_nothing(case):
    made = model()
    tensors = [x.requires_grad_(case != "frozen") for x in given()[:3]]
    made.states.train(case != "evaluated")
    with pytest.warns(UserWarning, match=UNSET):
        attention_delayed.apply(*tensors, states=made.states, variant="cudnn", mask=CAUSAL)
    assert not any(state.seen.any() or state.used for state in made.states.values())
    tensors[1].requires_grad_()  # one is enough
    attention_delayed.apply(*tensors, states=made.states.train(), variant="cudnn", mask=CAUSAL)
    assert made.states["q"].seen.any()


class Layer(nn.Module):
    """Attention with states of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.states = attention_delayed.states("cudnn", "cpu")

    def forward(self, q, k, v):
        return attention_delayed.apply(q, k, v, states=self.states, variant="cudnn", mask=CAUSAL)


@pytest.mark.slow
def test_one_graph_observes_with_eagers_bits():  # A-19, B-9
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, h, 16, 16, generator=generator).bfloat16() for h in (2, 1, 1, 2))
    found = []
    for compiled in (False, True):
        layer, seen = Layer(), []
        run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        for _ in range(3):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            o = run(*leaves)
            o.backward(do)
            seen += [
                o.detach(),
                *(leaf.grad for leaf in leaves),
                *(state.seen.clone() for state in layer.states.values()),
            ]
            delayed.update(layer)
            seen += [state.scale.clone() for state in layer.states.values()]
        found.append(seen)
    assert len(found[0]) == 3 * (4 + 2 * len(layer.states))
    assert all(map(torch.equal, *found))
    assert all(state.amax_history[0] > 0 for state in layer.states.values())


def test_calibration_sets_the_scales_of_an_evaluation():
    layer, (q, k, v, _) = Layer(), given()
    with torch.no_grad():
        expected = attention.apply(q, k, v, variant="cudnn", mask=CAUSAL)
    delayed.calibrate(layer, [(q, k, v)])
    for role, x in (("q", q), ("k", k), ("v", v)):
        assert layer.states[role].scale == (448 / x.detach().abs().max().double()).float(), role
    assert all(layer.states[role].step == (role in ROLES) for role in layer.states)
    layer.eval()
    # e4m3 rounds each of q, k, v and p by 2^-4 of it at most; dynamic scales differ from these in
    # that alone
    assert (layer(q, k, v) - expected).norm() < 4 * 2.0**-4 * expected.norm()
