"""Grouped linears in PyTorch (spec X), beside their parity with the simulator."""

import numpy as np
import pytest
import torch
from helpers.gemm.grouped_cases import (
    GEMMS,
    OFFS,
    integers,
    name_of,
    operands,
    parts,
    simulated,
    tensors,
)
from helpers.gemm.grouped_kernel import ScaledGroupedMm

from fp8ref.conformance.gemm import bound
from fp8ref.formats import BFLOAT16, E4M3FN, FLOAT16, FLOAT32
from fp8ref.recipe import CastSpec, GemmSpec, Recipe
from fp8ref.selection.grouped import GROUPED_RECIPES, GroupedRecipe
from fp8ref.torch import delayed
from fp8ref.torch.experts import gemm as grouped_gemm
from fp8ref.torch.experts import grouped
from fp8ref.torch.gemm import gemm

ENDS = torch.tensor(OFFS, dtype=torch.int32)
E4 = CastSpec(fmt=E4M3FN)
ALL_E4 = Recipe(
    name="all_e4",
    **{
        which: GemmSpec(a=E4, b=E4, accumulate="fast")
        for which in ("output", "grad_input", "grad_weight")
    },
)


def run(x, w, g, recipe, dtype=torch.bfloat16, offs=ENDS, **options):
    """{GEMM: result}, float32."""
    x, w = (torch.from_numpy(v).to(dtype).requires_grad_() for v in (x, w))
    y = grouped.apply(x, w, offs, recipe=recipe, **options)
    y.backward(torch.from_numpy(g).to(dtype))
    return {
        "output": y.detach().float().numpy(),
        "grad_input": x.grad.float().numpy(),
        "grad_weight": w.grad.float().numpy(),
    }


@pytest.fixture
def kernel(monkeypatch):
    made = ScaledGroupedMm()
    monkeypatch.setattr(torch, "_scaled_grouped_mm", made)
    monkeypatch.setattr(grouped_gemm, "_has_kernel", lambda device: True)
    return made


ON_GPU = [
    "rowwise",
    GroupedRecipe(recipe=ALL_E4),
    GroupedRecipe(recipe=ALL_E4, amax="all"),
    GroupedRecipe(recipe=GROUPED_RECIPES["rowwise"].recipe, amax="all"),
]


@pytest.mark.parametrize("recipe", ON_GPU, ids=name_of)
def test_a_gpus_kernel_gets_what_it_takes(recipe, kernel, rng):
    """Rows of no group and groups without rows, which the kernel leaves as they were, are zeros
    after it.
    """
    x, w, g = integers(rng)
    found = run(x, w, g, recipe)
    assert kernel.calls == 3
    for which, expected in simulated(x, w, g, recipe).items():
        np.testing.assert_array_equal(found[which], expected, err_msg=which)


def test_gradients_in_e5m2_are_multiplied_group_by_group(kernel, rng):
    x, w, g = integers(rng)
    found = run(x, w, g, "tensorwise")
    assert kernel.calls == 1  # the output
    for which, expected in simulated(x, w, g, "tensorwise").items():
        np.testing.assert_array_equal(found[which], expected, err_msg=which)
    device = torch.device("cpu")
    assert (
        grouped_gemm.kernels(GROUPED_RECIPES["tensorwise"].recipe, device)
        == "torch._scaled_grouped_mm and one GEMM for each group"
    )
    assert (
        grouped_gemm.kernels(GROUPED_RECIPES["rowwise"].recipe, device)
        == "torch._scaled_grouped_mm"
    )
    assert (
        grouped_gemm.kernels(GROUPED_RECIPES["mxfp8"].recipe, device)
        == "torch._grouped_mm on dequantized codes"
    )
    assert (
        grouped_gemm.kernels(GROUPED_RECIPES["blockwise"].recipe, device)
        == "one GEMM for each group"
    )


@pytest.mark.parametrize("recipe", ["mxfp8", "blockwise_ue8m0"])
# B-1
def test_blocks_of_powers_of_two_are_exact_in_bfloat16(recipe, monkeypatch, rng):
    """torch._grouped_mm, of which a CPU has a form too, in the place of a GEMM for each group."""
    x, w, g = tensors(rng)
    expected, groups = simulated(x, w, g, recipe), operands(x, w, g, recipe)
    monkeypatch.setattr(grouped_gemm, "_has_kernel", lambda device: True)
    monkeypatch.setattr(gemm, "matmul", None)
    found = run(x, w, g, recipe)
    for which in GEMMS:
        for e, part in parts(which):
            out, mine = found[which][part], expected[which][part]
            assert (
                np.abs(out - mine)
                <= bound.bound(
                    *groups[which][e], out, mine, out_dtype=BFLOAT16, epilogue="scale_then_round"
                )
            ).all()
    assert not found["output"][OFFS[-1] :].view(np.uint32).any()
    assert not found["grad_input"][OFFS[-1] :].view(np.uint32).any()
    assert not found["grad_weight"][1].view(np.uint32).any()


@pytest.mark.parametrize("recipe", [*ON_GPU, "mxfp8", "blockwise_ue8m0"], ids=name_of)
def test_a_gpus_path_does_not_read_the_device(recipe, monkeypatch, rng):
    """On the meta device there is nothing to read, and torch's own kernel checks dtypes, strides
    and the shapes of scales.
    """
    monkeypatch.setattr(grouped_gemm, "_has_kernel", lambda device: True)
    x, w, g = (torch.from_numpy(v).bfloat16().to("meta") for v in tensors(rng))
    x, w = x.requires_grad_(), w.requires_grad_()
    y = grouped.apply(x, w, ENDS.to("meta"), recipe=recipe)
    y.backward(g)
    assert (y.shape, x.grad.shape, w.grad.shape) == (g.shape, x.shape, w.shape)


