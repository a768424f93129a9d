"""Rows that move between two ranks with different experts: the bits of one process with all of
them.
"""

import torch
from helpers.processes.ranks import run
from torch import distributed

from fp8ref.recipe import RECIPES
from fp8ref.torch.experts import grouped
from fp8ref.torch.experts import operands as grouped_operands
from fp8ref.torch.experts import parallel as expert_parallel
from fp8ref.torch.quantize import scaling

RANKS, EXPERTS, ROWS, K, N = 2, 4, 24, 32, 16
SHARED = ((RECIPES["tensorwise"].output.a, -1), (RECIPES["rowwise"].grad_weight.b, -2))
SIZES = ((9, 0, 5, 10), (3, 0, 12, 4))  # of a rank's rows; 5 of the second's are in no group


def _tensors():
    """Integers, whose sums under scales of all of K are exact; the rows of no group are NaN."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-7, 8, (RANKS, ROWS, K), generator=generator).bfloat16()
    x[1, sum(SIZES[1]) :] = torch.nan
    return x, torch.randint(-7, 8, (EXPERTS, N, K), generator=generator).bfloat16()


def _ends(sizes):
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def _loss(y):
    return (y.float() * (1 + torch.arange(N) % 3)).sum()


def on_ranks():
    """{recipe: (y, grad of x, grad of the rank's weights)}, and whether codes moved alike; what is
    refused.
    """
    group, rank = distributed.group.WORLD, distributed.get_rank()
    x, w = _tensors()
    own, found = slice(rank * EXPERTS // RANKS, (rank + 1) * EXPERTS // RANKS), {}
    for recipe in ("rowwise", "tensorwise", "bf16"):
        mine, weights = x[rank].clone().requires_grad_(), w[own].clone().requires_grad_()
        moved = expert_parallel.dispatch(mine, _ends(SIZES[rank]), group)
        y = expert_parallel.combine(
            grouped.apply(moved.rows, weights, moved.ends, recipe=recipe), moved, group
        )
        _loss(y).backward()
        found[recipe] = y.detach(), mine.grad, weights.grad
    same = []
    for spec in (RECIPES["rowwise"].output.a, RECIPES["mxfp8"].output.a):

        def quantized(x, spec=spec):
            return scaling.quantize(
                x, spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=-1
            )

        tensor = expert_parallel.dispatch(x[rank], _ends(SIZES[rank]), group)
        after, (before, moved) = (
            quantized(tensor.rows),
            expert_parallel.dispatch_quantized(quantized(x[rank]), _ends(SIZES[rank]), group),
        )
        same += [
            torch.equal(after.codes.view(torch.uint8), before.codes.view(torch.uint8)),
            torch.equal(after.scale, before.scale),
        ]
        same.append(
            torch.equal(moved.ends, tensor.ends) and moved.rows.dtype == torch.float8_e4m3fn
        )
    groups, shared = grouped_operands.groups_of(_ends(SIZES[rank]), ROWS), []
    for one, axis in SHARED:  # with all experts here, as under data parallelism
        q = grouped_operands.quantize_rows(
            groups.only(x[rank]), one, axis, groups, "group", shared=group.group_name
        )
        shared.append((q.codes.view(torch.uint8), q.scale))
    said = []
    for refused in (
        lambda: expert_parallel.dispatch_quantized(
            scaling.quantize(x[0], spec.fmt), _ends(SIZES[rank]), group
        ),
        lambda: expert_parallel.dispatch(x[rank], _ends(SIZES[rank][:3]), group),
    ):
        try:
            refused()
        except ValueError as error:
            said.append(str(error))
    return found, same, said, shared


def test_two_ranks_have_the_bits_of_one_process():
    results = run(RANKS, on_ranks)
    x, w = _tensors()
    expert = torch.cat(
        [
            torch.repeat_interleave(torch.arange(EXPERTS + 1), torch.tensor([*s, ROWS - sum(s)]))
            for s in SIZES
        ]
    )
    order = torch.argsort(expert, stable=True)
    sizes = torch.tensor(SIZES).sum(0)
    for recipe in ("rowwise", "tensorwise", "bf16"):
        alone, weights = x.reshape(-1, K).clone().requires_grad_(), w.clone().requires_grad_()
        y = grouped.apply(alone[order], weights, sizes.cumsum(0).to(torch.int32), recipe=recipe)
        y = torch.empty_like(y).index_copy(0, order, y)
        _loss(y).backward()
        ys, grads, of_weights = (
            torch.cat([found[recipe][i] for found, *_ in results]) for i in range(3)
        )
        assert torch.equal(ys, y.detach())
        assert torch.equal(grads, alone.grad)
        assert torch.equal(of_weights, weights.grad)
    alone = grouped_operands.groups_of(sizes.cumsum(0).to(torch.int32), RANKS * ROWS)
    for i, (one, axis) in enumerate(SHARED):  # X-3: scales of all ranks' rows of a group
        q = grouped_operands.quantize_rows(
            alone.only(x.reshape(-1, K)[order]), one, axis, alone, "group"
        )
        codes = (
            torch.empty_like(q.codes.view(torch.uint8))
            .index_copy(0, order, q.codes.view(torch.uint8))
            .reshape(RANKS, ROWS, K)
        )
        for rank, (*_, shared) in enumerate(results):
            rows = slice(sum(SIZES[rank]))
            assert torch.equal(shared[i][0][rows], codes[rank, rows])
            assert torch.equal(shared[i][1], q.scale)
    for _, same, said, _ in results:
        assert all(same)
        assert "one scale per row; got 'tensorwise'" in said[0]
        assert "divisible by the 2 ranks that share them; got 3" in said[1]
