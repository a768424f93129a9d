"""Linears with stochastic, rotated and two-level operands: the simulator's bits, by seeds (S-22 to
S-24).
"""

import dataclasses

import numpy as np
import pytest
import torch
from helpers.models.linears import run
from helpers.processes import ranks
from helpers.training import seeds
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fp8ref.formats import E4M3FN
from fp8ref.policy import FP4_POLICIES
from fp8ref.recipe import OPERANDS, RECIPES, REDUCED_AXES, CastSpec, GemmSpec, Recipe
from fp8ref.sim import linear as sim
from fp8ref.spec.rotation import NVFP4_ROTATION
from fp8ref.torch.distributed import tensor_parallel
from fp8ref.torch.linear import linear as layer
from fp8ref.torch.linear import passes, rounding, torchao_linear
from fp8ref.torch.model import convert
from fp8ref.torch.quantize import scaling

SEED = 2**50 + 3


def every(name, recipe, **changes):
    """A recipe with these changes of each of its casts."""

    def changed(spec):
        casts = (dataclasses.replace(cast, **changes) for cast in (spec.a, spec.b))
        return dataclasses.replace(spec, **dict(zip("ab", casts, strict=True)))

    return Recipe(name=name, **{which: changed(spec) for which, spec in recipe.gemms.items()})


_FP8 = GemmSpec(
    a=CastSpec(fmt=E4M3FN, rounding="stochastic"), b=CastSpec(fmt=E4M3FN), accumulate="slow"
)
TRIED = {
    "nvfp4": RECIPES["nvfp4"],
    "mxfp8_32x32": RECIPES["mxfp8_32x32"],
    "all stochastic": every("all stochastic", RECIPES["nvfp4"], rounding="stochastic_8"),
    "mxfp4 rotated": every("mxfp4 rotated", RECIPES["mxfp4"], rotation=NVFP4_ROTATION),
    "mxfp4 stochastic": every("mxfp4 stochastic", RECIPES["mxfp4"], rounding="stochastic"),
    "4over6": every("4over6", RECIPES["nvfp4"], policy=FP4_POLICIES["te_nvfp4_4over6_mse"]),
    "one level": every(
        "one level", RECIPES["nvfp4"], policy=FP4_POLICIES["torchao_nvfp4_one_level"]
    ),
    "fp8 stochastic": Recipe(name="fp8 stochastic", output=_FP8, grad_input=_FP8, grad_weight=_FP8),
}


@pytest.fixture(autouse=True)
def in_backends(monkeypatch):
    """Backends take these recipes."""


def tensors(rng, m=64, n=96, k=64):
    """x [M, K], w [N, K], g [M, N] of bfloat16 numbers, as float32 arrays."""
    shapes = (m, k), (n, k), (m, n)
    return [torch.from_numpy(rng.standard_normal(s)).bfloat16().float().numpy() for s in shapes]


def layer_of(w, recipe):
    linear = layer.Linear(w.shape[1], w.shape[0], recipe, bias=False, dtype=torch.bfloat16)
    linear.weight.data = torch.from_numpy(w).bfloat16()
    return linear


def bfloat16(*arrays):
    return [torch.from_numpy(x).bfloat16() for x in arrays]


def observed(linear, x, g):
    """{GEMM: (a, b)} of a pass, and its results."""
    seen = {}
    passes.observers.append(lambda which, a, b, out: seen.update({which: (a, b)}))
    try:
        results = run(linear, *bfloat16(x, g))
    finally:
        passes.observers.pop()
    return seen, results


