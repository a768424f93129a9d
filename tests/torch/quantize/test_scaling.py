import functools
import math

import numpy as np
import pytest
import torch
from helpers.processes.ranks import run
from torch import distributed, nn
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx.experimental.proxy_tensor import make_fx
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

from fp8ref.conformance.inputs import quantizer_inputs
from fp8ref.formats import BFLOAT16, E4M3FN, E5M2
from fp8ref.policy import POLICIES
from fp8ref.recipe import OPERANDS
from fp8ref.sim.quantize import cast as sim_cast
from fp8ref.sim.quantize import scaling as sim
from fp8ref.torch.linear import linear as layer
from fp8ref.torch.linear import passes, torchao_linear
from fp8ref.torch.model import convert
from fp8ref.torch.quantize import cast, float_values, scaling
from fp8ref.torch.quantize.scaling import Groups

IMPLEMENTED = [name for name, p in POLICIES.items() if p.floored_quotient]
policies = pytest.mark.parametrize("policy", IMPLEMENTED)
groups = pytest.mark.parametrize(
    ("granularity", "axis"), [("tensorwise", -1), ("rowwise", 0), ("rowwise", -1)]
)


@policies
@groups
@pytest.mark.parametrize("case", quantizer_inputs.samples())
def test_quantize_equals_the_simulator(case, policy, granularity, axis):  # S-1, S-2, S-5, S-6, S-8
    x = quantizer_inputs.samples()[case]
    for fmt, dtype in ((E4M3FN, torch.float32), (E5M2, torch.bfloat16)):
        q = scaling.quantize(
            torch.from_numpy(x).to(dtype), fmt, granularity=granularity, policy=policy, axis=axis
        )
        expected = sim.quantize(x, fmt, granularity=granularity, policy=policy, axis=axis)
        np.testing.assert_array_equal(
            sim_cast.canonical_nans(q.codes.view(torch.uint8).numpy(), fmt), expected.codes
        )
        np.testing.assert_array_equal(q.scale.numpy(), expected.scale)
        np.testing.assert_array_equal(q.scale_inv.numpy(), expected.scale_inv)
        np.testing.assert_array_equal(scaling.dequantize(q).numpy(), sim.dequantize(expected))
        assert q.scale.shape == expected.scale.shape


