import dataclasses
import itertools

import pytest
import torch
from ranks import run
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from fp8ref import llama
from fp8ref.policy import POLICIES
from fp8ref.recipe import OPERANDS, RECIPES, CastSpec, GemmSpec, Recipe
from fp8ref.torch import gloo, linear, tensor
from fp8ref.torch.model import Llama

CONFIG = llama.LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


def mesh():
    return init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tensor",))


def build(recipe="tensorwise", dtype=torch.bfloat16, config=CONFIG, **options):
    weights = {name: value * (4 if value.ndim > 1 else 1) for name, value in llama.initial_weights(config, seed=0).items()}
    return linear.convert(Llama(config, weights).to(dtype), recipe, **options)


def some_tokens(batch=2, length=16):
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(0))


def some_gradient(y):
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)


def whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


class Watch(TorchDispatchMode):
    """FP8 GEMMs by (linear, gemm): codes and scales of both operands and the result, of this rank; gathers as (dtype, elements)."""

    def __init__(self, model):
        super().__init__()
        # the config is an object of each linear's own, which its weight and its grad_output carry
        self.names = {id(m.linear_mm_config): name for name, m in model.named_modules() if isinstance(m, Float8Linear)}
        self.gemms, self.gathers = {}, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types or (func is GATHER and Float8TrainingTensor in types):
            return NotImplemented  # once more, of what is inside
        out = func(*args, **(kwargs or {}))
        if func is GATHER:
            self.gathers.append((args[0].dtype, args[0].numel()))
        if func is torch.ops.aten.mm.default and isinstance(args[0], Float8TrainingTensor):
            gemm = next(g for g, roles in OPERANDS.items() if roles == tuple(a._gemm_input_role.value for a in args))
            owner = args[gemm != "grad_weight"]  # the weight, or grad_output
            a, b = ((x._data.view(torch.uint8).clone(), x._scale.clone()) for x in args)
            self.gemms[self.names[id(owner._linear_mm_config)], gemm] = (*a, *b, out.clone())
        return out


def observed(recipe, sequence):
    """Of a rank: the FP8 GEMMs of a step, and its part of each linear's input and gradient, outside of all styles."""
    model = tensor.parallelize(build(recipe), mesh(), sequence=sequence)
    parts = {}

    def takes(names):
        def hook(_, args):
            for name in names:
                parts[name, "input"] = args[0].detach().clone()

        return hook

    def gives(name):
        def hook(_, args, out):
            out.register_hook(lambda g: parts.__setitem__((name, "grad_output"), g.clone()))

        return hook

    for name, module in model.named_modules():
        last = name.split(".")[-1]
        if last in tensor.PLAN:
            module.register_forward_hook(gives(name))
        if last in tensor.ROW:
            module.register_forward_pre_hook(takes([name]), prepend=True)
        columns = [f"{name}.{child}" for child, _ in module.named_children() if child in tensor.COLUMN]
        module.register_forward_pre_hook(takes(columns), prepend=True)
    with Watch(model) as watch:
        y = model(some_tokens())
        y.backward(some_gradient(y))
    return watch.gemms, parts


def assembled(parts, dim):
    """Ranks' parts of a tensor cut along dim; where None, or where they have but one element there, all have the same."""
    if dim is None or parts[0].ndim == 0 or parts[0].shape[dim] == 1:
        assert all(torch.equal(parts[0], p) for p in parts)
        return parts[0]
    return torch.cat(parts, dim)


# Along which dim of each GEMM's operands a, b and of its result the ranks' parts lie; "sum": the result is a sum of the ranks' parts.
CUTS = {
    "colwise": {"output": (None, 1, 1), "grad_input": (1, 0, "sum"), "grad_weight": (0, None, 0)},
    "rowwise": {"output": (1, 0, "sum"), "grad_input": (None, 1, 1), "grad_weight": (None, 1, 1)},
}
POWERS_OF_TWO = CastSpec(fmt=RECIPES["tensorwise"].output.a.fmt, policy=POLICIES["torchao_pow2"])
FP8 = GemmSpec(a=POWERS_OF_TWO, b=POWERS_OF_TWO, accumulate="fast")
TENSORWISE_POW2 = Recipe(name="tensorwise_pow2", output=FP8, grad_input=FP8, grad_weight=FP8)