@pytest.mark.parametrize("name", TRIED)
def test_operands_are_the_simulators_and_products_near(name, rng):  # L-2, L-3, B-1
    recipe, (x, w, g) = TRIED[name], tensors(rng)
    linear, seed = layer_of(w, recipe), None
    if recipe.stochastic:
        seed = SEED
        rounding.seed_(linear, {"": SEED})
    seen, results = observed(linear, x, g)
    hp = {"input": x, "weight": w, "grad_output": g}
    for which, operands in seen.items():
        expected = sim.quantize_operands(which, hp, recipe, seed=seed)
        for q, axis, right in zip(operands, REDUCED_AXES[which], expected, strict=True):
            turned = (lambda t: t) if axis == 1 else (lambda t: t.T)
            np.testing.assert_array_equal(q.code_bits.numpy(), turned(right.codes))
            np.testing.assert_array_equal(q.scale_inv.numpy(), turned(right.scale_inv))
            np.testing.assert_array_equal(
                scaling.dequantize(q).numpy(), turned(sim.scaling.dequantize(right))
            )
    assert set(seen) == set(OPERANDS)
    kind = {} if seed is None else {"seed": seed}
    forward_kind = kind if recipe.output.a.stochastic else {}
    products = sim.forward(x, w, recipe, **forward_kind), *sim.backward(g, x, w, recipe, **kind)
    for mine, right in zip(results, products, strict=True):
        # float32 sums of up to 96 products in another order, rounded to bfloat16: 2^-8 of a sum,
        # and 2^-18 of its parts
        np.testing.assert_allclose(mine.float().numpy(), right, rtol=2**-7, atol=2**-12)


def test_products_of_integers_are_the_simulators_bits(rng):  # S-22
    """Numbers of e2m1fn in blocks of one amax: sums are exact, whatever their order."""
    shapes = (64, 64), (96, 64), (64, 96)
    x, w, g = (rng.choice([-6, -4, -3, -2, -1, 1, 2, 3, 4, 6], s) for s in shapes)
    for values in (x, w, g):
        values[::4, ::4] = 6
    x, w, g = (v.astype(np.float32) for v in (x, w * 0.375, g * 2.0**-9))
    linear = layer_of(w, "nvfp4")
    rounding.seed_(linear, {"": SEED})
    y, grad_input, _ = run(linear, *bfloat16(x, g))
    np.testing.assert_array_equal(y.float(), sim.forward(x, w, "nvfp4"))
    right, _ = sim.backward(g, x, w, "nvfp4", seed=SEED)
    np.testing.assert_array_equal(grad_input.float(), right)


def test_seeds_of_linears_are_made_of_a_passs_and_their_names():  # S-24
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)).bfloat16()
    model = convert.convert(nn.ModuleDict({"mlp": model, "head": nn.Linear(32, 32)}), "nvfp4")
    assert list(rounding.stochastic_linears(model)) == ["mlp.0", "mlp.1", "head"]
    seed = rounding.pass_seed(SEED, 7, 2)
    assert seed == seeds.derived(SEED, 7, 6)
    rounding.seed_(model, seed)
    for name, linear in rounding.stochastic_linears(model).items():
        of_linear = seeds.of_linear(SEED, 7, 2, name)
        of_gemms = [sim.seed_of(of_linear, which) for which in OPERANDS]
        assert [low | high << 32 for low, high in linear.keys.tolist()] == of_gemms
    kept = linear.keys
    rounding.seed_(model, dict.fromkeys(rounding.stochastic_linears(model), 5))
    assert linear.keys is kept
    assert [low | high << 32 for low, high in kept.tolist()] == [
        sim.seed_of(5, which) for which in OPERANDS
    ]
    assert not any(key.endswith("keys") for key in model.state_dict())


def test_parts_that_were_converted_each_by_itself_are_all_seeded():  # S-24
    blocks = (nn.ModuleDict({"up": nn.Linear(32, 32)}) for _ in range(2))
    model = nn.Sequential(*(convert.convert(block, "nvfp4") for block in blocks))
    rounding.seed_(model, 1)
    keys = [block["up"].keys for block in model]
    assert not torch.equal(*keys)
    model[1] = torch.compile(model[1], backend="eager")  # which inserts a module
    assert list(rounding.stochastic_linears(model)) == ["0.up", "1.up"]
    assert list(rounding.stochastic_linears(model[0])) == ["up"]


def test_inference_seeds_no_less_than_training_does(rng):  # S-24
    x, w, g = tensors(rng, 16, 32, 32)
    linear = layer_of(w, TRIED["all stochastic"])
    with torch.inference_mode():
        rounding.seed_(linear, SEED)
        y = linear(*bfloat16(x))
    rounding.seed_(linear, 2)
    assert not torch.equal(run(linear, *bfloat16(x, g))[0], y)
    rounding.seed_(linear, SEED)
    assert torch.equal(run(linear, *bfloat16(x, g))[0], y)


