"""Gradients summed over ranks in FP8 against the simulator, bit for bit (spec P-21, P-22, P-24,
P-25).
"""

import functools

import numpy as np
import pytest
import torch
from helpers.models.sharded_models import batch, plain, sharded
from helpers.processes.ranks import run
from helpers.training import gradient_cases as cases
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from fp8ref.sim.distributed import gradient_reduction as sim
from fp8ref.sim.quantize import scaling as sim_scaling
from fp8ref.spec import gradient_reduction as data
from fp8ref.torch.distributed import gradient_reduction
from fp8ref.torch.distributed.fp8_exchange import GradientCast
from fp8ref.torch.model import convert
from fp8ref.torch.model.parallel import Parallelism, parallelize
from fp8ref.torch.quantize import scaling

MU = data.AutoScale(threshold=0.05, window=7)


class Sent(TorchDispatchMode):
    """The dtypes of what goes into all-to-alls, its bytes, and the operators that would wait for a
    GPU.
    """

    def __init__(self):
        super().__init__()
        self.dtypes, self.bytes, self.waits = set(), 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "alltoall" in str(func):
            self.dtypes.add(args[1].dtype)
            self.bytes += args[1].numel() * args[1].element_size()
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.waits.append(str(func))
        return func(*args, **(kwargs or {}))


def each_rank():
    """What one rank has of all cases, specials, mu and microbatches."""
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    found: dict = {"cases": [], "special": {}, "mu": []}
    with Sent() as sent:
        for rows, fmt, options in cases.CASES:
            g = torch.from_numpy(cases.of_ranks(ranks, rows)[rank])
            keys = options.keys() & {"policy", "prescale"}
            by = GradientCast(fmt, **{key: options[key] for key in keys})
            rest = {key: value for key, value in options.items() if key not in keys}
            piece = gradient_reduction.reduce_scatter(g, None, by, count=True, **rest)
            whole = gradient_reduction.all_reduce(g, None, by, count=True, **rest)
            found["cases"].append(
                (
                    piece.value.numpy(),
                    whole.value.numpy(),
                    int(piece.saturated),
                    int(whole.saturated),
                )
            )
    found["dtypes"] = sent.dtypes
    for name in cases.SPECIAL:
        found["special"][name] = gradient_reduction.all_reduce(
            torch.from_numpy(cases.special(ranks, name)[rank])
        ).value.numpy()
    half = torch.from_numpy(cases.of_ranks(ranks, 13, "bfloat16")[rank]).bfloat16()
    found["half"] = gradient_reduction.reduce_scatter(half).value.numpy()
    g, mu = torch.from_numpy(cases.of_ranks(ranks, 13)[rank]), torch.tensor(1.0)
    for _ in range(8):
        reduced = gradient_reduction.all_reduce(g, mu=mu, result="codes", count=True)
        mu = gradient_reduction.next_mu(mu, reduced.saturated, g.numel(), MU)
        found["mu"].append((reduced.value.numpy(), mu.item()))
    total = None
    for part in cases.of_ranks(4, 16):
        mine = torch.from_numpy(np.array_split(part, ranks)[rank])
        total = gradient_reduction.accumulate(total, mine, group=distributed.group.WORLD)
    found["accumulated"] = scaling.dequantize(total).numpy()
    return found


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_rank_has_the_simulators_sums(ranks):  # P-3, P-21, P-22, P-24
    found = run(ranks, each_rank)
    for i, case in enumerate(cases.CASES):
        expected = cases.expected(ranks, case)
        pieces = np.concatenate([of_rank["cases"][i][0] for of_rank in found])
        assert cases.equal(pieces[: case[0]], expected.value)
        assert not pieces[case[0] :].any()  # what fills the last pieces
        for _, whole, *saturated in (of_rank["cases"][i] for of_rank in found):
            assert cases.equal(whole, expected.value)
            assert saturated == [expected.saturated] * 2
    assert found[0]["dtypes"] == {torch.uint8}
    for name in cases.SPECIAL:
        expected = sim.reduce(cases.special(ranks, name)).value
        assert all(cases.equal(of_rank["special"][name], expected) for of_rank in found)
    half = np.concatenate([of_rank["half"] for of_rank in found])
    assert cases.equal(half[:13], sim.reduce(cases.of_ranks(ranks, 13, "bfloat16")).value)
    mu, grads, moves = np.float32(1), cases.of_ranks(ranks, 13), set()
    for value, after in found[0]["mu"]:
        reduced = sim.reduce(grads, mu=mu, result="codes")
        assert cases.equal(value, reduced.value)
        before, mu = mu, sim.next_mu(mu, reduced.saturated, grads[0].size, MU)
        moves.add(bool(mu > before))
        assert mu == after
    assert moves == {True, False}
    total = functools.reduce(sim.accumulate, cases.of_ranks(4, 16), None)
    assert cases.equal(
        np.concatenate([of_rank["accumulated"] for of_rank in found]), sim_scaling.dequantize(total)
    )


