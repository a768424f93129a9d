"""Sums of gradients in rank order (SEMANTICS P-13).

Of three ranks' parts, 2^24, 1 and -1: float32 has no 2^24 + 1, which rounds to 2^24, the even neighbour; (2^24 + 1) - 1 is then 2^24 - 1. Every
other order of the sum starts with 2^24 - 1, which float32 has, or with 1 - 1, and gives 2^24.
"""

import torch
from ranks import run
from torch import distributed, nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fp8ref.torch.fsdp import OrderedReduceScatter, sum_in_rank_order

PARTS = (2.0**24, 1.0, -1.0)
IN_ORDER = 2.0**24 - 1
MEAN = IN_ORDER / 3
assert IN_ORDER == 3 * 5592405.0  # no rounding in the mean


def reduced():
    """Per rank: sum and average, over 3, of parts that no other order adds alike; each rank's are twice those of the rank before."""
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    mine = (PARTS[rank] * 2.0 ** torch.arange(ranks)).repeat_interleave(2)
    kept, reduction, found = mine.clone(), OrderedReduceScatter(), []
    for op in (ReduceOp.SUM, ReduceOp.AVG):
        out = reduction.allocate((2,), dtype=mine.dtype, device=mine.device)
        reduction(out, mine, distributed.group.WORLD, op)
        found.append(out)
    assert torch.equal(mine, kept)
    return found


def test_gradients_are_added_in_rank_order():  # P-13
    for rank, (total, average) in enumerate(run(3, reduced)):
        assert total.tolist() == [IN_ORDER * 2**rank] * 2
        assert average.tolist() == [MEAN * 2**rank] * 2


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(9))

    def forward(self, x):
        return self.w * x


def sharded():
    """Whole gradients of two units, one in the other, that are this rank's part each."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    model = nn.Sequential(fully_shard(Scale(), mesh=mesh), Scale())
    fully_shard(model, mesh=mesh)
    sum_in_rank_order(model)
    model(torch.ones(9)).mul(PARTS[distributed.get_rank()]).sum().backward()
    return [p.grad.full_tensor().tolist() for p in model.parameters()]


def test_every_unit_of_a_model_sums_in_order():  # P-13
    assert run(3, sharded) == [[[MEAN] * 9] * 2] * 3
