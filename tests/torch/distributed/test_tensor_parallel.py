import dataclasses
import itertools

import pytest
import torch
from helpers.models.tensor_models import (
    CONFIG,
    build,
    exact,
    mesh,
    passed_exactly,
    some_gradient,
    some_tokens,
    whole,
)
from helpers.processes.ranks import run
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from fp8ref.torch.distributed import tensor_parallel
from fp8ref.torch.model import convert
from fp8ref.torch.observe.gemms import observe_gemms
from fp8ref.train.torch.llama.llama import Llama


def passed(recipe, sequence, config, parallel):
    """Logits and every gradient, whole, and the norm that clipping takes of them; then an
    update.
    """
    model = build(recipe, torch.float64, config)
    if parallel:
        model = tensor_parallel.parallelize(model, mesh(), sequence=sequence)
    y = model(some_tokens())
    assert not isinstance(y, DTensor)
    y.backward(some_gradient(y))
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert not any(
        g.placements[0].is_partial() for g in gradients.values() if isinstance(g, DTensor)
    )
    norm = torch.nn.utils.get_total_norm(list(gradients.values()))
    torch.optim.AdamW(model.parameters(), foreach=True).step()
    return {"logits": y.detach(), "norm": whole(norm)} | {
        name: whole(g) for name, g in gradients.items()
    }


