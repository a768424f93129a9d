"""Train with FSDP2 and weights gathered in FP8: torchrun --nproc-per-node 2
examples/torch_fsdp.py
"""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from fp8ref import torch as ft


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(distributed.get_node_local_rank())
    mesh = init_device_mesh(device, (distributed.get_world_size(),), mesh_dim_names=("fsdp",))

    torch.manual_seed(0)  # the same masters on every rank
    blocks = [
        nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
        for _ in range(4)
    ]
    model = nn.Sequential(*blocks, nn.Linear(256, 16)).to(device)
    parallelism = ft.parallel.Parallelism(amax_scope="global", checkpointing="full")
    model = ft.parallel.parallelize(
        model, "delayed", mesh=mesh, blocks=blocks, parallelism=parallelism
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    torch.manual_seed(1 + distributed.get_rank())  # every rank its own batch
    for step in range(5):
        x = torch.randn(64, 256, dtype=torch.bfloat16, device=device)
        loss = (model(x).float() - x[:, :16].float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ft.delayed.update(model)
        mean = loss.detach()
        distributed.all_reduce(mean)
        if distributed.get_rank() == 0:
            print(f"step {step}: loss {mean.item() / distributed.get_world_size():.4f}")
    if distributed.get_rank() == 0:
        print(ft.proof.gathers(model))  # u8: codes, a byte an element
    distributed.barrier()  # no rank exits while another still communicates with it
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
