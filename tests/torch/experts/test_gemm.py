"""Which kernel multiplies, one GEMM for each group, and the padding that torch's kernel needs."""

import pytest
import torch

from fp8ref.selection.grouped import GROUPED_RECIPES
from fp8ref.torch.experts import gemm as grouped_gemm
from fp8ref.torch.experts import operands as grouped_operands
from fp8ref.torch.gemm import gemm

CPU, HOPPER = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize(
    ("recipe", "which", "kernel"),
    [
        ("rowwise", "output", "scaled_grouped_mm"),
        ("rowwise", "grad_weight", "scaled_grouped_mm"),
        ("tensorwise", "grad_input", "each_group"),  # e5m2
        ("blockwise", "output", "each_group"),  # scales that are no powers of two
        ("mxfp8", "output", "grouped_mm"),
        ("bf16", "output", "each_group"),
    ],
)
def test_the_kernel_of_a_gpu(recipe, which, kernel, monkeypatch):
    monkeypatch.setattr(grouped_gemm, "_has_kernel", lambda device: device.type == "cuda")
    spec = GROUPED_RECIPES[recipe].recipe.gemms[which]
    assert grouped_gemm.kernel(spec, HOPPER) == kernel
    assert grouped_gemm.kernel(spec, CPU) == "each_group"


def test_reports_name_every_kernel_once(monkeypatch):
    assert grouped_gemm.kernels(GROUPED_RECIPES["rowwise"].recipe, CPU) == "one GEMM for each group"
    monkeypatch.setattr(grouped_gemm, "_has_kernel", lambda device: True)
    assert (
        grouped_gemm.kernels(GROUPED_RECIPES["tensorwise"].recipe, HOPPER)
        == "torch._scaled_grouped_mm and one GEMM for each group"
    )


@pytest.mark.parametrize("which", ["output", "grad_input", "grad_weight"])
def test_each_group_is_its_own_gemm(which):
    ends = torch.tensor([16, 16, 48], dtype=torch.int32)
    groups = grouped_operands.groups_of(ends, 50)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "input": torch.randn(50, 32, generator=generator).bfloat16(),
        "weight": torch.randn(3, 16, 32, generator=generator).bfloat16(),
    }
    tensors["grad_output"] = torch.randn(50, 16, generator=generator).bfloat16()
    recipe = GROUPED_RECIPES["rowwise"]
    from fp8ref.recipe import OPERANDS
    from fp8ref.torch.experts import grouped

    spec = recipe.recipe.gemms[which]
    a, b = (
        grouped.quantize_operand(
            which,
            role,
            tensors[role] if role == "weight" else groups.only(tensors[role]),
            groups,
            recipe,
        )
        for role in OPERANDS[which]
    )
    out = grouped_gemm.multiply(which, a, b, groups, spec, torch.bfloat16)
    host = ends.tolist()
    pairs = zip(grouped_operands.parts_of(a, host), grouped_operands.parts_of(b, host), strict=True)
    for (e, begin, end, of_a), (*_, of_b) in pairs:
        alone = gemm.matmul(
            of_a, of_b, accumulate=spec.accumulate, epilogue=spec.epilogue, out_dtype=torch.bfloat16
        )
        assert torch.equal(out[e] if which == "grad_weight" else out[begin:end], alone)
    assert not (out[1] if which == "grad_weight" else out[48:]).any()


def test_groups_are_padded_apart_from_each_other():
    groups = grouped_operands.groups_of(torch.tensor([3, 3, 20], dtype=torch.int32), 22)
    to, ends, total = grouped_operands.padded_rows(groups, 22, grouped_gemm.ALIGNMENT)
    assert ends.tolist() == [16, 16, 48]
    assert to.tolist() == [*range(3), *range(16, 33), total, total]
    assert total >= 48
