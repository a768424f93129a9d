"""Steps of AdamW by the Triton kernel, interpreted: the bits of the simulator and of plain
operations, and what they leave for linears (spec O)."""

import pytest
import torch
from helpers.processes.ranks import run
from helpers.states.state_layouts import ALL, MASTERED
from helpers.states.torch_states import EVERY, trained
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("triton")

from fp8ref.spec.states.layouts import LAYOUTS
from fp8ref.torch.states import kernel, states

SERVED = ["float32", "bfloat16", "bfloat16_master"]


@pytest.mark.parametrize("name", SERVED)
def test_steps_have_the_simulators_bits(name):  # O-2 to O-6, O-14
    """Gradients that are not finite, tiny and huge ones included."""
    assert trained(EVERY[name], 8, kernels="triton") == 0


def test_what_it_takes():
    served = {
        name
        for name, layout in (ALL | MASTERED).items()
        if kernel.takes(nn.Parameter(torch.ones(4, 8)), layout, "triton")
    }
    assert served == set(SERVED)
    layout = LAYOUTS["float32"]
    parts = [torch.ones(8), torch.ones(2, 3, 4), torch.ones(4, 8).t(), torch.ones(0, 8)]
    assert not any(kernel.takes(p, layout, "triton") for p in parts)
    assert not kernel.takes(torch.ones(4, 8), layout, "auto")  # on a CPU


def sharded(kernels: str) -> list[torch.Tensor]:
    """Weights of a rank after steps of shards of several lengths, one of them empty."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    model = fully_shard(nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 1)), mesh=mesh)
    optimizer = states.AdamW(model.parameters(), lr=0.1, layout="bfloat16")
    optimizer.kernels = kernels
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.to_local().detach() for p in model.parameters()]


def both_sharded() -> list[bool]:
    plain, triton = sharded("plain"), sharded("triton")
    return [torch.equal(a, b) for a, b in zip(plain, triton, strict=True)]


def test_shards_of_fsdp2_have_the_same_bits():  # O-11
    assert run(2, both_sharded) == [[True] * 4] * 2


def test_autograd_sees_its_writes():
    p = nn.Parameter(torch.ones(4, 8))
    p.grad = torch.ones_like(p)
    loss = (p * p).sum()
    optimizer = states.AdamW([p], layout="float32")
    optimizer.kernels = "triton"
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_kernels_that_there_are_not_are_refused_before_anything_changes():
    vector, matrix = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(4, 8))
    optimizer = states.AdamW([vector, matrix], layout="float32")
    optimizer.kernels = "other"
    for p in (vector, matrix):
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"kernels is one of .*; got 'other'"):
        optimizer.step()
    assert (vector == 1).all()
    assert not optimizer.state
