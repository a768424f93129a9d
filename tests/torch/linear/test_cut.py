"""fp8ref's own linear, cut over tensor next to a cut batch: codes, scales, states and sums of the
simulator's mesh.
"""

import numpy as np
import pytest
import torch
from helpers.models.tensor_models import whole
from helpers.processes.ranks import run
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fp8ref.crosscheck import bounds
from fp8ref.crosscheck.operands import as_factor, initial_states, states_after
from fp8ref.formats import BFLOAT16, E4M3FN, E5M2
from fp8ref.policy import POLICIES
from fp8ref.recipe import CUT_AXES, OPERANDS, RECIPES, REDUCED_AXES, CastSpec, GemmSpec, Recipe
from fp8ref.sim import delayed as sim_delayed
from fp8ref.sim.distributed import sharded_gemm, sharding
from fp8ref.sim.distributed.mesh import Layout, Mesh
from fp8ref.sim.gemm import gemm
from fp8ref.sim.quantize import scaling
from fp8ref.torch import delayed
from fp8ref.torch.distributed import tensor_parallel
from fp8ref.torch.model import convert
from fp8ref.torch.observe.gemms import observe_gemms

PLAN = {"0": "colwise", "1": "rowwise"}
MESH = Mesh(axes={"data": 2, "tensor": 2})
ROWS, STEPS = 128, 3  # of each rank; blocks of 128 divide every part

_LINE, _POW2 = (
    CastSpec(fmt=E5M2, granularity="rowwise"),
    CastSpec(fmt=E4M3FN, policy=POLICIES["torchao_pow2"]),
)
MIXED = Recipe(  # one linear with lines along N and M, a whole tensor, and blocks
    name="mixed",
    output=GemmSpec(a=_POW2, b=CastSpec(fmt=E4M3FN, granularity="rowwise"), accumulate="fast"),
    grad_input=RECIPES["blockwise"].grad_input,
    grad_weight=GemmSpec(a=_LINE, b=_LINE, accumulate="slow"),
)
TRIED = {
    name: RECIPES[name] for name in ("tensorwise", "rowwise", "delayed", "blockwise", "mxfp8")
} | {"mixed": MIXED}


def numbers(*shape, seed):
    """Of magnitudes that differ by rank, by row and by column."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (
        x * torch.linspace(0.2, 5, shape[0])[:, None] * torch.linspace(3, 0.1, shape[1])
    ).bfloat16()


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128)).bfloat16()


def cut(name, grid):
    model = convert.convert(plain(), TRIED[name], amax_group=grid["data"].get_group())
    return tensor_parallel.parallelize(
        model, grid["tensor"], plan=PLAN, amax_group=distributed.group.WORLD
    )


def compiled(name, grid, x, g):
    """Whether a compiled pass has the bits of an eager one: output, gradients and observations."""
    found = []
    for how in (False, True):
        model, mine = cut(name, grid), x.clone().requires_grad_()
        y = (torch.compile(model, fullgraph=True, backend="aot_eager") if how else model)(mine)
        y.backward(g)
        found.append(
            [
                y.detach(),
                mine.grad,
                *(whole(p.grad) for p in model.parameters()),
                *(s.seen for _, s in delayed.states(model)),
            ]
        )
    return [torch.equal(a, b) for a, b in zip(*found, strict=True)]


def trained(names):
    """Of each recipe and step, this rank's GEMMs, output, gradients and states; and what is the
    same compiled.
    """
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    mine, found = (
        slice(grid.get_local_rank("data") * ROWS, (grid.get_local_rank("data") + 1) * ROWS),
        {},
    )
    x, g = (numbers(2 * ROWS, 128, seed=seed)[mine] for seed in (0, 10))
    found["compiled"] = compiled("delayed", grid, x, g)
    for name in names:
        model = cut(name, grid)
        found[name] = []
        for step in range(STEPS if TRIED[name].delayed else 1):
            gemms = {}

            def observer(layer, which, a, b, out, gemms=gemms):
                operands = [
                    (x.hp.float().numpy().copy(), x.codes.numpy().copy(), x.scale.numpy().copy())
                    for x in (a, b)
                ]
                gemms[layer, which] = (*operands, out.float().numpy().copy())

            x = (numbers(2 * ROWS, 128, seed=step) * (1 + step))[mine].clone().requires_grad_()
            with observe_gemms(model, observer):
                y = model(x)
                y.backward(numbers(2 * ROWS, 128, seed=10 + step)[mine])
            delayed.update(model)
            states = {
                key: [t.numpy().copy() for t in (s.scale, s.amax_history, s.step)]
                for key, s in delayed.states(model)
            }
            grads = {key: whole(p.grad).float().numpy() for key, p in model.named_parameters()}
            found[name].append(
                (gemms, y.detach().float().numpy(), x.grad.float().numpy(), grads, states)
            )
            model.zero_grad()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.5)
    return found


@pytest.fixture(scope="module")
def ranks():
    return run(4, trained, list(TRIED))


def simulated(hp, layer, role, spec, axis, state):
    """The simulator's operand on every rank."""
    if spec.delayed is not None:
        scales = sim_delayed.scales(state, spec.delayed, spec.fmt)
        return [
            scaling.quantize_with(x, scales, spec.fmt, policy=spec.policy, axis=axis) for x in hp
        ]
    cut, shape = CUT_AXES[PLAN[layer]].get(role), list(hp[0].shape)
    splits = {} if role == "weight" else {0: ("data",)}
    if cut is not None:
        splits[cut] = ("tensor",)
    for i in splits:
        shape[i] *= 2
    layout = Layout(mesh=MESH, shape=tuple(shape), splits=splits)
    shards = dict(zip(MESH.devices, hp, strict=True))
    found = sharding.quantize(
        shards,
        layout,
        spec.fmt,
        granularity=spec.granularity,
        policy=spec.policy,
        axis=axis,
        scope="global",
    )
    return [found[device] for device in MESH.devices]


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", TRIED)
# P-4, P-5, P-14, P-16
def test_codes_scales_and_sums_are_those_of_the_simulators_mesh(ranks, name):
    recipe = TRIED[name]
    recipes = dict.fromkeys(PLAN, recipe)
    states = initial_states(recipes)
    for step in range(len(ranks[0][name])):
        steps = [rank[name][step] for rank in ranks]
        parts, amaxes = {}, {}
        for layer in PLAN:
            for which, spec in recipe.gemms.items():
                if not spec.fp8:
                    assert (layer, which) not in steps[0][0]
                    continue
                found = [gemms[layer, which] for gemms, *_ in steps]
                sides = []
                for i, (role, how, axis) in enumerate(
                    zip(OPERANDS[which], (spec.a, spec.b), REDUCED_AXES[which], strict=True)
                ):
                    hp = [f[i][0] for f in found]
                    amaxes[f"{layer}/{role}"] = [scaling.amax(x) for x in hp]
                    expected = simulated(hp, layer, role, how, axis, states.get(f"{layer}/{role}"))
                    for q, f in zip(expected, found, strict=True):
                        np.testing.assert_array_equal(
                            f[i][1], q.codes, err_msg=f"{layer} {which} {role}"
                        )
                        np.testing.assert_array_equal(
                            f[i][2], q.scale, err_msg=f"{layer} {which} {role}"
                        )
                    sides.append([as_factor(q) for q in expected])
                for a, b, f in zip(*sides, found, strict=True):
                    out = gemm.matmul(a, b, epilogue=spec.epilogue, out_dtype=BFLOAT16)
                    assert (np.abs(f[2] - out) <= bounds.gemm(a, b, spec, f[2], out)).all(), (
                        layer,
                        which,
                    )
                    parts.setdefault((layer, which), []).append((a, b, out))
        _check_sums(steps, parts, recipe)
        states = states_after(states, recipes, amaxes)
        for key, state in states.items():
            linear, role = key.split("/")
            for *_, of_rank in steps:
                for mine, theirs in zip(
                    of_rank[f"{linear}.states.{role}"],
                    (state.stored, state.amax_history, state.step),
                    strict=True,
                ):
                    np.testing.assert_array_equal(mine, theirs, err_msg=key)  # H-4


