"""Weights cut by hand; what the graphs of them are is in test_compile."""

import functools
import re

import pytest
import torch
from helpers.processes.compiled import matrix, said
from helpers.processes.ranks import run
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from fp8ref.torch import delayed
from fp8ref.torch.distributed import compiled_fsdp
from fp8ref.torch.model import convert


def world():
    return distributed.group.WORLD


def refusals():
    found, group = {}, world()
    found["shared"] = said(compiled_fsdp.shard, fully_shard(matrix.model()), group)
    made = matrix.model()
    made[1].compile(backend="eager")
    found["compiled"] = said(compiled_fsdp.shard, made, group)
    made = matrix.model()
    optimizer = torch.optim.SGD(made.parameters())
    found["optimizer"] = said(compiled_fsdp.shard, made, group, gather_fp8=False)
    optimizer.param_groups.clear()
    found["uneven"] = said(
        compiled_fsdp.shard, nn.Sequential(nn.Linear(16, 33)), group, gather_fp8=False
    )
    found["bfloat16"] = said(
        compiled_fsdp.shard, convert.convert(matrix.model().bfloat16(), "tensorwise"), group
    )
    found["rows"] = said(compiled_fsdp.shard, convert.convert(matrix.model(), "rowwise"), group)
    found["states"] = said(compiled_fsdp.shard, convert.convert(matrix.model(), "delayed"), group)
    tied = matrix.model()
    tied[1][0].weight = tied[0][0].weight
    found["tied"] = said(compiled_fsdp.shard, convert.convert(tied, "tensorwise"), group)
    return found


@functools.cache
def refused():
    return run(2, refusals)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("shared", r"the model is compiled or sharded already"),
        ("compiled", r"1 is compiled or sharded already"),
        ("optimizer", r"a SGD already holds 0\.0\.weight\. Build it afterwards"),
        ("uneven", r"evenly over 2 ranks; got 0\.weight, torch\.float32 \(33, 16\)\. Pad it"),
        ("bfloat16", r"masters are float32.*0\.0\.weight, torch\.bfloat16"),
        ("rows", r"the model has no such linear\. Use gather_fp8=False"),
        ("states", r"ranks share the states of delayed scaling; 0\.0.*amax_group"),
        ("tied", r"0\.0\.weight and 1\.0\.weight are one parameter"),
    ],
)
def test_what_cannot_be_cut_by_hand_is_refused_by_name(case, message):
    for rank in refused():
        assert re.search(message, rank[case]), rank[case]


def evaluations():
    """Whether a forward pass without gradients observes, next to one with; what is held, and
    whether it is the plain model's.
    """
    sharded = compiled_fsdp.shard(
        convert.convert(matrix.model(), "delayed", amax_group=world()), world()
    )
    observed = []
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            sharded(matrix.batch(0))
        observed.append(
            [
                bool(state.seen.any())
                for name, state in delayed.states(sharded)
                if not name.endswith("grad_output")
            ]
        )
    held = {name: p.shape for name, p in sharded.named_parameters()}
    same = all(
        torch.equal(whole, plain)
        for whole, plain in zip(
            sharded.weights().values(), matrix.model().parameters(), strict=True
        )
    )
    return observed, held, same


def test_evaluation_observes_nothing_and_weights_are_held_in_parts():  # H-4
    for observed, held, same in run(2, evaluations):
        assert observed == [[False] * 6, [True] * 6]
        assert held["model.0.0.weight"] == (32, 64)
        assert same


def whole_numbers():
    """A model of one weight, used twice, and 4 rows for each rank.

    No entry of an output or of a grad_input is larger than 2, as the weight is a permutation with
    signs, and none of a gradient than 4 rows x 2 uses x 2 x 2 = 32 on a rank: bfloat16 has all
    whole numbers up to 256, and no sum is rounded, in any order.
    """
    x = [
        torch.arange(32).reshape(4, 8).remainder(3) - 1,
        torch.arange(32).reshape(4, 8).remainder(5) - 2,
    ]
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(8).roll(3, dims=0) * torch.tensor([1.0, -1.0] * 4))
    return model, [part.bfloat16() for part in x]


def passed():
    model, x = whole_numbers()
    rank = distributed.get_rank()
    sharded = compiled_fsdp.shard(model, world(), gather_fp8=False)
    y = sharded(x[rank])
    y.backward(x[1 - rank])
    (shard,) = sharded.parameters()  # tied ones stay tied
    return y.detach(), shard.detach(), shard.grad


def test_a_call_is_of_whole_weights_and_its_gradient_of_a_ranks_own_rows():  # P-18
    """In bfloat16 the output; float32 the gradient, the mean over ranks."""
    model, x = whole_numbers()
    model.bfloat16()
    outputs = [model(part) for part in x]
    for y, g in zip(outputs, reversed(x), strict=True):
        y.backward(g)
    mean = model[0].weight.grad.float() / 2
    assert mean.count_nonzero() > 32
    for rank, (y, shard, gradient) in enumerate(run(2, passed)):
        rows = slice(4 * rank, 4 * rank + 4)
        assert torch.equal(y, outputs[rank])
        assert torch.equal(shard, whole_numbers()[0][0].weight[rows])
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, mean[rows])


def rounded_masters():
    """Of a weight that bfloat16 does not hold: what a call multiplies by, in that type and in
    float32.
    """
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        model = nn.Sequential(nn.Linear(2, 2, bias=False))
        with torch.no_grad():
            model[0].weight.fill_(1 + 2.0**-8 + 2.0**-16)
        found.append(
            compiled_fsdp.shard(model, world(), param_dtype=dtype, gather_fp8=False)(
                torch.eye(2, dtype=dtype)
            ).detach()
        )
    return found


def test_masters_are_rounded_to_param_dtype():  # M-2
    for in_bfloat16, in_float32 in run(2, rounded_masters):
        assert (in_bfloat16 == 1 + 2.0**-7).all()
        assert (in_float32 == 1 + 2.0**-8 + 2.0**-16).all()