@pytest.mark.parametrize(
    ("recipe", "sequence"),
    [("tensorwise", False), ("tensorwise", True), ("rowwise", True), ("rowwise_with_gw_hp", False), (TENSORWISE_POW2, True)],
    ids=["tensorwise", "tensorwise-sequence", "rowwise-sequence", "rowwise_with_gw_hp", "tensorwise_pow2-sequence"],
)
def test_codes_and_scales_are_those_of_one_process(recipe, sequence):  # P-14, P-15, P-16
    ranks = run(2, observed, recipe, sequence)
    layers = {name: m for name, m in build(recipe).named_modules() if name.split(".")[-1] in tensor.PLAN}
    assert len(layers) == 14
    for name, layer in layers.items():
        style = tensor.PLAN[name.split(".")[-1]]
        ends = (1 if sequence else None, -1)
        cuts = dict(zip(("input", "grad_output"), ends if style == "colwise" else ends[::-1], strict=True))
        x, g = (assembled([parts[name, role] for _, parts in ranks], dim) for role, dim in cuts.items())
        with Watch(layer) as watch:
            layer(x.requires_grad_()).backward(g)
        expected = {gemm: found for (_, gemm), found in watch.gemms.items()}
        assert set(expected) == {gemm for gemm in CUTS[style] if (name, gemm) in ranks[0][0]}
        assert len(expected) == (2 if recipe == "rowwise_with_gw_hp" else 3)
        for gemm, (*operands, out) in expected.items():
            found = [gemms[name, gemm] for gemms, _ in ranks]
            cut_a, cut_b, cut_out = CUTS[style][gemm]
            for i, dim in enumerate((cut_a, cut_a, cut_b, cut_b)):
                assert torch.equal(assembled([f[i] for f in found], dim), operands[i]), (name, gemm, i)
            outs = [f[4].double() for f in found]
            # B-1 for either side's float32 sums; each result rounded to bfloat16, u = 2^-8, twice under G-5
            a, sa, b, sb = operands
            fmts = [torch.float8_e5m2 if v is not None and v == 57344 else torch.float8_e4m3fn for v in dtypes(recipe, gemm)]
            magnitude = (a.view(fmts[0]).double().abs() / sa) @ (b.view(fmts[1]).double().abs() / sb)
            sums = 2 * (a.shape[1] + 9) * 2.0**-24 * magnitude
            u = 2.0**-8 * (1 if "tensorwise" in str(recipe) else 2) * (1 + 2.0**-7)
            if cut_out == "sum":
                result, rounded = sum(outs), sum(o.abs() for o in outs)
            else:
                result = assembled(outs, cut_out)
                rounded = result.abs()
            assert ((result - out.double()).abs() <= u * (rounded + out.double().abs()) + sums).all(), (name, gemm)


def dtypes(recipe, gemm):
    spec = (recipe if isinstance(recipe, Recipe) else RECIPES[recipe]).gemms[gemm]
    return float(spec.a.fmt.max), float(spec.b.fmt.max)


def passed(recipe, sequence, config, parallel):
    """Logits and every gradient, whole, and the norm that clipping takes of them; then an update."""
    model = build(recipe, torch.float64, config)
    if parallel:
        model = tensor.parallelize(model, mesh(), sequence=sequence)
    y = model(some_tokens())
    assert not isinstance(y, DTensor)
    y.backward(some_gradient(y))
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert not any(g.placements[0].is_partial() for g in gradients.values() if isinstance(g, DTensor))
    norm = torch.nn.utils.get_total_norm(list(gradients.values()))
    torch.optim.AdamW(model.parameters(), foreach=True).step()
    return {"logits": y.detach(), "norm": whole(norm)} | {name: whole(g) for name, g in gradients.items()}


