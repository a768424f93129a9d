"""Ranks that train one model with separate states are refused; what is right stays silent."""

import contextlib
import functools
import warnings

import pytest
import torch
from helpers.processes.ranks import run
from torch import distributed, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from fp8ref.torch import delayed
from fp8ref.torch.delayed import rank_checks as delayed_ranks
from fp8ref.torch.distributed import compiled_fsdp
from fp8ref.torch.model import convert

STEPS = 3


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def rows():
    return torch.full((8, 16), 1.0 + 3 * distributed.get_rank())


def stepped(model, update=None):
    """What the first update says, or "" if nothing."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model(rows()).square().mean().backward()
    optimizer.step()
    try:
        delayed.update(update or model)
    except ValueError as error:
        return str(error)
    return ""


def separate():
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    group, found = mesh.get_group(), {}
    found["fully_shard"] = stepped(fully_shard(convert.convert(made(), "delayed"), mesh=mesh))
    found["DDP"] = stepped(DistributedDataParallel(convert.convert(made(), "delayed")))
    inner = convert.convert(made(), "delayed")
    found["DDP, its module"] = stepped(
        DistributedDataParallel(inner, broadcast_buffers=False), inner
    )
    inner = convert.convert(made(), "delayed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replicate(inner)
    found["replicate"] = stepped(inner)
    inner = convert.convert(made(), "delayed", amax_group=group)
    found["DDP, broadcast"] = stepped(DistributedDataParallel(inner), inner)
    try:
        compiled_fsdp.shard(convert.convert(made(), "delayed"), group, gather_fp8=False)
    except ValueError as error:
        found["compiled_fsdp"] = str(error)
    by_hand = convert.convert(made(), "delayed")
    for p in by_hand.parameters():
        p.register_hook(lambda grad: distributed.nn.functional.all_reduce(grad))
    found["by hand"] = stepped(by_hand)
    # right ones
    found["shared"] = stepped(
        fully_shard(convert.convert(made(), "delayed", amax_group=group), mesh=mesh)
    )
    found["another model on each rank"] = stepped(
        convert.convert(nn.Sequential(nn.Linear(16, 16 * (1 + distributed.get_rank()))), "delayed")
    )
    return found


def sampled():
    """What the first update would compare of a gradient: whole, cut by rows, and terms of a sum."""
    mesh, linear = init_device_mesh("cpu", (2,)), convert.convert(made(), "delayed")[0]
    local, states = torch.full((4, 8), 1.0 + distributed.get_rank()), list(linear.states.values())
    found = {}
    for placement in (Replicate(), Shard(0), Partial()):
        delayed_ranks._gradients.clear()
        p = nn.Parameter(DTensor.from_local(torch.zeros(4, 8), mesh, [placement]))
        p.grad = DTensor.from_local(local, mesh, [placement])
        # runs in a hook of an optimizer's step: no error, no collective
        delayed_ranks.sample(linear, p, states)
        found[str(placement)] = (
            delayed_ranks._gradients[linear].tolist()
            if linear in delayed_ranks._gradients
            else None
        )
    return found


def test_a_gradient_that_is_a_sum_over_ranks_is_not_sampled():  # H-12
    for rank, found in enumerate(run(2, sampled)):
        assert found == {"R": [1.0 + rank] * 32, "S(0)": [1.0 + rank] * 32, "P(sum)": None}


def test_separate_states_are_refused():  # H-12
    first, second = run(2, separate)
    for found in (first, second):
        for case in ("fully_shard", "DDP, its module", "replicate", "compiled_fsdp"):
            assert "is of this rank alone. Pass their process group to" in found[case], case
        for case in ("DDP", "DDP, broadcast"):
            assert (
                "Use broadcast_buffers=False (torch 2.13: forward_sync_buffers=False" in found[case]
            )
        assert [found[case] for case in ("shared", "another model on each rank")] == ["", ""]
    # no rank waits for another: the last of them finds out
    assert any("is of this rank alone" in found["by hand"] for found in (first, second))


def no_change():
    """Equal weights that a step leaves as they are: of a model's copies, and of models that
    differ.
    """
    found = {}
    for case in ("copies", "others", "others, no gradient at first"):
        torch.manual_seed(0)
        model = convert.convert(nn.Sequential(nn.Linear(16, 16, bias=False)), "delayed")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        if case == "copies":
            for p in model.parameters():
                p.register_hook(lambda grad: distributed.nn.functional.all_reduce(grad))
        found[case] = ""
        # a rank that is refused leaves the others alone in collectives
        for index in range(1 if case == "copies" else STEPS):
            scale = 0.0 if index == 0 and case.endswith("at first") else 1.0
            (scale * model(rows()).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            try:
                delayed.update(model)
            except ValueError as error:
                found[case] = str(error)
                break
    return found


def test_a_state_outside_of_a_linear_is_not_compared():  # H-12
    model = convert.convert(nn.Sequential(nn.Linear(32, 32)).bfloat16(), "delayed")
    state = next(iter(model[0].states.values()))
    assert delayed_ranks.check_copies(nn.ParameterDict(), [("amaxes", state)])
    assert [
        delayed_ranks._linear(name) for name in ("states.input", "0.states.input", "amaxes")
    ] == ["", "0", None]


def test_equal_weights_of_other_models_are_not_refused():  # H-12
    """As the stages of a pipeline, made of one seed, while a learning rate warms up from 0."""
    found = run(2, no_change)
    assert any("is of this rank alone" in of_rank["copies"] for of_rank in found)
    for of_rank in found:
        assert of_rank["others"] == of_rank["others, no gradient at first"] == ""


def stages():
    torch.manual_seed(0)
    return [
        convert.convert(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), "delayed")
        for _ in range(2)
    ]


def pipelined():
    """What the first update says of stages that ran to learn shapes; and this rank's stage after
    steps in a pipeline and in one process.
    """
    from torch.distributed import pipelining

    rank, given = distributed.get_rank(), functools.partial(torch.empty, 8, 16)

    def loss(y, target):
        return (y - target).square().mean()

    def trained(schedule_of, lr, **args):
        stage = stages()[rank]
        schedule = schedule_of(
            pipelining.PipelineStage(stage, rank, 2, torch.device("cpu"), **args),
            n_microbatches=4,
            loss_fn=loss,
        )
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.0)
        for index in range(STEPS):
            x = torch.full((32, 16), 1.0 + index)
            schedule.step(*([] if rank else [x]), **({"target": x.flip(0)} if rank else {}))
            optimizer.step()
            optimizer.zero_grad()
            delayed.update(stage)
            optimizer.param_groups[0]["lr"] = lr  # after a step that changes no weight
        return stage.state_dict()

    try:
        trained(pipelining.Schedule1F1B, 0.1)
        refused = ""
    except ValueError as error:
        refused = str(error)
    args = {"input_args": given(requires_grad=rank > 0), "output_args": given(requires_grad=True)}
    found = trained(pipelining.Schedule1F1B, 0.1, **args)
    first, second = alone = stages()
    optimizer = torch.optim.SGD([p for m in alone for p in m.parameters()], lr=0.0)
    for m in alone:
        for _, state in delayed.states(m):
            state.checked = state.compared = True  # both ranks have both models
    for index in range(STEPS):
        x = torch.full((32, 16), 1.0 + index)
        for a, b in zip(x.chunk(4), x.flip(0).chunk(4), strict=True):
            loss(second(first(a)), b).backward()
        for p in optimizer.param_groups[0]["params"]:
            p.grad /= 4  # as a schedule does
        optimizer.step()
        optimizer.zero_grad()
        for m in alone:
            delayed.update(m)
        optimizer.param_groups[0]["lr"] = 0.1
    expected = alone[rank].state_dict()
    return refused, [key for key, value in expected.items() if not torch.equal(value, found[key])]


@pytest.mark.slow
def test_stages_of_a_pipeline():  # H-12
    """A stage that ran on no values to learn its shapes is refused, one whose shapes are given
    trains as in one process.
    """
    for refused, different in run(2, pipelined, timeout=400):
        assert "observed it. Give PipelineStage input_args and output_args" in refused
        assert not different


def data_parallel():
    """Whether DistributedDataParallel trains as one process does, in scales and weights; and all
    ranks' scales.
    """
    group = distributed.group.WORLD
    model = convert.convert(made(), "delayed", amax_group=group)
    trained = DistributedDataParallel(model, broadcast_buffers=False)
    alone = convert.convert(
        made(),
        "delayed",
        amax_group=distributed.new_group([distributed.get_rank()], use_local_synchronization=True),
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=2.0**-4) for m in (trained, alone)]
    for index in range(STEPS):
        parts = [torch.full((8, 16), 2.0 ** (rank + index)) for rank in range(2)]
        for last in (False, True):  # microbatches
            with contextlib.nullcontext() if last else trained.no_sync():
                trained(parts[distributed.get_rank()] * (1 + last)).square().mean().backward()
            for part in parts:
                (alone(part * (1 + last)).square().mean() / 2).backward()
        for optimizer, m in zip(optimizers, (trained, alone), strict=True):
            optimizer.step()
            optimizer.zero_grad()
            delayed.update(m)
    return {name: value.tolist() for name, value in model.state_dict().items()}, {
        k: v.tolist() for k, v in alone.state_dict().items()
    }


def test_distributed_data_parallel_shares_scales():  # H-4, H-12
    (first, alone), (second, _) = run(2, data_parallel)
    assert first == second
    of_input = [
        key
        for key in first
        if key.endswith(("0.states.input.scale", "0.states.input.amax_history"))
    ]
    assert of_input
    assert {key: first[key] for key in of_input} == {key: alone[key] for key in of_input}
