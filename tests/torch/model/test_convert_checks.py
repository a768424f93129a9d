import copy
import types

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import FullyShardedDataParallel
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from fp8ref.torch import delayed
from fp8ref.torch.model import convert, convert_checks

ways = pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])


@ways
def test_attributes_go_along_both_ways(recipe):
    flag = object()
    model = nn.Sequential(nn.Linear(32, 16))
    model[0].lr_mult, model[0]._is_hf_initialized, model[0].mask = 3, True, torch.ones(2)
    model[0].weight.tag = flag
    model = convert.convert(model, recipe)
    assert model[0]._is_hf_initialized
    assert convert.added_attributes(model[0]).keys() == {"lr_mult", "_is_hf_initialized", "mask"}
    model[0].lr_mult, model[0].later = 4, flag
    model[0](torch.ones(4, 32)).sum().backward()
    delayed.update(model)
    model = convert.deconvert(copy.copy(model))
    assert vars(model[0]).keys() - vars(nn.Linear(32, 16)).keys() == {
        "lr_mult",
        "_is_hf_initialized",
        "mask",
        "later",
    }
    assert (model[0].lr_mult, model[0].later, model[0].weight.tag) == (4, flag, flag)


def quantized():
    model = nn.Sequential(nn.Linear(64, 64))
    quantize_(model, Int8WeightOnlyConfig())
    return model


def with_(**attributes):
    """A model whose first linear was given them."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    for key, value in attributes.items():
        if key in ("weight", "bias"):
            delattr(model[0], key)
        setattr(model[0], key, value)
    return model


def sharded_by_fsdp1():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        return nn.Sequential(
            FullyShardedDataParallel(with_(), device_id=torch.device("cpu"), use_orig_params=True)
        )
    finally:
        torch.distributed.destroy_process_group()


def bound():
    model = with_()
    model[0].hello = types.MethodType(lambda self: self, model[0])
    return model


def encoder():
    return nn.Sequential(nn.TransformerEncoderLayer(64, 4, 128))


class Attention(nn.MultiheadAttention):
    """With torch's own forward pass, which reads ``out_proj.weight``."""

    def __init__(self):
        super().__init__(64, 4)
        self.gate = nn.Linear(64, 64)

    def forward(self, x):
        return self.gated(super().forward(x, x, x)[0], x)

    def gated(self, y, x):
        return y * self.gate(x).sigmoid()


class AttentionOfItsOwn(Attention):
    def forward(self, x):
        return self.out_proj(x)


class Encoder(nn.TransformerEncoderLayer):
    """Whose fast path leaves out its own method too."""

    def forward(self, src):
        return nn.TransformerEncoderLayer.forward(self, src)

    def _ff_block(self, x):
        return self.linear2(self.linear1(x))


class Own(nn.TransformerEncoderLayer):
    def forward(self, src):
        return self.linear2(self.linear1(src))


@pytest.mark.filterwarnings("ignore:.*FullyShardedDataParallel|FSDP.*")
@ways
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: with_(state_dict=dict),
            "^0 is a Linear whose state_dict was replaced, which would be lost",
        ),
        (
            lambda: with_(reset_parameters=print),
            "^0 is a Linear whose reset_parameters was replaced, which would be lost",
        ),
        (bound, "^0 has a method of its own, hello"),
        (
            lambda: with_(config={}),
            "^0 has an attribute config, which has another meaning in an FP8 linear",
        ),
        (lambda: with_(of=1), "^0 has an attribute of, which"),
        (
            lambda: with_(weight=torch.ones(16, 16)),
            r"^0 has a weight that is a Tensor; convert takes an nn\.Parameter.*filter_fqns",
        ),
        (lambda: with_(bias=torch.ones(16)), "^0 has a bias that is a Tensor"),
        (lambda: with_(weight=None), "^0 has a weight that is a NoneType"),
        (quantized, "^0 has a weight that is a Int8Tensor.*before you shard, quantize"),
        (
            lambda: nn.MultiheadAttention(64, 4),
            r"^out_proj is never called: nn\.MultiheadAttention reads its weight.*filter_fqns",
        ),
        (
            sharded_by_fsdp1,
            "^0 is sharded by FullyShardedDataParallel. Convert a model first, then shard it",
        ),
        (encoder, r"^0\.self_attn\.out_proj is never called"),
        (Attention, r"^out_proj is never called: nn\.MultiheadAttention reads its weight"),
    ],
)
def test_what_would_be_lost_is_refused(recipe, build, message):
    model = build()
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=message):
        convert.convert(model, recipe)
    assert [type(m) for m in model.modules()] == kinds


@ways
def test_a_linear_that_torchs_fast_path_leaves_out_is_refused(recipe):
    x = torch.randn(2, 16, 64)
    for name in ("linear1", "linear2"):
        model = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True).eval()
        for refused in (model, Encoder(64, 4, 128)):
            with pytest.raises(
                ValueError,
                match=rf"^{name} is not called in torch's fast "
                r"path.*set_fastpath_enabled\(False\) first",
            ):
                convert.convert(
                    refused, recipe, filter_fqns=["out_proj", *{"linear1", "linear2"} - {name}]
                )
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        plain = copy.deepcopy(model)(x)
        convert.convert(model, recipe, filter_fqns=["out_proj"])
        if recipe == "delayed":
            delayed.calibrate(model, [x])
        with torch.no_grad():
            found = model(x)
        assert torch.equal(found, model(x))
        assert not torch.equal(found, plain)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_layers_that_call_their_linears_are_converted():
    decoder = convert.convert(
        nn.TransformerDecoderLayer(64, 4, 128), "tensorwise", filter_fqns=["out_proj"]
    )
    own = convert.convert(Own(64, 4, 128), "tensorwise", filter_fqns=["out_proj"])
    assert isinstance(decoder.linear1, convert.FP8_LINEARS)
    assert isinstance(own.linear2, convert.FP8_LINEARS)
    assert isinstance(
        convert.convert(Attention(), "tensorwise", filter_fqns=["out_proj"]).gate,
        convert.FP8_LINEARS,
    )
    assert isinstance(
        convert.convert(AttentionOfItsOwn(), "tensorwise").out_proj, convert.FP8_LINEARS
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: setattr(m, "state_dict", dict),
            "0 is a .*Linear whose state_dict was replaced.*Undo",
        ),
        (
            lambda m: setattr(m, "extra_repr", str),
            "0 is a .*Linear whose extra_repr was replaced.*Undo",
        ),
    ],
)
@ways
def test_a_way_back_that_would_lose_a_method_is_refused(recipe, change, message):
    model = convert.convert(nn.Sequential(nn.Linear(16, 16)), recipe)
    change(model[0])
    with pytest.raises(ValueError, match=message):
        convert.deconvert(model)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0)])
def test_a_gpu_without_fp8_is_named(capability, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    with FakeTensorMode():
        model = nn.ModuleDict({"up": nn.Linear(32, 32, bias=False, device="meta")})
        model["up"].weight = nn.Parameter(torch.empty(32, 32, device="cuda"))
    if capability >= (8, 9):
        convert_checks.check_linear("up", dict(model.named_modules()), model)
        return
    with pytest.raises(
        ValueError,
        match=rf"up lies on A GPU of compute capability {capability[0]}\.{capability[1]}; .* "
        r"8\.9 or later",
    ):
        convert.convert(model, "tensorwise")
