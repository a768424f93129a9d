"""The arithmetic of a step on flat tensors (spec O); ``test_states`` holds it to the simulator."""

import pytest
import torch
from helpers.states.state_layouts import ALL, MASTERED

from fp8ref.spec.states import layouts as states
from fp8ref.torch.states import moments
from fp8ref.torch.states import update as adamw_update
from fp8ref.torch.states.moments import MomentState, Part
from fp8ref.torch.states.update import Update, Work


def work(layout, size: int) -> Work:
    """A second step, so that the states are not zeros."""
    generator = torch.Generator().manual_seed(0)
    p, *gradients = (torch.randn(size, generator=generator) for _ in range(3))
    kept = tuple(moments.zeros(p, moment) for moment in layout.kept[:2])
    numbers = {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    for step, g in enumerate(gradients, start=1):
        found = Work(p, g, kept, states.scalars(step, **numbers), layout, Part(size), (None, None))
        if step == 1:
            Update(compiled=False).update(found)
    return found


def bits(found: Work) -> list[torch.Tensor]:
    return [found.p, *(x for state in found.kept for x in state if x is not None)]


@pytest.mark.parametrize("name", ["sqrt_e4m3", "sqrt_e5m2", "coat", "predicted"])
def test_extremes_of_parts_make_the_update_of_the_whole(name):  # O-11
    """As ranks do it: each begins its part, maxima are taken over all, and each finishes its
    part.
    """
    layout, size = ALL[name], 1024
    whole, cut = work(layout, size), work(layout, size)
    Update(compiled=False).update(whole)

    def part(start: int, length: int) -> Work:
        def rest(x):
            return None if x is None else x.clone()

        kept = tuple(
            MomentState(state.codes[start : start + length], *map(rest, state[1:]))
            for state in cut.kept
        )
        return cut._replace(
            p=cut.p[start : start + length],
            g=cut.g[start : start + length],
            kept=kept,
            part=Part(size, start),
        )

    parts = [part(0, 300), part(300, size - 300)]
    begun = [Update(compiled=False).begin(one) for one in parts]
    found = [torch.maximum(*of_both) for of_both in zip(*begun, strict=True)]
    updates = Update(compiled=False)
    amaxes = [updates.update(one, found) for one in parts]
    # of stored moments, which a predicted scale reads
    for mine, others in zip(*amaxes, strict=True):
        together = torch.maximum(mine, others)
        mine.copy_(together)
        others.copy_(together)
    for one in parts:
        fields = [x for state in one.kept for x in state[1:] if x is not None]
        wanted = [x for state in whole.kept for x in state[1:] if x is not None]
        assert all(torch.equal(x, y) for x, y in zip(fields, wanted, strict=True))
    assert torch.equal(cut.p, whole.p)
    assert all(torch.equal(x.codes, y.codes) for x, y in zip(cut.kept, whole.kept, strict=True))


def test_a_ratio_is_bounded_on_both_sides():  # O-6
    numbers = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
    at = states.scalars(2, learning_rate=1.0, **numbers)
    m, root = torch.tensor([1.0, -1.0]), torch.full((2,), 1e-6)
    change = adamw_update._change(torch.zeros(2), m, root, at, ALL["sqrt_e5m2"])
    assert torch.equal(change, torch.tensor([at.bound, -at.bound]))


def test_eps_is_added_to_the_corrected_root():  # O-6
    numbers = {"b1": 0.9, "b2": 0.95, "eps": 0.5, "weight_decay": 0.0}
    at = states.scalars(2, learning_rate=1.0, **numbers)
    m, root = torch.tensor([1.0]), torch.tensor([0.25])
    change = adamw_update._change(torch.zeros(1), m, root, at, ALL["te"])
    # float32 rounds each of the five operations by at most 2^-24 of its result
    expected = (1 / (1 - 0.9**2)) / (0.25 / (1 - 0.95**2) ** 0.5 + 0.5)
    assert change.item() == pytest.approx(expected, rel=5 * 2.0**-24)


def test_layouts_that_need_an_amax_before_anything_is_stored():
    first = {
        name for name, layout in {**ALL, **MASTERED}.items() if adamw_update.amaxes_first(layout)
    }
    assert {"msamp", "te", "fishman", "sqrt_e5m2", "msamp_o2"} <= first
    assert not {"float32", "bfloat16", "sqrt_e4m3", "torchao", "coat", "previous"} & first


def test_pieces_of_whole_blocks_are_updated_as_blocks():
    layout = ALL["sqrt_e4m3"]
    found = adamw_update.in_blocks(work(layout, 1024))
    assert found.p.shape == found.g.shape == (8, 128)
    assert all(state.codes.shape == (8, 128) for state in found.kept)
    ragged = work(layout, 1000)
    assert adamw_update.in_blocks(ragged) is ragged


def test_a_gradient_out_of_range():  # O-2
    g = torch.tensor([2.0**-57, -(2.0**-57), 2.0**-56, 2.0**56, 2.0**57, torch.inf, torch.nan])
    found = adamw_update.in_range(g)
    assert found[:4].tolist() == [0, 0, 2.0**-56, 2.0**56]
    assert found[4:].isnan().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 2.0**57, -(2.0**57)])
def test_one_gradient_out_of_range_is_seen_alone(bad):  # O-2
    """Each end of the range is asked for, on a CPU of the extremes alone."""
    found = adamw_update.in_range(torch.tensor([1.0, bad, -1.0, 2.0**-57]))
    assert found.isnan().tolist() == [False, True, False, False]
    assert found[[0, 2, 3]].tolist() == [1.0, -1.0, 0.0]
