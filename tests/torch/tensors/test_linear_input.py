import pytest
import torch
from helpers.models.linears import run
from helpers.processes.ranks import run as run_ranks
from torch import distributed, nn
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

from fp8ref.formats import E4M3FN
from fp8ref.torch import delayed
from fp8ref.torch.attention import attention
from fp8ref.torch.experts import grouped
from fp8ref.torch.gemm import gemm
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.model import convert
from fp8ref.torch.observe.gemms import observe_gemms
from fp8ref.torch.quantize import scaling
from fp8ref.torch.tensors import linear_input

recipes = pytest.mark.parametrize(
    "recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise", "mxfp8"]
)
own = pytest.mark.parametrize("recipe", ["delayed", "blockwise", "mxfp8"])


def converted(recipe, dtype=torch.float32):
    torch.manual_seed(0)
    return convert.convert(
        nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128)).to(dtype), recipe
    )


def autocast(module, dtype=torch.bfloat16):
    def call(x):
        with torch.autocast("cpu", dtype):
            return module(x)

    call.parameters = module.parameters
    return call


@own
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_is_the_model_in_autocasts_dtype(recipe, dtype):  # L-7
    x, g = torch.randn(128, 128), torch.randn(128, 128).to(dtype)
    masters, rounded = converted(recipe), converted(recipe, dtype)
    y, grad_input, *grads = run(autocast(masters, dtype), x, g)
    assert y.dtype == dtype
    assert {grad.dtype for grad in (grad_input, *grads)} == {torch.float32}
    expected = run(rounded, x.to(dtype), g)
    assert all(
        torch.equal(a, b.to(a.dtype))
        for a, b in zip((y, grad_input, *grads), expected, strict=True)
    )
    # what was observed is what was cast
    assert all(torch.equal(a, b) for a, b in zip(masters.buffers(), rounded.buffers(), strict=True))


@own
def test_the_backward_pass_may_run_under_autocast(recipe):  # L-7
    x, g = torch.randn(128, 128).bfloat16(), torch.randn(128, 128).bfloat16()
    found = []
    for enabled in (False, True):
        module = converted(recipe, torch.bfloat16)
        y = module(x)
        with torch.autocast("cpu", torch.float16, enabled=enabled):
            y.backward(g)
        found.append([p.grad for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_torchaos_linear_casts_the_master_under_autocast(recipe):  # L-7
    x, g = torch.randn(2, 64, 128), torch.randn(2, 64, 128).bfloat16()
    expected = run(converted(recipe), x.bfloat16(), g)
    found = run(autocast(converted(recipe)), x, g)
    assert found[0].dtype == torch.bfloat16
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, expected, strict=True))


@recipes
def test_between_layers_in_high_precision_under_autocast(recipe):  # L-7
    model = nn.Sequential(
        nn.Linear(60, 128), nn.LayerNorm(128), converted(recipe), nn.Linear(128, 60)
    )
    y, *grads = run(autocast(model), torch.randn(128, 60), torch.randn(128, 60).bfloat16())
    assert y.dtype == torch.bfloat16
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads)


@pytest.mark.grid(2)
@recipes
def test_under_autocast_compiled_by_aot_eager_it_is_itself(recipe):  # L-7
    x, g = torch.randn(128, 128), torch.randn(128, 128).bfloat16()
    torch._dynamo.reset()
    eager, compiled = converted(recipe), converted(recipe)
    expected = run(autocast(eager), x, g)
    whole = torch.compile(autocast(compiled), backend="aot_eager", fullgraph=True)
    whole.parameters = compiled.parameters
    found = run(whole, x, g)
    assert all(
        torch.equal(a, b)
        for a, b in zip([*expected, *eager.buffers()], [*found, *compiled.buffers()], strict=True)
    )


def test_a_weight_gathered_in_fp8_is_taken_as_it_is():  # L-7
    layer, x = Linear(64, 32, "tensorwise", bias=False), torch.randn(16, 64)
    codes = scaling.quantize(layer.weight.detach().bfloat16(), E4M3FN)
    whole = Float8TrainingTensor(
        codes.codes, codes.scale, torch.float32, None, GemmInputRole.WEIGHT
    ).requires_grad_()
    with torch.autocast("cpu"):
        expected = layer(x)
        y = torch.func.functional_call(layer, {"weight": whole}, x)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert whole.grad.dtype == torch.float32


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (
            torch.ones(4, 64),
            r"^linear 0 takes x \[\.\.\., K\] and w \[N, K\] with one K; got \(4, 64\) and \(128, 128\)",
        ),
        (torch.ones(()), r"^linear 0 takes x .*got \(\)"),
        (
            torch.ones(4, 128, dtype=torch.int64),
            r"^linear 0 takes float32, float16 or bfloat16; got torch\.int64",
        ),
        (torch.ones(4, 128, dtype=torch.float64), r"^linear 0 takes float32, .*got torch\.float64"),
        (
            torch.ones(4, 128, device="meta"),
            "^linear 0 takes x on its weight's device; got meta and cpu",
        ),
    ],
)
def test_errors_name_the_module(recipe, x, message):
    with pytest.raises(ValueError, match=message):
        converted(recipe)(x)


