"""A stand-in for torch's scaled_mm of MX and NVFP4 operands, of a GPU of capability 10.0.

PyTorch's own checks run on it (``torch._meta_registrations.meta_scaled_mm_v2``). What it multiplies
is read by the simulator: codes two a byte (F-5), scales in swizzled_128x4 (S-25).
"""

import numpy as np
import torch
from torch.nn import functional

from fp8ref.formats import E2M1FN, E4M3FN, E8M0FNU
from fp8ref.sim.quantize import cast, packing, scale_layouts
from fp8ref.torch.gemm import blocks

FORMATS = {
    torch.float8_e4m3fn: E4M3FN,
    torch.float4_e2m1fn_x2: E2M1FN,
    torch.float8_e8m0fnu: E8M0FNU,
}


class ScaledMM:
    """Products of dequantized operands, exact, times the tensors' scales, rounded once.

    calls     dtypes of codes and scales, and the length of a block, of each call.
    operands  a [M, K] and b [N, K] of the last call, as it stores them.
    """

    def __init__(self) -> None:
        self.calls = []

    def __call__(self, a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, **options):
        names, swizzles = functional.ScalingType, functional.SwizzleType
        assert (recipe_a, swizzle_a) == (recipe_b, swizzle_b)
        assert swizzle_a[0] is swizzles.SWIZZLE_32_4_4
        assert swizzle_a[1:] == [swizzles.NO_SWIZZLE] * (len(recipe_a) - 1)
        torch.ops.aten._scaled_mm_v2(
            a.to("meta"),
            b.to("meta"),
            [scale.to("meta") for scale in scale_a],
            [kind.value for kind in recipe_a],
            [kind.value for kind in swizzle_a],
            [scale.to("meta") for scale in scale_b],
            [kind.value for kind in recipe_b],
            [kind.value for kind in swizzle_b],
            None,
            options["output_dtype"],
        )
        assert options["output_dtype"] in (torch.bfloat16, torch.float32)
        block = {names.BlockWise1x16: 16, names.BlockWise1x32: 32}[recipe_a[0]]
        # [M, K] and [N, K]
        left, right = (
            _dequantized(codes, scales[0], block)
            for codes, scales in ((a, scale_a), (b.t(), scale_b))
        )
        total = torch.from_numpy(left @ right.T)
        factor = 1.0
        for scales in (scale_a, scale_b):
            if len(scales) > 1:
                assert recipe_a[1] is names.TensorWise
                factor *= float(scales[1])
        self.calls.append((a.dtype, scale_a[0].dtype, block))
        self.operands = a, b.t()
        return (total * factor).to(options["output_dtype"])


def _dequantized(codes: torch.Tensor, scales: torch.Tensor, block: int) -> np.ndarray:
    """float64 [M, K] of row-major codes."""
    assert codes.is_contiguous()
    bits = codes.view(torch.uint8).numpy()
    bits = packing.unpack(bits) if codes.dtype == torch.float4_e2m1fn_x2 else bits
    shape = bits.shape[0], -(-bits.shape[1] // block)
    memory = scale_layouts.load(scales.view(torch.uint8).numpy(), "swizzled_128x4", shape)
    factors = cast.decode(memory, FORMATS[scales.dtype]).astype(np.float64)
    return cast.decode(bits, FORMATS[codes.dtype]) * np.repeat(factors, block, axis=1)


def install(monkeypatch, capability=(10, 0)) -> ScaledMM:
    """scaled_mm for this test, on a device of this compute capability."""
    kernel = ScaledMM()
    monkeypatch.setattr(functional, "scaled_mm", kernel)
    monkeypatch.setattr(blocks, "capability", lambda device: capability)
    return kernel
