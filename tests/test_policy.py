import dataclasses
import sys
import types
from pathlib import Path

import pytest

from fp8ref import policy
from fp8ref.formats import BFLOAT16, FLOAT16
from fp8ref.policy import POLICIES, ScalePolicy


def test_torchao_is_eps_1e_12_and_no_power_of_two():  # S-3
    assert (POLICIES["torchao"].eps, POLICIES["torchao"].power_of_two) == (1e-12, None)


def test_eps_is_that_of_torchao():  # S-3
    from torchao.float8.float8_utils import EPS

    assert {p.eps for p in POLICIES.values() if p.floored_quotient} == {EPS}


def test_every_policy_has_its_own_name_and_decisions():  # S-9
    assert all(name == policy.name for name, policy in POLICIES.items())
    assert len({dataclasses.replace(p, name="") for p in POLICIES.values()}) == len(POLICIES)


def test_the_backends_policies_differ_in_eps_and_power_of_two_alone():  # S-3
    assert [name for name, p in POLICIES.items() if p.floored_quotient] == [
        "torchao",
        "torchao_pow2",
        "torchao_mask",
    ]
    assert ScalePolicy(name="mine", eps=1e-6).floored_quotient
    other = {
        "margin": 1,
        "ratio": "max*(1/amax)",
        "overflow": "float32_max",
        "zero": "one",
        "infinite": "keep",
        "nan": "one",
    }
    for key, value in {**other, "stored": "scale_inv"}.items():
        assert not ScalePolicy(name="mine", eps=1e-12, **{key: value}).floored_quotient, key


FURTHER = (
    "mx_ceil",
    "mx_even",
    "te_block_unmasked_bf16",
    "torchao_adamw_fp8",
    "deepseek_v3",
    "deepseek_v3_2024",
    "deepseek_v3_ue8m0",
    "microxcaling",
    "gfloat",
    "qwix",
    "qwix_bf16",
    "qwix_mx",
    "qwix_mx_0.1.8",
    "vllm",
    "vllm_ue8m0",
    "vllm_ue8m0_cuda",
    "vllm_token",
    "sglang_cuda",
    "sglang_ue8m0",
    "flashinfer",
    "compressed_tensors",
    "compressed_tensors_bf16",
    "modelopt_bf16",
    "modelopt_mx",
    "mx_floor_0.19",
    "mx_ceil_0.19",
    "mx_even_0.19",
    "mx_rceil_0.19",
)


def test_backends_implement_none_of_the_further_ones():  # S-20
    assert not any(POLICIES[name].in_backends for name in FURTHER)
    assert [name for name, p in POLICIES.items() if p.in_backends] == [
        "torchao",
        "torchao_pow2",
        "torchao_mask",
        "mx_floor",
        "mx_rceil",
        "te_mxfp8",
        "te_mxfp8_2.13",
        "deepgemm",
        "deepgemm_cpu",
        "deepgemm_ue8m0",
        "sglang",
        "vllm_native",
        "sglang_token",
    ]


@pytest.fixture
def planted(monkeypatch):
    """``fp8ref.policy`` with a decision more in ScalePolicy and in E8M0Rule, which nothing reads."""
    source = Path(policy.__file__).read_text(encoding="utf-8")
    for line in (
        "    two_level: TwoLevel | None = None\n",
        '    infinite: Literal["computed", "as_nan"] = "computed"\n',
    ):
        assert source.count(line) == 1
        source = source.replace(line, f"{line}    planted: int = 0\n")
    module = types.ModuleType("planted_policy")
    module.__file__ = policy.__file__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, module.__name__, "exec"), module.__dict__)
    return module.POLICIES


def test_a_decision_that_the_backends_do_not_know_is_refused(planted):  # S-9
    assert {n for n, p in planted.items() if p.in_backends} == {
        n for n, p in POLICIES.items() if p.in_backends
    }
    for name, scale_policy in planted.items():
        changed = [dataclasses.replace(scale_policy, planted=1)]
        if scale_policy.e8m0 is not None:
            rule = dataclasses.replace(scale_policy.e8m0, planted=1)
            changed.append(dataclasses.replace(scale_policy, e8m0=rule))
        for each in changed:
            assert (each.in_backends, each.finite_quotient) == (False, False), name


