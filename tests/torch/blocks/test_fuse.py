"""Blocks of libraries' models, fused by ``convert``, against the same blocks unfused."""

import copy
import pickle

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers.models.llama import modeling_llama

import fp8ref.torch as ft
from fp8ref.selection.rules import Rule
from fp8ref.torch import delayed
from fp8ref.torch.blocks import forms, parts
from fp8ref.torch.kernels import fused as kernels

TOKENS = torch.randint(0, 64, (1, 12), generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 16,
}


def library(name, **keys):
    """A causal model of transformers, in bfloat16."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **keys)
    return getattr(transformers, f"{name}ForCausalLM")(config).bfloat16()


class FeedForward(nn.Module):
    """torchtitan's (models/llama3), with its names."""

    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


def reshape_for_broadcast(freqs_cis, x):
    """torchtitan's: [max_seqlen, D / 2] as [1, T, 1, D / 2]."""
    freqs_cis = freqs_cis[0 : x.shape[1]]
    assert freqs_cis.shape == (x.shape[1], x.shape[-1])
    return freqs_cis.view(1, x.shape[1], 1, x.shape[-1])


def apply_rotary_emb(xq, xk, freqs_cis):
    """torchtitan's: neighbors are complex numbers."""
    xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = reshape_for_broadcast(freqs_cis, xq_)
    xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(3)
    xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)


def angles(tokens, width=32):
    """freqs_cis [tokens, width / 2]."""
    freqs = torch.outer(torch.arange(tokens), 100.0 ** -(torch.arange(0, width, 2) / width))
    return torch.polar(torch.ones_like(freqs), freqs)


class Attention(nn.Module):
    """torchtitan's, with as many heads of keys."""

    def __init__(self, dim, heads):
        super().__init__()
        self.head_dim = dim // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in "qkvo")

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        bs, seqlen, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = xq.view(bs, seqlen, -1, self.head_dim)
        xk = xk.view(bs, seqlen, -1, self.head_dim)
        xv = xv.view(bs, seqlen, -1, self.head_dim)
        xq, xk = apply_rotary_emb(xq, xk, freqs_cis=freqs_cis)
        xq, xk, xv = (y.transpose(1, 2) for y in (xq, xk, xv))
        output = functional.scaled_dot_product_attention(xq, xk, xv, is_causal=True)
        return self.wo(output.transpose(1, 2).reshape(bs, seqlen, -1))


class TransformerBlock(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.attention, self.feed_forward = Attention(dim, 2), FeedForward(dim, 128)
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        self.ffn_norm = nn.RMSNorm(dim, eps=1e-5)

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor):
        h = x + self.attention(self.attention_norm(x), freqs_cis)
        out = h + self.feed_forward(self.ffn_norm(h))
        return out


