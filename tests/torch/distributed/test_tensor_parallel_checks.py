import dataclasses

import pytest
import torch
from helpers.models.tensor_models import CONFIG, build, mesh, some_tokens
from helpers.processes.ranks import run
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fp8ref.torch.distributed import tensor_parallel, tensor_parallel_checks
from fp8ref.torch.model import convert
from fp8ref.train.torch.llama.llama import Llama


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
    return tensor_parallel.parallelize(build(), mesh())


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
    "sequence of others": (
        linears,
        {"sequence": True, **COLUMN},
        "sequence needs .*got a Sequential with a plan.*Leave sequence",
    ),
    "sequence with a plan": (
        build,
        {"sequence": True, "plan": Llama.tensor_plan.styles},
        "got a Llama with a plan",
    ),
    "no style": (linears, {"plan": {"0": "column"}}, "colwise and rowwise; got 'column' for '0'"),
    "no linear": (linears, {"plan": {"q_proj": "colwise"}}, "'q_proj' matches none of: 0, 1"),
    "two styles": (
        linears,
        {"plan": {"0": "colwise", "*": "rowwise"}},
        r"a linear has one style; 0 has colwise and, by '\*', rowwise",
    ),
    "one kv head": (
        llamas(num_key_value_heads=1, num_attention_heads=2),
        {},
        "k_proj has 1 heads of 32, which 2 ranks do not cut evenly",
    ),
    "FP8 dims": (
        llamas(intermediate_size=48),
        {},
        "gate_proj is FP8 and colwise, its out_features a multiple of 16.*got 48, 24 on each",
    ),
    "odd dims": (
        lambda: nn.Sequential(nn.Linear(16, 33)),
        COLUMN,
        "0 is colwise, its out_features divisible by 2 ranks; got 33",
    ),
    "odd rows": (
        lambda: nn.Sequential(nn.Linear(33, 16)),
        {"plan": {"0": "rowwise"}},
        "0 is rowwise, its in_features divisible by 2.*got 33",
    ),
    "shared": (shared, COLUMN, r"0 shares its weight, and is cut: 0.weight, 1.weight. Untie"),
    "subclass": (
        lambda: nn.Sequential(Scaled(64, 64)),
        COLUMN,
        "0 is a Scaled, a subclass of nn.Linear",
    ),
    "beside": (
        lambda: nn.Sequential(nn.Linear(16, 16), Beside()),
        COLUMN,
        "1 has parameters next to modules",
    ),
    "a batch's amaxes": (
        lambda: build(amax_group=distributed.group.WORLD),
        {},
        r"q_proj shares amaxes with its batch's ranks.*Give amax_group",
    ),
    "a block": (
        lambda: convert.convert(nn.Sequential(nn.Linear(128, 128)), "blockwise"),
        COLUMN,
        r"^0 is colwise under recipe 'blockwise': its out_features is a multiple of 128 on each of 2 ranks; got 128, 64",
    ),
    "a short block": (
        lambda: convert.convert(nn.Sequential(nn.Linear(96, 32)), "mxfp8"),
        {"plan": {"0": "rowwise"}},
        r"^0 is rowwise under recipe 'mxfp8'.*its in_features is a multiple of 32 on each of 2 "
        r"ranks; got 96, 48",
    ),
    "compiled": (
        lambda: torch.compile(linears(), backend="eager"),
        {"plan": {"*": "colwise"}},
        "the model is compiled. Parallelize.*first",
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
            tensor_parallel.parallelize(model, on, **options)
        assert before == [(name, type(p.data)) for name, p in model.named_parameters()], message
    with pytest.raises(ValueError, match=r"T divisible by 2 ranks; got T = 15\. Pad them"):
        tensor_parallel.parallelize(build(), mesh(), sequence=True)(some_tokens(length=15))
    with torch._inductor.config.patch(_micro_pipeline_tp=True):
        for make, message in (
            (build, "got a mesh of cpu"),
            (lambda: build("delayed"), r"q_proj, fp8ref's own Linear.*Set .* to False"),
        ):
            with pytest.raises(ValueError, match=rf"asynchronous tensor parallelism .*{message}"):
                tensor_parallel.parallelize(make(), mesh())
    with pytest.raises(ValueError, match=r"q_proj (has forward hooks|is sharded already)"):
        convert.convert(tensor_parallel.parallelize(build("bf16"), mesh()), "tensorwise")
    return len(REFUSED)


def test_what_cannot_be_cut_is_refused():  # P-14
    assert run(2, refusals) == [len(REFUSED)] * 2


# ---- each by itself: no ranks, no mesh ----


def in_fp8(k, n):
    return convert.convert(nn.Sequential(nn.Linear(k, n, bias=False)).bfloat16(), "tensorwise")


@pytest.mark.parametrize(("style", "shape"), [("colwise", (16, 6)), ("rowwise", (6, 16))])
def test_the_dim_that_a_style_cuts_is_divided_evenly(style, shape):
    model, which = (
        nn.Sequential(nn.Linear(*shape)),
        {"colwise": "out_features", "rowwise": "in_features"}[style],
    )
    for ranks in (1, 2, 3, 6):
        tensor_parallel_checks.check_linear("0", model, style, ranks)
    for ranks in (4, 5, 12):
        with pytest.raises(
            ValueError,
            match=rf"^0 is {style}, its {which} divisible by {ranks} ranks; got 6\. Use fewer "
            r"ranks",
        ):
            tensor_parallel_checks.check_linear("0", model, style, ranks)


@pytest.mark.parametrize(("style", "shape"), [("colwise", (32, 96)), ("rowwise", (96, 32))])
def test_the_parts_of_an_fp8_linear_are_multiples_of_16(style, shape):
    model = in_fp8(*shape)
    for ranks in (1, 2, 3, 6):  # parts of 96, 48, 32 and 16
        tensor_parallel_checks.check_linear("0", model, style, ranks)
    for ranks in (4, 12):
        with pytest.raises(
            ValueError,
            match=rf"FP8 and {style}.* of 16 on each of {ranks} ranks; got 96, {96 // ranks} on "
            r"each",
        ):
            tensor_parallel_checks.check_linear("0", model, style, ranks)
        # in high precision it may be anything
        tensor_parallel_checks.check_linear("0", nn.Sequential(nn.Linear(*shape)), style, ranks)


class Heads(nn.Module):
    """Six heads of 4."""

    def __init__(self):
        super().__init__()
        self.head_dim, self.q, self.o = 4, nn.Linear(8, 24), nn.Linear(24, 8)


def test_heads_stay_whole():
    model = nn.ModuleDict({"attention": Heads()})
    for name, style in (("attention.q", "colwise"), ("attention.o", "rowwise")):
        for ranks in (1, 2, 3, 6):
            tensor_parallel_checks.check_linear(name, model, style, ranks)
        for ranks in (4, 8, 12):
            with pytest.raises(
                ValueError,
                match=rf"^{name} has 6 heads of 4, which {ranks} ranks do not cut evenly",
            ):
                tensor_parallel_checks.check_linear(name, model, style, ranks)


class Other(torch.Tensor):
    pass


def test_a_weight_of_another_kind_is_not_cut():
    model = nn.Sequential(nn.Linear(16, 16))
    model[0].weight = nn.Parameter(torch.ones(16, 16).as_subclass(Other))
    with pytest.raises(
        ValueError, match=r"^0 has a weight that is a Other, not plain\. Parallelize first"
    ):
        tensor_parallel_checks.check_linear("0", model, "colwise", 2)


def test_every_place_of_a_shared_parameter_is_named():
    model = nn.ModuleDict(
        {"up": nn.Linear(16, 16), "down": nn.Linear(16, 16), "last": nn.Linear(16, 16)}
    )
    model["down"].bias = model["last"].bias = model["up"].bias
    with pytest.raises(
        ValueError,
        match=r"^down shares its bias, and is cut: up\.bias, down\.bias, last\.bias\. Untie",
    ):
        tensor_parallel_checks.check_linear("down", model, "rowwise", 2)


@pytest.mark.parametrize(
    "recipe", ["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"]
)
def test_models_of_plain_linears_torchaos_and_fp8refs_are_cut(recipe):
    tensor_parallel_checks.check_model(build(recipe), None)


def test_a_sequence_is_cut_evenly():
    for ranks in (1, 2, 4, 8):
        tensor_parallel_checks.check_length(torch.zeros(3, 8), ranks)
    with pytest.raises(ValueError, match=r"T divisible by 3 ranks; got T = 8\. Pad them"):
        tensor_parallel_checks.check_length(torch.zeros(3, 8), 3)  # B is, T is not
