import numpy as np
import pytest
import torch
from helpers.models.linears import run
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8ref.crosscheck import bounds
from fp8ref.formats import E4M3FN, E5M2, FLOAT16
from fp8ref.policy import POLICIES, UNSCALED, ScalePolicy
from fp8ref.recipe import RECIPES, CastSpec, GemmSpec, Recipe
from fp8ref.sim import linear as sim
from fp8ref.sim.quantize import scaling as sim_scaling
from fp8ref.torch.linear import linear as layer
from fp8ref.torch.linear import torchao_linear
from fp8ref.torch.model import convert

MIXED = Recipe(
    name="mixed",
    output=GemmSpec(a=CastSpec(fmt=E4M3FN), b=CastSpec(fmt=E4M3FN), accumulate="slow"),
    grad_weight=GemmSpec(
        a=CastSpec(fmt=E5M2, granularity="rowwise"), b=CastSpec(fmt=E5M2), accumulate="slow"
    ),
)


def layer_of(w, recipe, dtype=torch.bfloat16):
    made = layer.Linear(w.shape[1], w.shape[0], recipe, bias=False, dtype=dtype)
    made.weight.data = torch.from_numpy(w).to(dtype)
    return made


@pytest.mark.parametrize(
    "recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "tensorwise_pow2"]
)
def test_it_is_torchaos_linear_where_that_runs_the_recipe(recipe):
    """Another implementation of the same clauses: the same bits."""
    torch.manual_seed(0)
    x, g, plain = (
        torch.randn(2, 24, 64).bfloat16(),
        torch.randn(2, 24, 32).bfloat16(),
        nn.Linear(64, 32).bfloat16(),
    )
    theirs = convert.convert(nn.Sequential(nn.Linear(64, 32)).bfloat16(), recipe)
    theirs[0].weight.data, theirs[0].bias.data = plain.weight.data.clone(), plain.bias.data.clone()
    ours = layer.Linear.of(plain, recipe)
    assert all(torch.equal(a, b) for a, b in zip(run(ours, x, g), run(theirs, x, g), strict=True))


@pytest.mark.parametrize(
    "recipe",
    ["tensorwise", "rowwise_with_gw_hp", "tensorwise_pow2", "rowwise_native", MIXED],
    ids=str,
)
def test_outputs_and_gradients_equal_the_simulator_on_integers(recipe, rng):  # L-1 to L-4, G-9
    shapes = ((2, 24, 64), (32, 64), (2, 24, 32))
    x, w, g = (
        rng.integers(-7, 8, shape).astype(np.float32) * s
        for shape, s in zip(shapes, (1, 2.0**-6, 2.0**-10), strict=True)
    )
    y, grad_input, grad_weight = run(
        layer_of(w, recipe), torch.from_numpy(x).bfloat16(), torch.from_numpy(g).bfloat16()
    )
    np.testing.assert_array_equal(y.float(), sim.forward(x, w, recipe))
    expected = sim.backward(g, x, w, recipe)
    np.testing.assert_array_equal(grad_input.float(), expected[0])
    np.testing.assert_array_equal(grad_weight.float(), expected[1])


POW2 = CastSpec(fmt=E4M3FN, policy=POLICIES["torchao_pow2"])
LINES = CastSpec(fmt=E5M2, granularity="rowwise", policy=POLICIES["torchao_pow2"])
ONE_SIDED = [
    Recipe(
        name="one",
        output=GemmSpec(b=POW2),
        grad_input=GemmSpec(a=LINES),
        grad_weight=GemmSpec(b=POW2),
    ),
    Recipe(
        name="both roles",
        output=GemmSpec(a=POW2),
        grad_input=GemmSpec(b=POW2),
        grad_weight=GemmSpec(b=POW2),
    ),
]


@pytest.mark.parametrize("recipe", ONE_SIDED, ids=lambda recipe: recipe.name)
def test_an_operand_cast_alone_equals_the_simulator_on_integers(recipe, rng):  # L-4
    """Scales are powers of two, so that the numbers of codes are bfloat16's and every sum is
    exact.
    """
    shapes = ((2, 24, 64), (32, 64), (2, 24, 32))
    x, w, g = (
        rng.integers(-7, 8, shape).astype(np.float32) * s
        for shape, s in zip(shapes, (1, 2.0**-6, 2.0**-10), strict=True)
    )
    g = np.where(g > 0, np.float32(9 * 2.0**-10), g)  # which e5m2 rounds
    assert not torchao_linear.expresses(recipe)
    found = run(layer_of(w, recipe), torch.from_numpy(x).bfloat16(), torch.from_numpy(g).bfloat16())
    for ours, theirs in zip(
        found, (sim.forward(x, w, recipe), *sim.backward(g, x, w, recipe)), strict=True
    ):
        np.testing.assert_array_equal(ours.float(), theirs)