class Titan(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings, self.layers = nn.Embedding(64, 64), nn.ModuleList([TransformerBlock()])
        self.lm_head = nn.Linear(64, 64, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, angles(16))
        return self.lm_head(h)


MODELS = {
    "llama": lambda: library("Llama"),
    "qwen3": lambda: library("Qwen3"),
    "mistral": lambda: library("Mistral"),
    "torchtitan": lambda: Titan().bfloat16(),
}


def results(model, steps=1):
    """Outputs and gradients of steps on one batch, by name."""
    found = {}
    for step in range(steps):
        model.zero_grad()
        y = model(TOKENS)
        y = getattr(y, "logits", y)
        y.float().square().mean().backward()
        found |= {f"{step} output": y.detach()}
        found |= {f"{step} {name}": p.grad for name, p in model.named_parameters()}
        delayed.update(model)
    return found


def differing(first, second):
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


@pytest.fixture
def ran(monkeypatch):
    """The parts that ran, whether with a norm, and what they rotated."""
    calls = []
    for name in ("mlp", "projections"):
        monkeypatch.setattr(parts, name, noted(calls, name, getattr(parts, name)))
    return calls


def noted(calls, name, part):
    def run(*arguments, **options):
        rotates = options.get("tables") is not None
        calls.append((name, options["norm"] is not None, options["form"] if rotates else ""))
        return part(*arguments, **options)

    return run


ROTATED = {"llama": "rounded halves", "mistral": "rounded halves", "torchtitan": "pairs"}
"""{model: the form of its rotation, if a part does it}."""


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_fused_model_computes_what_it_did(name, recipe, ran):  # M-11, R-5
    """By interpreted kernels; and as its modules do where kernels are off."""
    steps = 2 if recipe == "delayed" else 1
    options = {"filter_fqns": ["lm_head"], "kernels": "triton"}
    plain = results(ft.convert(MODELS[name](), recipe, **options), steps)
    fused = ft.convert(MODELS[name](), recipe, fuse=True, **options)
    assert not ran
    assert not differing(plain, results(fused, steps))
    form = ROTATED.get(name, "")
    assert ran == [("projections", True, form), ("mlp", True, "")] * steps
    rows = ft.report(fused).fused
    assert len(rows) == 6  # q, k, v, gate, up, down
    assert all("; fused: norm, " in row.reason for row in rows)
    why = "not RoPE: its query and key change before they are rotated"  # by QK norms
    assert all(row.reason.endswith("RoPE" if form else why) for row in rows[:3])


@pytest.mark.parametrize("name", ROTATED)
def test_kernels_cast_the_gradient_as_they_rotate_it(name, monkeypatch):  # M-11
    """Query's and key's: then no GEMM's operand is cast of them by itself."""
    shapes = []

    def noted_cast(g, *arguments, **options):
        shapes.append((tuple(g.shape), options["form"]))
        return cast(g, *arguments, **options)

    cast = kernels.rotary_gradient_cast
    monkeypatch.setattr(kernels, "rotary_gradient_cast", noted_cast)
    results(ft.convert(MODELS[name](), "tensorwise", kernels="triton", fuse=True))
    heads = 2 if name == "torchtitan" else 1
    expected = [((1, 12, heads, 32), ROTATED[name]), ((1, 12, 2, 32), ROTATED[name])]
    assert shapes == expected  # key's, then query's


def test_a_converted_instance_alone_rotates_otherwise():
    scope, function = vars(modeling_llama), modeling_llama.apply_rotary_pos_emb
    forward, before = modeling_llama.LlamaAttention.forward, dict(scope)
    other = library("Llama")
    expected = other(TOKENS).logits
    ft.convert(library("Llama"), "tensorwise", kernels="triton", fuse=True)(TOKENS)
    assert scope == before
    assert modeling_llama.apply_rotary_pos_emb is function
    assert modeling_llama.LlamaAttention.forward is forward
    assert torch.equal(other(TOKENS).logits, expected)


def plain_and_fused(model, run):
    """What it returns of a model, unfused and fused."""
    return [
        run(ft.convert(copy.deepcopy(model), "tensorwise", kernels="triton", fuse=fuse))
        for fuse in (False, True)
    ]


def test_tables_of_each_sequence_are_left_to_the_model(ran):
    positions = torch.stack([torch.arange(12), torch.arange(12).flip(0)])

    def run(model):
        y = model(TOKENS.expand(2, -1), position_ids=positions).logits
        y.float().square().mean().backward()
        return [y, *(p.grad for p in model.parameters())]

    assert all(map(torch.equal, *plain_and_fused(library("Llama"), run)))
    assert ran == [("projections", True, ""), ("mlp", True, "")]


class Positioned(Attention):
    """torchtitan's, by positions if there are any."""

    def forward(self, x, freqs_cis, attention_masks=None, positions=None):
        bs, seqlen, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = xq.view(bs, seqlen, -1, self.head_dim)
        xk = xk.view(bs, seqlen, -1, self.head_dim)
        xq, xk = rotated_by_position(xq, xk, freqs_cis, positions)
        return self.wo(xq.flatten(-2) * xk.flatten(-2) + xv)


def rotated_by_position(xq, xk, freqs_cis, positions=None):
    freqs_cis = freqs_cis if positions is None else freqs_cis[positions]
    return apply_rotary_emb(xq, xk, freqs_cis)


@pytest.mark.parametrize("positions", [None, torch.arange(12).flip(0)], ids=["none", "some"])
def test_positions_are_left_to_the_model(positions, ran):
    torch.manual_seed(0)
    attention, x = Positioned(64, 2).bfloat16(), torch.randn(1, 12, 64).bfloat16()

    def run(attention):
        y = attention(x, angles(16), None, positions)
        y.float().square().mean().backward()
        return [y, *(p.grad for p in attention.parameters())]

    assert all(map(torch.equal, *plain_and_fused(attention, run)))
    assert ran == [("projections", False, "pairs" if positions is None else "")]


def attention_results(x, tables):
    def run(attention):
        y, _ = attention(x, position_embeddings=tables, attention_mask=None)
        y.float().square().mean().backward()
        return [y, *(p.grad for p in attention.parameters())]

    return run


@pytest.mark.parametrize("trained", [False, True])
def test_tables_with_gradients_are_left_to_the_model(trained, ran):
    generator = torch.Generator().manual_seed(0)
    x, cos, sin = (torch.randn(1, 12, n, generator=generator).bfloat16() for n in (64, 32, 32))
    sin.requires_grad_(trained)
    results = plain_and_fused(
        library("Llama").model.layers[0].self_attn, attention_results(x, (cos, sin))
    )
    assert all(map(torch.equal, *results))
    assert (sin.grad is None) != trained
    assert ran == [("projections", False, "" if trained else "rounded halves")]


@pytest.mark.parametrize("name", MODELS)
def test_a_fused_model_runs_its_modules_where_kernels_are_off(name, ran):
    options = {"filter_fqns": ["lm_head"], "kernels": "plain"}
    plain = results(ft.convert(MODELS[name](), "delayed", **options), 2)
    assert not differing(
        plain, results(ft.convert(MODELS[name](), "delayed", fuse=True, **options), 2)
    )
    assert not ran


def test_deconvert_undoes_it():
    model = MODELS["llama"]()
    kinds, keys = [type(m) for m in model.modules()], list(model.state_dict())
    plain = results(model)
    fused = ft.convert(model, "tensorwise", filter_fqns=["lm_head"], kernels="triton", fuse=True)
    assert list(ft.weights(fused)) == keys
    assert [type(m) for m in fused.modules()] != kinds
    assert [type(m) for m in ft.deconvert(fused).modules()] == kinds
    assert not differing(plain, results(model))


def test_a_fused_model_is_copied_and_pickled():
    fused = ft.convert(MODELS["torchtitan"](), "delayed", kernels="triton", fuse=True)
    want = results(copy.deepcopy(fused))
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        layer = other.layers[0]
        assert layer.feed_forward.fused.norm[0] is layer.ffn_norm
        assert not differing(want, results(other))


def test_a_pass_by_modules_takes_no_result_of_a_fused_one():
    options = {"kernels": "triton", "filter_fqns": ["lm_head"]}
    plain = ft.convert(MODELS["torchtitan"](), "tensorwise", **options)
    fused = ft.convert(MODELS["torchtitan"](), "tensorwise", fuse=True, **options)
    with torch.no_grad():
        fused(TOKENS)
        fused.layers[0].attention.register_forward_hook(lambda *_: None)
        assert torch.equal(fused(TOKENS.flip(1)), plain(TOKENS.flip(1)))


def test_linears_of_one_input_share_its_state():
    fused = ft.convert(MODELS["torchtitan"](), "delayed", kernels="triton", fuse=True)
    attention, mlp = fused.layers[0].attention, fused.layers[0].feed_forward
    for first, others in ((attention.wq, (attention.wk, attention.wv)), (mlp.w1, (mlp.w3,))):
        assert all(each.state("input") is first.states["input"] for each in others)
    assert mlp.w2.state("input") is mlp.w2.states["input"]


def reasons(change, recipe="tensorwise", **options):
    """Why linears are not fused, of a model changed before it is converted, by the part's name."""
    model = Titan().bfloat16()
    change(model.layers[0])
    converted = ft.convert(model, recipe, kernels="triton", fuse=True, **options)
    rows = {row.path: row.reason for row in ft.report(converted).rows}
    return {
        key: rows[f"layers.0.{key}"].partition("; ")[2]
        for key in ("attention.wq", "feed_forward.w1")
    }


class Normalized(Attention):
    def __init__(self, dim, heads):
        super().__init__(dim, heads)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-5)

    def forward(self, x, freqs_cis):
        bs, seqlen, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = self.q_norm(xq.view(bs, seqlen, -1, self.head_dim))
        xk = xk.view(bs, seqlen, -1, self.head_dim)
        xq, xk = apply_rotary_emb(xq, xk, freqs_cis=freqs_cis)
        return self.wo(xq.flatten(-2) * xk.flatten(-2) + xv)