@pytest.mark.parametrize(("sequence", "tied"), list(itertools.product([False, True], repeat=2)))
def test_in_float64_the_model_is_one_process_model(sequence, tied):  # P-14
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    expected = passed("bf16", False, config, parallel=False)
    for found in run(2, passed, "bf16", sequence, config, True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            # norms, rotary embeddings and SiLU compute in float32: some 10 roundings of 2^-24 a
            # layer; a lost or doubled sum is off by tens of percent
            assert (found[name] - value).norm() <= 100 * 2.0**-24 * value.norm(), name


def exact_models():
    """Without biases, with them, and with one more linear, which no plan cuts."""
    more = nn.Linear(32, 32).bfloat16()
    with torch.no_grad():
        more.weight.copy_(torch.eye(32).flip(0))
        more.bias.zero_()
    return [exact(False), exact(True), nn.Sequential(*exact(True), more)]


def cut_exactly(recipe):
    plan = {"0": "colwise", "1": "rowwise"}
    return [
        passed_exactly(tensor_parallel.parallelize(convert.convert(m, recipe), mesh(), plan=plan))
        for m in exact_models()
    ]


@pytest.mark.parametrize(
    "recipe", ["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "mxfp8"]
)
def test_where_sums_are_exact_a_plan_gives_what_one_process_gives(recipe):  # P-14, P-16
    expected = [passed_exactly(convert.convert(model, recipe)) for model in exact_models()]
    assert expected[0][0].count_nonzero() > 300
    for rank in run(2, cut_exactly, recipe):
        for found, whole_ones in zip(rank, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, whole_ones, strict=True))


def changed_in_place():
    """Of each recipe and style, whether an output that is changed in place has the bits of another
    one.
    """
    equal = {}
    for recipe, style in itertools.product(
        ("tensorwise", "rowwise", "delayed"), ("colwise", "rowwise")
    ):
        results = []
        for function in (torch.relu, torch.relu_):
            torch.manual_seed(0)
            model = convert.convert(
                nn.ModuleDict({"up": nn.Linear(64, 64, bias=False)}).bfloat16(), recipe
            )
            up = tensor_parallel.parallelize(model, mesh(), plan={"up": style})["up"]
            x = torch.randn(16, 64 if style == "colwise" else 32).bfloat16().requires_grad_()
            y = function(up(x))
            y.square().sum().backward()
            results.append([y.detach(), x.grad, whole(up.weight.grad)])
        equal[recipe, style] = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return equal


def test_an_output_may_be_changed_in_place():
    for equal in run(2, changed_in_place):
        assert all(equal.values()), equal


def gradients_of(parameters):
    """Gradients, whole, of a pass that starts from none."""
    gradients = [whole(p.grad).clone() for p in parameters]
    for p in parameters:
        p.grad = None
    return gradients


def of_no_tokens():
    """What is wrong with passes without tokens, between two with them, by recipe and style."""
    wrong = []
    cases = ["bf16", "tensorwise", "tensorwise with a bias", "rowwise", "delayed"]
    for case, style in itertools.product(cases, ("colwise", "rowwise")):
        recipe, bias = case.split()[0], "bias" in case
        torch.manual_seed(0)
        up = nn.Linear(64, 96, bias=bias).bfloat16()
        model = convert.convert(nn.ModuleDict({"up": up}), recipe)
        up = tensor_parallel.parallelize(model, mesh(), plan={"up": style})["up"]
        k, n = (64, 48) if style == "colwise" else (32, 96)
        x, passes, seen = torch.randn(2, 8, k).bfloat16().requires_grad_(), [], []
        for shape in ((2, 8), (0, 8), (2, 0), (0,), (2, 8)):
            rows = x if shape == (2, 8) else torch.ones(*shape, k).bfloat16().requires_grad_()
            with torch.no_grad():
                evaluated = up(rows)
            with observe_gemms(model, lambda *gemm: seen.append(gemm)):  # noqa: B023 (called here)
                y = up(rows)
                torch.relu_(y).square().sum().backward()
            gradients = [rows.grad.clone(), *gradients_of(list(up.parameters()))]
            rows.grad = None
            if evaluated.shape != y.shape or y.shape != (*shape, n) or isinstance(y, DTensor):
                wrong.append((recipe, style, shape, y.shape))
            if shape == (2, 8):
                passes.append([y.detach(), *gradients])
                seen.clear()
            elif seen or any(g.any() for g in gradients) or gradients[0].shape != rows.shape:
                wrong.append((recipe, style, shape, len(seen)))
        if not all(torch.equal(a, b) for a, b in zip(*passes, strict=True)):
            wrong.append((recipe, style, "the pass after it"))
    for sequence, shape in ((False, (2, 0)), (True, (0, 16))):
        model = tensor_parallel.parallelize(build("tensorwise"), mesh(), sequence=sequence)
        y = model(torch.zeros(shape, dtype=torch.int64))
        y.sum().backward()
        if y.shape != (*shape, 256) or any(g.any() for g in gradients_of(list(model.parameters()))):
            wrong.append((sequence, shape, y.shape))
    return wrong


def test_no_tokens_give_no_outputs_and_zeros_as_gradients():  # L-9; ao#1200, torchtitan#1166
    assert run(2, of_no_tokens) == [[], []]


def test_a_stand_in_for_no_tokens_leaves_other_calls_as_they_are():  # L-9
    linear, x = nn.Linear(8, 4), torch.randn(3, 8)
    expected = linear(x)
    tensor_parallel._stand_in_for_no_tokens(linear)
    assert torch.equal(linear(x), expected)
    assert torch.equal(linear(input=x), expected)
    assert linear(x[:0]).shape == (0, 4)


def on_two_dims(sequence):
    """Of a 2 x 2 mesh, the gradients of a batch that fsdp cuts, and the mean of those that tensor
    parallelism alone has for each part of it.
    """
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tensor"))
    tokens = some_tokens(4)

    def gradients(model, tokens):
        model(tokens).float().square().mean().backward()
        return {name: whole(p.grad) for name, p in model.named_parameters()}

    alone = [
        gradients(
            tensor_parallel.parallelize(
                build(dtype=torch.float32), grid["tensor"], sequence=sequence
            ),
            part,
        )
        for part in tokens.chunk(2)
    ]
    model = tensor_parallel.parallelize(
        build(dtype=torch.float32), grid["tensor"], sequence=sequence
    )
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
    """Of float32 masters that a step rounds first (spec M-2), and of a model in bfloat16: gradients
    of the matrices.
    """
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = tensor_parallel.parallelize(build(dtype=dtype), mesh(), sequence=True)
        parameters = dict(model.named_parameters())
        y = functional_call(
            model, {name: p.to(torch.bfloat16) for name, p in parameters.items()}, (some_tokens(),)
        )
        gradients = torch.autograd.grad(y.float().square().mean(), list(parameters.values()))
        assert all(g.dtype == dtype and not g.placements[0].is_partial() for g in gradients)
        found.append([whole(g).float() for g in gradients if g.ndim > 1])
    return found


def test_a_step_may_round_masters_first():  # P-14
    for masters, rounded in run(2, on_masters):
        assert all(torch.equal(a, b) for a, b in zip(masters, rounded, strict=True))


def with_a_nan(rank_of_nan):
    model = convert.convert(nn.Sequential(nn.Linear(64, 32, bias=False)).bfloat16(), "tensorwise")
    model = tensor_parallel.parallelize(
        nn.Sequential(nn.Identity(), model[0]), mesh(), plan={"1": "rowwise"}
    )
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
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = convert.convert(
        LlamaForCausalLM(config).double() if recipe == "bf16" else LlamaForCausalLM(config), recipe
    )
    if parallel:
        model = tensor_parallel.parallelize(model, mesh(), plan=Llama.tensor_plan.styles)
    logits = model(some_tokens() % 64).logits
    logits.square().sum().backward()
    return {"logits": logits.detach()} | {
        name: whole(p.grad) for name, p in model.named_parameters()
    }


def test_a_plan_parallelizes_hugging_faces_llama():  # P-14
    expected = hugging_face("bf16", parallel=False)
    for found in run(2, hugging_face, "bf16", True):
        for name, value in expected.items():
            assert (found[name] - value).norm() <= 100 * 2.0**-24 * value.norm(), name  # as above