@pytest.mark.parametrize("case", quantizer_inputs.samples())
@pytest.mark.parametrize(
    ("granularity", "policy"),
    [
        ("blockwise_1x128", "torchao"),
        ("blockwise_128x128", "torchao"),
        *(("mx_1x32", name) for name, p in POLICIES.items() if p.in_backends and p.e8m0),
    ],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_equal_the_simulator(case, granularity, policy, axis):  # S-6, S-14
    """[150, 384] and its transpose: a last block of 22 along the other axis."""
    x = np.resize(quantizer_inputs.samples()[case], (384, 150) if axis == 0 else (150, 384))
    q = scaling.quantize(
        torch.from_numpy(x), E4M3FN, granularity=granularity, policy=policy, axis=axis
    )
    expected = sim.quantize(x, E4M3FN, granularity=granularity, policy=policy, axis=axis)
    np.testing.assert_array_equal(
        sim_cast.canonical_nans(q.codes.view(torch.uint8).numpy(), E4M3FN), expected.codes
    )
    np.testing.assert_array_equal(q.scale.numpy(), expected.scale)
    np.testing.assert_array_equal(q.scale_inv.numpy(), expected.scale_inv)
    np.testing.assert_array_equal(scaling.dequantize(q).numpy(), sim.dequantize(expected))


def test_quantize_with_is_quantize_by_a_given_scale(rng):
    x = torch.from_numpy(rng.standard_normal((16, 32)).astype(np.float32))
    q = scaling.quantize(x, E5M2)
    again = scaling.quantize_with(x, q.scale, E5M2)
    assert torch.equal(q.codes.view(torch.uint8), again.codes.view(torch.uint8))
    assert torch.equal(q.scale_inv, again.scale_inv)
    with pytest.raises(ValueError, match=r"have shape \(\); got \(1,\)"):
        scaling.quantize_with(x, q.scale.reshape(1), E5M2)


@groups
@pytest.mark.parametrize("pow2", [False, True])
def test_quantize_equals_torchaos_dynamic_cast(granularity, axis, pow2, rng):
    x = torch.from_numpy(rng.standard_normal((48, 80)).astype(np.float32)).bfloat16()
    theirs = hp_tensor_to_float8_dynamic(
        x,
        torch.float8_e4m3fn,
        None,
        scaling_granularity=torchao_linear.GRANULARITIES[granularity],
        axiswise_dim=axis if granularity == "rowwise" else None,
        round_scales_to_power_of_2=pow2,
    )
    ours = scaling.quantize(
        x, E4M3FN, granularity=granularity, policy="torchao_pow2" if pow2 else "torchao", axis=axis
    )
    assert torch.equal(ours.codes.view(torch.uint8), theirs._data.view(torch.uint8))
    assert torch.equal(ours.scale, theirs._scale)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.ones(0, 4), {}, "at least one element"),  # S-7
        (torch.ones(4, 128), {"granularity": "mx_1x32"}, "e8m0 scales.*'torchao'"),
        (torch.ones(4, 100), {"granularity": "blockwise_1x128"}, "divisible by 128"),
        (torch.ones(4, 4, dtype=torch.float64), {}, "float64"),
        (torch.ones(4, 4), {"granularity": "rowwise", "axis": 2}, r"\[-2, 2\)"),
    ],
)
def test_errors(x, options, message):
    with pytest.raises(ValueError, match=message):
        scaling.quantize(x, E4M3FN, **options)


@pytest.mark.parametrize(
    ("fmt", "message"),
    [("e4m3fn", "fmt is a Format.*got 'e4m3fn'"), (BFLOAT16, "e2m1fn; got bfloat16")],
)
@pytest.mark.parametrize("policy", ["torchao", "mx_rceil"])
def test_a_fmt_that_is_not_fp8_is_refused(fmt, message, policy):
    x = torch.ones(4, 32)
    with pytest.raises(ValueError, match=message):
        scaling.quantize(x, fmt, policy=policy)
    with pytest.raises(ValueError, match=message):
        scaling.quantize_with(x, torch.ones(()), fmt)
    with pytest.raises(ValueError, match=message):
        scaling.scale_from_amax(torch.ones(()), fmt, policy)


def test_codes_are_native_float8():
    assert scaling.quantize(torch.ones(4, 4), E5M2).codes.dtype == cast.DTYPES["e5m2"]


INF, NAN = math.inf, math.nan
# What each of three ranks has, and all of them together.
AMAXES = [
    ((1.0, 3.0, 2.0), 3.0),
    ((0.0, 0.0, 0.0), 0.0),
    # the least and the largest of float32
    ((448.0, 2.0**-149, 3.4028234663852886e38), 3.4028234663852886e38),
    ((INF, 1.0, 2.0), INF),
    ((1.0, 2.0, INF), INF),
    ((NAN, 1.0, 2.0), NAN),
    ((1.0, NAN, 2.0), NAN),
    ((1.0, 2.0, NAN), NAN),
    ((INF, NAN, 1.0), NAN),
    ((NAN, 1.0, INF), NAN),
    ((INF, INF, INF), INF),
    ((NAN, NAN, NAN), NAN),
]


def merged(shape):
    """The amaxes one by one, and all at once in a shape; of this rank's, what is left after the
    merge.
    """
    mine = torch.tensor([amaxes[distributed.get_rank()] for amaxes, _ in AMAXES])
    group, kept = distributed.group.WORLD.group_name, mine.clone()
    alone = [scaling.merge_amax(amax, group) for amax in mine]
    return (
        torch.stack(alone),
        scaling.merge_amax(mine.reshape(shape), group),
        torch.equal(mine.nan_to_num(-1.0), kept.nan_to_num(-1.0)),
    )