@pytest.mark.parametrize(("sequence", "tied"), list(itertools.product([False, True], repeat=2)))
def test_in_float64_the_model_is_one_process_model(sequence, tied):  # P-14
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    expected = passed("bf16", False, config, parallel=False)
    for found in run(2, passed, "bf16", sequence, config, True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            # norms, rotary embeddings and SiLU compute in float32: some 10 roundings of 2^-24 a layer; a lost or doubled sum is off by tens of percent
            assert (found[name] - value).norm() <= 100 * 2.0**-24 * value.norm(), name


def signs(*shape, seed):
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def exact(bias):
    """Two linears of -1, 0 and 1, whose sums are exact in any order where inputs and gradients are so too."""
    model = nn.Sequential(nn.Linear(64, 64, bias=bias), nn.Linear(64, 32, bias=bias)).bfloat16()
    with torch.no_grad():
        # a permutation with signs: its outputs are of -1, 0, 1 as its inputs are, and no sum of its grad_input has two terms
        order, flips = torch.randperm(64, generator=torch.Generator().manual_seed(2)), 1 - 2 * (torch.arange(64) % 2)
        model[0].weight.copy_(torch.eye(64)[order] * flips)
        model[1].weight.copy_(signs(32, 64, seed=3))
        if bias:
            model[0].bias.zero_()
            model[1].bias.copy_(signs(32, seed=4))
    return model


def passed_exactly(model):
    x = signs(16, 64, seed=5).requires_grad_()
    y = model(x)
    y.backward(signs(16, 32, seed=6))
    return [t.clone() for t in (y.detach(), x.grad, *(whole(p.grad) for p in model.parameters()))]  # a clone waits for what is reduced


def cut_exactly(recipe):
    plan = {"0": "colwise", "1": "rowwise"}
    return [passed_exactly(tensor.parallelize(linear.convert(exact(bias), recipe), mesh(), plan=plan)) for bias in (False, True)]


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_where_sums_are_exact_a_plan_gives_what_one_process_gives(recipe):  # P-14, P-16
    expected = [passed_exactly(linear.convert(exact(bias), recipe)) for bias in (False, True)]
    assert expected[0][0].count_nonzero() > 300
    for rank in run(2, cut_exactly, recipe):
        for bias in (False, True):
            assert all(torch.equal(a, b) for a, b in zip(rank[bias], expected[bias], strict=True))


def cut_by_torchao():
    """As cut_exactly, by torchao's own styles: without biases, with biases, and the scales that a rowwise recipe's input has."""
    found = []
    for bias in (False, True):
        model = linear.convert(exact(bias), "tensorwise")
        gloo.gather_fp8_as_bytes()
        found.append(passed_exactly(parallelize_module(model, mesh(), {"0": Float8ColwiseParallel(), "1": Float8RowwiseParallel()})))
    shapes = []
    for cut in (
        lambda m: parallelize_module(m, mesh(), {"0": Float8ColwiseParallel()}),
        lambda m: tensor.parallelize(m, mesh(), plan={"0": "colwise"}),
    ):
        model = cut(linear.convert(nn.Sequential(nn.Linear(64, 64, bias=False)).bfloat16(), "rowwise"))
        with Watch(model) as watch, torch.no_grad():
            model(signs(16, 64, seed=5))
        shapes.append(watch.gemms["0", "output"][1].shape)
    return *found, shapes


def test_what_torchaos_styles_do_not_mean_takes_others():  # P-15
    expected = [passed_exactly(linear.convert(exact(bias), "tensorwise")) for bias in (False, True)]
    for without, with_biases, shapes in run(2, cut_by_torchao):
        assert all(torch.equal(a, b) for a, b in zip(without, expected[False], strict=True))
        # the first bias's gradient is a sum of e5m2 codes, where Float8Linear sums what it has before the cast
        assert [torch.equal(a, b) for a, b in zip(with_biases, expected[True], strict=True)] == [True, True, True, False, True, True]
        assert shapes == [(), (16, 1)]  # a rowwise recipe's input is cast tensorwise


def gathered(recipe, filter_fqns):
    model = tensor.parallelize(build(recipe, filter_fqns=filter_fqns), mesh(), sequence=True)
    with Watch(model) as watch:
        y = model(some_tokens())
        forward = list(watch.gathers)
        y.sum().backward()
    return forward, watch.gathers[len(forward) :]


def test_under_sequence_parallelism_what_is_gathered_is_a_byte_an_element():  # P-15
    n = 2 * 8 * 64  # a rank's part of [B, T, hidden]
    codes, hp = (torch.uint8, n), (torch.bfloat16, n)  # uint8 on gloo
    for forward, backward in run(2, gathered, "tensorwise", ()):
        assert forward == [codes, codes] * 2 + [hp]  # of q, k and v together, of gate and up; the last norm's
        assert backward == [codes, codes] * 2 + [hp]  # of grad_output of down and o; the embedding's
    for forward, backward in run(2, gathered, "tensorwise", ("k_proj", "layers.1.mlp")):
        assert forward == [hp, codes, hp, hp, hp]  # k takes hp, so q and v cast what all three gathered
        assert backward == [hp, codes, codes, codes, hp]
    for forward, backward in run(2, gathered, "rowwise", ()):
        assert forward == [hp] * 5
        assert backward == [hp] * 5


def on_two_dims(sequence):
    """Of a 2 x 2 mesh, the gradients of a batch that fsdp cuts, and the mean of those that tensor parallelism alone has for each part of it."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tensor"))
    tokens = some_tokens(4)

    def gradients(model, tokens):
        model(tokens).float().square().mean().backward()
        return {name: whole(p.grad) for name, p in model.named_parameters()}

    alone = [gradients(tensor.parallelize(build(dtype=torch.float32), grid["tensor"], sequence=sequence), part) for part in tokens.chunk(2)]
    model = tensor.parallelize(build(dtype=torch.float32), grid["tensor"], sequence=sequence)
    for layer in model.model.layers:
        fully_shard(layer, mesh=grid["fsdp"])
    fully_shard(model, mesh=grid["fsdp"])
    found = gradients(model, tokens.chunk(2)[grid["fsdp"].get_local_rank()])
    return found, {name: (g + alone[1][name]) / 2 for name, g in alone[0].items()}


@pytest.mark.parametrize("sequence", [False, True])
def test_fully_shard_over_another_dim_means_its_gradients(sequence):  # P-14
    for found, expected in run(4, on_two_dims, sequence):
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert len(found) == len(expected) == 21


def on_masters():
    """Of float32 masters that a step rounds first (SEMANTICS M-2), and of a model in bfloat16: gradients of the matrices."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = tensor.parallelize(build(dtype=dtype), mesh(), sequence=True)
        parameters = dict(model.named_parameters())
        y = functional_call(model, {name: p.to(torch.bfloat16) for name, p in parameters.items()}, (some_tokens(),))
        gradients = torch.autograd.grad(y.float().square().mean(), list(parameters.values()))
        assert all(g.dtype == dtype and not g.placements[0].is_partial() for g in gradients)
        found.append([whole(g).float() for g in gradients if g.ndim > 1])
    return found


def test_a_step_may_round_masters_first():  # P-14
    for masters, rounded in run(2, on_masters):
        assert all(torch.equal(a, b) for a, b in zip(masters, rounded, strict=True))


def with_a_nan(rank_of_nan):
    model = linear.convert(nn.Sequential(nn.Linear(64, 32, bias=False)).bfloat16(), "tensorwise")
    model = tensor.parallelize(nn.Sequential(nn.Identity(), model[0]), mesh(), plan={"1": "rowwise"})
    x = torch.ones(16, 32).bfloat16()  # this rank's part of [16, 64]
    if distributed.get_rank() == rank_of_nan:
        x[3, 3] = torch.nan
    with torch.no_grad():
        return model(x).clone()  # which waits for it


def test_a_nan_makes_its_row_nan_whatever_the_amax_is():  # P-17
    for rank_of_nan in range(2):
        for y in run(2, with_a_nan, rank_of_nan):
            assert y[3].isnan().all()


def hugging_face(recipe, parallel):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
    )
    model = linear.convert(LlamaForCausalLM(config).double() if recipe == "bf16" else LlamaForCausalLM(config), recipe)
    if parallel:
        model = tensor.parallelize(model, mesh(), plan=tensor.PLAN)
    logits = model(some_tokens() % 64).logits
    logits.square().sum().backward()
    return {"logits": logits.detach()} | {name: whole(p.grad) for name, p in model.named_parameters()}