@recipes
@pytest.mark.parametrize("shape", [(0, 128), (2, 0, 128)])
@pytest.mark.parametrize("under_autocast", [False, True])
# L-9; ao#1200, torchtitan#1166
def test_no_tokens_give_no_outputs_and_zeros_as_gradients(recipe, shape, under_autocast):
    torch._dynamo.reset()
    model = converted(recipe)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    results = []
    for forward in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        x = torch.ones(shape, requires_grad=True)
        y = (autocast(forward) if under_autocast else forward)(x)
        y.sum().backward()
        results += [(y.shape, y.dtype), (x.grad.shape, x.grad.dtype)]
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())
    delayed.update(model)
    assert (
        results
        == [
            ((*shape[:-1], 128), torch.bfloat16 if under_autocast else torch.float32),
            (shape, torch.float32),
        ]
        * 2
    )
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


def without_tokens(recipe):
    """Gradients and states where the second of two ranks has no tokens, and how many tokens it
    had.
    """
    model, rank = (
        convert.convert(converted("bf16"), recipe, amax_group=distributed.group.WORLD),
        distributed.get_rank(),
    )
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(1))[: 0 if rank else 128]
    seen = []
    with observe_gemms(model, lambda name, which, *_: seen.append((name, which))):
        y = model(x)
        y.square().sum().backward()
    assert len(seen) == (0 if rank else 5)
    delayed.update(model)
    return (
        [p.grad for p in model.parameters()],
        [buffer.clone() for buffer in model.buffers()],
        len(y),
    )


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_rank_without_tokens_keeps_no_other_rank_waiting(recipe):  # L-9, P-2
    gemm.use_native_scaled_mm()  # as convert has each rank multiply
    alone = Linear.of  # fp8ref's own linear, as ranks have it
    model = converted("bf16")
    model[0], model[2] = (alone(linear, recipe) for linear in (model[0], model[2]))
    model(
        torch.randn(128, 128, generator=torch.Generator().manual_seed(1))
    ).square().sum().backward()
    delayed.update(model)
    (gradients, states, rows), (zeros, same, none) = run_ranks(2, without_tokens, recipe)
    assert (rows, none) == (128, 0)
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))
    assert not any(g.any() for g in zeros)
    for found in (states, same):
        assert all(torch.equal(a, b) for a, b in zip(found, model.buffers(), strict=True))


def test_tensors_of_devices_without_autocast_are_taken():
    assert linear_input.autocast_dtype(torch.ones(1, device="meta")) is None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(128, 128)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.grid(2)
@recipes
def test_blocks_whose_linears_differ_in_name_alone_share_a_graph(recipe):
    torch._dynamo.reset()
    counters.clear()
    model = convert.convert(nn.Sequential(*(Block() for _ in range(3))), recipe)
    for block in model:
        torch.compile(block.forward, backend="aot_eager", fullgraph=True)(torch.randn(128, 128))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated"
)  # by torch's own forward mode
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_transforms_of_torch_func_and_forward_mode_are_refused_by_name(recipe):  # L-8
    model, x = converted(recipe), torch.randn(4, 128)
    parameters = dict(model.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    def duals():
        with forward_ad.dual_level():
            model(forward_ad.make_dual(x, x))

    for transformed in (
        lambda: torch.func.grad(loss)(parameters, x),
        lambda: torch.func.vmap(model)(x),
        lambda: torch.func.jvp(model, (x,), (x,)),
        lambda: torch.func.jacrev(model)(x),
        duals,
    ):
        with pytest.raises(
            ValueError,
            match=r"^linear 0 has a backward pass of its own, .*; got (forward mode|a transform of torch\.func)",
        ):
            transformed()
    with forward_ad.dual_level():  # without a tangent
        y = model(x)
    assert torch.equal(y, model(x))
    grads = torch.autograd.grad(loss(parameters, x), list(parameters.values()))
    loss({}, x).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))


class Counting(nn.Module):
    """A parametrization that changes nothing."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight.clone()


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_parametrized_weight_is_computed_once_a_pass(recipe):
    model, x, g = converted(recipe), torch.randn(4, 128), torch.randn(4, 128)
    expected, counting = run(model, x, g), Counting()
    model.zero_grad()
    delayed.forget(model)
    parametrize.register_parametrization(model[0], "weight", counting)
    counting.calls = 0
    y, grad_input, *_ = run(model, x, g)
    assert counting.calls == 1
    assert torch.equal(y, expected[0])
    assert torch.equal(grad_input, expected[1])
    assert torch.equal(model[0].parametrizations.weight.original.grad, expected[2])


def test_transforms_of_grouped_linears_and_attention_are_refused_by_name():  # L-8
    x, ends, q = torch.randn(4, 16), torch.tensor([4], dtype=torch.int32), torch.randn(1, 1, 32, 32)
    with pytest.raises(
        ValueError, match=r"^up has a backward pass .* or give each expert an nn\.Linear"
    ):
        torch.func.grad(
            lambda x: grouped.apply(
                x, torch.ones(1, 16, 16), ends, recipe="rowwise", name="up"
            ).sum()
        )(x)
    with pytest.raises(
        ValueError,
        match=r"^attention has a backward pass .* or call torch's scaled_dot_product_attention",
    ):
        torch.func.grad(lambda q: attention.apply(q, q, q, variant="cudnn").sum())(q)
