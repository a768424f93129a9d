import contextlib
import functools
import re

import pytest
import torch
from helpers.models.sharded_models import POW2, RANKS, batch, equal, plain, sharded, trained
from helpers.processes.ranks import run
from torch import distributed, nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from fp8ref.torch import delayed
from fp8ref.torch.distributed.fsdp import (
    OrderedReduceScatter,
    gather_in_fp8,
    keep_reduced_dtype,
    sum_in_rank_order,
)
from fp8ref.torch.model import convert
from fp8ref.torch.model.parallel import Parallelism, parallelize


@contextlib.contextmanager
def refusing():
    """What was raised, as a list that is filled on the way out."""
    said = []
    try:
        yield said
    except ValueError as error:
        said.append(str(error))


# ---- what ranks do; each returns what the tests below look at ----


def on_and_off():
    found = {}
    for name, how in {
        "tensorwise": {},
        "tensorwise, global": {"group": True},
        "delayed": {"recipe": "delayed", "group": True},
        "powers of two": {"recipe": POW2},
        "float32 compute": {"param_dtype": torch.float32},
    }.items():
        off = trained(sharded(fp8=False, **how))
        found[name] = [
            equal(off, trained(sharded(precompute=precompute, **how)))
            for precompute in (True, False)
        ]
    return found


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("in the backward pass")


def broken_backward():
    """Whether training resumes after an error in a backward pass as if there had been none, also
    without FP8 gather.
    """
    found = []
    for fp8 in (True, False):
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("fsdp",))
        models = []
        for _ in range(2):
            made = plain()
            models.append(
                parallelize(
                    made,
                    "tensorwise",
                    mesh=mesh,
                    blocks=[made[0]],
                    parallelism=Parallelism(gather_fp8=fp8),
                )
            )
        model, expected = models
        parameters = list(model.parameters())
        handle = model[0][0].register_forward_hook(lambda module, args, out: Broken.apply(out))
        with contextlib.suppress(KeyError):
            model(batch(0)).float().square().mean().backward()
        handle.remove()
        found.append(equal(trained(model, parameters=parameters), trained(expected)))
    return found


def interrupted():
    """Whether training resumes after an interrupt in a forward pass as if there had been none."""
    found = []
    for how in ({}, {"recipe": "delayed", "group": True}):
        model = sharded(**how)
        # after an interrupt they are whole ones, until the next pass begins
        parameters = list(model.parameters())

        def interrupt(*args):
            raise KeyboardInterrupt

        handle = model[0][2].register_forward_pre_hook(interrupt)
        with contextlib.suppress(KeyboardInterrupt):
            model(batch(0))
        handle.remove()
        delayed.forget(model)
        found.append(equal(trained(model, parameters=parameters), trained(sharded(**how))))
    return found