def test_torchs_grouped_mm_leaves_rows_of_no_group(rng):  # why rows are masked
    """torch 2.13 on a CPU: what an allocation held before."""
    x, w, _ = tensors(rng)
    x = torch.from_numpy(np.nan_to_num(x, posinf=0)).bfloat16()
    for _ in range(500):
        held = torch.full((150, 128), torch.nan, dtype=torch.bfloat16)
        del held
        y = torch._grouped_mm(x, torch.from_numpy(w).bfloat16().mT, offs=ENDS)
        if y[OFFS[-1] :].any():
            return
    pytest.fail("rows of no group were zeros in 500 runs: this torch may write them")


@pytest.mark.parametrize(
    ("dtype", "fmt"), [(torch.float32, FLOAT32), (torch.float16, FLOAT16)], ids=str
)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "bf16"])
def test_other_dtypes(recipe, dtype, fmt, rng):  # G-8
    x, w, g = integers(rng)
    found = run(x, w, g, recipe, dtype)
    for which, expected in simulated(x, w, g, recipe, out_dtype=fmt).items():
        np.testing.assert_array_equal(found[which], expected, err_msg=which)


def test_offs_may_be_int64(rng):
    x, w, g = integers(rng)
    for a, b in zip(
        run(x, w, g, "rowwise").values(),
        run(x, w, g, "rowwise", offs=ENDS.long()).values(),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_under_autocast(rng):  # L-7
    x, w, _ = integers(rng)
    wide = torch.from_numpy(x).requires_grad_(), torch.from_numpy(w).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = grouped.apply(*wide, ENDS, recipe="rowwise")
    y.float().sum().backward()
    assert (y.dtype, wide[0].grad.dtype, wide[1].grad.dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )
    np.testing.assert_array_equal(
        y.detach().float(), simulated(x, w, np.ones((150, 128), np.float32), "rowwise")["output"]
    )


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8", "delayed"])
def test_compiled(recipe, rng):
    x, w, g = integers(rng)
    states = torch.nn.ModuleDict(
        {
            r: delayed.RoleState(f, c, torch.device("cpu"))
            for r, (f, c) in delayed.casts(recipe).items()
        }
    )
    eager = run(x, w, g, recipe, states=states)
    seen = {role: state.seen.clone() for role, state in states.items()}
    for state in states.values():
        state.seen.zero_()
    bound = grouped.bind(recipe)
    compiled = torch.compile(
        lambda x, w: grouped.apply(x, w, ENDS, recipe=bound, states=states),
        backend="aot_eager",
        fullgraph=True,
    )
    x, w = (torch.from_numpy(v).bfloat16().requires_grad_() for v in (x, w))
    y = compiled(x, w)
    y.backward(torch.from_numpy(g).bfloat16())
    for found, which in ((y, "output"), (x.grad, "grad_input"), (w.grad, "grad_weight")):
        np.testing.assert_array_equal(found.detach().float(), eager[which], err_msg=which)
    for role, state in states.items():
        assert torch.equal(state.seen, seen[role])


def test_only_gradients_that_are_wanted(rng):
    x, w, g = (torch.from_numpy(v).bfloat16() for v in integers(rng))
    w.requires_grad_()
    grouped.apply(x, w, ENDS, recipe="rowwise").backward(g)
    assert x.grad is None
    assert w.grad.any()
    with torch.no_grad():
        assert grouped.apply(x, w, ENDS, recipe="rowwise").grad_fn is None


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_no_tokens(recipe):  # L-9
    states = torch.nn.ModuleDict(
        {
            r: delayed.RoleState(f, c, torch.device("cpu"))
            for r, (f, c) in delayed.casts(recipe).items()
        }
    )
    x, w = (
        torch.zeros(0, 32, requires_grad=True),
        torch.full((3, 16, 32), torch.nan, requires_grad=True),
    )
    y = grouped.apply(x, w, torch.zeros(3, dtype=torch.int32), recipe=recipe, states=states)
    y.sum().backward()
    assert y.shape == (0, 16)
    assert not w.grad.any()
    assert not any(state.seen.any() for state in states.values())


def test_not_in_evaluation(rng):  # H-4
    x, w, _ = (torch.from_numpy(v).bfloat16().requires_grad_() for v in integers(rng))
    states = torch.nn.ModuleDict(
        {
            r: delayed.RoleState(f, c, torch.device("cpu"))
            for r, (f, c) in delayed.casts("delayed").items()
        }
    )
    grouped.apply(x, w, ENDS, recipe="delayed", states=states, observe=False).nansum().backward()
    assert not any(state.seen.any() for state in states.values())
    grouped.apply(x, w, ENDS, recipe="delayed", states=states).nansum().backward()
    assert all(state.seen.any() for state in states.values())


def test_a_second_derivative_is_refused(rng):  # L-8
    x, w, _ = (torch.from_numpy(v).bfloat16().requires_grad_() for v in integers(rng))
    y = grouped.apply(x, w, ENDS, recipe="rowwise")
    with pytest.raises(
        ValueError, match="gradients of a grouped linear in FP8 are not differentiated again"
    ):
        torch.autograd.grad(y.sum(), x, create_graph=True)
