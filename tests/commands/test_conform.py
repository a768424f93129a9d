"""The conform command: from a file with somebody's function to what it is, and to an exit code."""

import json

import pytest

from fp8ref import cli

FUNCTIONS = """
import numpy as np
import torch
from fp8ref.formats import E2M1FN, E4M3FN, E5M2
from fp8ref.spec.attention.variants import FULL
from fp8ref.sim.attention import attention
from fp8ref.sim.quantize import cast, packing, scaling
from fp8ref.sim.gemm import gemm
from fp8ref.sim.states import states


def to_fp8(x):
    return x.to(torch.float8_e4m3fn)


def from_fp8(codes):
    return cast.decode(codes, E4M3FN)


def ties_away(x):
    return cast.encode(x, E4M3FN, rounding="nearest_away")


def rows(x):
    q = scaling.quantize(x, E4M3FN, granularity="rowwise", policy="torchao_pow2")
    return q.codes, q.scale_inv


def columns(x):
    q = scaling.quantize(x, E4M3FN, granularity="rowwise", axis=0)
    return q.codes, q.scale


def slow(a, b):
    return gemm.matmul(a, b, accumulate="hopper_slow")


def on_a_gpu(x):
    return x.cuda()


def random(x):
    return np.random.default_rng().integers(0, 100, x.shape, dtype=np.uint8)


def vector(x):
    assert x.ndim == 1
    return rows(x[None])


def scaled_cast(x, scale):
    return cast.encode(x * scale, E4M3FN)


def three(x):
    print("now I cast")
    return cast.encode(x, E4M3FN)


def narrow(x):
    return cast.encode(x, E5M2)


def four(x):
    return cast.encode(x, E2M1FN)


def nvfp4(x):
    q = scaling.quantize(x, E2M1FN, granularity="nvfp4_1x16", policy="te_nvfp4")
    return packing.pack(q.codes), q.scale_inv, q.tensor_scale_inv


def step(p, g, state, learning_rate, b1, b2, eps, weight_decay):
    print("now I step")
    state = states.init(p.shape, "te") if state is None else state
    optimizer = states.AdamW(
        learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, layout="te"
    )
    return states.step(p, g, state, optimizer)


def attend(q, k, v, mask=FULL):
    print("now I attend")
    return attention.forward(q, k, v, variant="fa4_threshold4", mask=mask).o


def turned(q, k, v):
    return attend(*(x.transpose(0, 2, 1, 3) for x in (q, k, v))).transpose(0, 2, 1, 3)


constant = 3
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "somebodys_functions.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def run(*arguments):
    return cli.main(["conform", *arguments])


def test_a_cast_and_a_quantizer_of_4_bits(functions, capsys):  # C-9, S-22
    assert run("somebodys_functions:four", "--format", "e2m1fn", "--expect", "saturating") == 0
    assert "somebodys_functions:four is 'saturating'" in capsys.readouterr().out
    assert run("somebodys_functions:four", "--format", "e2m1fn", "--expect", "ml_dtypes") == 1
    given = ("somebodys_functions:nvfp4", "--format", "e2m1fn", "--granularity", "nvfp4_1x16")
    assert run(*given, "--expect", "te_nvfp4", "--json", "found.json") == 0
    found = json.loads((functions / "found.json").read_text())
    assert found["is"]["profiles"] == ["te-nvfp4"]
    assert found["is"]["scales"] == {"[1]": "scale_inv", "[2]": "tensor_scale_inv"}
    assert run(*given, "--expect", "torchao_nvfp4") == 1


def test_a_cast_by_name(functions, capsys):
    assert (
        run(
            "somebodys_functions:to_fp8",
            "--format",
            "e4m3fn",
            "--expect",
            "torch",
            "--json",
            "found.json",
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "somebodys_functions:to_fp8: a cast of torch arrays, e4m3fn" in said
    assert "somebodys_functions:to_fp8 is 'torch'" in said
    found = json.loads((functions / "found.json").read_text())
    assert found["ok"]
    assert found["is"]["behavior"] == ["torch"]
    keys = (
        "rounding",
        "saturates",
        "double_rounding",
        "inf_code",
        "nan_code",
        "subnormals",
        "negative_zero",
        "policy",
    )
    assert [found["is"][key] for key in keys] == [
        "nearest_even",
        True,
        None,
        0x7E,
        0x7F,
        "kept",
        "kept",
        None,
    ]


def test_a_wrong_cast_exits_with_1_and_says_all_there_is_to_know(functions, capsys):
    assert run("somebodys_functions:ties_away") == 1
    assert (
        "rounds nearest_away, overflow gives max, infinities max. It matches no known name"
        in capsys.readouterr().out
    )
    assert (
        run("somebodys_functions:ties_away", "--expect", "saturating", "--json", "found.json") == 1
    )
    said = capsys.readouterr().out
    assert (
        "somebodys_functions:ties_away is not 'saturating', but a cast to e4m3fn that rounds "
        "nearest_away" in said
    )
    assert "1.0625 (float32 0x3F880000): got 0x39 = 1.125, expected 0x38 = 1 (C-2)" in said
    found = json.loads((functions / "found.json").read_text())
    assert not found["ok"]
    witness = found["differences"][0]
    assert (witness["bits"], witness["dtype"], witness["got"], witness["clause"]) == (
        ["0x3F880000"],
        "float32",
        "0x39 = 1.125",
        "C-2",
    )


def test_a_name_is_shown_as_it_is_and_what_a_function_prints_is_not_the_answer(functions, capsys):
    (functions / "casts.py").write_text((functions / "somebodys_functions.py").read_text())
    assert run("casts:three:") == 2  # no such attribute, and no emoji either
    assert "casts:three:" in capsys.readouterr().err
    assert run("casts:three") == 0
    shown = capsys.readouterr()
    assert "casts:three: a cast of numpy arrays" in shown.out
    assert "now I cast" not in shown.out
    assert "now I cast" in shown.err


def test_another_format_than_was_asked_exits_with_1(functions, capsys):
    assert run("somebodys_functions:narrow") == 1
    assert (
        "a cast to e5m2 (max 57344), not e4m3fn (max 448), equal to saturating"
        in capsys.readouterr().out
    )
    assert run("somebodys_functions:narrow", "--format", "e5m2") == 0


def test_a_quantizer_by_its_policy(functions, capsys):
    assert (
        run(
            "somebodys_functions:rows",
            "--expect",
            "torchao_pow2",
            "--granularity",
            "rowwise",
            "--axis",
            "-1",
            "--json",
            "found.json",
        )
        == 0
    )
    found = json.loads((functions / "found.json").read_text())
    assert found["kind"] == "quantizer"
    assert [found["is"][key] for key in ("granularity", "axis", "returns", "policy")] == [
        "rowwise",
        -1,
        "scale_inv",
        "torchao_pow2",
    ]
    capsys.readouterr()
    assert run("somebodys_functions:columns", "--expect", "torchao", "--axis", "-1") == 1
    assert "x [2, 2] of ones, x[0, 1] = 512" in capsys.readouterr().out


def test_a_name_of_another_kind_exits_with_1(functions, capsys):
    assert run("somebodys_functions:ties_away", "--expect", "torchao") == 1
    assert (
        "expected 'torchao', a policy: codes that depend on the amax of a tensor (S-5)"
        in capsys.readouterr().out
    )
    assert run("somebodys_functions:rows", "--expect", "saturating") == 1
    assert (
        "expected 'saturating', a cast: codes that depend on each number alone (C-1)"
        in capsys.readouterr().out
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decoder", "dequantizer"])
def test_a_decoder_by_either_name(functions, kind, capsys):  # F-1
    assert run("somebodys_functions:from_fp8", "--kind", kind) == 0
    assert "a right decoder of e4m3fn" in capsys.readouterr().out


def test_a_gemm_is_handed_over_to_the_probe(functions, capsys):
    assert run("somebodys_functions:slow", "--json", "found.json") == 0
    assert "results have the simulator's bits under it" in capsys.readouterr().out
    found = json.loads((functions / "found.json").read_text())
    assert found["plan"]["promotion"] == 128
    assert run("somebodys_functions:slow", "--expect", "torchao") == 2
    assert (
        "or attention; somebodys_functions:slow is a GEMM. Leave it out" in capsys.readouterr().err
    )


def test_an_optimizer_and_the_layout_that_it_should_have(functions, capsys):
    assert run("somebodys_functions:step", "--expect", "te", "--json", "found.json") == 0
    said = capsys.readouterr()
    assert (
        "somebodys_functions:step is 'te': layout 'te', bit for bit, in the order of clause O"
        in said.out
    )
    assert "now I step" not in said.out
    found = json.loads((functions / "found.json").read_text())
    assert (found["ok"], found["kind"], found["is"]["layout"], found["state_shown"]) == (
        True,
        "optimizer",
        "te",
        True,
    )
    assert run("somebodys_functions:step", "--expect", "fishman", "--numbers", "b2=0.999") == 1
    assert "step 1, tensor spread, scale_inv of m: got" in capsys.readouterr().out


@pytest.mark.slow
def test_attention_and_the_variant_that_it_should_be(functions, capsys):
    assert run("somebodys_functions:attend", "--expect", "fa4", "--json", "found.json") == 1
    said = capsys.readouterr()
    assert "somebodys_functions:attend is not 'fa4', but 'fa4_threshold4', bit for bit" in said.out
    assert "threshold: 4 powers of two, in the variant 0.0" in said.out
    assert "] of case 'ordinary'" in said.out
    assert "now I attend" not in said.out
    found = json.loads((functions / "found.json").read_text())
    assert (found["ok"], found["kind"], found["is"], found["exact"], found["nearest"]) == (
        False,
        "attention",
        "fa4_threshold4",
        True,
        "fa4",
    )
    assert {finding["what"] for finding in found["findings"]} > {
        "tiles",
        "threshold",
        "promotion",
        "heads",
        "causal mask",
    }
    assert (
        run(
            "somebodys_functions:turned",
            "--layout",
            "BTHD",
            "--framework",
            "numpy",
            "--expect",
            "fa4_threshold4",
        )
        == 0
    )
    assert "somebodys_functions:turned is 'fa4_threshold4', bit for bit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["attend", "--steps", "3"],
            "--steps is for an optimizer; somebodys_functions:attend is attention. Leave it out",
        ),
        (["attend", "--alignment", "top"], "alignment is one of end, start; got 'top'"),
        (["attend", "--layout", "TBHD"], "layout is one of BHTD, BTHD; got 'TBHD'"),
        (["attend", "--expect", "torchao"], "expect is one of exact, bf16"),
        (
            ["rows", "--alignment", "end"],
            "--alignment is for attention; somebodys_functions:rows is a quantizer",
        ),
        (
            ["rows", "--layout", "BTHD"],
            "--layout is for a decoder or attention; somebodys_functions:rows is a quantizer",
        ),
        (["rows", "--kind", "attention"], "somebodys_functions:rows raised"),
        (
            ["ties_away", "--format", "float16"],
            "--format is one of e4m3fn, e5m2, e4m3fnuz, e5m2fnuz, e2m1fn, e2m3fn, e3m2fn, e3m4",
        ),
        (
            ["rows", "--format", "e2m3fn"],
            "a quantizer's format is one of e4m3fn, e5m2, e4m3fnuz, e5m2fnuz, e2m1fn; got 'e2m3fn'",
        ),
        (
            ["attend", "--format", "e2m1fn"],
            "--format of attention is one of e4m3fn, e5m2, e4m3fnuz, e5m2fnuz; got e2m1fn",
        ),
        (
            ["slow", "--format", "e2m1fn"],
            "--formats takes two of e4m3fn, e5m2, e4m3fnuz, e5m2fnuz; got e2m1fn",
        ),
        (
            ["four", "--format", "e2m1fn", "--expect", "jax"],
            "is expected to be one of saturating, ml_dtypes, torchao_f4; got 'jax'",
        ),
        (["four", "--format", "e2m1fn", "--exhaustive"], "exhaustive is of casts to FP8"),
        (
            ["ties_away", "--kind", "norm"],
            "--kind is one of cast, quantizer, decoder, gemm, optimizer, attention; got norm",
        ),
        (
            ["ties_away", "--axis", "1"],
            "--axis is -1, the last axis of x [M, K], or 0, the first; got 1",
        ),
        (
            ["ties_away", "--expect", "te"],
            "--expect is a cast's behavior, one of saturating, non_saturating",
        ),
        (
            ["ties_away", "--granularity", "rowwise"],
            "--granularity is for a quantizer or a decoder or a GEMM; somebodys_functions:ties_away is a cast.",
        ),
        (
            ["ties_away", "--framework", "mxnet"],
            "framework is one of numpy, torch, jax; got 'mxnet'",
        ),
        (
            ["ties_away", "--json", "missing/found.json"],
            "--json names a file in a directory that exists",
        ),
        (
            ["rows", "--exhaustive"],
            "--exhaustive is for a cast; somebodys_functions:rows is a quantizer",
        ),
        (
            ["rows", "--axis", "0"],
            "--granularity and --axis need an expected policy. Name one, such as --expect torchao.",
        ),
        (
            ["rows", "--numbers", "b2=0.9"],
            "--numbers is for an optimizer; somebodys_functions:rows is a quantizer",
        ),
        (
            ["rows", "--steps", "7"],
            "--steps is for an optimizer; somebodys_functions:rows is a quantizer",
        ),
        (["step", "--steps", "0"], "steps is an integer of at least 1; got 0"),
        (
            ["step", "--numbers", "momentum=0.9"],
            "--numbers are KEY=VALUE, with a key of learning_rate, b1, b2, eps, weight_decay; got",
        ),
        (
            ["step", "--axis", "0"],
            "--axis is for a quantizer; somebodys_functions:step is an optimizer",
        ),
        (["step", "--expect", "torch"], "expect is one of float32, bfloat16, msamp"),
        (["rows", "--kind", "optimizer"], "somebodys_functions:rows is no optimizer"),
        (["missing"], "somebodys_functions:missing cannot be imported from"),
        (["constant"], "somebodys_functions:constant is a int; a function is needed"),
        (["on_a_gpu", "--framework", "torch"], "somebodys_functions:on_a_gpu raised"),
        (["random", "--kind", "cast"], "somebodys_functions:random does not repeat itself"),
        (["vector", "--kind", "quantizer"], "A quantizer is called with x [M, K]"),
        (
            ["scaled_cast"],
            "somebodys_functions:scaled_cast has two arguments without defaults, so it was "
            "called as a GEMM",
        ),
        (
            ["rows", "--kind", "cast"],
            "a cast gives one array of codes or values. Of a quantizer use require_quantizer, or --kind quantizer.",
        ),
    ],
)
def test_what_a_user_can_do_wrong_exits_with_2(functions, arguments, said, capsys):
    assert run(f"somebodys_functions:{arguments[0]}", *arguments[1:]) == 2
    assert said in capsys.readouterr().err


def test_a_module_that_is_not_there(functions, capsys):
    assert run("no_such_module:cast") == 2
    assert "no_such_module:cast cannot be imported" in capsys.readouterr().err
    assert run("somebodys_functions") == 2
    assert "a function is named as module:function" in capsys.readouterr().err