def loss_of(model):
    model(batch(0)).float().square().mean().backward()


def replica(recipe):
    """The same model as ``sharded``'s on one rank, in the dtype that it computes in."""
    model = convert.convert(plain(), recipe)
    return model.to(torch.bfloat16)


def under_fsdp():
    """Whole gradients of a sharded model, this rank's own of a replica, and the bytes of
    all-to-alls.
    """
    model = sharded("tensorwise", fp8=False)
    units = gradient_reduction.reduce_in_fp8(model)
    with Sent() as sent:
        loss_of(model)
    alone = replica("tensorwise")
    loss_of(alone)
    whole = {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()}
    assert sent.waits == []
    return (
        whole,
        {name: p.grad.float().numpy() for name, p in alone.named_parameters()},
        sent.bytes,
        len(units),
    )


@pytest.mark.parametrize("ranks", [3, 4])
def test_fsdp2_reduces_weights_of_linears_in_fp8(ranks):  # P-25; under 3 ranks shards are unequal
    found = run(ranks, under_fsdp)
    assert found[0][3] == 2
    narrow = {
        name for name in found[0][0] if name.endswith("weight") and found[0][0][name].ndim == 2
    }
    assert len(narrow) == 3
    for name, whole in found[0][0].items():
        parts = [of_rank[1][name] for of_rank in found]
        if name in narrow:
            assert cases.equal(whole, sim.reduce(parts).value)
        else:  # in float32, in rank order, divided by the ranks
            assert cases.equal(whole, functools.reduce(np.add, parts) / np.float32(ranks))
        assert all(cases.equal(whole, of_rank[0][name]) for of_rank in found)
    padded = {
        name: -(-g.shape[0] // ranks) * ranks * (g.size // g.shape[0])
        for name, g in found[0][0].items()
    }
    assert found[0][2] == sum(n * (1 if name in narrow else 4) for name, n in padded.items())


def divided():
    """Gradients under FSDP2's divide factors; None: the number of ranks."""
    mesh, rank = init_device_mesh("cpu", (distributed.get_world_size(),)), distributed.get_rank()
    found = {}
    for factor in (None, 1.0, 8.0):
        torch.manual_seed(0)
        model = fully_shard(
            nn.Linear(16, 8), mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)
        )
        gradient_reduction.reduce_in_fp8(model)
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        model(torch.arange(32.0).view(2, 16) + rank).square().mean().backward()
        found[factor] = [p.grad.full_tensor().numpy() for p in model.parameters()]
    return found


def test_fsdp2s_divide_factor_takes_the_place_of_the_ranks():  # P-21, P-25
    for found in run(2, divided):
        for factor in (1.0, 8.0):  # powers of two: each result is exact
            assert all(
                cases.equal(one, mean * np.float32(2 / factor))
                for one, mean in zip(found[factor], found[None], strict=True)
            )
        assert all(mean.any() for mean in found[None])


def parallelized():
    """Whole gradients under ``parallelize``, not compiled and compiled whole, in FP8 and in
    float32.
    """
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "fsdp"))
    found = []
    for compile, dtype in (
        ("none", torch.float8_e4m3fn),
        ("model", torch.float8_e4m3fn),
        ("none", torch.float32),
    ):
        how = Parallelism(compile=compile, compile_backend="aot_eager", reduce_dtype=dtype)
        model = parallelize(plain(), "bf16", mesh=mesh, parallelism=how)
        loss_of(model)
        found.append({name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()})
    return found


@pytest.mark.slow
def test_parallelize_reduces_in_fp8_also_if_the_model_is_compiled():  # P-25
    for eager, compiled, wide in run(2, parallelized):
        for name, value in eager.items():
            assert cases.equal(value, compiled[name])
            if value.ndim == 1:
                assert cases.equal(value, wide[name])  # a sum of two has one order
            else:
                assert not cases.equal(value, wide[name])