def test_a_pass_without_seeds_is_refused_where_it_rounds(rng):  # S-24
    x, w, g = tensors(rng)
    linear = layer_of(w, "nvfp4")
    with torch.no_grad():
        linear(*bfloat16(x))  # to nearest
    with pytest.raises(ValueError, match=r"rounds grad_output stochastically in grad_input.*seed_"):
        run(linear.eval(), *bfloat16(x, g))
    model = convert.convert(nn.ModuleDict({"up": nn.Linear(64, 96).bfloat16()}), "nvfp4")
    with pytest.raises(ValueError, match=r"^up rounds stochastically in training.*got none.*seed_"):
        model["up"](*bfloat16(x))
    for seed, match in (
        ({"other": 1}, "seeds are for 0; got other"),
        (2**64, r"a seed is an integer in \[0, 2\^64\)"),
        ({"0": -1}, r"a seed is an integer in \[0, 2\^64\)"),
    ):
        with pytest.raises(ValueError, match=match):
            rounding.seed_(nn.Sequential(linear), seed)


def test_a_compiled_pass_draws_anew_without_compiling_anew(rng):  # S-24
    torch.compiler.reset()
    x, w, g = tensors(rng)
    linear = layer_of(w, TRIED["all stochastic"])
    rounding.seed_(linear, 1)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    results = []
    for step in range(3):
        rounding.seed_(linear, step)
        linear.zero_grad()
        eager = [t.clone() for t in run(linear, *bfloat16(x, g))]
        linear.zero_grad()
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            mine = run(compiled, *bfloat16(x, g))
        assert all(torch.equal(a, b) for a, b in zip(eager, mine, strict=True))
        results.append(eager)
    assert not any(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))


def test_a_graph_of_any_number_of_rows_draws_as_eager(rng):  # S-24
    torch.compiler.reset()
    x, w, g = tensors(rng, 16, 32, 32)  # rows unlike columns, which are constants
    model = nn.Sequential(layer_of(w, "nvfp4"))
    rounding.seed_(model, SEED)
    results = []
    for f in (model, torch.compile(model, backend="aot_eager", dynamic=True)):
        model.zero_grad()
        results.append([t.clone() for t in run(f, *bfloat16(x, g))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_pass_that_checkpointing_repeats_draws_the_same(rng):  # T-8
    x, w, g = tensors(rng)
    linear = layer_of(w, TRIED["all stochastic"])
    rounding.seed_(linear, SEED)
    right = [t.clone() for t in run(linear, *bfloat16(x, g))]
    linear.zero_grad()
    value, grad = bfloat16(x, g)
    value.requires_grad_()
    y = checkpoint(linear, value, use_reentrant=False)
    y.backward(grad)
    for a, b in zip(right, (y.detach(), value.grad, linear.weight.grad), strict=True):
        assert torch.equal(a, b)


def test_no_tokens_give_no_outputs():  # L-9
    linear = layer_of(np.ones((32, 64), np.float32), "nvfp4")
    rounding.seed_(linear, SEED)
    y, grad_input, _ = run(linear, *(torch.zeros(0, k).bfloat16() for k in (64, 32)))
    assert y.shape == (0, 32)
    assert grad_input.shape == (0, 64)


@pytest.mark.parametrize("name", ["fp8 stochastic", "nvfp4"])
def test_torchaos_linear_and_kernels_leave_them(name):  # R-1, P-15
    recipe = TRIED[name]
    assert not torchao_linear.expresses(recipe)
    linear = convert.convert(nn.Sequential(nn.Linear(64, 32)).bfloat16(), recipe)[0]
    assert type(linear) is layer.Linear
    assert "grad_output" not in linear.spec.pairs
    assert linear.spec.cast_once["grad_output"] is None


def cut(name, w1, w2, grid):
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2))).bfloat16()
    for linear, w in zip(model, (w1, w2), strict=True):
        linear.weight.data = w.clone()
    model = convert.convert(model, TRIED[name], amax_group=grid["data"].get_group())
    plan = {"0": "colwise", "1": "rowwise"}
    model = tensor_parallel.parallelize(
        model, grid["tensor"], plan=plan, amax_group=distributed.group.WORLD
    )
    rounding.seed_(model, SEED)
    return model


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # its own
def test_inductor_rounds_rotated_blocks(rng):  # S-23
    """Of grad_weight, whose rotated operands it would keep in float32."""
    x, _, w, g = (bfloat16(rng.standard_normal((64, 64)).astype(np.float32))[0] for _ in range(4))
    found = []
    for compiled in (False, True):
        model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        model.weight.data = w.clone()
        model = convert.convert(model, "nvfp4")
        rounding.seed_(model, SEED)
        (torch.compile(model) if compiled else model)(x).backward(g)
        found.append(model.weight.grad)
    assert torch.equal(*found)


