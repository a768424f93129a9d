"""Models that FSDP2 shards over a few ranks, trained for a few steps."""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8ref.formats import E4M3FN
from fp8ref.policy import POLICIES
from fp8ref.recipe import CastSpec, GemmSpec, Recipe
from fp8ref.torch import delayed
from fp8ref.torch.distributed.fsdp import gather_in_fp8
from fp8ref.torch.model import convert

RANKS = 3
N = 64  # rows that 3 ranks do not share evenly: 22, 22, 20
_POW2 = CastSpec(fmt=E4M3FN, policy=POLICIES["torchao_pow2"])
POW2 = Recipe(
    name="pow2",
    output=GemmSpec(a=_POW2, b=_POW2, accumulate="fast"),
    grad_input=GemmSpec(a=_POW2, b=_POW2, accumulate="slow"),
    grad_weight=GemmSpec(a=_POW2, b=_POW2, accumulate="slow"),
)


def plain():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(64, N), nn.ReLU(), nn.Linear(N, 64, bias=False)),
        nn.LayerNorm(64),
        nn.Linear(64, 32),
    )


def sharded(
    recipe="tensorwise", *, group=False, fp8=True, param_dtype=torch.bfloat16, model=None, **options
):
    """A model whose first block and itself are fully_shard units, on all ranks."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("fsdp",))
    model = convert.convert(
        plain() if model is None else model, recipe, amax_group=mesh.get_group() if group else None
    )
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for unit in (model[0], model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    if fp8:
        gather_in_fp8(model, **{"dtype": param_dtype, **options})
    return model


def batch(step):
    """This rank's rows."""
    generator = torch.Generator().manual_seed(10 * step + distributed.get_rank())
    return torch.randn(32, 64, generator=generator).bfloat16()


def trained(model, steps=3, *, parameters=None):
    optimizer, losses = torch.optim.AdamW(parameters or model.parameters(), lr=1e-2), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(step)).float().square().mean()
        loss.backward()
        optimizer.step()
        delayed.update(model)
        losses.append(loss.item())
    return losses, {
        k: v.full_tensor().clone() if hasattr(v, "full_tensor") else v.clone()
        for k, v in model.state_dict().items()
    }


def equal(a, b):
    return (
        a[0] == b[0]
        and a[1].keys() == b[1].keys()
        and all(torch.equal(a[1][k], b[1][k]) for k in a[1])
    )
