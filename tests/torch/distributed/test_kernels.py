"""Triton kernels under FSDP2 and tensor parallelism: the bits of plain operations."""

import pytest
import torch
from helpers.processes.ranks import run
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

pytest.importorskip("triton")

from fp8ref.torch import delayed
from fp8ref.torch.linear import both_orders
from fp8ref.torch.model.parallel import Parallelism, parallelize


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(n, k, bias=False) for n, k in ((64, 96), (64, 96), (96, 64))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_proj(x) * self.up_proj(x))


def steps(axis: str, recipe: str, kernels: str, gather_fp8: bool, checkpointing: str):
    """Outputs and gradients of two steps on two ranks, and the shapes that kernels cast."""
    torch.manual_seed(0)
    blocks = [MLP(), MLP()]
    model, shapes, quantize = nn.Sequential(*blocks), [], both_orders.quantize
    if axis == "tensor":
        model.bfloat16()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    parallelism = Parallelism(
        amax_scope="global",
        gather_fp8=gather_fp8,
        kernels=kernels,
        checkpointing=checkpointing,
        tensor_plan={"*.gate_proj": "colwise", "*.up_proj": "colwise", "*.down_proj": "rowwise"}
        if axis == "tensor"
        else None,
    )
    model = parallelize(model, recipe, mesh=mesh, blocks=blocks, parallelism=parallelism)

    def counted(x, *rest, **keys):
        shapes.append(tuple(x.shape))
        return quantize(x, *rest, **keys)

    both_orders.quantize = counted
    results, part = [], distributed.get_rank() if axis == "fsdp" else 0
    try:
        for seed in range(2):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * seed + part))
            y = model(x.bfloat16().requires_grad_())
            y.float().square().sum().backward()
            results += [y.detach(), *(whole(p.grad) for p in model.parameters())]
            model.zero_grad()
            delayed.update(model)
    finally:
        both_orders.quantize = quantize
    return results, shapes


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x.clone()


def compare(*arguments) -> tuple[bool, int]:
    axis, recipe, gather_fp8, checkpointing = arguments
    (plain, _), (ours, shapes) = (
        steps(axis, recipe, kernels, gather_fp8, checkpointing) for kernels in ("plain", "triton")
    )
    return all(map(torch.equal, plain, ours)), len(shapes)


CASES = [
    ("fsdp", "tensorwise", True, "none"),
    ("fsdp", "tensorwise", False, "none"),
    ("fsdp", "delayed", True, "selective"),
    ("fsdp", "rowwise", False, "none"),
    ("tensor", "tensorwise", False, "full"),
    ("tensor", "rowwise", False, "none"),
    ("tensor", "delayed", False, "none"),
]


def every_case() -> list[tuple[bool, int]]:
    return [compare(*case) for case in CASES]


def test_ranks_have_the_bits_of_plain_operations():  # P-2, P-5
    for found in run(2, every_case):
        assert [equal for equal, _ in found] == [True] * len(CASES)
        assert all(count for _, count in found)