def on_ranks(names, x, w1, w2, g):
    """{(recipe, sizes of data and tensor): (GEMM, codes of both operands) of this rank, in order}."""
    seen = {}
    for shape in ((2, 1), (1, 2)):
        grid = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        rows = slice(None)
        if shape[0] == 2:
            rows = slice(grid.get_local_rank("data") * 32, (grid.get_local_rank("data") + 1) * 32)
        for name in names:
            model, calls = cut(name, w1, w2, grid), []

            def observe(which, a, b, out, calls=calls):
                calls.append((which, a.code_bits.numpy().copy(), b.code_bits.numpy().copy()))

            passes.observers.append(observe)
            run(model, x[rows], g[rows])
            passes.observers.pop()
            seen[name, shape] = calls
            model.zero_grad()
            y, grad_input, *_ = run(model, x[:0], g[:0])  # the ranks wait for each other
            assert (y.shape, grad_input.shape) == ((0, 64), (0, 64))
    return seen


def test_ranks_have_the_codes_of_the_whole(rng):  # S-24, P-2, L-9
    """Of a batch in two parts, and of linears that two ranks cut by columns and by rows. Without
    tokens rows of zeros are rotated.
    """
    names = ["nvfp4", "all stochastic", "mxfp4 stochastic"]
    x, w1, w2, g = (bfloat16(rng.standard_normal((64, 64)).astype(np.float32))[0] for _ in range(4))
    x[5, 5], g[50, 3] = 9, -11  # one rank's part has the largest magnitude
    by_rank = ranks.run(2, on_ranks, names, x, w1, w2, g)
    for name in names:
        model = nn.Sequential(*(layer_of(w.float().numpy(), TRIED[name]) for w in (w1, w2)))
        rounding.seed_(model, SEED)
        right = []
        passes.observers.append(
            lambda which, a, b, out, right=right: right.append((which, a.code_bits, b.code_bits))
        )
        run(model, x, g)
        passes.observers.pop()
        for shape in ((2, 1), (1, 2)):
            for i, (which, *whole) in enumerate(right):
                layer_number = 0 if i in (0, 4, 5) else 1
                for role, operand, place in zip(OPERANDS[which], whole, (1, 2), strict=True):
                    parts = [seen[name, shape][i] for seen in by_rank]
                    assert {part[0] for part in parts} == {which}
                    if shape == (2, 1):
                        axis = None if role == "weight" else 0
                    else:
                        style = ("colwise", "rowwise")[layer_number]
                        axis = scaling.CUT_AXES[style].get(role)
                    pieces = [part[place] for part in parts]
                    mine = pieces[0] if axis is None else np.concatenate(pieces, axis)
                    np.testing.assert_array_equal(mine, operand.numpy(), err_msg=f"{name} {which}")


def test_a_pass_has_a_whole_step():  # S-24
    assert rounding.pass_seed(3, np.int64(7)) == rounding.pass_seed(3, 7)
    for step, microbatch in ((1.5, 0), (-1, 0), (1 << 32, 0), (0, -1)):
        with pytest.raises(ValueError, match=r"is an integer in \[0, 2\^32\); got"):
            rounding.pass_seed(3, step, microbatch)
