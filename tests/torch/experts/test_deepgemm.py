"""What DeepGEMM's grouped kernel is handed, against a function that checks what it checks, in its
place.
"""

import pytest
import torch

from fp8ref.selection.grouped import GROUPED_RECIPES
from fp8ref.torch.experts import deepgemm as grouped_deepgemm
from fp8ref.torch.experts import gemm as grouped_gemm
from fp8ref.torch.experts import grouped
from fp8ref.torch.experts.operands import dequantized, groups_of, padded_rows
from fp8ref.torch.gemm import blocks as block_gemm

HOPPER, CPU = torch.device("cuda:0"), torch.device("cpu")
RECIPE = GROUPED_RECIPES["blockwise"]
SIZES, ROWS, N, K = (130, 0, 5, 128), 270, 256, 128  # 7 rows of no group


class FakeDeepGEMM:
    """What DeepGEMM 54e2261 checks of m_grouped_fp8_gemm_nt_contiguous on compute capability 9.0,
    and G-13's order of each group.

    csrc/apis/gemm.hpp: m_grouped_fp8_fp4_gemm_nt_contiguous, whose alias it is;
    csrc/utils/layout.hpp: check_sf_layout.
    """

    def __init__(self) -> None:
        self.calls = 0

    def fp8_gemm_nt(self, *_, **__):
        raise AssertionError("a GEMM for each group would wait for the device")

    def m_grouped_fp8_gemm_nt_contiguous(self, a, b, d, m_indices, recipe=None):
        (codes_a, sfa), (codes_b, sfb) = a, b
        (m, k), (experts, n, k_) = codes_a.shape, codes_b.shape
        assert {codes_a.dtype, codes_b.dtype} == {torch.float8_e4m3fn}
        assert codes_a.is_contiguous()
        assert codes_b.is_contiguous()
        assert k == k_
        assert (tuple(d.shape), d.dtype, d.stride(-1)) == ((m, n), torch.bfloat16, 1)
        assert (m_indices.dtype, tuple(m_indices.shape), m_indices.is_contiguous()) == (
            torch.int32,
            (m,),
            True,
        )
        assert recipe in (None, (1, 128, 128))
        assert {sfa.dtype, sfb.dtype} == {torch.float32}
        assert tuple(sfa.shape) == (m, k // 128)
        assert tuple(sfb.shape) == (experts, n // 128, k // 128)
        d.fill_(torch.nan)  # rows of no tile are left as memory was
        for first in range(0, m, 128):
            e = m_indices[first].item()
            if e < 0:
                continue
            assert set(m_indices[first : first + 128].tolist()) <= {e, -1}  # a tile is of one group
            total = torch.zeros(128, n)
            for i in range(k // 128):
                part = slice(i * 128, (i + 1) * 128)
                # exact
                acc = (
                    codes_a[first : first + 128].float()[:, part].double()
                    @ codes_b[e].float()[:, part].double().t()
                )
                scale = sfa[first : first + 128, i, None] * sfb[e, :, i].repeat_interleave(128)
                total = (acc.float().double() * scale.double() + total.double()).float()
            d[first : first + 128] = total
        self.calls += 1


@pytest.fixture
def deepgemm(monkeypatch):
    """A Hopper with DeepGEMM's kernels, where there is none: tensors of a CPU are taken as its."""
    made = FakeDeepGEMM()
    monkeypatch.setattr(block_gemm, "_has_tensor_cores", lambda device: True)
    monkeypatch.setattr(block_gemm, "_is_hopper", lambda device: True)
    monkeypatch.setattr(block_gemm, "deep_gemm", lambda: made)
    monkeypatch.setattr(grouped_gemm, "_has_kernel", lambda device: True)
    return made


def test_the_kernel_is_chosen_by_name(deepgemm, monkeypatch):
    assert [grouped_gemm.kernel(spec, HOPPER) for spec in RECIPE.recipe.gemms.values()] == [
        "deep_gemm",
        "deep_gemm",
        "each_group",
    ]
    assert (
        grouped_gemm.kernels(RECIPE.recipe, HOPPER)
        == "DeepGEMM's grouped kernel and one GEMM for each group"
    )
    assert (
        grouped_gemm.kernel(GROUPED_RECIPES["rowwise"].recipe.output, HOPPER) == "scaled_grouped_mm"
    )
    assert not grouped_deepgemm.takes(RECIPE.recipe.output, CPU)
    monkeypatch.delattr(FakeDeepGEMM, "m_grouped_fp8_gemm_nt_contiguous")  # an older one
    assert grouped_gemm.kernel(RECIPE.recipe.output, HOPPER) == "each_group"


@pytest.mark.parametrize("which", ["output", "grad_input"])
def test_it_gets_rows_by_group_and_gives_each_groups_gemm(which, deepgemm):  # G-17
    generator = torch.Generator().manual_seed(0)
    columns = K if which == "output" else N
    rows = torch.randn(ROWS, columns, generator=generator).bfloat16()
    rows[sum(SIZES) :] = torch.nan
    w = torch.randn(len(SIZES), N, K, generator=generator).bfloat16()
    groups = groups_of(torch.tensor(SIZES).cumsum(0).int(), ROWS)
    role = "input" if which == "output" else "grad_output"
    a, b = (
        grouped.quantize_operand(which, r, t, groups, RECIPE)
        for r, t in ((role, groups.only(rows)), ("weight", w))
    )
    found = grouped_deepgemm.rows_by_weights(a, b, groups)
    assert deepgemm.calls == 1
    x, y = dequantized(a, groups).double(), dequantized(b, groups).double()
    begin = 0
    for e, size in enumerate(SIZES):
        of_group, weight = x[begin : begin + size], y[e].t() if which == "output" else y[e]
        exact, magnitudes = of_group @ weight, of_group.abs() @ weight.abs()
        # Rounded to bfloat16 once, u = 2^-8. Before: two dequantizations, the product of scales, a
        # product and a sum for each of up to two blocks, at most 8 roundings of 2^-24 of the sum of
        # magnitudes.
        assert (
            (found[begin : begin + size].double() - exact).abs()
            <= 2.0**-8 * exact.abs() + 8 * 2.0**-24 * magnitudes
        ).all()
        begin += size
    assert not found[sum(SIZES) :].any()


def test_groups_begin_at_multiples_of_a_tile():
    groups = groups_of(torch.tensor(SIZES).cumsum(0).int(), ROWS)
    to, ends, total = padded_rows(groups, ROWS, grouped_deepgemm.ALIGNMENT)
    assert ends.tolist() == [256, 256, 384, 512]
    assert (to[0], to[130], to[135], to[-1]) == (0, 256, 384, total)
    assert total % 128 == 0
