"""The FP8 all-gather of a weight: its codes, its scale, and the bytes that move (spec P-3, P-4,
P-11).
"""

import contextlib
import functools
import math

import pytest
import torch
from helpers.models.sharded_models import RANKS, batch, plain, sharded
from helpers.processes.ranks import run
from torch import distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8ref.formats import E4M3FN
from fp8ref.torch.quantize import scaling


class Collectives(TorchDispatchMode):
    """Counts collectives, and the bytes that each rank puts into gathers."""

    def __init__(self):
        super().__init__()
        self.gathered, self.reduced = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "allgather" in str(func):
            tensor = args[1]
            self.gathered += tensor.numel() * tensor.element_size()
        self.reduced += "all_reduce" in str(func)
        return func(*args, **(kwargs or {}))


def given(model):
    """Codes, as uint8, and scale of the first linear's weight in a forward pass."""
    seen = []
    handle = model[0][0].register_forward_pre_hook(
        lambda m, _: seen.append(
            (m.weight._data.view(torch.uint8).clone(), m.weight._scale.clone())
        )
    )
    model(batch(0))
    handle.remove()
    return seen[0]


def codes_of_the_gathered_weight():
    """Of the first linear, by source; what its forward pass was given."""
    found = {}
    for source in (torch.bfloat16, torch.float32):
        found[source] = given(sharded(dtype=source))
    return found


def scales_after_writes():
    """The scale of the first linear's weight, and what it should be, after each way of writing
    weights outside of the step.
    """
    model, found = sharded(), []
    state = {k: v.clone() for k, v in model.state_dict().items()}

    def check():
        with torch.no_grad():
            scale = given(model)[1]
        model.reshard()
        model[0].reshard()
        whole = model[0][0].weight.full_tensor().bfloat16()
        found.append((scale, scaling.quantize(whole, E4M3FN).scale))

    check()
    model[0][0].weight.data.mul_(16)
    check()
    model.load_state_dict(state)
    check()
    model.load_state_dict({k: v * 3 for k, v in state.items()}, assign=True)
    check()
    with torch.no_grad():
        model[0][0].weight.lerp_(torch.zeros_like(model[0][0].weight), 0.75)
    check()
    return found


def gathered_outside_of_a_pass():
    """Largest differences that gathering before the pass makes, and scales beside those of the
    weights as they are.
    """
    outputs, scales = {}, []
    for fp8 in (True, False):
        for early in (False, True):
            model = sharded(fp8=fp8)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for step in range(3):
                if early:
                    model.unshard(async_op=True)
                    model[0].unshard(async_op=True)
                y = model(batch(step))
                outputs.setdefault((fp8, early), []).append(y.detach())
                optimizer.zero_grad()
                y.float().square().mean().backward()
                optimizer.step()
    model = sharded()
    model(batch(0)).float().square().mean().backward()
    for change in (lambda w: w.mul_(8), lambda w: w.data.mul_(8), lambda w: w.to_local().mul_(8)):
        with torch.no_grad():
            change(model[0][0].weight)
        whole = model[0][0].weight.full_tensor().bfloat16()
        model[0].unshard()
        scales.append((model[0][0].weight._scale.clone(), scaling.quantize(whole, E4M3FN).scale))
        model[0].reshard()
    model[0][0].fp8_gather.in_pass = True  # as after an interrupt, which no hook reports
    with torch.no_grad():
        model[0][0].weight.mul_(8)
    whole = model[0][0].weight.full_tensor().bfloat16()
    model[0].unshard()
    scales.append((model[0][0].weight._scale.clone(), scaling.quantize(whole, E4M3FN).scale))
    gathers = (lambda model: model[0].unshard(), lambda model: model[0](batch(0)))
    scales.extend(interrupted(gather) for gather in gathers)
    return outputs, scales


