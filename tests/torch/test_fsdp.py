import contextlib
import functools
import math
import re

import pytest
import torch
from ranks import run
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fp8ref.formats import E4M3FN
from fp8ref.policy import POLICIES
from fp8ref.recipe import CastSpec, GemmSpec, Recipe
from fp8ref.torch import convert, delayed, scaling
from fp8ref.torch.fsdp import gather_in_fp8
from fp8ref.torch.parallel import parallelize

RANKS = 3
N = 64  # rows that 3 ranks do not share evenly: 22, 22, 20
_POW2 = CastSpec(fmt=E4M3FN, policy=POLICIES["torchao_pow2"])
POW2 = Recipe(
    name="pow2",
    output=GemmSpec(a=_POW2, b=_POW2, accumulate="fast"),
    grad_input=GemmSpec(a=_POW2, b=_POW2, accumulate="slow"),
    grad_weight=GemmSpec(a=_POW2, b=_POW2, accumulate="slow"),
)


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(64, N), nn.ReLU(), nn.Linear(N, 64, bias=False)), nn.LayerNorm(64), nn.Linear(64, 32))


def sharded(recipe="tensorwise", *, group=False, fp8=True, param_dtype=torch.bfloat16, model=None, **options):
    """A model whose first block and itself are fully_shard units, on all ranks."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("fsdp",))
    model = convert.convert(plain() if model is None else model, recipe, amax_group=mesh.get_group() if group else None)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for unit in (model[0], model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    if fp8:
        gather_in_fp8(model, **{"dtype": param_dtype, **options})
    return model


def batch(step):
    """This rank's rows."""
    generator = torch.Generator().manual_seed(10 * step + distributed.get_rank())
    return torch.randn(32, 64, generator=generator).bfloat16()


def trained(model, steps=3, *, parameters=None):
    optimizer, losses = torch.optim.AdamW(parameters or model.parameters(), lr=1e-2), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(step)).float().square().mean()
        loss.backward()
        optimizer.step()
        delayed.update(model)
        losses.append(loss.item())
    return losses, {k: v.full_tensor().clone() if hasattr(v, "full_tensor") else v.clone() for k, v in model.state_dict().items()}


def equal(a, b):
    return a[0] == b[0] and a[1].keys() == b[1].keys() and all(torch.equal(a[1][k], b[1][k]) for k in a[1])


@contextlib.contextmanager
def refusing():
    """What was raised, as a list that is filled on the way out."""
    said = []
    try:
        yield said
    except ValueError as error:
        said.append(str(error))


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
        found[name] = [equal(off, trained(sharded(precompute=precompute, **how))) for precompute in (True, False)]
    return found


def given(model):
    """Codes, as uint8, and scale of the first linear's weight in a forward pass."""
    seen = []
    handle = model[0][0].register_forward_pre_hook(
        lambda m, _: seen.append((m.weight._data.view(torch.uint8).clone(), m.weight._scale.clone()))
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
    """The scale of the first linear's weight, and what it should be, after each way of writing weights outside of the step."""
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


def one_bad_shard(value):
    model = sharded()
    if distributed.get_rank() == 1:
        model[0][0].weight.to_local().data[3, 5] = value
    return given(model)[1]


def traffic():
    """Per rank and forward pass: bytes into gathers, and reductions, of FP8 with and without precomputed scales, bfloat16 and float32."""
    found = []
    for how in ({}, {"precompute": False}, {"fp8": False}, {"fp8": False, "param_dtype": torch.float32}):
        big = nn.Sequential(nn.Sequential(nn.Linear(192, 192, bias=False), nn.Linear(192, 192, bias=False)), nn.Linear(192, 96, bias=False))
        model, x = sharded(model=big, **how), torch.randn(16, 192)
        model(x.bfloat16() if how.get("param_dtype") is None else x)  # FSDP2 sets itself up
        model.reshard()
        with Collectives() as seen:
            model(x.bfloat16() if how.get("param_dtype") is None else x)
        found.append((seen.gathered, seen.reduced))
    return found


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("in the backward pass")


def broken_backward():
    """Whether training goes on, after an error in a backward pass, as if there had been none; of a model without FP8 gather too."""
    found = []
    for fp8 in (True, False):
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("fsdp",))
        models = []
        for _ in range(2):
            made = plain()
            models.append(parallelize(made, "tensorwise", mesh=mesh, blocks=[made[0]], gather_fp8=fp8))
        model, expected = models
        parameters = list(model.parameters())
        handle = model[0][0].register_forward_hook(lambda module, args, out: Broken.apply(out))
        with contextlib.suppress(KeyError):
            model(batch(0)).float().square().mean().backward()
        handle.remove()
        found.append(equal(trained(model, parameters=parameters), trained(expected)))
    return found


