"""What the device does at most: large GEMMs, fused attention, a copy, and kernels that do next to
nothing.
"""

import torch
from torch.nn import functional

from measuring import timing
from on_torch.bench import Bench

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RATES = {  # keys of ``ceilings`` and the GEMMs that they are read off
    "bf16_flops": "bf16",
    "fp8_flops": "tensorwise fast",
    "fp8_slow_flops": "tensorwise slow",
    "fp8_e5m2_slow_flops": "tensorwise slow, e5m2 x e4m3",
    "fp8_rowwise_flops": "rowwise fast",
}


def run(bench: Bench) -> dict:
    """Rows of GEMMs, and ``ceilings``: FLOP/s, bytes/s (read and written), seconds from kernel to
    kernel, in a graph and launched one by one.

    attention_flops counts causal products by half: 2 forward and 5 backward, of 2 T^2 hidden FLOPs
    each.
    """
    rows = timing.rows(bench.timed(gemms(bench)), "bf16")
    seconds = {row["name"]: row["seconds"] for row in rows if "seconds" in row}
    flops = 2 * bench.sizes.square**3
    rates = {key: flops / seconds[name] for key, name in RATES.items() if name in seconds}
    attended = timing.rows(bench.timed({"attention": attention(bench)}), "attention")
    moved = timing.rows(bench.timed({"copy": copying(bench)}), "copy")
    gaps = timing.rows(bench.timed(launching(bench), queued=False), "launched one by one")
    gap = {row["name"]: row["seconds"] / bench.sizes.launches for row in gaps if "seconds" in row}
    of_copy = moved[0].get("seconds")
    of_attention = attended[0].get("seconds")
    ceilings = rates | {
        "attention_flops": 7 * bench.sizes.tokens**2 * bench.sizes.blocks.hidden_size / of_attention
        if of_attention
        else None,
        "bandwidth": 2 * bench.sizes.copied / of_copy if of_copy else None,
        "launch_seconds": gap.get("launched one by one"),
        "launch_in_graph_seconds": gap.get("in a graph"),
        "square": bench.sizes.square,
        "copied_bytes": bench.sizes.copied,
    }
    return {
        "rows": rows,
        "attention": attended,
        "copy": moved,
        "launches": gaps,
        "ceilings": ceilings,
    }


def gemms(bench: Bench) -> dict[str, timing.Call]:
    """[S, S] by [S, S]; every operand contiguous along what is reduced."""
    size = bench.sizes.square
    count = timing.sets(6 * size * size)
    hp = [(bench.random(size, size), bench.random(size, size)) for _ in range(count)]
    e4m3 = [
        (bench.codes(size, size, dtype=E4M3), bench.codes(size, size, dtype=E4M3))
        for _ in range(count)
    ]
    e5m2 = [bench.codes(size, size, dtype=E5M2) for _ in range(count)]
    one = torch.ones((), device=bench.device)
    rows, columns = (
        torch.rand(shape, device=bench.device) * 1e-3 + 1e-3 for shape in ((size, 1), (1, size))
    )

    def scaled(a, b, fast, scale_a=one, scale_b=one):
        return torch._scaled_mm(
            a,
            b.t(),
            scale_a=scale_a,
            scale_b=scale_b,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )

    return {
        "bf16": lambda i: hp[i % count][0] @ hp[i % count][1].t(),
        "tensorwise fast": lambda i: scaled(*e4m3[i % count], True),
        "tensorwise slow": lambda i: scaled(*e4m3[i % count], False),
        "tensorwise slow, e5m2 x e4m3": lambda i: scaled(
            e5m2[i % count], e4m3[i % count][1], False
        ),
        "rowwise fast": lambda i: scaled(*e4m3[i % count], True, rows, columns),
    }


def attention(bench: Bench) -> timing.Call:
    """Forward and backward of the blocks' attention, causal, over one sequence: what PyTorch takes
    for it by itself.
    """
    config = bench.sizes.blocks
    shape = 1, config.num_attention_heads, bench.sizes.tokens, config.head_dim
    q, k, v = (bench.random(*shape).requires_grad_() for _ in range(3))
    g = bench.random(*shape)

    def forward_backward(i: int) -> None:
        torch.autograd.grad(
            functional.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), g
        )

    return forward_backward


def copying(bench: Bench) -> timing.Call:
    elements = bench.sizes.copied // 2
    sources = [bench.random(elements // 16).repeat(16) for _ in range(2)]
    copies = [torch.empty_like(source) for source in sources]
    return lambda i: copies[i % 2].copy_(sources[i % 2])


def launching(bench: Bench) -> dict[str, timing.Call]:
    """So many kernels of one element, one after the other."""
    x, launches = torch.ones(1, device=bench.device), bench.sizes.launches

    def one_by_one(i: int) -> None:
        for _ in range(launches):
            x.add_(1)

    if bench.dry:
        return {"launched one by one": one_by_one, "in a graph": one_by_one}
    one_by_one(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_by_one(0)
    return {"launched one by one": one_by_one, "in a graph": lambda i: graph.replay()}
