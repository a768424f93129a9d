"""Steps of PyTorch's AdamW against the simulator's, for its tests of states and of moments."""

import numpy as np
import torch
from helpers.states import state_layouts
from helpers.states.state_layouts import ALL, MASTERED, SHAPES, differing
from torch import nn
from torch.distributed.tensor import DTensor

from fp8ref.sim.states import states as sim
from fp8ref.torch.states import states

HYPER = {"weight_decay": 0.1}
SEED = 0xFEDCBA9876543210
EVERY = {**ALL, **MASTERED}


def simulated(layout, steps: int, **hyper):
    """Weights, or masters, and states by name after each step."""
    p = {
        name: sim.master(x, layout) if layout.keeps_master else x
        for name, x in start(layout).items()
    }
    state = {name: sim.init(shape, layout) for name, shape in SHAPES.items()}
    for t in range(steps):
        g = gradients_of(t, layout)
        for number, name in enumerate(SHAPES):
            given = {**HYPER, **hyper, "seed": SEED * layout.stochastic}
            optimizer = sim.AdamW(learning_rate=1e-3, layout=layout, **given)
            p[name], state[name] = sim.step(p[name], g[name], state[name], optimizer, tensor=number)
        yield p, state


def gradients_of(step: int, layout=None) -> dict[str, np.ndarray]:
    """Gradients by name of a step, as numbers of the parameters' dtype."""
    return {
        name: torch.tensor(g).to(dtype_of(layout)).float().numpy()
        for name, g in state_layouts.gradients_of(step).items()
    }


def whole(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    x = x.full_tensor() if isinstance(x, DTensor) else x
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def count(optimizer, p: torch.Tensor, wanted_p, wanted: sim.State) -> int:
    """How many elements of the weight, codes, scales and amaxes of a parameter differ. wanted_p is
    the weight, or its master.
    """
    state, kept = dict(optimizer.state[p]), [("m", wanted.m), ("v", wanted.v)]
    if isinstance(wanted_p, sim.MomentState):
        expected = torch.tensor(sim.weight(wanted_p, optimizer.layout)).to(p.dtype).float()
        total = differing(whole(p).float().numpy(), expected.numpy())
        kept += [("master", wanted_p)] if "master_codes" in state else []
        assert ("master_codes" in state) == (optimizer.layout.master.fmt.name == "float16")
    else:
        total = differing(whole(p).numpy(), wanted_p)
    assert int(state.pop("step")) == wanted.step
    for key, stored in kept:
        for field, value in stored._asdict().items():
            if value is not None:
                total += differing(whole(state.pop(f"{key}_{field}")).numpy(), value)
    assert not state
    return total


def start(layout=None) -> dict[str, np.ndarray]:
    """Weights by name, as numbers of the parameters' dtype."""
    return {
        name: torch.tensor(x).to(dtype_of(layout)).float().numpy()
        for name, x in state_layouts.start().items()
    }


def dtype_of(layout) -> torch.dtype:
    return torch.bfloat16 if layout is not None and layout.keeps_master else torch.float32


def parameters(layout=None) -> dict[str, nn.Parameter]:
    return {
        name: nn.Parameter(torch.tensor(x).to(dtype_of(layout)))
        for name, x in start(layout).items()
    }


def trained(layout, steps: int, *, compiled=False, kernels="plain", **hyper) -> int:
    p = parameters(layout)
    betas = (hyper.get("b1", 0.9), hyper.get("b2", 0.95))
    seed = SEED * layout.stochastic
    optimizer = states.AdamW(
        p.values(), lr=1e-3, betas=betas, layout=layout, compiled=compiled, seed=seed, **HYPER
    )
    optimizer.kernels = kernels
    total = 0
    for t, (q, state) in enumerate(simulated(layout, steps, **hyper)):
        for name, g in gradients_of(t, layout).items():
            p[name].grad = torch.tensor(g).to(p[name].dtype)
        optimizer.step()
        total += sum(count(optimizer, p[name], q[name], state[name]) for name in SHAPES)
    return total
