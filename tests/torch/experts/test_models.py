"""Layers of experts whose products become grouped linears (spec X-11)."""

import copy
import io
import logging

import pytest
import torch
from helpers.processes.ranks import run
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

from fp8ref import torch as ft
from fp8ref.recipe import RECIPES
from fp8ref.torch import delayed
from fp8ref.torch.experts import grouped
from fp8ref.torch.experts import models as experts
from fp8ref.torch.model.convert_checks import FP8_LINEARS

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
SMALL = {
    "Mixtral": {**SIZES, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {
        **SIZES,
        "head_dim": 16,
        "moe_intermediate_size": 64,
        "num_experts": 16,
        "num_experts_per_tok": 2,
    },
}
IDS = torch.arange(32).reshape(2, 16) * 7 % 64


def model_of(name, dtype=torch.bfloat16, **sizes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL.get(name, SIZES) | sizes)
    return getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)


def converted(name, recipe, **sizes):
    return ft.convert(model_of(name, **sizes), recipe, filter_fqns=["lm_head"], experts=True)


def in_high_precision(x, w, ends, **_):
    """What ``grouped.apply`` stands for, by a loop."""
    ends = ends.tolist()
    parts = [
        functional.linear(x[begin:end], w[e])
        for e, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    return torch.cat([*parts, x.new_zeros(len(x) - ends[-1], w.shape[1])])


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
@pytest.mark.parametrize("name", SMALL)
def test_a_mixture_of_transformers_is_converted_and_trains(name, recipe, caplog):
    with caplog.at_level(logging.INFO, "fp8ref.torch"):
        model = converted(name, recipe)
    (record,) = [record for record in caplog.records if record.name == "fp8ref.torch"]
    assert record.levelno == logging.INFO  # nothing surprises
    found = ft.report(model, (IDS,))
    assert found.parameters > 0.9
    assert not found.experts
    rows = {row.path: row for row in found.rows}
    of_experts, router = rows["model.layers.0.mlp.experts"], rows["model.layers.0.mlp.gate"]
    assert (of_experts.recipe, of_experts.kernel, of_experts.reason) == (
        recipe,
        "one GEMM for each group",
        "converted",
    )
    assert of_experts.in_fp8 == of_experts.parameters
    inner = 64
    # gate, up and down of two experts a token
    assert of_experts.multiplications == IDS.numel() * 2 * 3 * 32 * inner
    assert (router.recipe, router.reason) == (None, "a router: it stays in high precision (X-11)")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        delayed.update(model)
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1
    states = dict(delayed.states(model))
    # layers; linears and weights of experts; roles
    assert len(states) == (2 * (4 + 2) * 3 if recipe == "delayed" else 0)
    assert all(int(state.step) == 6 for state in states.values())


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_other_recipes_run(recipe):
    model = converted("Qwen3Moe", recipe)
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Mixtral", {}),
        ("Qwen3Moe", {}),
        ("GptOss", {"intermediate_size": 32, "num_local_experts": 4}),
    ],
)
def test_all_but_the_products_is_as_transformers_has_it(name, sizes, monkeypatch):
    """With products in float64 the experts' outputs and gradients are those of transformers, to the
    rounding of float64 sums in another order.

    GptOss's weights are transposed and have biases; its activation is another.
    """
    plain = model_of(name, torch.float64, head_dim=16, **sizes)
    module = next(m for m in plain.modules() if experts.kind_of(m))
    for p in module.parameters():
        nn.init.normal_(p)
    module.config._experts_implementation = "eager"
    made = copy.deepcopy(module)
    experts.convert(only := {"experts": made}, experts.plan(only, experts.by_name("rowwise")))
    monkeypatch.setattr(grouped, "apply", in_high_precision)
    x, index = (
        torch.randn(12, 32, dtype=torch.float64),
        torch.rand(12, module.num_experts).topk(2).indices,
    )
    weights = torch.rand(12, 2, dtype=torch.float64)
    index[index == 1] = 0  # expert 1 has no token; some have expert 0 twice
    found = []
    for one in (module, made):
        given = x.clone().requires_grad_(), weights.clone().requires_grad_()
        out = one(given[0], index, given[1])
        out.square().sum().backward()
        found.append([out, *(v.grad for v in given), *(p.grad for p in one.parameters())])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-9, atol=1e-9 * float(theirs.detach().abs().max())
        )