def normalize(block):
    block.attention = Normalized(64, 2).bfloat16()


class Other(FeedForward):
    def forward(self, x):
        return self.w2(functional.gelu(self.w1(x)) * self.w3(x))


class PeekingQueries(Attention):
    def forward(self, x, freqs_cis):
        return self.wo(self.wq(x) + self.wk(x) + self.wv(x) + x)


def hook(block):
    block.feed_forward.register_forward_hook(lambda *_: None)


def bias(block):
    block.feed_forward.w3 = nn.Linear(64, 128).bfloat16()


def gelu(block):
    block.feed_forward = Other(64, 128).bfloat16()


def peek(block):
    block.attention = PeekingQueries(64, 2).bfloat16()


def replace(block):
    block.feed_forward.forward = lambda x: x


def nothing(block):
    pass


OTHER_FORMAT = Rule(layers=("w3",), roles=("grad_output",), format="e4m3fn")


@pytest.mark.parametrize(
    ("change", "options", "part", "reason"),
    [
        (hook, {}, "feed_forward.w1", "a FeedForward has hooks"),
        (bias, {}, "feed_forward.w1", "a linear has a bias"),
        (gelu, {}, "feed_forward.w1", "is not down(silu(gate(x)) * up(x))"),
        (replace, {}, "feed_forward.w1", "is not down(silu(gate(x)) * up(x))"),
        (peek, {}, "attention.wq", "reads its input by more than its linears"),
        (nothing, {"filter_fqns": ["w3"]}, "feed_forward.w1", "w3 is a Linear, which casts"),
        (nothing, {"rules": [OTHER_FORMAT]}, "feed_forward.w1", "its linears differ in recipe"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_not_fused_is_named(change, options, part, reason):
    found = reasons(change, **options)
    assert found[part].startswith("not fused: ")
    assert reason in found[part]
    (other,) = set(found) - {part}
    assert found[other].startswith("fused: ")


def test_a_rotation_that_is_not_fused_is_named():
    found = reasons(normalize)["attention.wq"]
    reason = "its query and key change before they are rotated"
    assert found == f"fused: norm, wq, wk, wv; not RoPE: {reason}"
    assert reasons(nothing)["attention.wq"] == "fused: norm, wq, wk, wv, RoPE"


def of_other_heads(block):
    block.attention.wv = nn.Linear(64, 48, bias=False)


def test_values_of_other_heads_leave_the_rotation_to_the_model():
    reason = "wv makes 48 features, no heads of 32"
    assert reasons(of_other_heads)["attention.wq"] == f"fused: norm, wq, wk, wv; not RoPE: {reason}"


def test_torchaos_linears_are_not_fused():
    found = ft.convert(Titan().bfloat16(), "tensorwise", kernels="plain", fuse=True)
    (why,) = {row.reason for row in ft.report(found).rows if ".w1" in row.path}
    assert "not fused: w1 is a Float8Linear, which casts by itself or not at all" in why


def test_a_norm_that_others_read_stays_a_module():
    class Reading(TransformerBlock):
        def forward(self, x, freqs_cis):
            y = self.attention_norm(x)
            h = x + self.attention(y, freqs_cis) + y
            return h + self.feed_forward(self.ffn_norm(h))

    class Again(TransformerBlock):
        def forward(self, x, freqs_cis):
            h = x + self.attention(self.attention_norm(x), freqs_cis)
            return h + self.feed_forward(self.ffn_norm(h)) + self.ffn_norm(x)

    assert forms.norm_name(TransformerBlock(), "attention") == "attention_norm"
    assert forms.norm_name(Reading(), "attention") == ""
    assert forms.norm_name(Reading(), "feed_forward") == "ffn_norm"
    assert forms.norm_name(Again(), "feed_forward") == ""


class Pair(nn.Module):
    """Two blocks that share a norm."""

    def __init__(self, shared):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = TransformerBlock(), TransformerBlock()
        for p in self.parameters():
            nn.init.normal_(p, std=0.5)
        setattr(self.second, shared, getattr(self.first, shared))

    def forward(self, x):
        return self.second(self.first(x, angles(16)), angles(16))


@pytest.mark.parametrize("shared", ["attention_norm", "ffn_norm"])
def test_a_norm_of_several_blocks_stays_a_module(shared):
    pairs = [
        ft.convert(Pair(shared).bfloat16(), "tensorwise", kernels="triton", fuse=fuse)
        for fuse in (False, True)
    ]
    x = torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        assert torch.equal(*(pair(x) for pair in pairs))


@pytest.mark.parametrize("register", ["one", "every"])
def test_a_hook_reads_what_a_norm_returned_before(register):
    found = []
    for fuse in (False, True):
        torch.manual_seed(0)
        block = TransformerBlock().bfloat16()
        nn.init.uniform_(block.ffn_norm.weight)
        ft.convert(block, "tensorwise", kernels="triton", fuse=fuse)
        outputs, handles = [], []

        def hook(module, inputs, y, *, outputs=outputs, norm=block.ffn_norm, handles=handles):
            if module is norm:
                outputs.append(y)
                handles.pop().remove()

        x = torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        if register == "one":
            handles.append(block.ffn_norm.register_forward_hook(hook))
        else:
            handles.append(nn.modules.module.register_module_forward_hook(hook))
        with torch.no_grad():
            y, again = (block(x, angles(16)) for _ in "ab")
        assert torch.equal(y, again)
        found.append((y, *outputs))
    assert len(found[0]) == 2
    assert all(map(torch.equal, *found))


def test_hooks_of_what_a_part_stands_for_are_called():
    block = ft.convert(TransformerBlock().bfloat16(), "tensorwise", kernels="triton", fuse=True)
    mlp = library("Llama").model.layers[0].mlp
    ft.convert(mlp, "tensorwise", kernels="triton", fuse=True)
    x, seen = torch.randn(1, 16, 64).bfloat16(), []
    block.feed_forward.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs))
    mlp.act_fn.register_forward_hook(lambda *_: seen.append("called"))
    with torch.no_grad():
        block(5 * x, angles(16))
        mlp(x)
    assert torch.isclose(seen[0].float().square().mean(), torch.tensor(1.0), rtol=0.1)  # normalized
    assert seen[1:] == ["called"]


def test_a_module_in_a_readers_place_reads_the_norm():
    x = torch.randn(1, 16, 64).bfloat16()
    blocks = [TransformerBlock().bfloat16() for _ in "ab"]
    blocks[1].load_state_dict(blocks[0].state_dict())
    other = Other(64, 128).bfloat16()
    with torch.no_grad():
        for block, fuse in zip(blocks, (False, True), strict=True):
            ft.convert(block, "tensorwise", kernels="triton", fuse=fuse)
            block.feed_forward = other
        assert torch.equal(*(block(5 * x, angles(16)) for block in blocks))


def test_a_fused_mlp_takes_its_input_by_name():
    class Named(FeedForward):
        def forward(self, hidden):
            return self.w2(functional.silu(self.w1(hidden)) * self.w3(hidden))

    class Second(FeedForward):
        def forward(self, other, x):
            return self.w2(functional.silu(self.w1(x)) * self.w3(x))

    names = ("w1", "w3", "w2")
    assert forms.swiglu_input(Second(64, 128), names) == ""
    mlp = Named(64, 128).bfloat16()
    assert forms.swiglu_input(mlp, names) == "hidden"
    ft.convert(mlp, "tensorwise", kernels="triton", fuse=True)
    x = torch.randn(1, 16, 64).bfloat16()
    assert torch.equal(mlp(hidden=x), mlp(x))


def test_an_unknown_option_is_an_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'fused'"):
        ft.convert(Titan(), "tensorwise", fused=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo's guards
@pytest.mark.parametrize("name", ["torchtitan", "llama"])
def test_a_compiled_fused_model_is_the_eager_one(name, ran):
    fused = ft.convert(MODELS[name](), "delayed", kernels="triton", fuse=True)
    eager = results(copy.deepcopy(fused))
    for layer in getattr(fused, "model", fused).layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert not differing(eager, results(fused))
    assert ("projections", True, ROTATED[name]) in ran
