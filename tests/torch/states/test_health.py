"""The health of states measured on the device and on ranks against the simulator's (spec O-12)."""

import numpy as np
import pytest
import torch
from helpers.processes.ranks import run
from helpers.states.state_layouts import (
    ALL,
    NEAREST,
    SHAPES,
    gradients_of,
    idle_and_stalling,
    start,
)
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from fp8ref.sim.states import health as simulated
from fp8ref.sim.states import states as sim
from fp8ref.spec.states.health import COUNTS
from fp8ref.torch.states import health, states


def expected(layout, steps: int):
    """{tensor: measurement} of each step."""
    state = {name: sim.init(shape, layout) for name, shape in SHAPES.items()}
    for t in range(steps):
        found = {}
        for name, g in gradients_of(t).items():
            number = list(SHAPES).index(name)
            seed = 7 * layout.stochastic
            optimizer = sim.AdamW(learning_rate=1e-3, layout=layout, seed=seed)
            after = sim.step(start()[name], g, state[name], optimizer, tensor=number)[1]
            found[name] = simulated.numbers(
                g, state[name], after, b1=0.9, b2=0.95, eps=1e-8, layout=layout
            )
            state[name] = after
        yield found


def differing(found: torch.Tensor, names: list[str], wanted: dict[str, np.ndarray]) -> int:
    """How many counts differ; sums in float64, of up to 4096 terms, are checked."""
    n, total = len(COUNTS), 0
    for row, name in zip(found.numpy(), names, strict=True):
        total += int((row[:n] != wanted[name][:n]).sum())
        np.testing.assert_allclose(
            row[n:], wanted[name][n:], rtol=4096 * 2.0**-52, atol=4096 * 2.0**-52 * wanted[name][n]
        )
    return total


@pytest.mark.parametrize("name", ALL)
def test_counts_are_the_simulators(name):  # O-12
    layout = ALL[name]
    p = {key: nn.Parameter(torch.tensor(x)) for key, x in start().items()}
    optimizer = states.AdamW(p.values(), layout=layout, seed=7 * layout.stochastic)
    total = 0
    for t, wanted in enumerate(expected(layout, 3)):
        for key, g in gradients_of(t).items():
            p[key].grad = torch.tensor(g)
        with health.measuring(optimizer) as found:
            optimizer.step()
        total += differing(health.merge_ranks(found), list(p), wanted)
    assert total == 0


@pytest.mark.parametrize("case", idle_and_stalling())
def test_bounded_and_stalled_have_one_reading(case):  # O-6, O-12
    layout, gradients, counts = idle_and_stalling()[case]
    p = nn.Parameter(torch.ones(gradients.shape[1]))
    optimizer = states.AdamW([p], layout=layout)
    for g in gradients:
        p.grad = torch.tensor(g)
        with health.measuring(optimizer) as found:
            optimizer.step()
    (row,) = health.merge_ranks(found)
    assert {key: int(row[COUNTS.index(key)]) for key in counts} == counts


def on_ranks(names: list[str]) -> dict[str, int]:
    """Counts that differ, by layout, under FSDP2; one tensor is whole on every rank."""
    totals = {}
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("fsdp",))
    for name in names:
        module = nn.Module()
        for key, x in start().items():
            if x.ndim:
                module.register_parameter(key, nn.Parameter(torch.tensor(x)))
        fully_shard(module, mesh=mesh)
        p = dict(module.named_parameters())
        p["number"] = nn.Parameter(torch.tensor(start()["number"]))
        p = {key: p[key] for key in SHAPES}
        optimizer = states.AdamW(p.values(), layout=NEAREST[name])
        totals[name] = 0
        for t, wanted in enumerate(expected(NEAREST[name], 3)):
            for key, g in gradients_of(t).items():
                grad = torch.tensor(g)
                p[key].grad = (
                    grad
                    if key == "number"
                    else distribute_tensor(grad, p[key].device_mesh, p[key].placements)
                )
            with health.measuring(optimizer) as found:
                optimizer.step()
            totals[name] += differing(health.merge_ranks(found), list(p), wanted)
    return totals


@pytest.mark.slow
def test_ranks_add_their_parts():  # O-11, O-12
    """Of rows that ranks do not divide, and of ranks that have nothing of a tensor."""
    names = ["sqrt_e4m3", "fishman", "coat"]
    assert run(3, on_ranks, names, timeout=300) == [dict.fromkeys(names, 0)] * 3


def test_wrong_use_is_refused():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    with (
        pytest.raises(ValueError, match=r"health needs fp8ref.torch.states.AdamW; got SGD"),
        health.measuring(torch.optim.SGD([p])),
    ):
        pass
    with (
        pytest.raises(ValueError, match="the optimizer made 0"),
        health.measuring(states.AdamW([p])),
    ):
        pass
    p.grad = None
    with health.measuring(states.AdamW([p])) as found:
        pass
    with pytest.raises(
        ValueError, match="health needs parameters with a gradient; the step had none"
    ):
        health.merge_ranks(found)