def test_a_cast_without_a_scale_is_not_torchaos():  # S-21
    cast = CastSpec(fmt=E4M3FN, policy=UNSCALED)
    assert not torchao_linear.expresses(
        Recipe(name="bare", output=GemmSpec(a=cast, b=cast, accumulate="fast"))
    )


@pytest.mark.parametrize("size", [2.0**-16, 1.0, 2.0**8])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_float16_outputs_equal_the_simulator_on_integers(recipe, size, rng):  # G-8
    """Of results that are subnormal in float16, normal, and beyond it."""
    x, w = (rng.integers(-7, 8, shape).astype(np.float32) for shape in ((48, 64), (32, 64)))
    x *= np.float32(size)
    y = layer_of(w, recipe, torch.float16)(torch.from_numpy(x).half())
    np.testing.assert_array_equal(y.detach().float(), sim.forward(x, w, recipe, out_dtype=FLOAT16))


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "mxfp4"])
def test_gemms_of_blocks_are_within_their_bound_of_the_simulator(recipe, rng):  # G-16, B-1
    x, w, g = (
        rng.standard_normal(s).astype(np.float32) for s in ((128, 256), (384, 256), (128, 384))
    )
    rounded = [torch.from_numpy(v).bfloat16().float().numpy() for v in (x, w, g)]
    x, w, g = rounded
    found = run(layer_of(w, recipe), torch.from_numpy(x).bfloat16(), torch.from_numpy(g).bfloat16())
    expected = [sim.forward(x, w, recipe), *sim.backward(g, x, w, recipe)]
    hp = [(x, w), (g, w.T), (g.T, x.T)]
    for (which, spec), out, simulated, operands in zip(
        RECIPES[recipe].gemms.items(), found, expected, hp, strict=True
    ):
        q = [
            sim_scaling.quantize(v, c.fmt, granularity=c.granularity, policy=c.policy)
            for v, c in zip(operands, (spec.a, spec.b), strict=True)
        ]
        out = out.float().numpy()
        assert (np.abs(out - simulated) <= bounds.gemm(*q, spec, out, simulated)).all(), which


def test_gradients_are_made_only_where_they_are_wanted():
    made = layer.Linear(32, 16, "delayed")
    made.weight.requires_grad_(False)
    x = torch.randn(4, 32, requires_grad=True)
    made(x).sum().backward()
    assert made.weight.grad is None
    assert x.grad is not None
    made.weight.requires_grad_(True)
    made(torch.randn(4, 32)).sum().backward()
    assert made.weight.grad is not None


def test_recomputing_the_forward_pass_changes_nothing():
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(layer.Linear(32, 16, "delayed"), nn.ReLU(), layer.Linear(16, 16, "delayed")),
        torch.randn(4, 32),
    )
    results = []
    for reentrant in (None, False, True):
        model.zero_grad()
        given = x.clone().requires_grad_()
        y = (
            model(given)
            if reentrant is None
            else torch.utils.checkpoint.checkpoint(model, given, use_reentrant=reentrant)
        )
        y.square().sum().backward()
        results.append([y.detach(), given.grad, *(p.grad.clone() for p in model.parameters())])
        results[-1] += [b.clone() for b in model.buffers()]
        for state in (s for m in (model[0], model[2]) for s in m.states.values()):
            state.seen.zero_()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.grid(2)
@pytest.mark.parametrize("recipe", ["delayed", "blockwise", "tensorwise"])
def test_compiled_by_aot_eager_it_is_itself(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(
        layer.Linear(256, 128, recipe, dtype=torch.bfloat16),
        nn.ReLU(),
        layer.Linear(128, 128, recipe, dtype=torch.bfloat16),
    )
    x, g = torch.randn(128, 256).bfloat16(), torch.randn(128, 128).bfloat16()
    eager = [*run(model, x, g), *(b.clone() for b in model.buffers())]
    model.zero_grad()
    for state in (s for m in (model[0], model[2]) for s in m.states.values()):
        state.seen.zero_()
    compiled = run(torch.compile(model, backend="aot_eager", fullgraph=True), x, g)
    # parameters of a compiled model are the model's own
    assert all(torch.equal(a, b) for a, b in zip(eager, [*compiled, *model.buffers()], strict=True))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            Recipe(
                name="eps",
                output=GemmSpec(
                    a=CastSpec(fmt=E4M3FN, policy=ScalePolicy(name="e", eps=1e-9)),
                    b=CastSpec(fmt=E4M3FN),
                    accumulate="slow",
                ),
            ),
            "eps",
        ),
        (
            Recipe(
                name="halves",
                output=GemmSpec(
                    a=CastSpec(fmt=E4M3FN, granularity="blockwise_1x128"),
                    b=CastSpec(fmt=E4M3FN),
                    accumulate="slow",
                ),
            ),
            "got blockwise_1x128 and tensorwise",
        ),
        (
            Recipe(
                name="epilogue",
                output=GemmSpec(
                    a=CastSpec(fmt=E4M3FN),
                    b=CastSpec(fmt=E4M3FN),
                    accumulate="slow",
                    epilogue="product_then_round",
                ),
            ),
            "product_then_round",
        ),
    ],
)
def test_recipes_that_cannot_run_are_refused_by_name(recipe, message):
    with pytest.raises(ValueError, match=f"recipe '{recipe.name}'.*{message}"):
        layer.Linear(32, 16, recipe)


