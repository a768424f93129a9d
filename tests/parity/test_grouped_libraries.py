"""Grouped GEMMs of torchao and the grouped casts of DeepGEMM, against the simulator (spec X-2, X-7,
X-8).

torchao's ``_Float8GroupedMM`` runs on a CPU but for two things, which are replaced: its Triton
casts, by the torch functions that torchao says they fuse; and ``torch._scaled_grouped_mm``, which a
CPU lacks. Its ``_MXFP8GroupedMM`` runs as ``KernelPreference.EMULATED``.
"""

import numpy as np
import pytest
import torch
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
from torchao.prototype.moe_training import fp8_grouped_mm, mxfp8_grouped_mm, utils
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.quantization.quantize_.common import KernelPreference

from fp8ref.conformance.gemm import bound
from fp8ref.formats import BFLOAT16, E4M3FN
from fp8ref.sim.experts import grouped
from fp8ref.sim.quantize import cast, scaling

GEMMS = ("output", "grad_input", "grad_weight")
OFFS = (32, 96, 128)


def bf16(values):
    return torch.from_numpy(np.ascontiguousarray(values, np.float32)).bfloat16()


def tensors(rng, integers=False):
    """x [144, 64], w [3, 32, 64], g [144, 32]: numbers of bfloat16; 16 rows are in no group."""
    shapes = ((144, 64), (3, 32, 64), (144, 32))
    if integers:
        return [
            rng.integers(-7, 8, shape).astype(np.float32) * s
            for shape, s in zip(shapes, (1, 2.0**-6, 2.0**-10), strict=True)
        ]
    return [
        cast.round_to(rng.standard_normal(s) * np.exp(rng.standard_normal(s[-1])), BFLOAT16)
        for s in shapes
    ]


def cast_along(x, axis):
    """tensor_to_scale, the product in float32 and the saturating cast: the three operators that
    torchao's Triton casts fuse.
    """
    how = {
        "scaling_granularity": ScalingGranularity.AXISWISE,
        "axiswise_dim": axis,
        "round_scales_to_power_of_2": True,
    }
    scale = tensor_to_scale(x, torch.float8_e4m3fn, **how)
    return to_fp8_saturated(x.float() * scale, torch.float8_e4m3fn), scale


class Kernel:
    """``torch._scaled_grouped_mm`` by float32 products for each group; keeps its arguments."""

    def __init__(self):
        self.calls = []

    def __call__(self, a, b, scale_a, scale_b, offs, *, out_dtype, use_fast_accum):
        assert use_fast_accum
        self.calls.append((a, b, scale_a, scale_b))
        begins, ends = [0, *offs.tolist()[:-1]], offs.tolist()
        if b.ndim == 3:
            out = torch.full((len(a), b.shape[-1]), torch.nan)  # rows of no group stay as they are
            for e, rows in enumerate(map(slice, begins, ends)):
                out[rows] = a[rows].float() @ b[e].float() * scale_a[rows, None] * scale_b[e][None]
            return out.to(out_dtype)
        scale_a, scale_b = scale_a.view(len(ends), -1, 1), scale_b.view(len(ends), 1, -1)
        parts = [
            a[:, rows].float() @ b[rows].float() * scale_a[e] * scale_b[e]
            for e, rows in enumerate(map(slice, begins, ends))
        ]
        return torch.stack(parts).to(out_dtype)