def test_a_plan_parallelises_hugging_faces_llama():  # P-14
    expected = hugging_face("bf16", parallel=False)
    for found in run(2, hugging_face, "bf16", True):
        for name, value in expected.items():
            assert (found[name] - value).norm() <= 100 * 2.0**-24 * value.norm(), name  # as above


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Beside(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(16)), nn.Linear(16, 16)


def shared():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    return model


def llamas(**sizes):
    return lambda: build(config=dataclasses.replace(CONFIG, **sizes))


def linears():
    return nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64))


def sharded():
    return tensor.parallelize(build(), mesh())


def fully_sharded():
    return fully_shard(linears(), mesh=mesh())


COLUMN = {"plan": {"0": "colwise"}}
REFUSED = {
    "several dims": (
        build,
        {"mesh": lambda: init_device_mesh("cpu", (2, 1), mesh_dim_names=("fsdp", "tensor"))},
        r"one dim; got dims \('fsdp'",
    ),
    "no mesh": (build, {"mesh": lambda: None}, "one dim; got a NoneType.*mesh"),
    "no plan": (linears, {}, "got a Sequential. Give plan="),
    "sequence of others": (linears, {"sequence": True, **COLUMN}, "trainer's Llama.*got a Sequential with a plan.*Leave sequence"),
    "sequence with a plan": (build, {"sequence": True, "plan": tensor.PLAN}, "got a Llama with a plan"),
    "no style": (linears, {"plan": {"0": "column"}}, "colwise and rowwise; got 'column' for '0'"),
    "no linear": (linears, {"plan": {"q_proj": "colwise"}}, "'q_proj' names none of the linears: 0, 1"),
    "two styles": (linears, {"plan": {"0": "colwise", "*": "rowwise"}}, r"0 is to be both colwise and rowwise, the second by '\*'"),
    "one kv head": (llamas(num_key_value_heads=1, num_attention_heads=2), {}, "k_proj has 1 heads of 32, which 2 ranks do not cut evenly"),
    "FP8 dims": (llamas(intermediate_size=48), {}, "gate_proj is FP8 and colwise, its out_features a multiple of 16.*got 48, 24 on each"),
    "odd dims": (lambda: nn.Sequential(nn.Linear(16, 33)), COLUMN, "0 is colwise, its out_features divisible by 2 ranks; got 33"),
    "odd rows": (
        lambda: nn.Sequential(nn.Linear(33, 16)),
        {"plan": {"0": "rowwise"}},
        "0 is rowwise, its in_features divisible by 2.*got 33",
    ),
    "shared": (shared, COLUMN, r"0 shares its weight, and is cut: 0.weight, 1.weight. Untie"),
    "subclass": (lambda: nn.Sequential(Scaled(64, 64)), COLUMN, "0 is a Scaled"),
    "beside": (lambda: nn.Sequential(nn.Linear(16, 16), Beside()), COLUMN, "1 holds parameters beside modules"),
    "delayed": (lambda: build("delayed"), {}, "q_proj is fp8ref's own Linear of recipe 'delayed'.*Use tensorwise"),
    "blockwise": (lambda: linear.convert(nn.Sequential(nn.Linear(128, 128)), "blockwise"), COLUMN, "0 is fp8ref's own.*'blockwise'"),
    "compiled": (
        lambda: torch.compile(linears(), backend="eager"),
        {"plan": {"*": "colwise"}},
        "the model is compiled. Parallelise.*first",
    ),
    "twice": (sharded, {}, "embed_tokens is sharded already.*once, and before fully_shard"),
    "fully_shard": (fully_sharded, COLUMN, "the model is sharded already"),
}


def refusals():
    for make, options, message in REFUSED.values():
        model, options = make(), dict(options)
        before = [(name, type(p.data)) for name, p in model.named_parameters()]
        on = options.pop("mesh", mesh)()
        with pytest.raises(ValueError, match=message):
            tensor.parallelize(model, on, **options)
        assert before == [(name, type(p.data)) for name, p in model.named_parameters()], message
    with pytest.raises(ValueError, match=r"T divisible by 2 ranks; got T = 15\. Pad them"):
        tensor.parallelize(build(), mesh(), sequence=True)(some_tokens(length=15))
    with pytest.raises(ValueError, match=r"q_proj (has forward hooks|is sharded already)"):
        linear.convert(tensor.parallelize(build("bf16"), mesh()), "tensorwise")
    return len(REFUSED)


def test_what_cannot_be_cut_is_refused():  # P-14
    assert run(2, refusals) == [len(REFUSED)] * 2