@functools.cache
def on_three(shape):
    return run(3, merged, shape)


@pytest.mark.parametrize("shape", [(12,), (12, 1), (3, 4)], ids=str)
@pytest.mark.parametrize("index", range(len(AMAXES)), ids=[str(amaxes) for amaxes, _ in AMAXES])
def test_ranks_amaxes_merge_and_what_is_not_finite_shows(index, shape):  # P-2, P-3
    expected = torch.tensor(AMAXES[index][1])
    for alone, together, unchanged in on_three(shape):
        assert together.shape == shape
        for found in (alone[index], together.flatten()[index]):
            assert found.dtype == torch.float32
            assert torch.equal(found, expected) or (found.isnan() and expected.isnan())
        assert unchanged


def largest():
    return scaling.all_reduce_max(
        torch.tensor([[-1.0, 0.0, 5.0], [-3.0, 2.0, 4.0]])[distributed.get_rank()],
        distributed.group.WORLD.group_name,
    )


def test_the_maximum_is_elementwise():
    assert [found.tolist() for found in run(2, largest)] == [[-1.0, 2.0, 5.0]] * 2


def operands_of_all(recipe, poison):
    """Codes and scales of every operand of one linear, of this rank's half of a batch, scaled by
    amaxes of both halves.
    """
    made = convert.convert(
        nn.Sequential(nn.Linear(64, 32, bias=False)), recipe, amax_group=distributed.group.WORLD
    )
    return operands(made, *halves(made, poison)[distributed.get_rank()])


def halves(model, poison=False):
    torch.manual_seed(0)
    model[0].weight.data.normal_()
    x, g = torch.randn(32, 64), torch.randn(32, 32)
    if poison:
        x[20, 3] = torch.nan
    return [(x[rows], g[rows]) for rows in (slice(0, 16), slice(16, 32))]


def canonical(codes):
    """NaNs without their signs (C-5), of e4m3fn; e5m2 has no other code that looks like them."""
    return torch.where(codes & 0x7F == 0x7F, 0x7F, codes)


def operands(model, x, g):
    found = {}
    observer = lambda which, a, b, _: found.update(  # noqa: E731
        {
            (which, role): (canonical(q.codes.view(torch.uint8)), q.scale)
            for role, q in zip(OPERANDS[which], (a, b), strict=True)
        }
    )
    passes.observers.append(observer)
    model(x.requires_grad_()).backward(g)
    passes.observers.remove(observer)
    return found


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("poison", [False, True])
def test_under_scope_global_codes_are_those_of_one_process(recipe, poison):  # P-2, P-4, P-5
    whole = nn.Sequential(layer.Linear(64, 32, recipe, bias=False))
    parts = halves(whole, poison)
    expected = operands(whole, *(torch.cat(pair) for pair in zip(*parts, strict=True)))
    first, second = run(2, operands_of_all, recipe, poison)
    for key, (codes, scale) in expected.items():
        shared = key[1] == "weight"
        assert torch.equal(
            first[key][0] if shared else torch.cat([first[key][0], second[key][0]]), codes
        )
        by_row = scale.ndim == 2 and scale.shape[0] > 1 and not shared
        for rank, found in enumerate((first, second)):
            mine = scale[16 * rank :][:16] if by_row else scale
            assert torch.equal(found[key][1].nan_to_num(-1.0), mine.nan_to_num(-1.0))