@pytest.fixture
def kernel(monkeypatch):
    made = Kernel()
    monkeypatch.setattr(torch, "_scaled_grouped_mm", made)

    def columns(x, offs):
        codes, scales = utils.torch_to_float8_per_group_colwise(
            x, offs, round_scales_to_power_of_2=True
        )
        codes[offs[-1] :] = (
            0  # the function leaves rows of no group uninitialized; Triton's kernel too
        )
        return codes.t().contiguous().t(), scales

    monkeypatch.setattr(
        fp8_grouped_mm, "triton_fp8_rowwise_2d_scale_and_cast", lambda x, **_: cast_along(x, -1)
    )
    monkeypatch.setattr(
        fp8_grouped_mm,
        "triton_fp8_colwise_3d_scale_and_cast",
        lambda x, **_: (lambda codes, scale: (codes.mT.contiguous().mT, scale))(*cast_along(x, -2)),
    )
    monkeypatch.setattr(
        fp8_grouped_mm,
        "triton_fp8_rowwise_3d_transpose_rhs",
        lambda x, *, output_dtype, round_scales_to_power_of_2: (
            utils.torch_to_3d_rowwise_float8_transpose_rhs(
                x, output_dtype, round_scales_to_power_of_2
            )
        ),
    )
    monkeypatch.setattr(
        fp8_grouped_mm,
        "triton_fp8_per_group_colwise_scales_dual",
        lambda g, x, offs, *_, **__: (*columns(g, offs), *columns(x, offs)),
    )
    return made


def run(function, x, w, g, *options):
    """Results of the three GEMMs, float32 [M, N], [M, K] and [E, N, K]."""
    x, w_t = bf16(x).requires_grad_(), bf16(w).mT.detach().requires_grad_()
    y = function.apply(x, w_t, torch.tensor(OFFS, dtype=torch.int32), *options)
    y.backward(bf16(g))
    return {
        "output": y.detach().float().numpy(),
        "grad_input": x.grad.float().numpy(),
        "grad_weight": w_t.grad.mT.float().numpy(),
    }


def simulated(x, w, g, recipe):
    grad_input, grad_weight = grouped.backward(g, x, w, OFFS, recipe)
    return {
        "output": grouped.forward(x, w, OFFS, recipe),
        "grad_input": grad_input,
        "grad_weight": grad_weight,
    }


def operands(x, w, g, recipe):
    """For each GEMM the operands of the groups."""
    found = {"input": x, "weight": w, "grad_output": g}
    roles = {
        "output": ("input", "weight"),
        "grad_input": ("grad_output", "weight"),
        "grad_weight": ("grad_output", "input"),
    }
    return {
        which: grouped.quantize_operands(which, {r: found[r] for r in roles[which]}, OFFS, recipe)
        for which in GEMMS
    }


def test_torchaos_grouped_fp8_has_the_simulators_codes_and_scales(kernel, rng):
    x, w, g = tensors(rng)
    run(fp8_grouped_mm._Float8GroupedMM, x, w, g, torch.bfloat16, torch.float8_e4m3fn, False)
    begins = (0, *OFFS[:-1])
    for (a, b, scale_a, scale_b), (which, groups) in zip(
        kernel.calls, operands(x, w, g, "rowwise").items(), strict=True
    ):
        for e, (begin, end, (qa, qb)) in enumerate(zip(begins, OFFS, groups, strict=True)):
            if which == "grad_weight":
                theirs = (
                    (a[:, begin:end], scale_a.view(3, -1)[e]),
                    (b[begin:end].t(), scale_b.view(3, -1)[e]),
                )
            else:
                theirs = (a[begin:end], scale_a[begin:end]), (b[e].t(), scale_b[e])
            for (codes, scale_inv), q in zip(theirs, (qa, qb), strict=True):
                np.testing.assert_array_equal(
                    codes.contiguous().view(torch.uint8).numpy(), q.codes, err_msg=f"{which} {e}"
                )
                np.testing.assert_array_equal(
                    scale_inv.numpy(), q.scale_inv[:, 0], err_msg=f"{which} {e}"
                )


def test_torchaos_grouped_fp8_on_integers(kernel, rng):
    """The same bits, but for rows of no group: torchao's are what the kernel leaves there."""
    x, w, g = tensors(rng, integers=True)
    found = run(
        fp8_grouped_mm._Float8GroupedMM, x, w, g, torch.bfloat16, torch.float8_e4m3fn, False
    )
    for which, expected in simulated(x, w, g, "rowwise").items():
        rows = slice(None) if which == "grad_weight" else slice(OFFS[-1])
        np.testing.assert_array_equal(found[which][rows], expected[rows], err_msg=which)
    for which in ("output", "grad_input"):
        assert np.isnan(found[which][OFFS[-1] :]).all()