def _check_sums(steps, parts, recipe):
    """What ranks along tensor sum: the output of the rowwise linear, grad_input of the colwise
    one.
    """
    torch.manual_seed(0)
    for rank in range(4):
        pair = [rank - rank % 2, rank - rank % 2 + 1]
        for layer, which in (("1", "output"), ("0", "grad_input")):
            of_pair = [torch.from_numpy(steps[r][0][layer, which][2]) for r in pair]
            total = (of_pair[0] + of_pair[1]).bfloat16()  # a sum of two, rounded once
            spec, exact = recipe.gemms[which], [parts[layer, which][r] for r in pair]
            if which == "grad_input":
                np.testing.assert_array_equal(steps[rank][2], total.float().numpy())
            a, b = [p[0] for p in exact], [p[1] for p in exact]
            if spec.epilogue == "scale_then_round":
                expected = sharded_gemm.matmul(a, b, reduce="rounded", out_dtype=BFLOAT16)
                bound = bounds.summed_gemm(exact, spec, total.float().numpy(), wide=False)
                assert (np.abs(total.float().numpy() - expected) <= bound).all(), (layer, which)


def test_a_bias_is_added_after_the_sum(ranks):  # G-15, P-16
    torch.manual_seed(0)
    bias = plain()[1].bias.detach()
    for r, rank in enumerate(ranks):
        gemms, y, _, grads, _ = rank["delayed"][0]
        of_pair = [
            torch.from_numpy(ranks[i]["delayed"][0][0]["1", "output"][2])
            for i in (r - r % 2, r - r % 2 + 1)
        ]
        assert torch.equal(
            torch.from_numpy(y), ((of_pair[0] + of_pair[1]).bfloat16() + bias).float()
        )
        # bias gradients are sums of grad_output's columns, of this rank's rows, in float32
        g = gemms["1", "grad_weight"][0][0]
        expected = torch.from_numpy(g).bfloat16().sum(0).float().numpy()
        np.testing.assert_array_equal(grads["1.bias"], expected)


def test_compiled_it_has_the_same_bits(ranks):  # P-14
    for rank in ranks:
        assert rank["compiled"] == [True] * (2 + 4 + 6)


@pytest.mark.parametrize(
    ("name", "multiple"),
    [("blockwise", 128), ("mxfp8", 32), ("delayed", 1), ("rowwise", 1), ("mixed", 128)],
)
def test_parts_are_whole_blocks(name, multiple):  # P-5
    assert [TRIED[name].multiple(style) for style in ("colwise", "rowwise")] == [multiple, multiple]


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
def test_torchs_own_styles_are_refused_by_name(style):  # P-4
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model, mesh = (
            convert.convert(nn.Sequential(nn.Linear(32, 32)), "delayed"),
            init_device_mesh("cpu", (1,)),
        )
        with pytest.raises(
            ValueError, match=r"share linear 0 need shared amaxes; got its weight as a DTensor"
        ):
            parallelize_module(model, mesh, {"0": style()})
    finally:
        distributed.destroy_process_group()
    assert model(torch.ones(2, 32)).shape == (2, 32)