def test_a_compiler_sees_casts_of_one_tensor_as_one():
    """Along either axis.

    To torch's elimination of common subexpressions the axes -1 and -2 were alike: hash(-2) ==
    hash(-1).
    """

    def casts(x):
        return [
            scaling.quantize(x, E4M3FN, granularity="rowwise", axis=axis).codes
            for axis in (-1, -2, -1, -2)
        ]

    with torch.no_grad():
        graph = fx_graph_cse(make_fx(casts)(torch.ones(16, 32)).graph)
    assert sum(node.target is torch.ops.aten.amax.default for node in graph.nodes) == 2


def test_ranks_share_a_scale_where_they_cut_its_group():  # P-5
    groups = {
        style: Groups(batch="b", tensor="t", every="e", style=style)
        for style in ("colwise", "rowwise")
    }
    shared = {
        (style, role, granularity, axis): g.sharing(role, granularity, axis)
        for style, g in groups.items()
        for role in ("input", "weight", "grad_output")
        for granularity in (
            "tensorwise",
            "rowwise",
            "blockwise_1x128",
            "blockwise_128x128",
            "mx_1x32",
        )
        for axis in (-2, -1)
    }
    expected = {}
    for axis in (-2, -1):
        expected |= {
            ("colwise", role, "tensorwise", axis): g
            for role, g in (("input", "b"), ("weight", "t"), ("grad_output", "e"))
        }
        expected |= {
            ("rowwise", role, "tensorwise", axis): g
            for role, g in (("input", "e"), ("weight", "t"), ("grad_output", "b"))
        }
    expected |= {
        (style, role, "rowwise", -2): "b" for style in groups for role in ("input", "grad_output")
    }
    expected |= {
        ("colwise", "weight", "rowwise", -2): "t",
        ("colwise", "grad_output", "rowwise", -1): "t",
    }
    expected |= {
        ("rowwise", "weight", "rowwise", -1): "t",
        ("rowwise", "input", "rowwise", -1): "t",
    }
    assert {key: group for key, group in shared.items() if group} == expected
    assert Groups().sharing("input", "tensorwise", -1) is None


@pytest.mark.parametrize("x", [np.ones((4, 16), np.float32), [[1.0] * 16], None, "x", 1.0])
def test_what_is_no_tensor_is_refused(x):
    ones = torch.ones(4, 16)
    for call in (
        lambda: scaling.quantize(x, E4M3FN),
        lambda: scaling.quantize_with(x, torch.ones(()), E4M3FN),
        lambda: scaling.quantize_with(ones, x, E4M3FN),
        lambda: scaling.amax(x),
        lambda: scaling.dequantize(x),
    ):
        with pytest.raises(ValueError, match=f"(Tensor.*|Quantized); got {type(x).__name__}"):
            call()


def test_a_cast_within_vmap_is_refused():
    with pytest.raises(ValueError, match=r"no rule for torch\.vmap.*loop over its examples"):
        torch.vmap(lambda x: scaling.quantize(x, E4M3FN).codes)(torch.ones(4, 16))


@pytest.mark.parametrize(
    ("granularity", "axis"),
    [
        ("tensorwise", -1),
        ("rowwise", -1),
        ("rowwise", 0),
        ("blockwise_1x128", -1),
        ("blockwise_1x128", 0),
        ("blockwise_128x128", -1),
    ],
)
def test_codes_made_in_pieces_are_those_of_the_whole(monkeypatch, rng, granularity, axis):  # S-5
    x = torch.from_numpy(rng.normal(size=(384, 256)).astype(np.float32)).bfloat16()
    x[3, 5], x[200] = math.nan, x[200] * 1000
    whole = scaling.quantize(x, E4M3FN, granularity=granularity, axis=axis)
    numbers = scaling.dequantize(whole)
    monkeypatch.setattr(float_values, "_PIECE", 700)
    pieces = scaling.quantize(x, E4M3FN, granularity=granularity, axis=axis)
    assert torch.equal(pieces.codes.view(torch.uint8), whole.codes.view(torch.uint8))
    assert torch.equal(scaling.dequantize(pieces).view(torch.int32), numbers.view(torch.int32))
