"""Codes and scales under tensor parallelism: those of one process, for the recipe's own styles and
where torchao's mean it.
"""

import pytest
import torch
from helpers.models.tensor_models import (
    Watch,
    build,
    exact,
    mesh,
    passed_exactly,
    signs,
    some_gradient,
    some_tokens,
)
from helpers.processes.ranks import run
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

from fp8ref.policy import POLICIES
from fp8ref.recipe import RECIPES, CastSpec, GemmSpec, Recipe
from fp8ref.spec import llama
from fp8ref.torch.distributed import tensor_parallel
from fp8ref.torch.model import convert
from fp8ref.train.torch.llama.llama import Llama


def observed(recipe, sequence):
    """Of a rank: the FP8 GEMMs of a step, and its part of each linear's input and gradient, outside
    of all styles.
    """
    model = tensor_parallel.parallelize(build(recipe), mesh(), sequence=sequence)
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
        if last in Llama.tensor_plan.styles:
            module.register_forward_hook(gives(name))
        if last in llama.ROW:
            module.register_forward_pre_hook(takes([name]), prepend=True)
        columns = [
            f"{name}.{child}" for child, _ in module.named_children() if child in llama.COLUMN
        ]
        module.register_forward_pre_hook(takes(columns), prepend=True)
    with Watch(model) as watch:
        y = model(some_tokens())
        y.backward(some_gradient(y))
    return watch.gemms, parts


def assembled(parts, dim):
    """Ranks' parts of a tensor cut along dim; where None, or where they have but one element there,
    all have the same.
    """
    if dim is None or parts[0].ndim == 0 or parts[0].shape[dim] == 1:
        assert all(torch.equal(parts[0], p) for p in parts)
        return parts[0]
    return torch.cat(parts, dim)


# Along which dim of each GEMM's operands a, b and of its result the ranks' parts lie; "sum": the
# result is a sum of the ranks' parts.
CUTS = {
    "colwise": {"output": (None, 1, 1), "grad_input": (1, 0, "sum"), "grad_weight": (0, None, 0)},
    "rowwise": {"output": (1, 0, "sum"), "grad_input": (None, 1, 1), "grad_weight": (None, 1, 1)},
}
POWERS_OF_TWO = CastSpec(fmt=RECIPES["tensorwise"].output.a.fmt, policy=POLICIES["torchao_pow2"])
FP8 = GemmSpec(a=POWERS_OF_TWO, b=POWERS_OF_TWO, accumulate="fast")
TENSORWISE_POW2 = Recipe(name="tensorwise_pow2", output=FP8, grad_input=FP8, grad_weight=FP8)


@pytest.mark.parametrize(
    ("recipe", "sequence"),
    [
        ("tensorwise", False),
        ("tensorwise", True),
        ("rowwise", True),
        ("rowwise_with_gw_hp", False),
        (TENSORWISE_POW2, True),
    ],
    ids=[
        "tensorwise",
        "tensorwise-sequence",
        "rowwise-sequence",
        "rowwise_with_gw_hp",
        "tensorwise_pow2-sequence",
    ],
)
def test_codes_and_scales_are_those_of_one_process(recipe, sequence):  # P-14, P-15, P-16
    ranks = run(2, observed, recipe, sequence)
    layers = {
        name: m
        for name, m in build(recipe).named_modules()
        if name.split(".")[-1] in Llama.tensor_plan.styles
    }
    assert len(layers) == 14
    for name, layer in layers.items():
        style = Llama.tensor_plan.styles[name.split(".")[-1]]
        ends = (1 if sequence else None, -1)
        cuts = dict(
            zip(("input", "grad_output"), ends if style == "colwise" else ends[::-1], strict=True)
        )
        x, g = (
            assembled([parts[name, role] for _, parts in ranks], dim) for role, dim in cuts.items()
        )
        with Watch(layer) as watch:
            layer(x.requires_grad_()).backward(g)
        expected = {gemm: found for (_, gemm), found in watch.gemms.items()}
        assert set(expected) == {gemm for gemm in CUTS[style] if (name, gemm) in ranks[0][0]}
        assert len(expected) == (2 if recipe == "rowwise_with_gw_hp" else 3)
        for gemm, (*operands, out) in expected.items():
            found = [gemms[name, gemm] for gemms, _ in ranks]
            cut_a, cut_b, cut_out = CUTS[style][gemm]
            for i, dim in enumerate((cut_a, cut_a, cut_b, cut_b)):
                assert torch.equal(assembled([f[i] for f in found], dim), operands[i]), (
                    name,
                    gemm,
                    i,
                )
            outs = [f[4].double() for f in found]
            # B-1 for either side's float32 sums; each result rounded to bfloat16, u = 2^-8, twice
            # under G-5
            a, sa, b, sb = operands
            fmts = [
                torch.float8_e5m2 if v is not None and v == 57344 else torch.float8_e4m3fn
                for v in dtypes(recipe, gemm)
            ]
            magnitude = (a.view(fmts[0]).double().abs() / sa) @ (
                b.view(fmts[1]).double().abs() / sb
            )
            sums = 2 * (a.shape[1] + 9) * 2.0**-24 * magnitude
            u = 2.0**-8 * (1 if "tensorwise" in str(recipe) else 2) * (1 + 2.0**-7)
            if cut_out == "sum":
                result, rounded = sum(outs), sum(o.abs() for o in outs)
            else:
                result = assembled(outs, cut_out)
                rounded = result.abs()
            assert (
                (result - out.double()).abs() <= u * (rounded + out.double().abs()) + sums
            ).all(), (name, gemm)


def dtypes(recipe, gemm):
    spec = (recipe if isinstance(recipe, Recipe) else RECIPES[recipe]).gemms[gemm]
    return float(spec.a.fmt.max), float(spec.b.fmt.max)


def cut_by_torchao():
    """As cut_exactly, by torchao's own styles: without biases, with biases, and the scales that a
    rowwise recipe's input has.
    """
    found = []
    for bias in (False, True):
        model = convert.convert(exact(bias), "tensorwise")
        tensor_parallel.gather_fp8_as_bytes()
        found.append(
            passed_exactly(
                parallelize_module(
                    model, mesh(), {"0": Float8ColwiseParallel(), "1": Float8RowwiseParallel()}
                )
            )
        )
    shapes = []
    for cut in (
        lambda m: parallelize_module(m, mesh(), {"0": Float8ColwiseParallel()}),
        lambda m: tensor_parallel.parallelize(m, mesh(), plan={"0": "colwise"}),
    ):
        model = cut(
            convert.convert(nn.Sequential(nn.Linear(64, 64, bias=False)).bfloat16(), "rowwise")
        )
        with Watch(model) as watch, torch.no_grad():
            model(signs(16, 64, seed=5))
        shapes.append(watch.gemms["0", "output"][1].shape)
    return *found, shapes


def test_what_torchaos_styles_do_not_mean_takes_others():  # P-15
    expected = [
        passed_exactly(convert.convert(exact(bias), "tensorwise")) for bias in (False, True)
    ]
    for without, with_biases, shapes in run(2, cut_by_torchao):
        assert all(torch.equal(a, b) for a, b in zip(without, expected[False], strict=True))
        # the first bias's gradient is a sum of e5m2 codes, where Float8Linear sums what it has
        # before the cast
        assert [torch.equal(a, b) for a, b in zip(with_biases, expected[True], strict=True)] == [
            True,
            True,
            True,
            False,
            True,
            True,
        ]
        assert shapes == [(), (16, 1)]  # a rowwise recipe's input is cast tensorwise