def test_attention_of_backends_asks_for_decisions_and_not_for_a_name():  # S-9
    assert [name for name, p in POLICIES.items() if p.finite_quotient] == ["te_current"]
    current = POLICIES["te_current"]
    assert dataclasses.replace(current, name="mine").finite_quotient
    for key, value in {"margin": 1, "overflow": "inf", "nan": "keep", "eps": 1e-12}.items():
        assert not dataclasses.replace(current, **{key: value}).finite_quotient, key


def test_every_policy_names_the_clause_that_decides_it():
    clauses = {
        "torchao": "S-3",
        "torchao_pow2": "S-4",
        "torchao_mask": "S-4",
        "flax": "S-13",
        "flax_bf16": "S-13",
        "msamp": "S-15",
        "transformers": "S-15",
    }
    clauses |= {
        "deepgemm": "S-17",
        "deepgemm_cpu": "S-17",
        "sglang": "S-17",
        "vllm_native": "S-17",
        "sglang_token": "S-17",
        "deepgemm_ue8m0": "S-14",
    }
    clauses |= dict.fromkeys(("mx_floor", "mx_rceil", "te_mxfp8", "te_mxfp8_2.13"), "S-14")
    clauses |= dict.fromkeys(
        ("te_current", "te_delayed", "te_block", "verl_torch"), "S-9"
    ) | dict.fromkeys(FURTHER, "S-20")
    assert {name: p.clause for name, p in POLICIES.items()} == clauses


def test_which_policies_keep_a_previous_scale():  # S-11
    assert {name for name, p in POLICIES.items() if p.keeps} == {
        "te_delayed",
        "flax",
        "flax_bf16",
        "msamp",
    }


@pytest.mark.parametrize(
    ("name", "power_of_two"), [("torchao_pow2", "exp2_log2"), ("torchao_mask", "mask")]
)
def test_the_power_of_two_policies_differ_in_that_alone(name, power_of_two):  # S-4
    assert POLICIES[name] == ScalePolicy(name=name, eps=1e-12, power_of_two=power_of_two)


def test_by_name_finds_every_policy():
    named = {
        "torchao",
        "te_delayed",
        "te_current",
        "te_block",
        "flax",
        "msamp",
        "mx_floor",
        "mx_rceil",
    }
    assert named < {policy.by_name(name).name for name in POLICIES}


def test_by_name_returns_a_policy_itself():
    mine = ScalePolicy(name="mine", eps=1e-6)
    assert policy.by_name(mine) is mine


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'deepseek'") as error:
        policy.by_name("deepseek")
    assert all(name in str(error.value) for name in POLICIES)


E8M0 = policy.E8M0Rule(scale_of_code_0=1.0, scale_of_nan="nan")


