"""What the kernels compute on a device, compared with plain operations before they are used."""

import torch

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.torch.kernels import casts
from fp8ref.torch.quantize import scaling

__all__ = ["failure"]


def failure(device: torch.device) -> str:
    """The first kernel whose results on a device differ from those of plain operations, as a few
    words; "" if none does."""
    bits = torch.arange(65536, dtype=torch.int32, device=device).to(torch.int16)
    x = bits.view(torch.bfloat16).nan_to_num(0.0, 1e38, -1e38).reshape(256, 256)
    scale = torch.tensor(3.1415927, device=device)
    for fmt in (E4M3FN, E5M2):
        want = scaling.quantize_with(x, scale, fmt).codes.view(torch.uint8)
        codes, transposed, _ = casts.cast(x, scale, fmt == E5M2)
        for got, order in ((codes, "as it lies"), (transposed.t(), "transposed")):
            if not torch.equal(got.view(torch.uint8), want):
                return f"cast to {fmt.name}, {order}, has other codes"
    return ""
