"""CUDA graphs of compiled linears, on a GPU. test_aot_torch asks inductor's rules about them
without one.
"""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from fp8ref.torch import delayed
from fp8ref.torch.model import convert

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise"]


def steps(recipe: str, mode: str) -> list[torch.Tensor]:
    """Losses, weights and states of four steps of training."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = convert.convert(
            nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).bfloat16(), recipe
        )
        optimizer, batches = (
            torch.optim.SGD(model.parameters(), lr=0.1),
            torch.randn(4, 128, 256, dtype=torch.bfloat16),
        )
    compiled, found = torch.compile(model, mode=mode, fullgraph=True), []
    for x in batches:
        torch.compiler.cudagraph_mark_step_begin()
        loss = compiled(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        delayed.update(model)
        found += [loss.detach().clone(), *(t.clone() for t in model.state_dict().values())]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_cuda_graphs_change_no_bit_and_none_is_left_out(recipe):  # P-12
    expected = steps(recipe, "default")
    counters.clear()
    found = steps(recipe, "reduce-overhead")
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
