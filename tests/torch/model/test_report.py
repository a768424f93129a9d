"""What a report says of a model: layers in FP8, what is not and why, shares; and the line that
convert logs.
"""

import copy
import logging
import pickle
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize, prune

from fp8ref import torch as ft
from fp8ref.torch.experts import gemm as grouped_gemm
from fp8ref.torch.model import report as reports

D, F, TOKENS, EXPERTS = 32, 64, 8, 4


class Experts(nn.Module):
    """A router, and experts in one parameter."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, 16, bias=False)
        self.up = nn.Parameter(torch.ones(EXPERTS, D, F))

    def forward(self, x):
        self.router(x)
        return torch.bmm(x.reshape(1, -1, D).expand(EXPERTS, -1, -1), self.up)[0, :, :D].reshape(
            x.shape
        )


class Conv1D(nn.Module):
    """As the class of transformers: [K, N]."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D, F))

    def forward(self, x):
        return (x.reshape(-1, D) @ self.weight)[:, :D].reshape(x.shape)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(48, D)
        self.norm = nn.BatchNorm1d(TOKENS)
        self.conv = nn.Conv1d(D, D, 3, padding=1)
        self.attend, self.unused = nn.Linear(D, D), nn.Linear(D, D)
        self.mixture, self.old = Experts(), Conv1D()
        self.head, self.odd = nn.Linear(D, 48, bias=False), nn.Linear(D, 24)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        x = functional.dropout(self.attend(self.conv(x.mT).mT))
        x = functional.scaled_dot_product_attention(x, x, x)
        x = self.old(self.mixture(x))
        return self.head(x), self.odd(x)


INPUTS = (torch.zeros(1, TOKENS, dtype=torch.long),)


def of(rows, path="", kind=None):
    (row,) = [row for row in rows if row.path == path and kind in (None, row.kind)]
    return row


def converted(recipe="rowwise"):
    return ft.convert(Model(), recipe, filter_fqns=["head"])


def test_rows():
    found = ft.report(converted(), INPUTS)
    attend = of(found.rows, "attend")
    assert (attend.recipe, attend.kernel, attend.kind, attend.shape) == (
        "rowwise",
        "torch._scaled_mm",
        "Float8Linear",
        (D, D),
    )
    assert (attend.parameters, attend.in_fp8, attend.multiplications) == (
        D * D + D,
        D * D,
        TOKENS * D * D,
    )
    for path, reason in {
        "unused": "never called",
        "head": "filter_fqns 'head'",
        "odd": "needs multiples of",
        "conv": "convolutions",
        "mixture": "a parameter of 3 dims outside linears",
        "old": "a Conv1D of transformers",
    }.items():
        assert reason in of(found.rows, path).reason
    assert [row.path for row in found.rows if row.recipe] == ["attend", "unused", "mixture.router"]
    assert of(found.rows, "head").multiplications == TOKENS * D * 48
    assert of(found.rows, "mixture").multiplications == EXPERTS * TOKENS * D * F
    assert of(found.rows, "old").multiplications == TOKENS * D * F
    assert of(found.rows, "conv").multiplications == TOKENS * D * D * 3
    assert of(found.rows, kind="vectors").parameters == 2 * TOKENS


class Reads(nn.Module):
    """Multiplies by the weight of ``read``, which it does not call; ``kept`` has a linear that
    convert replaces elsewhere.
    """

    def __init__(self):
        super().__init__()
        self.read, self.called, self.held = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.kept = [self.held]

    def forward(self, x):
        return self.kept[0](functional.linear(self.called(x), self.read.weight))


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_a_weight_that_is_read_is_not_multiplied_in_fp8(recipe):
    found = ft.report(ft.convert(Reads(), recipe), (torch.ones(TOKENS, D),))
    assert [(row.path, row.multiplications) for row in found.rows if row.recipe] == [
        ("read", 0),
        ("called", TOKENS * D * D),
        ("held", 0),
    ]
    assert {row.reason for row in found.rows if row.recipe and not row.multiplications} == {
        "never called"
    }
    outside = [row for row in found.rows if not row.recipe]
    assert [row.multiplications for row in outside] == [TOKENS * D * D] * 2
    assert [row.reason for row in outside] == [
        f"reads {name}.weight and does not call the linear: in high precision"
        for name in ("read", "held")
    ]
    assert found.multiplications == 1 / 3
    assert "reads read.weight" in found.summary()


