"""Parts of a block, against the modules that they stand for."""

import gc

import pytest
import torch
from helpers.processes.ranks import run as run_ranks
from torch import distributed, nn
from torch.nn import functional

from fp8ref.recipe import RECIPES
from fp8ref.spec.llama import LlamaConfig
from fp8ref.torch import delayed
from fp8ref.torch.blocks import operations, parts, sources
from fp8ref.torch.kernels import fused as kernels
from fp8ref.torch.linear import rounding
from fp8ref.torch.linear.linear import Linear
from fp8ref.train.torch.llama.llama import Layer

FP8 = [name for name, recipe in RECIPES.items() if recipe.fp8]
GROUP = "0"
"""torch's name of the group of all ranks."""
SIZES = {"hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 2}
TOKENS = 24


def layer(recipe, *, kernels="plain", group=None, **keys):
    """A block of the trainer's Llama in bfloat16, by fp8ref's own linears."""
    torch.manual_seed(0)
    sizes = SIZES | {"num_key_value_heads": 1} | keys
    config = LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes)
    made = Layer(config).bfloat16()
    for p in made.parameters():
        (nn.init.normal_ if p.ndim > 1 else nn.init.uniform_)(p, 0.1)
    for name, linear in list(made.named_modules()):
        if isinstance(linear, nn.Linear):
            parent, _, key = name.rpartition(".")
            converted = Linear.of(linear, recipe, group, kernels)
            if converted.recipe.stochastic:
                rounding.seed_(converted, 1)
            setattr(made.get_submodule(parent), key, converted)
    return made


def fused(block, h, cos, sin):
    """A block's pass by parts, with attention between."""
    attention, mlp = block.self_attn, block.mlp
    _, heads = parts.projections(
        h, attention.linears, norm=block.input_layernorm, tables=(cos, sin)
    )
    q, k, v = (y.transpose(1, 2) for y in heads)
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    y = attention.o_proj(y.transpose(1, 2).flatten(-2))
    h, y = parts.mlp(h, mlp.linears, residual=y, norm=block.post_attention_layernorm)
    return h + y


def results(block, run, steps=1, tokens=TOKENS):
    """Output, gradients and states of steps, by name."""
    width = block.self_attn.head_dim
    found = {}
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        h, g = (torch.randn(2, tokens, 256, generator=generator).bfloat16() for _ in "hg")
        cos, sin = (torch.rand(tokens, width, generator=generator) for _ in "cs")
        h.requires_grad_()
        block.zero_grad()
        y = run(block, h, cos, sin)
        y.backward(g)
        found |= {f"{step} output": y.detach(), f"{step} h": h.grad}
        found |= {f"{step} {name}": p.grad for name, p in block.named_parameters()}
        found |= {f"{step} {name}": b.clone() for name, b in block.named_buffers()}
        delayed.update(block)
    return found


def differing(first, second):
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


@pytest.mark.parametrize("recipe", FP8)
def test_parts_are_the_modules_bit_for_bit(recipe):  # M-3, L-3
    """Outputs, gradients, and what delayed states observe and become: of two steps, so that scales
    other than 1 are used."""
    steps = 2 if RECIPES[recipe].delayed else 1
    assert not differing(
        results(layer(recipe), Layer.forward, steps), results(layer(recipe), fused, steps)
    )


class TransformersMLP(nn.Module):
    """silu(gate) is rounded, then the product."""

    def __init__(self, block):
        super().__init__()
        self.linears, self.norm = nn.ModuleList(block.mlp.linears), block.input_layernorm

    def forward(self, h):
        gate, up, down = self.linears
        wide = h.to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.norm.constants.eps)
        x = self.norm.weight * normed.to(h.dtype)
        return down(functional.silu(gate(x)) * up(x))


class Twice:
    """A norm of transformers, as a part takes it."""

    def __init__(self, norm):
        self.constants, self.weight = operations.Norm(norm.constants.eps, twice=True), norm.weight


def twice(model, h):
    return parts.mlp(h, list(model.linears), norm=Twice(model.norm), twice=True)[1]