class Again(nn.Module):
    """Runs a model without gradients, then again with them in the backward pass."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return checkpoint(self.model, x.requires_grad_(), use_reentrant=True)


def run_again():
    how = {"recipe": "delayed", "group": True}
    found, plain = trained(Again(sharded(**how))), trained(sharded(**how))
    return equal(found, (plain[0], {f"model.{name}": value for name, value in plain[1].items()}))


def refusals():
    world = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("fsdp",))
    found = {}
    with refusing() as found["nothing"]:
        sharded("rowwise")
    with refusing() as found["not sharded"]:
        gather_in_fp8(convert.convert(plain(), "tensorwise"), dtype=torch.bfloat16)
    with refusing() as found["no group"]:
        sharded("delayed")
    with refusing() as found["dtype"]:
        sharded(dtype=torch.float16)(batch(0))
    with refusing() as found["integer"]:
        model = convert.convert(plain(), "tensorwise")
        fully_shard(model[0], mesh=world, reshard_after_forward=2)
        fully_shard(model, mesh=world)
        gather_in_fp8(model, dtype=torch.float32)
    with refusing() as found["offloaded"]:
        model = convert.convert(plain(), "tensorwise")
        fully_shard(model, mesh=world, offload_policy=CPUOffloadPolicy(pin_memory=False))
        state = model._get_fsdp_state()
        (getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group])[
            0
        ].device = torch.device("cuda")
        gather_in_fp8(model, dtype=torch.float32)
    found["hooks of offloaded shards"] = [
        str(hasattr(model[2].weight._local_tensor, "fsdp_pre_all_gather"))
    ]
    with refusing() as found["other dim"]:
        model = convert.convert(nn.Sequential(nn.Linear(96, 48, bias=False)), "tensorwise")
        fully_shard(model, mesh=world, shard_placement_fn=lambda p: Shard(1))
        gather_in_fp8(model, dtype=torch.float32)
        model(torch.randn(16, 96))
    with refusing() as found["tied"]:
        model = plain()
        model.append(nn.Linear(32, 64))
        model[3].weight = nn.Parameter(model[2].weight.detach())
        model.append(nn.Embedding(32, 64))
        model[4].weight = model[2].weight
        sharded(model=model)
    return found


def by_hand():
    """Whether torchtitan's order trains as the same model does eagerly, bit for bit: compile a
    block, shard, gather in FP8.
    """
    found = []
    for recipe in ("tensorwise", "delayed"):
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        model = convert.convert(
            plain(), recipe, amax_group=mesh.get_group() if recipe == "delayed" else None
        )
        model[0].compile(fullgraph=True, backend="aot_eager")
        for unit in (model[0], model):
            fully_shard(
                unit,
                mesh=mesh,
                mp_policy=MixedPrecisionPolicy(
                    param_dtype=torch.bfloat16, reduce_dtype=torch.float32
                ),
            )
        gather_in_fp8(model, dtype=torch.bfloat16)
        found.append(equal(trained(model), trained(sharded(recipe, group=recipe == "delayed"))))
    return found


# ---- what they show ----


@pytest.fixture(scope="module")
def ranks():
    return functools.cache(lambda function, *args, n=RANKS: run(n, function, *args))


@pytest.mark.parametrize(
    "case", ["tensorwise", "tensorwise, global", "delayed", "powers of two", "float32 compute"]
)
def test_gathering_in_fp8_changes_no_bit_of_training(ranks, case):  # P-11, shards of unequal length
    assert [rank[case] for rank in ranks(on_and_off)] == [[True, True]] * RANKS


def test_an_interrupt_leaves_nothing_behind(ranks):  # P-11
    assert ranks(interrupted) == [[True, True]] * RANKS
    assert ranks(broken_backward) == [[True, True]] * RANKS


def test_blocks_compile_before_they_are_sharded_by_hand():  # P-12
    assert run(2, by_hand) == [[True, True]] * 2


def inference():
    """Outputs in inference mode, next to those without gradients, between steps of training."""
    model, other = sharded(), sharded()
    first = trained(model, 1), trained(other, 1)
    with torch.inference_mode():
        found = model(batch(5)).clone()
    with torch.no_grad():
        expected = other(batch(5))
    return equal(*first), torch.equal(found, expected), equal(trained(model, 2), trained(other, 2))


def test_inference_mode_takes_weights_gathered_in_fp8(ranks):
    assert ranks(inference) == [(True, True, True)] * RANKS


def test_a_pass_without_gradients_that_runs_again_observes_its_weights(ranks):  # H-4, P-11
    assert ranks(run_again) == [True] * RANKS


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("nothing", "the model has no such linear"),
        ("not sharded", r"0\.0\.weight is not sharded"),
        ("no group", r"ranks share the delayed states of 0\.0.*amax_group"),
        ("dtype", r"the masters'; got torch.float16"),
        ("integer", "has an integer reshard_after_forward. Use True or False"),
        ("offloaded", r"the model has a CPUOffloadPolicy and trains on cuda. Drop the policy"),
        ("hooks of offloaded shards", "False"),
        ("other dim", r"0\.weight is not sharded along dim 0"),
        ("tied", r"2\.weight and 4\.weight are one parameter"),
    ],
)
def test_what_cannot_be_gathered_in_fp8_is_refused_by_name(ranks, case, message):
    for rank in ranks(refusals, n=4):  # whose mesh has a factor
        assert len(rank[case]) == 1
        assert re.search(message, rank[case][0])


# Of three ranks' parts, 2^24, 1 and -1: float32 has no 2^24 + 1, which rounds to 2^24, the even
# neighbor; (2^24 + 1) - 1 is then 2^24 - 1. Every other order of the sum starts with 2^24 - 1,
# which float32 has, or with 1 - 1, and gives 2^24.
PARTS = (2.0**24, 1.0, -1.0)
IN_ORDER = 2.0**24 - 1
MEAN = IN_ORDER / 3
assert IN_ORDER == 3 * 5592405.0  # no rounding in the mean


def reduced():
    """Per rank: sum and average, over 3, of parts that no other order adds alike; each rank's are
    twice those of the rank before.
    """
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    mine = (PARTS[rank] * 2.0 ** torch.arange(ranks)).repeat_interleave(2)
    kept, reduction, found = mine.clone(), OrderedReduceScatter(fully_shard(Scale())), []
    for op in (ReduceOp.SUM, ReduceOp.AVG):
        out = reduction.allocate((2,), dtype=mine.dtype, device=mine.device)
        reduction(out, mine, distributed.group.WORLD, op)
        found.append(out)
    assert torch.equal(mine, kept)
    return found


def test_gradients_are_added_in_rank_order():  # P-13
    for rank, (total, average) in enumerate(run(3, reduced)):
        assert total.tolist() == [IN_ORDER * 2**rank] * 2
        assert average.tolist() == [MEAN * 2**rank] * 2


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(9))

    def forward(self, x):
        return self.w * x


def summed(factor: float | None = None):
    """Whole gradients of two units, one in the other, that are this rank's part each."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    model = nn.Sequential(fully_shard(Scale(), mesh=mesh), Scale())
    fully_shard(model, mesh=mesh)
    sum_in_rank_order(model)
    for unit in (model, model[0]):
        if factor is not None:
            unit.set_gradient_divide_factor(factor)
    model(torch.ones(9)).mul(PARTS[distributed.get_rank()]).sum().backward()
    return [p.grad.full_tensor().tolist() for p in model.parameters()]