def test_experts_elsewhere_have_no_rows():
    """Under expert parallelism transformers sends tokens of other ranks to an index past the last,
    with weight 0.
    """
    model = converted("Mixtral", "rowwise")
    module = model.model.layers[0].mlp.experts
    x = torch.randn(8, 32).bfloat16()
    index, weights = torch.tensor([[0, 4]] * 4 + [[4, 4]] * 4), torch.ones(8, 2).bfloat16()
    x[4:] = torch.nan
    out = module(x.requires_grad_(), index, weights)
    out[:4].float().sum().backward()
    assert out.isfinite().all()
    assert not out[4:].any()
    assert not x.grad[4:].any()
    weights[:, 1] = 0
    assert torch.equal(out, module(x, index, weights))


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_it_saves_and_loads(recipe, tmp_path):
    model = converted("Mixtral", recipe)
    model(IDS, labels=IDS).loss.backward()
    delayed.update(model)
    expected = model.eval()(IDS).logits
    # the whole state, to resume
    again = converted("Mixtral", recipe, initializer_range=0.5).eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(IDS).logits, expected)
    # a copy, and a pickle
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(IDS).logits, expected)
    # the weights, for transformers
    model.save_pretrained(tmp_path, state_dict=ft.weights(model))
    plain = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert plain.state_dict().keys() == ft.weights(model).keys()
    loaded = ft.convert(plain, "rowwise", filter_fqns=["lm_head"], experts=True).eval()
    if recipe == "rowwise":
        assert torch.equal(loaded(IDS).logits, expected)


def test_a_conversion_keeps_parameters_and_is_undone():
    model = model_of("Mixtral")
    before, kinds, keys = (
        list(model.parameters()),
        [type(m) for m in model.modules()],
        list(model.state_dict()),
    )
    calls = []
    model.model.layers[0].mlp.experts.register_forward_hook(lambda *_: calls.append(1))
    ft.convert(model, "delayed", filter_fqns=["lm_head"], experts=True)
    module = model.model.layers[0].mlp.experts
    assert isinstance(module, experts.Experts)
    assert isinstance(
        module,
        kinds[[type(m).__name__ for m in model_of("Mixtral").modules()].index("MixtralExperts")],
    )
    assert "recipe=delayed" in repr(module)
    model(IDS)
    assert calls
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    ft.deconvert(model)
    assert ([type(m) for m in model.modules()], list(model.state_dict())) == (kinds, keys)


def test_filter_fqns_leaves_experts_out():
    model = ft.convert(
        model_of("Mixtral"),
        "rowwise",
        filter_fqns=["lm_head", "layers.0.mlp.experts"],
        experts=True,
    )
    assert [isinstance(layer.mlp.experts, experts.Experts) for layer in model.model.layers] == [
        False,
        True,
    ]
    assert len(ft.report(model).experts) == 1


def test_without_the_word_experts_stay():
    model = ft.convert(model_of("Mixtral"), "rowwise", filter_fqns=["lm_head"])
    assert not any(isinstance(m, experts.Experts) for m in model.modules())


class Titan(nn.Module):
    """torchtitan's GroupedExperts (commit 003edbe, models/moe/moe.py), its parameters and
    arguments; w*_EFD since models/common/moe.py.
    """

    def __init__(self, names):
        super().__init__()
        self.num_experts = 4
        for name, shape in zip(names, ((4, 64, 32), (4, 32, 64), (4, 64, 32)), strict=True):
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 8))

    def forward(self, x, num_tokens_per_expert):
        raise AssertionError("replaced")


class TitanDispatching(Titan):
    """A later one, whose forward pass also dispatches (models/common/moe.py)."""

    def forward(self, x, num_tokens_per_expert, extra):
        return self._experts_forward(x, num_tokens_per_expert) + extra

    def _experts_forward(self, x, num_tokens_per_expert):
        raise AssertionError("replaced")


class TitanFused(nn.Module):
    """The newest: gate and up interleaved in one weight, and one method for all products."""

    def __init__(self):
        super().__init__()
        self.num_experts = 4
        self.w13, self.w2_EDF = (
            nn.Parameter(torch.randn(4, 128, 32) / 8),
            nn.Parameter(torch.randn(4, 32, 64) / 8),
        )

    def forward(self, x, num_tokens_per_expert):
        ends = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
        gate, up = (
            self._grouped_mm(A=x.bfloat16(), weight_EOI=self.w13.bfloat16(), offs=ends)
            .reshape(-1, 64, 2)
            .unbind(-1)
        )
        return self._grouped_mm(
            A=functional.silu(gate) * up, weight_EOI=self.w2_EDF, offs=ends
        ).type_as(x)

    def _grouped_mm(self, *, A, weight_EOI, offs):
        raise AssertionError("replaced")