def interrupted():
    """Whether training goes on, after an interrupt in a forward pass, as if there had been none."""
    found = []
    for how in ({}, {"recipe": "delayed", "group": True}):
        model = sharded(**how)
        parameters = list(model.parameters())  # after an interrupt they are whole ones, until the next pass begins

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


# ---- what they show ----


@pytest.fixture(scope="module")
def ranks():
    return functools.cache(lambda function, *args, n=RANKS: run(n, function, *args))


@pytest.mark.parametrize("case", ["tensorwise", "tensorwise, global", "delayed", "powers of two", "float32 compute"])
def test_gathering_in_fp8_changes_no_bit_of_training(ranks, case):  # P-11, shards of unequal length
    assert [rank[case] for rank in ranks(on_and_off)] == [[True, True]] * RANKS


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
def test_codes_are_those_of_the_whole_weight_from_its_source(ranks, source):  # P-4, P-11
    whole = scaling.quantize(plain()[0][0].weight.to(source), E4M3FN)
    for rank in ranks(codes_of_the_gathered_weight):
        codes, scale = rank[source]
        assert torch.equal(codes, whole.codes.view(torch.uint8))
        assert torch.equal(scale, whole.scale)


def test_sources_give_other_codes(ranks):
    compute, master = (ranks(codes_of_the_gathered_weight)[0][source][0] for source in (torch.bfloat16, torch.float32))
    assert 0 < (compute != master).float().mean() < 0.1


def test_scales_are_of_the_weights_as_they_are_whoever_wrote_them(ranks):
    for rank in ranks(scales_after_writes):
        found, expected = zip(*rank, strict=True)
        assert torch.equal(torch.stack(found), torch.stack(expected))
        assert len(set(torch.stack(found).tolist())) == 4  # loading what was there gives back the first


def test_an_interrupt_leaves_nothing_behind(ranks):  # P-11
    assert ranks(interrupted) == [[True, True]] * RANKS
    assert ranks(broken_backward) == [[True, True]] * RANKS


def inference():
    """Outputs in inference mode, beside those without gradients, between steps of training."""
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


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_shard_that_is_not_finite_shows_on_every_rank(ranks, value):  # P-3
    scales = torch.stack(ranks(one_bad_shard, value))
    assert scales.isnan().all() if math.isnan(value) else (scales == 0).all()


def test_half_the_bytes_and_one_reduction(ranks):
    (fp8, one), (each, many), (bf16, _), (f32, _) = ranks(traffic)[0]
    assert (fp8, each) == (bf16 / 2, bf16 / 2) == (f32 / 4, f32 / 4)
    assert (one, many) == (1, 3)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("nothing", "the model has none"),
        ("not sharded", r"0\.0\.weight is not sharded"),
        ("no group", r"ranks share the states of 0\.0.*amax_group"),
        ("dtype", r"was to be from torch.float16"),
        ("integer", "has an integer reshard_after_forward. Use True or False"),
        ("other dim", r"along its first dim; 0\.weight is cut otherwise"),
        ("tied", r"2\.weight is 4\.weight too"),
    ],
)
def test_what_cannot_be_gathered_in_fp8_is_refused_by_name(ranks, case, message):
    for rank in ranks(refusals, n=4):  # whose mesh has a factor
        assert len(rank[case]) == 1
        assert re.search(message, rank[case][0])