def gradients_of_narrow_shards(kept: bool) -> list[torch.Tensor]:
    """Gradients of bfloat16 shards, summed over two passes."""
    made = sharded(model=plain().bfloat16())
    if kept:
        for p in made.parameters():
            p.grad_dtype = torch.float32
        keep_reduced_dtype(made)
    for step in range(1 + kept):
        made(batch(step)).float().square().mean().backward()
        found = [p.grad.full_tensor().clone() for p in made.parameters()]
        if not step:
            first = found
    return [*first, *found]


@pytest.mark.slow
def test_gradients_of_narrower_shards_keep_the_dtype_of_their_sum():  # M-2, T-7
    wide, rounded = (
        run(2, gradients_of_narrow_shards, True),
        run(2, gradients_of_narrow_shards, False),
    )
    for mine, theirs in zip(wide, rounded, strict=True):
        count = len(mine) // 2
        assert {g.dtype for g in mine} == {torch.float32}
        assert all(
            torch.equal(a.bfloat16(), b) for a, b in zip(mine[:count], theirs[:count], strict=True)
        )
        assert any(not torch.equal(g.bfloat16().float(), g) for g in mine[:count])
        assert all(not torch.equal(a, b) for a, b in zip(mine[:count], mine[count:], strict=True))


def test_every_unit_of_a_model_sums_in_order():  # P-13
    assert run(3, summed) == [[[MEAN] * 9] * 2] * 3


def test_fsdp2s_divide_factor_takes_the_place_of_the_ranks():  # P-13
    assert run(3, summed, 4.0) == [[[IN_ORDER / 4] * 9] * 2] * 3