def by_titan(module, x, sizes):
    """silu(x w1) * (x w3), times w2, for each expert, in bfloat16."""
    found = []
    for e, rows in enumerate(x[: sum(sizes)].bfloat16().split(sizes)):
        if hasattr(module, "w13"):
            first, third, second = module.w13[e, ::2], module.w13[e, 1::2], module.w2_EDF[e]
        else:
            first, second, third = (p[e] for p in module.parameters())
        h = functional.silu(functional.linear(rows, first.bfloat16())) * functional.linear(
            rows, third.bfloat16()
        )
        found.append(functional.linear(h, second.bfloat16()))
    return torch.cat(found).float()


TITANS = {
    "w1": lambda: Titan(("w1", "w2", "w3")),
    "w1_EFD": lambda: Titan(("w1_EFD", "w2_EDF", "w3_EFD")),
    "dispatching": lambda: TitanDispatching(("w1_EFD", "w2_EDF", "w3_EFD")),
    "fused": TitanFused,
}


@pytest.mark.parametrize("name", TITANS)
def test_torchtitans_experts(name, monkeypatch):
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"router": nn.Linear(32, 16), "experts": TITANS[name](), "shared": nn.Linear(32, 16)}
    )
    model["experts"].num_experts = 16 if name == "w1" else 4  # as many as the router has outputs
    if name == "w1":
        for key, p in list(model["experts"].named_parameters()):
            setattr(model["experts"], key, nn.Parameter(p.repeat(4, 1, 1)))
    plain = copy.deepcopy(model["experts"])
    ft.convert(model, "rowwise", experts=True)
    assert [type(m).__name__ for m in model.values()][1] == type(plain).__name__
    report = {row.path: row for row in ft.report(model).rows}
    assert report["experts"].recipe == "rowwise"
    # a linear with an output for each expert, of such a name
    assert (report["router"].recipe is None) == (name == "w1")
    assert report["shared"].recipe == "rowwise"
    sizes = [5, 0, 20, 3] + [0] * (model["experts"].num_experts - 4)
    x, more = torch.randn(32, 32), (torch.zeros(()),) if name == "dispatching" else ()
    x[28:] = torch.nan
    # torch.histc counts in floats
    counts = torch.tensor(sizes, dtype=torch.float32 if name == "w1" else torch.int64)
    given = x.clone().requires_grad_()
    out = model["experts"](given, counts, *more)
    out.sum().backward()
    assert not out[28:].any()
    assert given.grad.isfinite().all()
    assert all(p.grad[1].eq(0).all() and p.grad[2].any() for p in model["experts"].parameters())
    monkeypatch.setattr(grouped, "apply", in_high_precision)
    torch.testing.assert_close(
        model["experts"](x, counts, *more)[:28], by_titan(plain, x, sizes), rtol=0, atol=0
    )


def test_compiled():
    module = converted("Mixtral", "rowwise").model.layers[0].mlp.experts
    x, index, weights = (
        torch.randn(8, 32).bfloat16(),
        torch.rand(8, 4).topk(2).indices,
        torch.rand(8, 2).bfloat16(),
    )
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, index, weights), module(x, index, weights))


REAL = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
} | {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "share"), [("Mixtral", {}, 0.994), ("Qwen3Moe", REAL, 0.979)]
)
def test_shares_at_real_sizes(name, sizes, share):
    """Mixtral 8x7B and Qwen3-30B-A3B, on the meta device; of the multiplications those of 4,096
    tokens.
    """
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(
            getattr(transformers, f"{name}Config")(**sizes)
        ).bfloat16()
    ft.convert(model, "rowwise", filter_fqns=["lm_head"], experts=True)
    found = ft.report(model, (torch.zeros(1, 4096, dtype=torch.long, device="meta"),))
    assert round(found.parameters, 3) == share
    assert found.multiplications > 0.5
    assert not found.experts


def over_ranks(recipe):
    """Whether the gradients of a model that FSDP2 shards are the mean of the ranks' own, and the
    states of delayed scaling.
    """
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("fsdp",))
    group = mesh.get_group() if recipe == "delayed" else None
    models = [
        ft.convert(
            model_of("Mixtral", torch.float32),
            recipe,
            filter_fqns=["lm_head"],
            experts=True,
            amax_group=group,
        )
        for _ in range(2)
    ]
    sharded, plain = models
    for p in plain.parameters():
        p.data = p.data.bfloat16()  # and no buffer, which FSDP2 leaves as it is
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in (*sharded.model.layers, sharded):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    ids = IDS[distributed.get_rank() :][:1]
    for model in models:
        model(ids, labels=ids).loss.backward()
        delayed.update(model)
    equal = []
    for (name, p), q in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        mean = q.grad.float()
        distributed.all_reduce(mean)
        equal.append((name, torch.equal(p.grad.full_tensor(), mean / distributed.get_world_size())))
    states = [
        torch.equal(a.scale, b.scale)
        for (_, a), (_, b) in zip(*map(delayed.states, models), strict=True)
    ]
    return [name for name, same in equal if not same], states


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_under_fsdp2(recipe):
    for different, states in run(2, over_ranks, recipe):
        assert not different
        assert states == [True] * (36 if recipe == "delayed" else 0)