def under_ddp():
    """Gradients of a DistributedDataParallel model under the hook, and this rank's own of a
    replica.
    """
    kept = plain()
    ddp = nn.parallel.DistributedDataParallel(kept)
    keep = frozenset([kept[2].weight])
    ddp.register_comm_hook(
        gradient_reduction.DDPState(cast=GradientCast(prescale="inverse"), keep=keep),
        gradient_reduction.ddp_hook,
    )
    alone = plain()
    for model in (ddp, alone):
        model(batch(0).float()).square().mean().backward()
    return [
        {name: p.grad.numpy() for name, p in model.named_parameters()} for model in (kept, alone)
    ]


def test_a_hook_of_ddp_reduces_matrices_in_fp8():  # P-25
    found = run(3, under_ddp)
    for name, whole in found[0][0].items():
        parts = [of_rank[1][name] for of_rank in found]
        narrow = whole.ndim == 2 and name != "2.weight"
        expected = (
            sim.reduce(parts, prescale="inverse").value
            if narrow
            else functools.reduce(np.add, parts) / np.float32(3)
        )
        assert all(cases.equal(of_rank[0][name], expected) for of_rank in found)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x)


def refusals():
    """The messages of what FSDP2 and the functions refuse."""
    mesh = init_device_mesh("cpu", (2,))
    copies = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    wide = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    g = torch.ones(4)
    by_data = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "fsdp"))
    unused = fully_shard(Unused(), mesh=mesh, mp_policy=wide)
    gradient_reduction.reduce_in_fp8(unused)
    calls = [
        lambda: gradient_reduction.reduce_in_fp8(plain()),
        lambda: gradient_reduction.reduce_in_fp8(
            fully_shard(nn.LayerNorm(4), mesh=mesh, mp_policy=wide)
        ),
        lambda: gradient_reduction.reduce_in_fp8(fully_shard(plain(), mesh=copies, mp_policy=wide)),
        lambda: gradient_reduction.reduce_in_fp8(fully_shard(plain(), mesh=mesh)),
        lambda: unused(torch.ones(2, 8)).sum().backward(),
        lambda: gradient_reduction.all_reduce(g, None, GradientCast(policy="te_current")),
        lambda: gradient_reduction.all_reduce(g, None, GradientCast(policy="deepgemm")),
        lambda: gradient_reduction.all_reduce(g, None, GradientCast(prescale="half")),
        lambda: gradient_reduction.all_reduce(g, result="fp8"),
        lambda: gradient_reduction.all_reduce(g, mu=0.0),
        lambda: parallelize(
            plain(), "bf16", mesh=by_data, parallelism=Parallelism(reduce_dtype=torch.float8_e4m3fn)
        ),
        lambda: parallelize(
            plain(), "bf16", parallelism=Parallelism(reduce_dtype=torch.float8_e4m3fn)
        ),
        lambda: gradient_reduction.reduce_scatter(g[0]),
        lambda: gradient_reduction.accumulate(gradient_reduction.accumulate(None, g), g[:2]),
    ]
    found = []
    for call in calls:
        try:
            found.append(f"not refused: {call()}")
        except ValueError as error:
            found.append(str(error))
    return found


def test_what_cannot_be_reduced_is_refused_by_name():  # P-25
    expected = [
        "need units with linears; the model has none",
        "need units with linears; the model has none",
        "all-reduce over copies has no hook",
        "FP8 gradients are cast from float32; got reduce_dtype None",
        "Use all of them, or freeze the rest",
        "fp8ref.torch scales by",
        "has a policy of",
        "prescale is one of",
        "result is one of",
        "mu is in",
        "FSDP2's sum over data has no hook; got 2 ranks along data",
        "got no ranks that share a batch",
        "splits the first dim",
        "gradients of one shape, (4,); got (2,)",
    ]
    for of_rank in run(2, refusals):
        for message, part in zip(of_rank, expected, strict=True):
            assert part in message


def test_what_a_hook_cannot_do_is_refused_before_it_runs():  # P-21, P-22
    with pytest.raises(
        ValueError, match="prescale is one of one, inverse_root, inverse; got 'half'"
    ):
        gradient_reduction.DDPState(cast=GradientCast(prescale="half"))
    with pytest.raises(ValueError, match="a shared gradient scale has a policy of"):
        gradient_reduction.DDPState(cast=GradientCast(policy="deepgemm"))
    with pytest.raises(ValueError, match="gradients need a process group; there is none"):
        gradient_reduction.all_reduce(torch.ones(3))
    with pytest.raises(ValueError, match=r"got None\. Pass count=True to the reduction"):
        gradient_reduction.next_mu(torch.tensor(1.0), None, 3)