def test_shares():
    model = converted()
    found, parameters = ft.report(model, INPUTS), sum(p.numel() for p in model.parameters())
    assert sum(row.parameters for row in found.rows) == parameters
    assert found.parameters == (2 * D * D + 16 * D) / parameters
    fp8 = TOKENS * D * D + TOKENS * D * 16
    # conv, experts, old, head, odd; attention's two
    others = TOKENS * D * (D * 3 + EXPERTS * F + F + 48 + 24) + 2 * TOKENS * TOKENS * D
    assert found.multiplications == fp8 / (fp8 + others)
    assert ft.report(model).multiplications is None
    assert ft.report(Model()).parameters == 0
    assert of(ft.report(nn.Sequential(nn.Embedding(16, 16))).rows, "0").reason.startswith("a table")


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "mxfp8", "blockwise", "bf16"])
def test_multiplications_of_every_recipe(recipe):
    """Whether codes are multiplied or, of blocks, dequantized values."""
    model = ft.convert(nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 24)), recipe)
    found = ft.report(model, (torch.ones(TOKENS, 128),))
    assert found.multiplications == (0 if recipe == "bf16" else 128 / (128 + 24))
    kernel = {
        "bf16": None,
        "mxfp8": "float32 on dequantized codes",
        "blockwise": "float32 on dequantized codes",
    }
    assert found.rows[0].kernel == kernel.get(recipe, "torch._scaled_mm")


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_a_pass_changes_nothing_and_needs_no_memory_on_meta(recipe):
    model = converted(recipe)
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = ft.report(model, INPUTS)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert not any(state.seen.any() for _, state in ft.delayed.states(model))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert (
        ft.report(model.to("meta"), (INPUTS[0].to("meta"),)).multiplications
        == found.multiplications
    )


def test_reasons_stay_with_copies_and_go_with_fp8():
    model = nn.Sequential(converted(), nn.Linear(D, D))
    for again in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.compile(model, backend="eager"),
    ):
        found = {row.path.removeprefix("_orig_mod."): row.reason for row in ft.report(again).rows}
        assert found["0.head"] == "named by filter_fqns 'head'"
        assert found["1"] == "not converted"
    parts = ft.convert(Model(), "rowwise", filter_fqns=["head", "attend"])
    # as a part of its own: it is replaced, and not in the model
    ft.convert(parts.attend, "rowwise")
    vars(parts)["_modules"]["attend"] = ft.convert(parts.attend, "delayed")
    assert of(ft.report(parts).rows, "attend").recipe == "delayed"
    plain = ft.deconvert(model)
    assert {vars(module).keys() & {"_fp8_reasons"} == set() for module in plain.modules()} == {True}
    assert ft.report(plain).left_out


def test_a_table():
    lines = str(ft.report(converted(), INPUTS)).splitlines()
    assert lines[0].split() == [
        "layer",
        "kind",
        "shape",
        "recipe",
        "kernel",
        "parameters",
        "multiplications",
        "why",
    ]
    (attend,) = [line for line in lines if line.startswith("attend")]
    assert attend.split()[:7] == [
        "attend",
        "Float8Linear",
        "32x32",
        "rowwise",
        "torch._scaled_mm",
        "1,056",
        "8,192",
    ]
    assert lines[-1].startswith("3 layers in FP8 (rowwise by torch._scaled_mm), ")


def test_convert_prints_a_line_at_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    ft.convert(model, "rowwise", filter_fqns=["1"])
    assert capsys.readouterr().out == (
        "fp8: 1 of 2 layers (rowwise); in high precision: 1. "
        "print(fp8ref.torch.report(model)) says why.\n"
    )