@pytest.mark.parametrize(
    ("decisions", "message"),
    [
        ({"eps": -1e-12}, "eps must be in"),
        ({"eps": 1.0}, "eps must be in"),
        ({"eps": float("nan")}, "eps must be in"),
        ({"margin": -1}, r"margin is an integer in \[0, 64\]"),
        ({"margin": 65}, "margin"),
        ({"margin": 0.5}, "margin"),
        ({"margin": True}, "margin"),
        ({"ratio": "amax / max"}, r"ratio is one of max/amax"),
        ({"inverse": "amax/max"}, r"inverse is one of reciprocal, amax\*\(1/max\)"),
        ({"ratio": "amax/max", "inverse": "amax*(1/max)"}, "so inverse is 'reciprocal'"),
        ({"overflow": "max"}, "overflow is one of inf, float32_max, bfloat16_max"),
        ({"zero": "previous"}, "zero is one of compute, one, keep"),
        ({"infinite": "inf"}, "infinite is one of"),
        ({"nan": "nan"}, "nan is one of"),
        ({"stored": "both"}, "stored is one of scale, scale_inv"),
        ({"compute": BFLOAT16}, "with stored='scale_inv'"),
        ({"compute": FLOAT16, "stored": "scale_inv"}, "compute is float32, or bfloat16"),
        ({"e8m0": E8M0, "power_of_two": "mask"}, "e8m0 needs ratio"),
        ({"ratio": "exponents", "power_of_two": "mask"}, "need an E8M0Rule"),
        (
            {"ratio": "amax/max", "power_of_two": "mask"},
            "exponents and power_of_two 'mask' need an E8M0Rule",
        ),
        (
            {"ratio": "amax*(1/max)", "eps": 1e-4, "zero": "one"},
            r"'amax\*\(1/max\)' makes scale_inv, so zero is 'compute'",
        ),
        (
            {"ratio": "amax/max", "stored": "scale_inv", "power_of_two": "mask", "e8m0": E8M0},
            "so stored is 'scale'",
        ),
        (
            {"power_of_two": "cut"},
            "'cut', one_below, factor and scale_dtype need a ratio that makes scale_inv",
        ),
        ({"one_below": 0.5}, "need a ratio that makes scale_inv"),
        ({"replaced": 0.5}, "need a ratio that makes .* so do replaced and 'up'; .* replaced=0.5"),
        ({"power_of_two": "up"}, "need a ratio that makes scale_inv"),
        (
            {"ratio": "amax/max", "power_of_two": "up", "e8m0": E8M0},
            "needs power_of_two 'mask' or 'exp2_log2'",
        ),
        (
            {"ratio": "amax/max", "replaced": 0.5, "power_of_two": "mask", "e8m0": E8M0},
            "so replaced is 1.0",
        ),
        ({"factor": 1.5}, "need a ratio that makes scale_inv"),
        ({"scale_dtype": BFLOAT16}, "need a ratio that makes scale_inv"),
        ({"ratio": "amax/max", "scale_dtype": FLOAT16}, "scale_dtype is float32 or bfloat16"),
        ({"ratio": "amax/max", "factor": 2.0}, r"factor in \(0, 2\)"),
        ({"ratio": "amax/max", "one_below": 1.0}, r"one_below in \[0, 1\)"),
        (
            {"ratio": "amax/max", "factor": 1.5, "power_of_two": "mask", "e8m0": E8M0},
            "so factor is 1.0",
        ),
        (
            {"ratio": "amax/max", "power_of_two": "cut", "e8m0": E8M0},
            "needs power_of_two 'mask' or 'exp2_log2'",
        ),
        (
            {"ratio": "exponents_up", "power_of_two": "exp2_log2", "e8m0": E8M0},
            "needs power_of_two 'mask'",
        ),
        ({"ratio": "amax/max", "e8m0": E8M0}, "'exp2_log2'; got None"),
        (
            {"ratio": "amax/max", "power_of_two": "mask", "e8m0": E8M0, "margin": 1},
            "so margin is 0",
        ),
        (
            {"ratio": "exponents", "power_of_two": "mask", "e8m0": E8M0, "eps": 1e-9},
            "so eps is 0.0",
        ),
        (
            {"ratio": "amax/max", "power_of_two": "mask", "e8m0": E8M0, "zero": "one"},
            "so zero is 'compute'",
        ),
    ],
)
def test_decisions_that_do_not_exist_or_go_together_are_refused(decisions, message):  # S-9
    with pytest.raises(ValueError, match=message):
        ScalePolicy(name="mine", **decisions)


@pytest.mark.parametrize("power_of_two", ["nearest", "", True, 2])
def test_an_unknown_power_of_two_is_refused(power_of_two):
    with pytest.raises(ValueError, match="power_of_two is None, 'mask', 'exp2_log2'"):
        ScalePolicy(name="mine", eps=1e-12, power_of_two=power_of_two)


def test_policies_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        POLICIES["torchao"].eps = 1e-6


def test_policies_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        ScalePolicy("mine", 1e-12)


def test_without_a_scale_every_scale_is_1():  # S-21
    import jax.numpy as jnp
    import numpy as np
    import torch

    from fp8ref.formats import E4M3FN
    from fp8ref.jax.quantize import scales as of_jax
    from fp8ref.sim.quantize import scales as of_sim
    from fp8ref.torch.quantize import scales as of_torch

    amax = np.float32([0, 1e-30, 3.5, np.inf, np.nan])
    for found in (
        of_sim.scales_from_amax(amax, E4M3FN, policy.UNSCALED),
        of_jax.scales_from_amax(jnp.asarray(amax), E4M3FN, policy.UNSCALED),
        of_torch.scales_from_amax(torch.from_numpy(amax), E4M3FN, policy.UNSCALED),
    ):
        np.testing.assert_array_equal(np.asarray(found), np.ones((2, 5), np.float32))
    assert policy.UNSCALED.name not in POLICIES
    assert policy.UNSCALED.clause == "S-21"
    with pytest.raises(ValueError, match="takes no other decision; got eps, margin"):
        ScalePolicy(name="mine", ratio="one", eps=1e-6, margin=1)


def test_each_policy_has_a_line():
    lines = policy.SUMMARIES
    assert list(lines) == [*POLICIES, *policy.FP4_POLICIES]
    assert len(set(lines.values())) == len(lines)  # none is that of the policy that it is like
    assert all(len(line) <= 80 for line in lines.values())