def mlp_results(model, run):
    generator = torch.Generator().manual_seed(0)
    h, g = (torch.randn(2, 24, 256, generator=generator).bfloat16() for _ in "hg")
    y = run(model, h.requires_grad_())
    y.backward(g)
    return {"output": y.detach(), "h": h.grad} | {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_values_that_are_rounded_twice_are_transformers(recipe):
    models = [TransformersMLP(layer(recipe)) for _ in "ab"]
    assert not differing(
        mlp_results(models[0], TransformersMLP.__call__), mlp_results(models[1], twice)
    )


def recorded(names, name, operator):
    def run(*arguments, **options):
        names.add(name)
        return operator(*arguments, **options)

    return run


OPERATORS = {
    name for name, value in vars(kernels).items() if callable(value) and name != "operator"
}


@pytest.fixture
def called(monkeypatch):
    """The names of the operators that ran."""
    names = set()
    for key in OPERATORS:
        monkeypatch.setattr(kernels, key, recorded(names, key, getattr(kernels, key)))
    return names


LINES = {name for name in OPERATORS if name.endswith("_lines")}
OF_NORMS = {"norm_statistics", "sum_and_statistics"}
BY_ROWS = OF_NORMS | {name for name in LINES if name.endswith(("_amax_lines", "_cast_lines"))}
IN_BLOCKS = OF_NORMS | (LINES - BY_ROWS)
AMAXES = {"swiglu_amax", "swiglu_gradient_amaxes", "rotary_gradient_amax"}


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_interpreted_kernels_give_the_plain_forms_bits(recipe, called):  # M-11
    """exp, rsqrt and the order of two products may change the last bits of a float32 value (M-11),
    and so a bfloat16 result to its neighbor, where the value is within those bits of the middle of
    two: 3 ulps of 2^-24 of 2^-9, about 1 value of 5,000. None of this seed's is."""
    steps = 2 if recipe == "delayed" else 1
    plain = results(layer(recipe), Layer.forward, steps, tokens=12)
    assert not called
    assert not differing(plain, results(layer(recipe, kernels="triton"), Layer.forward, steps, 12))
    every = OPERATORS - LINES
    assert called == (every - AMAXES if recipe == "delayed" else every)


@pytest.mark.parametrize(
    "keys", [{"qk_norm": True}, {"num_experts": 16, "num_experts_per_tok": 1}], ids=str
)
def test_a_layer_of_another_form_fuses_what_it_can(keys, called):
    plain, fused = (layer("tensorwise", kernels=k, **keys) for k in ("plain", "triton"))
    assert not differing(*(results(block, Layer.forward, tokens=8) for block in (plain, fused)))
    assert "norm_statistics" in called


def test_interpreted_kernels_round_twice_where_transformers_does(called):
    models = [TransformersMLP(layer("tensorwise", kernels=k)) for k in ("plain", "triton")]
    assert not differing(mlp_results(models[0], twice), mlp_results(models[1], twice))
    assert {"norm_cast", "swiglu_cast", "swiglu_gradient_cast"} <= called


@pytest.mark.parametrize(
    ("recipe", "own"), [("rowwise", BY_ROWS), ("rowwise_native", BY_ROWS), ("blockwise", IN_BLOCKS)]
)
def test_scales_of_lines_are_those_of_values_as_they_are_computed(recipe, own, called):
    plain = results(layer(recipe), Layer.forward, tokens=12)
    assert not differing(plain, results(layer(recipe, kernels="triton"), Layer.forward, tokens=12))
    assert called == {"rotate"} | own


def test_linears_with_one_state_cast_and_observe_once(monkeypatch):
    """A second block's gate and up share one state; both blocks compute the same."""
    blocks = [layer("delayed", kernels="triton") for _ in "ab"]
    gate, up, _ = blocks[1].mlp.linears
    up.states["input"].first = (gate.states["input"],)
    operands, counts, found = sources.Source.operands, [], []
    for block in blocks:
        roles = []
        with monkeypatch.context() as patch:
            patch.setattr(sources.Source, "operands", noted(operands, roles))
            found.append(results(block, Layer.forward, tokens=8))
        counts.append(roles.count("input"))
    assert counts == [6, 5]  # of q, k, v, gate and up, each by a state of its own; and SwiGLU's
    assert differing(*found) == ["0 mlp.up_proj.states.input.seen"]  # until the update
    states = [dict(block.named_buffers()) for block in blocks]
    assert not differing(*states)


def noted(operands, roles):
    def run(source, role, *arguments):
        roles.append(role)
        return operands(source, role, *arguments)

    return run


def test_what_the_backward_pass_keeps_is_no_norm_and_no_product():
    block = layer("tensorwise", kernels="triton")
    h = torch.randn(1, 16, 256).bfloat16().requires_grad_()
    kept = []

    def pack(x):
        kept.append((tuple(x.shape), x.dtype))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        parts.mlp(h, block.mlp.linears, norm=block.post_attention_layernorm)
    wide = [shape for shape, dtype in kept if dtype == torch.bfloat16 and shape[-1] in (128, 256)]
    # the residual stream, gate and up; the norm's weight
    assert sorted(wide) == sorted([(1, 16, 256), (1, 16, 128), (1, 16, 128), (256,)])


def reasons():
    def hooked(block):
        block.mlp.up_proj.register_forward_hook(lambda *_: None)

    def biased(block):
        block.mlp.down_proj.bias = nn.Parameter(torch.zeros(256).bfloat16())

    def parametrized(block):
        nn.utils.parametrizations.weight_norm(block.mlp.gate_proj)

    def mixed(block):
        block.mlp.gate_proj.eval()

    def plain(block):
        block.mlp.up_proj = nn.Linear(256, 128, bias=False).bfloat16()

    def wide(block):
        block.mlp.up_proj.float()

    def observed(block):
        block.post_attention_layernorm.register_forward_pre_hook(lambda *_: None)

    return {
        "have hooks": (hooked, observed),
        "has a bias": (biased,),
        "is parametrized": (parametrized,),
        "training mode": (mixed,),
        "not fp8ref's own": (plain,),
        "float32 and the input": (wide,),
    }


@pytest.mark.parametrize(
    ("reason", "change"), [(why, f) for why, changes in reasons().items() for f in changes]
)
def test_modules_run_by_themselves_for_a_reason(reason, change, caplog):
    block, h = layer("tensorwise", kernels="triton"), torch.zeros(1, 8, 256).bfloat16()
    modules = (block.post_attention_layernorm, block.mlp)
    assert parts.fuses(h, block.mlp.linears, modules)
    change(block)
    assert reason in parts.why_not(h, block.mlp.linears, modules)
    with caplog.at_level("INFO", "fp8ref.torch"):
        parts._log.cache_clear()
        assert not any(parts.fuses(h, block.mlp.linears, modules) for _ in "ab")
    if isinstance(block.mlp.up_proj, Linear):
        assert [reason in record.getMessage() for record in caplog.records] == [True]


def test_a_pass_may_keep_them_apart():
    block, h = layer("delayed", kernels="triton"), torch.zeros(1, 8, 256).bfloat16()
    assert "no tokens" in parts.why_not(h[:, :0], block.mlp.linears)
    with torch.autocast("cpu", dtype=torch.float16):
        assert "autocast" in parts.why_not(h, block.mlp.linears)
    for register in (
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_full_backward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
    ):
        hook = register(lambda *_: None)
        reason = parts.why_not(h, block.mlp.linears)
        hook.remove()
        assert reason == "hooks of all modules are registered"


def test_a_part_refuses_second_derivatives():  # L-8
    block, h = layer("tensorwise"), torch.randn(1, 8, 256).bfloat16().requires_grad_()
    y = parts.mlp(h, block.mlp.linears, norm=block.post_attention_layernorm)[1]
    with pytest.raises(ValueError, match="not differentiated again"):
        torch.autograd.grad(y.sum(), h, create_graph=True)


def test_frozen_weights_have_no_gradient():
    made, frozen = layer("tensorwise"), layer("tensorwise")
    frozen.mlp.up_proj.weight.requires_grad_(False)
    want, found = (
        mlp_results(TransformersMLP(block), lambda model, h: twice(model, h))
        for block in (made, frozen)
    )
    assert found.pop("linears.1.weight") is None
    want.pop("linears.1.weight")
    assert not differing(want, found)


@pytest.mark.parametrize("run", ["mlp", "projections"])
def test_a_residual_alone_has_its_gradient(run):
    """That of the residual stream, if it and the norm are frozen."""
    found = []
    for frozen in (False, True):
        block = layer("tensorwise").requires_grad_(not frozen)
        h, residual = torch.randn(
            2, 1, 8, 256, generator=torch.Generator().manual_seed(0)
        ).bfloat16()
        residual.requires_grad_()
        linears = (block.mlp if run == "mlp" else block.self_attn).linears
        options = {"residual": residual, "norm": block.input_layernorm}
        _, y = getattr(parts, run)(h, linears, **options)
        (y if run == "mlp" else torch.cat(y, -1)).float().sum().backward()
        found.append(residual.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_a_residual_stream_of_strides_is_the_contiguous_one(recipe):
    block = layer(recipe, kernels="triton")
    whole = torch.randn(4, 2, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = []
    for h in (whole[:, -1:], whole[:, -1:].contiguous()):
        h = h.detach().requires_grad_()
        _, y = parts.mlp(h, block.mlp.linears, norm=block.input_layernorm)
        y.float().sum().backward()
        found.append((y, h.grad))
    assert all(map(torch.equal, *found))


def test_a_launch_without_strides_refuses_a_strided_tensor():
    x = torch.zeros(4, 16).bfloat16()
    for tensors in ((x[:, :8], x[:, :8].contiguous()), (x[:, :8].contiguous(), x[:, :8])):
        with pytest.raises(AssertionError, match="amax"):
            kernels.swiglu_amax(*tensors, twice=False)


@pytest.mark.parametrize("recipe", ["rowwise_with_gw_hp", "mxfp8"])
def test_linears_of_other_recipes_read_one_norm(recipe):
    """Though kernels cast nothing of the first one's input."""
    found = []
    for choice in ("plain", "triton"):
        block = layer("tensorwise", kernels=choice)
        block.mlp.gate_proj = Linear.of(block.mlp.gate_proj, recipe, kernels=choice)
        found.append(mlp_results(TransformersMLP(block), twice))
    assert not differing(*found)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise"])
def test_a_pass_leaves_no_cycle(recipe):
    block, h = layer(recipe, kernels="triton"), torch.randn(1, 16, 256).bfloat16().requires_grad_()
    _, y = parts.mlp(h, block.mlp.linears, norm=block.input_layernorm)
    gc.collect()
    gc.disable()
    try:
        y.float().sum().backward()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [each for each in gc.garbage if isinstance(each, (torch.Tensor, sources.Source))]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_no_codes_of_a_sharded_weight_are_kept(monkeypatch):
    block, kept = layer("tensorwise", kernels="triton"), []
    for each in block.mlp.linears:
        each._is_fsdp_managed_module = True
    h = torch.randn(1, 16, 256).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x):
        parts.mlp(h, block.mlp.linears, norm=block.input_layernorm)
    assert not [x for x in kept if x.dtype.itemsize == 1 and x.numel() == 128 * 256]


@pytest.mark.parametrize("kernels", ["plain", "triton"])
def test_a_compiled_part_is_the_eager_one(kernels):
    block = layer("delayed", kernels=kernels)

    def run(model, h):
        return parts.mlp(h, list(model.linears), norm=model.norm)[1]

    eager = mlp_results(TransformersMLP(block), run)
    block.zero_grad()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert not differing(eager, mlp_results(TransformersMLP(block), compiled))


def without_tokens(recipe):
    """Gradients of a block in FP8, of which the second of two ranks has no tokens."""
    block, rank = layer(recipe, kernels="triton", group=GROUP), distributed.get_rank()
    return results(block, Layer.forward, tokens=0 if rank else 8)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_rank_without_tokens_merges_amaxes_as_often(recipe):  # L-9, P-2
    first, second = run_ranks(2, without_tokens, recipe)
    alone = results(layer(recipe), Layer.forward, tokens=8)
    assert not differing(alone, first)
    assert not any(second[name].any() for name in second if name.endswith("weight"))


def of_no_tokens(recipe):
    """Of a block whose norms have no eps, on a rank that shares its amaxes."""
    block = layer(recipe, kernels="triton", group=GROUP)
    block.input_layernorm.eps = block.post_attention_layernorm.eps = 0.0
    return results(block, Layer.forward, tokens=0)


def test_no_tokens_are_no_nan_in_norms_without_eps():  # L-9
    (found,) = run_ranks(1, of_no_tokens, "tensorwise")
    assert not any(found[name].any() for name in found if name.endswith("weight"))