def test_torchaos_casts_refuse_an_empty_group():
    """Its reference has no amax of no rows; its Triton kernel writes the scale of a zero amax."""
    with pytest.raises(IndexError, match="reduction"):
        utils.torch_to_float8_per_group_colwise(torch.ones(32, 16), torch.tensor([16, 16, 32]))


def test_torchaos_emulated_mxfp8(rng):  # X-7, B-1
    x, w, g = tensors(rng)
    x, g = x[: OFFS[-1]], g[: OFFS[-1]]
    options = (torch.bfloat16, KernelPreference.EMULATED, False, ScaleCalculationMode.RCEIL, False)
    found, expected = (
        run(mxfp8_grouped_mm._MXFP8GroupedMM, x, w, g, *options),
        simulated(x, w, g, "mxfp8"),
    )
    begins = (0, *OFFS[:-1])
    for which, groups in operands(x, w, g, "mxfp8").items():
        for e, pair in enumerate(groups):
            part = e if which == "grad_weight" else slice(begins[e], OFFS[e])
            mine, theirs = expected[which][part], found[which][part]
            assert (
                np.abs(mine - theirs)
                <= bound.bound(*pair, theirs, mine, out_dtype=BFLOAT16, epilogue="scale_then_round")
            ).all(), which


@pytest.mark.parametrize("lines", ["rowwise", "colwise"])
def test_torchaos_mxfp8_of_groups_along_the_reduced_axis(lines, rng):
    """Its reference takes the FLOOR mode, whose policy is mx_floor.

    Its groups have whole blocks.
    """
    x, _, _ = tensors(rng)
    ends, x = torch.tensor(OFFS), bf16(x[: OFFS[-1]])
    if lines == "rowwise":
        codes, scales = utils._to_mxfp8_per_group_rowwise(x.t().contiguous(), ends)
    else:
        codes, scales = (v.t() for v in utils._to_mxfp8_per_group_colwise(x, ends))
    begins = (0, *OFFS[:-1])
    mine = [
        scaling.quantize(x.float().numpy()[b:e].T, E4M3FN, granularity="mx_1x32", policy="mx_floor")
        for b, e in zip(begins, OFFS, strict=True)
    ]
    np.testing.assert_array_equal(
        codes.contiguous().view(torch.uint8).numpy(),
        np.concatenate([q.codes for q in mine], axis=1),
    )
    np.testing.assert_array_equal(
        scales.float().numpy(), np.concatenate([q.scale_inv for q in mine], axis=1)
    )


def deepgemm_per_channel(x):
    """DeepGEMM (commit 54e22612), deep_gemm/utils/math.py, per_channel_cast_to_fp8 on a GPU: codes,
    and sf [M / 128, N], of x [M, N].
    """
    blocks = torch.from_numpy(x).view(-1, 128, x.shape[1])
    sf = blocks.abs().amax(dim=1, keepdim=True).clamp(1e-4) * torch.tensor(
        1 / 448, dtype=torch.float32
    )
    return (blocks * (1.0 / sf)).to(torch.float8_e4m3fn).view(x.shape), sf[:, 0]


def test_deepgemms_k_grouped_casts(rng):
    """One cast of all rows, whose groups are of whole blocks: the same blocks as those of each
    group.
    """
    x, g = (rng.standard_normal((384, n)).astype(np.float32) for n in (64, 32))
    ends = (128, 128, 384)
    pairs = grouped.quantize_operands(
        "grad_weight", {"input": x, "grad_output": g}, ends, "blockwise_deepgemm"
    )
    assert pairs[1] is None
    for at, tensor in enumerate((g, x)):
        codes, sf = deepgemm_per_channel(tensor)
        mine = [pair[at] for pair in pairs if pair is not None]
        np.testing.assert_array_equal(
            codes.t().contiguous().view(torch.uint8).numpy(),
            np.concatenate([q.codes for q in mine], axis=1),
        )
        np.testing.assert_array_equal(
            sf.numpy().T, np.concatenate([q.scale_inv for q in mine], axis=1)
        )
