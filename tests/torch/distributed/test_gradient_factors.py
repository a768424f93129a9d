"""What ``Factors`` refuses; its bits are tested against the simulator in
tests/parity/test_gradient_factors.py.
"""

import pytest
import torch
from helpers.processes.ranks import run
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8ref.spec.gradient_reduction import AutoScale
from fp8ref.torch.distributed import gradient_reduction
from fp8ref.torch.distributed.gradient_factors import Factors


def test_a_model_that_reduces_nothing_in_fp8_is_refused():
    with pytest.raises(ValueError, match=r"got none\. Call reduce_in_fp8 first"):
        Factors(nn.Linear(4, 4))


def passes() -> tuple:
    """Factors of two units, of which one has a norm; their counts by hand; and a refusal."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 6))
    for unit in (model[0], model):
        fully_shard(unit, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    gradient_reduction.reduce_in_fp8(model)
    said = ""
    try:
        Factors(model)
    except ValueError as error:
        said = str(error)
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.ones_(p.to_local())
    factors, found = Factors(model, AutoScale(threshold=0.25, window=1)), []
    for step in range(3):
        # Gradients of the first weight: of 1 in 7 of 8 columns, 16 in the other
        x = torch.tensor([[1.0] * 7 + [16.0]])
        model[0](x).sum().backward()
        factors.update(torch.tensor(step != 1))
        model.zero_grad()
        found.append((factors.mu.tolist(), factors.saturated.tolist()))
    return said, factors.names, found


@pytest.mark.slow
def test_counts_are_of_all_ranks():  # P-22, T-4
    for said, names, found in run(2, passes):
        assert said.startswith("factors need weights with values; got the meta device")
        assert set(names) == {"0.weight", "2.weight"}
        first = names.index("0.weight")
        mu, saturated = ([of[part][first] for of in found] for part in (0, 1))
        # mu 1: nothing saturates, mu doubles. Then 4 elements of each rank do, of 32, but the step
        # is not finite. Then 8 do: not above a quarter, and mu doubles again.
        assert mu == [2.0, 2.0, 4.0]
        assert saturated == [0, 0, 8]