def llama4():
    torch.manual_seed(0)
    sizes = {
        **SIZES,
        "head_dim": 16,
        "intermediate_size": 64,
        "intermediate_size_mlp": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
    }
    model = transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(**sizes, moe_layers=[0, 1])
    ).bfloat16()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(std=0.1)
    return model


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "delayed"])
def test_llama4s_experts_are_converted_and_train(recipe, monkeypatch):
    plain, model = llama4(), ft.convert(llama4(), recipe, filter_fqns=["lm_head"], experts=True)
    layer, before = (m.model.layers[0].feed_forward for m in (model, plain))
    assert isinstance(layer.experts, experts.OfSortedRows)
    assert type(layer.router) is type(before.router)
    model(IDS, labels=IDS).loss.backward()
    delayed.update(model)
    assert all(p.grad.isfinite().all() and p.grad.any() for p in layer.experts.parameters())
    rows = torch.randn(4 * 16, 32).bfloat16()
    y, expected = layer.experts(rows), before.experts(rows)
    # two products of two casts, each by 2^-4 of its number; SwiGLU multiplies two of the first
    assert (y - expected).norm() < 6 * 2.0**-4 * expected.norm()
    monkeypatch.setattr(grouped, "apply", in_high_precision)
    assert torch.equal(layer.experts(rows), before.experts(rows))
    restored = ft.deconvert(model).model.layers[0].feed_forward.experts
    assert type(restored) is type(before.experts)


def test_in_evaluation_nothing_is_observed():  # H-4
    model = converted("Mixtral", "delayed").eval()
    with pytest.warns(
        UserWarning,
        match="q_proj scales by earlier steps under delayed scaling, and no update has set its "
        "scales",
    ):
        model(IDS, labels=IDS).loss.backward()
    assert not any(state.seen.any() for _, state in delayed.states(model))


def test_what_is_refused():
    with pytest.raises(
        ValueError, match="experts=True converts no experts \\(the model has none that is known\\)"
    ):
        ft.convert(nn.Sequential(nn.Linear(32, 32)), "rowwise", experts=True)
    with pytest.raises(
        ValueError,
        match=r"gate_up_proj \[4, 128, 32\] has no multiple of 128 inputs, or of 128 outputs",
    ):
        ft.convert(model_of("Mixtral"), "blockwise", filter_fqns=["lm_head"], experts=True)
    with pytest.raises(
        ValueError, match="converts no experts \\(experts: its weights share one method"
    ):
        ft.convert(
            nn.ModuleDict({"linear": nn.Linear(32, 32), "experts": TitanFused()}),
            "delayed",
            experts=True,
        )
    model = converted("Mixtral", "rowwise")
    with pytest.raises(
        ValueError, match=r"is already FP8|converts no experts \(the model has none"
    ):
        ft.convert(model, "rowwise", experts=True)
    model = model_of("Mixtral")
    module = model.model.layers[0].mlp.experts
    module.forward = module.forward
    with pytest.raises(
        ValueError, match=r"layers\.0\.mlp\.experts has a forward of its own, which would be lost"
    ):
        ft.convert(model, "rowwise", filter_fqns=["lm_head"], experts=True)
    model = model_of("Mixtral")
    model.model.layers[1].mlp.experts.to(torch.float64)
    with pytest.raises(ValueError, match=r"has a gate_up_proj of torch.float64"):
        ft.convert(model, "rowwise", filter_fqns=["lm_head"], experts=True)
    # nothing was changed
    assert not any(isinstance(m, (experts.Experts, *FP8_LINEARS)) for m in model.modules())


def test_grouped_recipes_by_a_linears():
    assert (
        experts.by_name("rowwise")
        == experts.by_name(RECIPES["rowwise"])
        != experts.by_name("tensorwise")
    )
    assert experts.by_name(RECIPES["rowwise"]).recipe.grad_input.accumulate == "fast"