def test_one_process_of_torchrun_prints_before_they_are_a_group(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for rank, lines in (("1", 0), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        ft.convert(nn.Sequential(nn.Linear(D, D)), "rowwise")
        assert capsys.readouterr().out.count("\n") == lines


def test_convert_logs_one_line_and_warns_of_experts(caplog):
    with caplog.at_level(logging.INFO, "fp8ref.torch"):
        converted()
        ft.convert(nn.Sequential(nn.Linear(D, D)), "rowwise")
    warned, quiet = caplog.records
    assert warned.levelno == logging.WARNING
    for part in (
        "convert: Model: 3 layers in FP8 (rowwise by torch._scaled_mm)",
        "mixture (Experts: a parameter of 3 dims",
        "filter_fqns 'head'",
        "old (Conv1D: ",
    ):
        assert part in warned.getMessage()
    assert quiet.levelno == logging.INFO
    assert (
        quiet.getMessage()
        == "convert: Sequential: 1 layer in FP8 (rowwise by torch._scaled_mm), 97.0% of the "
        "parameters."
    )


def test_a_lazy_module_is_refused_before_anything_changes():
    model = nn.Sequential(nn.LazyLinear(D), nn.Linear(D, D))
    for filtered in ([], ["0"]):
        with pytest.raises(
            ValueError,
            match=r"0\.weight is of a lazy module, without a shape yet\. Run a forward pass first",
        ):
            ft.convert(model, "rowwise", filter_fqns=filtered)
    with pytest.raises(ValueError, match="lazy"):
        ft.report(model)
    assert type(model[1]) is nn.Linear
    model(torch.ones(TOKENS, D))
    assert ft.report(ft.convert(model, "rowwise")).parameters == 2 * D * D / (2 * D * D + 2 * D)


def triangular(linear):
    return parametrize.register_parametrization(linear, "weight", Triangle())


class Triangle(nn.Module):
    def forward(self, weight):
        return weight.tril()


def normed(linear):
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(linear)


@pytest.mark.parametrize(
    ("changed", "parameters"),
    [
        (triangular, 0),
        (nn.utils.parametrizations.weight_norm, D),
        (normed, D),
        (lambda linear: prune.l1_unstructured(linear, "weight", 0.5), 0),
    ],
)
def test_a_linear_whose_weight_is_computed_counts_as_one(changed, parameters):
    """Its parameters, of whatever names, and its multiplications."""
    model = ft.convert(
        nn.Sequential(changed(nn.Linear(D, D)), nn.Linear(D, D)), "rowwise", filter_fqns=["0"]
    )
    found = ft.report(model, (torch.ones(TOKENS, D),))
    row = of(found.rows, "0")
    assert (row.shape, row.parameters, row.reason) == (
        (D, D),
        D * D + D + parameters,
        "named by filter_fqns '0'",
    )
    assert found.multiplications == 1 / 2
    assert not found.surprising


def test_what_is_added_or_a_recurrence_is_no_expert(caplog):
    """Positions [1, T, D] and a class token [1, 1, D], as of vision transformers; modules of
    torch's that multiply by themselves.
    """

    class Vision(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.positions = (
                nn.Parameter(torch.ones(1, 1, D)),
                nn.Parameter(torch.ones(1, TOKENS, D)),
            )
            self.up = nn.Linear(D, D)

    with caplog.at_level(logging.INFO, "fp8ref.torch"):
        found = ft.report(ft.convert(Vision(), "rowwise"))
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert not found.experts
    assert of(found.rows, "Vision").reason.startswith("a parameter whose first dim is 1")
    others = ft.report(
        ft.convert(nn.ModuleList([nn.LSTM(D, D), nn.Bilinear(D, D, D), nn.Linear(D, D)]), "rowwise")
    )
    assert [row.reason for row in others.surprises] == [
        f"torch's {kind} multiplies by itself, in high precision" for kind in ("LSTM", "Bilinear")
    ]
    assert not others.experts


def test_a_model_without_linears_says_what_it_has():
    for model, filtered in (
        (nn.Sequential(Conv1D()), []),
        (nn.Sequential(Conv1D(), nn.Linear(D, D)), ["1"]),
    ):
        with pytest.raises(
            ValueError,
            match=r"converts no linear \(.*\)\. .* Of 1 other modules with matrices the first "
            r"are 0 \(Conv1D: a Conv1D",
        ):
            ft.convert(model, "rowwise", filter_fqns=filtered)
    with pytest.raises(
        ValueError,
        match=r"converts no linear \(the model has no linears\)\. Change filter_fqns or use "
        r"recipe 'bf16'\.$",
    ):
        ft.convert(nn.Sequential(nn.Conv1d(D, D, 3)), "rowwise")


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
        "moe_intermediate_size": 48,
        "num_experts": 16,
        "num_experts_per_tok": 2,
    },
}
# (an expert's inner features, experts, features of all heads)
STRUCTURE = {"Mixtral": (64, 4, 32), "Qwen3Moe": (48, 16, 32)}


def mixture(name, device, **sizes):
    transformers = pytest.importorskip("transformers")
    with torch.device(device):
        return getattr(transformers, f"{name}ForCausalLM")(
            getattr(transformers, f"{name}Config")(**sizes)
        ).bfloat16()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
@pytest.mark.parametrize("name", SMALL)
def test_experts_of_transformers_are_named_with_their_shares(name, recipe, device, caplog):
    model = mixture(name, device, **SMALL[name])
    with caplog.at_level(logging.WARNING, "fp8ref.torch"):
        ft.convert(model, recipe, filter_fqns=["lm_head"])
    (line,) = [record.getMessage() for record in caplog.records if record.name == "fp8ref.torch"]
    assert (
        f"model.layers.0.mlp.experts ({name}Experts: a parameter of 3 dims outside linears: experts"
        in line
    )

    found = ft.report(model, (torch.zeros(1, TOKENS, dtype=torch.long, device=device),))
    inner, number, heads = STRUCTURE[name]
    layers, hidden, vocabulary, chosen = 2, 32, 64, 2
    assert [row.path for row in found.experts] == [
        f"model.layers.{i}.mlp.experts" for i in range(layers)
    ]
    for row in found.experts:
        assert row.recipe is None
        assert row.parameters == number * 3 * hidden * inner
        # gate and up, and down, of the experts that a token is given
        assert row.multiplications == TOKENS * chosen * 3 * hidden * inner
    fp8 = TOKENS * 4 * hidden * heads  # q, k, v and o: as many key heads as query heads
    router, scores = TOKENS * hidden * number, 2 * heads * TOKENS * TOKENS
    everything = (
        layers * (fp8 + router + scores + TOKENS * chosen * 3 * hidden * inner)
        + TOKENS * hidden * vocabulary
    )
    assert found.multiplications == layers * fp8 / everything
    shares = (
        layers * row.parameters / sum(p.numel() for p in model.parameters()),
        layers * row.multiplications / everything,
    )
    assert (
        found.share_of(found.experts),
        found.share_of(found.experts, multiplications=True),
    ) == shares
    said = "Experts, which stay in high precision, have {:.1%} of the parameters"
    assert f"{said} and {{:.1%}} of the multiplications.".format(*shares) in found.summary()
    assert line.endswith(f"{said.format(shares[0])}.")


REAL = {
    # Mixtral 8x7B; Qwen3-30B-A3B
    "Mixtral": ({}, 46_702_792_704, (0.966, 0.816)),
    "Qwen3Moe": (
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        30_532_122_624,
        (0.950, 0.389),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_experts_at_real_sizes_need_no_memory(name):
    """On the meta device, of a sequence of 4096."""
    sizes, parameters, shares = REAL[name]
    model = ft.convert(mixture(name, "meta", **sizes), "tensorwise", filter_fqns=["lm_head"])
    found = ft.report(model, (torch.zeros(1, 4096, dtype=torch.long, device="meta"),))
    assert sum(row.parameters for row in found.rows) == parameters
    assert (
        round(found.share_of(found.experts), 3),
        round(found.share_of(found.experts, multiplications=True), 3),
    ) == shares


def test_a_report_is_of_a_module():
    with pytest.raises(ValueError, match=r"a model is an nn\.Module; got a int"):
        ft.report(3)


def test_multiplications_of_every_grouped_kernel():
    """An output [M, D] of M rows of C, whether the operator takes the name of the GEMM first or
    not.
    """
    a, b, out = (
        torch.empty(shape, device="meta") for shape in ((TOKENS, D), (EXPERTS, F, D), (TOKENS, F))
    )
    scale = torch.empty((TOKENS, 1), device="meta")
    each, high, kernel, deep = grouped_gemm.OPERATORS
    for func, args in (
        (each, ("output", a, scale, b)),
        (high, ("output", a, b)),
        (kernel, (a, scale, b)),
        (deep, (a, scale, b)),
    ):
        assert reports._multiplications(func, args, {}, out) == TOKENS * F * D, func
