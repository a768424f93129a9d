import functools
import math

import pytest
import torch
from ranks import run
from torch import distributed, nn

from fp8ref.recipe import OPERANDS
from fp8ref.torch import convert, sharding
from fp8ref.torch import linear as layer

INF, NAN = math.inf, math.nan
# What each of three ranks has, and all of them together.
AMAXES = [
    ((1.0, 3.0, 2.0), 3.0),
    ((0.0, 0.0, 0.0), 0.0),
    ((448.0, 2.0**-149, 3.4028234663852886e38), 3.4028234663852886e38),  # the least and the largest of float32
    ((INF, 1.0, 2.0), INF),
    ((1.0, 2.0, INF), INF),
    ((NAN, 1.0, 2.0), NAN),
    ((1.0, NAN, 2.0), NAN),
    ((1.0, 2.0, NAN), NAN),
    ((INF, NAN, 1.0), NAN),
    ((NAN, 1.0, INF), NAN),
    ((INF, INF, INF), INF),
    ((NAN, NAN, NAN), NAN),
]


def merged(shape):
    """The amaxes one by one, and all at once in a shape; of this rank's, what is left after the merge."""
    mine = torch.tensor([amaxes[distributed.get_rank()] for amaxes, _ in AMAXES])
    group, kept = distributed.group.WORLD.group_name, mine.clone()
    alone = [sharding.merge_amax(amax, group) for amax in mine]
    return torch.stack(alone), sharding.merge_amax(mine.reshape(shape), group), torch.equal(mine.nan_to_num(-1.0), kept.nan_to_num(-1.0))


@functools.cache
def on_three(shape):
    return run(3, merged, shape)


@pytest.mark.parametrize("shape", [(12,), (12, 1), (3, 4)], ids=str)
@pytest.mark.parametrize("index", range(len(AMAXES)), ids=[str(amaxes) for amaxes, _ in AMAXES])
def test_ranks_amaxes_merge_and_what_is_not_finite_shows(index, shape):  # P-2, P-3
    expected = torch.tensor(AMAXES[index][1])
    for alone, together, unchanged in on_three(shape):
        assert together.shape == shape
        for found in (alone[index], together.flatten()[index]):
            assert found.dtype == torch.float32
            assert torch.equal(found, expected) or (found.isnan() and expected.isnan())
        assert unchanged


def largest():
    return sharding.all_reduce_max(
        torch.tensor([[-1.0, 0.0, 5.0], [-3.0, 2.0, 4.0]])[distributed.get_rank()], distributed.group.WORLD.group_name
    )


def test_the_maximum_is_elementwise():
    assert [found.tolist() for found in run(2, largest)] == [[-1.0, 2.0, 5.0]] * 2


def operands_of_all(recipe, poison):
    """Codes and scales of every operand of one linear, of this rank's half of a batch, scaled by amaxes of both halves."""
    made = convert.convert(nn.Sequential(nn.Linear(64, 32, bias=False)), recipe, amax_group=distributed.group.WORLD)
    return operands(made, *halves(made, poison)[distributed.get_rank()])


def halves(model, poison=False):
    torch.manual_seed(0)
    model[0].weight.data.normal_()
    x, g = torch.randn(32, 64), torch.randn(32, 32)
    if poison:
        x[20, 3] = torch.nan
    return [(x[rows], g[rows]) for rows in (slice(0, 16), slice(16, 32))]


def canonical(codes):
    """NaNs without their signs (C-5), of e4m3fn; e5m2 has no other code that looks like them."""
    return torch.where(codes & 0x7F == 0x7F, 0x7F, codes)


def operands(model, x, g):
    found = {}
    observer = lambda which, a, b, _: found.update(  # noqa: E731
        {(which, role): (canonical(q.codes.view(torch.uint8)), q.scale) for role, q in zip(OPERANDS[which], (a, b), strict=True)}
    )
    layer.observers.append(observer)
    model(x.requires_grad_()).backward(g)
    layer.observers.remove(observer)
    return found


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("poison", [False, True])
def test_under_scope_global_codes_are_those_of_one_process(recipe, poison):  # P-2, P-4, P-5
    whole = nn.Sequential(layer.Linear(64, 32, recipe, bias=False))
    parts = halves(whole, poison)
    expected = operands(whole, *(torch.cat(pair) for pair in zip(*parts, strict=True)))
    first, second = run(2, operands_of_all, recipe, poison)
    for key, (codes, scale) in expected.items():
        shared = key[1] == "weight"
        assert torch.equal(first[key][0] if shared else torch.cat([first[key][0], second[key][0]]), codes)
        by_row = scale.ndim == 2 and scale.shape[0] > 1 and not shared
        for rank, found in enumerate((first, second)):
            mine = scale[16 * rank :][:16] if by_row else scale
            assert torch.equal(found[key][1].nan_to_num(-1.0), mine.nan_to_num(-1.0))