@pytest.mark.parametrize("recipe", ["delayed", "blockwise", "mxfp8"])
def test_gradients_are_not_differentiated_again(recipe):  # L-8
    model = nn.Sequential(
        nn.Linear(128, 128),
        nn.Tanh(),
        layer.Linear(128, 128, recipe),
        nn.Tanh(),
        nn.Linear(128, 128),
    )
    x = torch.randn(128, 128, requires_grad=True)
    (plain,) = torch.autograd.grad(model(x).square().sum(), x)
    assert not plain.requires_grad
    y = model(x)
    with pytest.raises(
        ValueError, match=r"not differentiated again.*create_graph=True.*filter_fqns"
    ):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


def test_the_input_has_the_name_that_nn_linears_has():
    made, x = layer.Linear(32, 16, "delayed"), torch.randn(4, 32)
    assert torch.equal(made(input=x), made(x))


def test_errors():
    made = layer.Linear(32, 16, "delayed")
    with pytest.raises(ValueError, match="one K"):
        made(torch.ones(4, 16))
    with pytest.raises(ValueError, match=r"one dtype.*bfloat16.*float32"):
        made(torch.ones(4, 32, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="float64"):
        made.double()(torch.ones(4, 32, dtype=torch.float64))


@pytest.mark.grid(2)
@pytest.mark.parametrize(("recipe", "block"), [("blockwise", 128), ("mxfp8", 32), ("mxfp4", 32)])
@pytest.mark.parametrize("compiled", [False, True])
# L-5; ms-swift#9723, NeMo-RL#1551
def test_a_last_block_of_rows_may_be_shorter(recipe, block, compiled):
    """Any number of tokens, as of the last batch of an epoch: gradients are those of tokens that
    zeros fill to whole blocks."""
    model = convert.convert(nn.ModuleDict({"up": nn.Linear(128, 128, bias=False)}), recipe)["up"]
    forward = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    x = torch.randint(-7, 8, (2, 17, 128), generator=torch.Generator().manual_seed(0)).float()
    y = forward(x)
    (y * 3).sum().backward()
    found, model.weight.grad = model.weight.grad, None
    rows = nn.functional.pad(x.reshape(34, 128), (0, 0, 0, -34 % block))
    (model(rows)[:34] * 3).sum().backward()
    assert torch.equal(found, model.weight.grad)
    assert torch.equal(y.reshape(34, 128), model(rows)[:34])


class Changed(nn.Module):
    """A linear whose output is changed in place, or copied first."""

    def __init__(self, recipe, in_place):
        super().__init__()
        torch.manual_seed(0)
        self.linear = convert.convert(nn.Linear(128, 128, bias=False), recipe)
        self.in_place = in_place

    def forward(self, x):
        y = self.linear(x)
        return y.relu_() if self.in_place else y.relu()


IN_PASSES = {
    "eager": lambda model, x: model(x),
    "aot_eager": lambda model, x: torch.compile(model, backend="aot_eager", fullgraph=True)(x),
    "reentrant": lambda model, x: checkpoint(model, x, use_reentrant=True),
    "recomputed": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "after a checkpoint": lambda model, x: checkpoint(model.linear, x, use_reentrant=True).relu_(),
}


@pytest.mark.parametrize(
    "recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise", "mxfp8"]
)
@pytest.mark.parametrize("shape", [(128, 128), (2, 64, 128)])
def test_an_output_may_be_changed_in_place(recipe, shape):
    torch._dynamo.reset()
    torch.manual_seed(1)
    x, g = torch.randn(shape), torch.randn(shape)
    expected = run(Changed(recipe, False), x, g)
    for name, forward in IN_PASSES.items():
        model, mine = Changed(recipe, True), x.clone().requires_grad_()
        y = forward(model, mine)
        y.backward(g)
        results = (y.detach(), mine.grad, model.linear.weight.grad)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)), name


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_the_output_of_a_compiled_linear_may_be_changed_in_place(recipe, rng):
    """By an operation outside of the compiled graph, whose output is a view that autograd would
    refuse to change.
    """
    linear = convert.convert(torch.nn.Sequential(torch.nn.Linear(128, 128, bias=False)), recipe)
    compiled = torch.compile(linear, backend="aot_eager")
    x = torch.from_numpy(rng.standard_normal((3, 16, 128)).astype(np.float32))
    expected = compiled(x) + 1
    found = compiled(x)
    found.add_(1)
    assert torch.equal(found, expected)
    found.sum().backward()
    assert linear[0].weight.grad.isfinite().all()
