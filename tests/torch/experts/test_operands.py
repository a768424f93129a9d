"""Groups of rows, their blocks, and each group's part of an operand."""

import pytest
import torch

from fp8ref.formats import E4M3FN
from fp8ref.recipe import RECIPES, CastSpec
from fp8ref.torch.experts import operands as grouped_operands
from fp8ref.torch.quantize import cast, scaling

# sizes 20, 0, 3 and 32; 5 rows are in no group
ENDS = torch.tensor([20, 20, 23, 55], dtype=torch.int32)
ROWS = 60
SPECS = {
    "tensorwise": CastSpec(fmt=E4M3FN),
    "rowwise": CastSpec(fmt=E4M3FN, granularity="rowwise"),
    "mx_1x32": RECIPES["mxfp8"].output.a,
}


@pytest.fixture
def x():
    return torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_each_row_has_its_group():
    groups = grouped_operands.groups_of(ENDS, ROWS)
    assert groups.sizes.tolist() == [20, 0, 3, 32]
    assert groups.group.tolist() == [0] * 20 + [2] * 3 + [3] * 32 + [4] * 5


def test_rows_of_no_group_are_zeros_whatever_they_hold(x):
    x[55:] = torch.nan
    only = grouped_operands.groups_of(ENDS, ROWS).only(x)
    assert torch.equal(only[:55], x[:55])
    assert not only[55:].any()


def test_blocks_begin_with_their_group():
    segment, first, count = grouped_operands.blocks_of(grouped_operands.groups_of(ENDS, ROWS), 16)
    assert segment.tolist() == [0] * 16 + [1] * 4 + [2] * 3 + [3] * 16 + [4] * 16 + [count] * 5
    assert first.tolist() == [0, 2, 2, 3]
    assert count == ROWS // 16 + 4


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "mx_1x32"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_a_groups_part_is_what_it_would_be_alone(granularity, axis, x):
    spec = SPECS[granularity]
    groups = grouped_operands.groups_of(ENDS, ROWS)
    q = grouped_operands.quantize_rows(groups.only(x), spec, axis, groups, "group")
    found = list(grouped_operands.parts_of(q, ENDS.tolist()))
    assert [(e, begin, end) for e, begin, end, _ in found] == [(0, 0, 20), (2, 20, 23), (3, 23, 55)]
    for _, begin, end, part in found:
        rows = x[begin:end]
        if granularity == "mx_1x32" and axis == -2:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % 32))
        alone = scaling.quantize(
            rows, spec.fmt, granularity=granularity, policy=spec.policy, axis=axis + 2
        )
        assert part.axis == alone.axis
        assert torch.equal(part.codes.view(torch.uint8), alone.codes.view(torch.uint8))
        assert torch.equal(part.scale, alone.scale)
        assert torch.equal(part.scale_inv, alone.scale_inv)


def test_an_experts_part_of_weights_is_what_it_would_be_alone():
    w = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(1))
    for granularity, axis in (("tensorwise", -1), ("rowwise", -1), ("rowwise", -2)):
        spec = CastSpec(fmt=E4M3FN, granularity=granularity)
        q = grouped_operands.quantize_weights(w, spec, axis, "group")
        for e in range(3):
            part = grouped_operands.group_part(q, e, 0, 0)
            alone = scaling.quantize(
                w[e], spec.fmt, granularity=granularity, policy=spec.policy, axis=axis + 2
            )
            assert torch.equal(part.codes.view(torch.uint8), alone.codes.view(torch.uint8))
            assert torch.equal(part.scale, alone.scale)


def test_exact_values_are_codes_times_scales():  # S-14, X-10
    groups = grouped_operands.groups_of(ENDS, ROWS)
    x = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(2))
    spec = SPECS["mx_1x32"]
    for axis in (-1, -2):
        q = grouped_operands.quantize_rows(groups.only(x), spec, axis, groups, "group")
        found = grouped_operands.exact_values(q, groups).float()
        for _, begin, end, part in grouped_operands.parts_of(q, ENDS.tolist()):
            own = cast.decode(part.codes, spec.fmt) * scaling.spread(
                part.scale_inv, tuple(part.codes.shape), part.blocks
            )
            assert torch.equal(found[begin:end], own[: end - begin])