def interrupted(gather):
    """The scale of a gather after an interrupted pass and an uncounted write, and the right one."""
    model, scales = sharded(), []
    with torch.no_grad():
        model(batch(0))
        handle = model[1].register_forward_pre_hook(interrupt)
        with contextlib.suppress(KeyboardInterrupt):
            model(batch(0))
        handle.remove()
        model[0].reshard()
        model[0][0].weight.to_local().mul_(2)
        whole = model[0][0].weight.full_tensor().bfloat16()
        linear = model[0][0]
        linear.register_forward_pre_hook(lambda *_: scales.append(linear.weight._scale.clone()))
        gather(model)
        scales = scales or [linear.weight._scale.clone()]
    return scales[0], scaling.quantize(whole, E4M3FN).scale


def interrupt(*_):
    raise KeyboardInterrupt


def one_bad_shard(value):
    model = sharded()
    if distributed.get_rank() == 1:
        model[0][0].weight.to_local().data[3, 5] = value
    return given(model)[1]


def traffic():
    """Per rank and forward pass: bytes into gathers, and reductions, of FP8 with and without
    precomputed scales, bfloat16 and float32.
    """
    found = []
    for how in (
        {},
        {"precompute": False},
        {"fp8": False},
        {"fp8": False, "param_dtype": torch.float32},
    ):
        big = nn.Sequential(
            nn.Sequential(nn.Linear(192, 192, bias=False), nn.Linear(192, 192, bias=False)),
            nn.Linear(192, 96, bias=False),
        )
        model, x = sharded(model=big, **how), torch.randn(16, 192)
        model(x.bfloat16() if how.get("param_dtype") is None else x)  # FSDP2 sets itself up
        model.reshard()
        with Collectives() as seen:
            model(x.bfloat16() if how.get("param_dtype") is None else x)
        found.append((seen.gathered, seen.reduced))
    return found


# ---- what they show ----


@pytest.fixture(scope="module")
def ranks():
    return functools.cache(lambda function, *args, n=RANKS: run(n, function, *args))


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
def test_codes_are_those_of_the_whole_weight_from_its_source(ranks, source):  # P-4, P-11
    whole = scaling.quantize(plain()[0][0].weight.to(source), E4M3FN)
    for rank in ranks(codes_of_the_gathered_weight):
        codes, scale = rank[source]
        assert torch.equal(codes, whole.codes.view(torch.uint8))
        assert torch.equal(scale, whole.scale)


def test_sources_give_other_codes(ranks):
    compute, master = (
        ranks(codes_of_the_gathered_weight)[0][source][0]
        for source in (torch.bfloat16, torch.float32)
    )
    assert 0 < (compute != master).float().mean() < 0.1


def test_scales_are_of_the_weights_as_they_are_whoever_wrote_them(ranks):
    for rank in ranks(scales_after_writes):
        found, expected = zip(*rank, strict=True)
        assert torch.equal(torch.stack(found), torch.stack(expected))
        # loading what was there gives back the first
        assert len(set(torch.stack(found).tolist())) == 4


def test_gathers_outside_of_a_pass_have_scales_of_the_weights_as_they_are(ranks):  # P-11
    for outputs, scales in ranks(gathered_outside_of_a_pass):
        for fp8 in (True, False):
            assert all(
                torch.equal(a, b)
                for a, b in zip(outputs[fp8, False], outputs[fp8, True], strict=True)
            )
        assert all(torch.equal(mine, wanted) for mine, wanted in scales)
        assert len({wanted.item() for _, wanted in scales}) == 5


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_shard_that_is_not_finite_shows_on_every_rank(ranks, value):  # P-3
    scales = torch.stack(ranks(one_bad_shard, value))
    assert scales.isnan().all() if math.isnan(value) else (scales == 0).all()


def test_half_the_bytes_and_one_reduction(ranks):
    (fp8, one), (each, many), (bf16, _), (f32, _) = ranks(traffic)[0]
    assert (fp8, each) == (bf16 / 2, bf16 / 2) == (f32 / 4, f32 / 4)
    assert (one, many) == (1, 3)
