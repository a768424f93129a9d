"""Rows that move between two ranks as FP8 codes: the bits of rows that move in bfloat16."""

import pytest
import torch
from helpers.processes.ranks import run
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from fp8ref.torch import delayed
from fp8ref.torch.experts import codes as expert_codes
from fp8ref.torch.experts import grouped
from fp8ref.torch.experts import parallel as expert_parallel
from fp8ref.torch.experts.layer import GroupedLinear

RANKS, EXPERTS, ROWS, K, N = 2, 4, 24, 32, 16
# the second rank has 8 rows of no group; nobody has rows of expert 1
SIZES = ((9, 0, 5, 10), (0, 0, 12, 4))


class Model(nn.Module):
    """SwiGLU of experts, as the trainer's."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = GroupedLinear(EXPERTS, K, N), GroupedLinear(EXPERTS, K, N)
        self.down_proj = GroupedLinear(EXPERTS, N, K)
        generator = torch.Generator().manual_seed(0)
        for p in self.parameters():
            p.data.normal_(generator=generator)
        self.bfloat16()

    def forward(self, rows, ends, codes=None, slot=None):
        gate, up = (
            of(rows, ends, input_codes=codes).float() for of in (self.gate_proj, self.up_proj)
        )
        return self.down_proj(
            (torch.nn.functional.silu(gate) * up).bfloat16(), ends, grad_codes=slot
        )


class Counted:
    """Counts the bytes that this rank sends in all-to-alls of rows."""

    def __init__(self, monkeypatch):
        self.bytes, honest = 0, expert_parallel.all_to_all

        def counted(x, *how):
            self.bytes += x.numel() * x.element_size()
            return honest(x, *how)

        monkeypatch.setattr(expert_parallel, "all_to_all", counted)


def passed(model, recipe, x, ends, group, *, in_codes):
    """(y, gradients of x and the weights, observations) of a pass; x has rows of no group, which
    are NaN.
    """
    x = x.clone().requires_grad_()
    model.zero_grad()
    if in_codes:
        moved, codes = expert_codes.dispatch(x, ends, group, (model.gate_proj, model.up_proj))
        slot = (
            expert_codes.Slot() if expert_codes.cast_of([model.down_proj], "grad_output") else None
        )
    else:
        moved, codes, slot = expert_parallel.dispatch(x, ends, group), None, None
    y = model(moved.rows, moved.ends, codes, slot)
    y = (
        expert_parallel.combine(y, moved, group)
        if slot is None
        else expert_codes.combine(y, moved, ends, group, model.down_proj, slot)
    )
    (y.float() * (1 + torch.arange(K) % 3)).sum().backward()
    seen = [state.seen.clone() for _, state in delayed.states(model)]
    delayed.update(model) if seen else None
    # a rank's own rows are observed before they move or after: the maximum over ranks is the same
    for of_role in seen:
        distributed.all_reduce(of_role, op=distributed.ReduceOp.MAX, group=group)
    return [
        y.detach(),
        x.grad,
        *(p.grad.to_local() for p in model.parameters()),
        *seen,
    ], codes is not None


def on_ranks(recipes):
    """{recipe: (whether codes moved, whether all is equal, bytes that moved in codes and in
    bfloat16)}.
    """
    found, group, rank = {}, distributed.group.WORLD, distributed.get_rank()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("expert",))
    generator = torch.Generator().manual_seed(rank)
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        for recipe in recipes:
            made = []
            for in_codes in (False, True):
                model = Model()
                for linear in (model.gate_proj, model.up_proj, model.down_proj):
                    linear.convert(recipe, group=group if recipe == "delayed" else None)
                expert_parallel.cut(model, mesh)
                generator.manual_seed(rank)
                begun, results = counted.bytes, []
                for _ in range(2):  # of delayed scaling the second under other scales
                    x = torch.randn(ROWS, K, generator=generator).bfloat16()
                    x[sum(SIZES[rank]) :] = torch.nan
                    of_pass, codes = passed(
                        model,
                        recipe,
                        x,
                        torch.tensor(SIZES[rank]).cumsum(0).to(torch.int32),
                        group,
                        in_codes=in_codes,
                    )
                    results += of_pass
                made.append((results, counted.bytes - begun))
            (rows, of_rows), (codes_made, of_codes) = made
            equal = [
                torch.equal(a, b) and bool(a.isfinite().all())
                for a, b in zip(rows, codes_made, strict=True)
            ]
            found[recipe] = codes, equal, of_codes, of_rows
    return found


def test_codes_give_the_bits_of_rows_and_move_half_the_bytes():
    for rank, found in enumerate(run(RANKS, on_ranks, ["tensorwise", "delayed", "rowwise"])):
        for recipe, (codes, equal, of_codes, of_rows) in found.items():
            assert equal, recipe
            assert all(equal), (recipe, equal)
            one = recipe != "rowwise"
            assert codes == one
            sent, taken = (
                sum(SIZES[rank]),
                sum(n for sizes in SIZES for n in sizes[rank * 2 : rank * 2 + 2]),
            )
            # two passes; rows and gradients of results are sent, results and gradients of rows come
            # back
            assert of_rows == 2 * 2 * 2 * (sent + taken) * K
            assert of_codes == 2 * (2 * sent * (1 if one else 2) + 2 * taken * 2) * K


def test_what_reads_rows_that_only_stand_for_codes_shows():
    x = expert_codes._nothing(torch.ones(3, 4, dtype=torch.bfloat16), 5)
    assert x.shape == (5, 4)
    assert x.isnan().all()
    assert x.untyped_storage().nbytes() == 2


@pytest.mark.parametrize("role", ["input", "grad_output"])
def test_codes_move_where_one_scale_of_a_group_serves_both_gemms(role, monkeypatch):
    def of(*recipes):
        linears = [GroupedLinear(2, 16, 16) for _ in recipes]
        for linear, recipe in zip(linears, recipes, strict=True):
            linear.convert(recipe)
        return expert_codes.cast_of(linears, role)

    for recipe in ("tensorwise", "delayed"):
        assert of(recipe, recipe) is not None
    for recipe in ("bf16", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"):
        assert of(recipe) is None
    assert of("tensorwise", "delayed") is None
    monkeypatch.setattr(grouped, "observers", [print])  # what observes reads rows
    assert of("tensorwise") is None


def test_linears_that_observed_other_rows_are_refused():
    """Before a rank sends anything: the scale of the first would be that of both."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        linears = [GroupedLinear(1, 16, 16) for _ in range(2)]
        for linear in linears:
            linear.convert("delayed")
        x, ends = torch.ones(4, 16), torch.tensor([4], dtype=torch.int32)
        expert_codes.dispatch(x, ends, distributed.group.WORLD, linears)
        linears[1].states["input"].scale.fill_(2)
        with pytest.raises(
            ValueError, match=r"need equal delayed scales of input; got \[1\.0, 2\.0\]"
        ):
            expert_codes.dispatch(x, ends, distributed.group.WORLD, linears)
    finally:
        distributed.destroy_process_group()
