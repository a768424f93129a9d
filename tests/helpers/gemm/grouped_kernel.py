"""A GPU's grouped kernel of torch, for tests without a GPU."""

import torch


class ScaledGroupedMm:
    """``torch._scaled_grouped_mm`` as a GPU has it, in float32: what it requires is checked, and
    what it does not write is NaN.
    """

    calls = 0

    def __call__(self, a, b, scale_a, scale_b, offs, *, out_dtype, use_fast_accum):
        self.calls += 1
        assert (a.dtype, b.dtype, out_dtype, offs.dtype) == (
            torch.float8_e4m3fn,
            torch.float8_e4m3fn,
            torch.bfloat16,
            torch.int32,
        )
        assert a.stride(-1) == 1
        assert b.stride(-2) == 1
        assert a.stride(0) % 16 == 0
        assert b.stride(-1) % 16 == 0
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        assert scale_a.dtype == scale_b.dtype == torch.float32
        ends = offs.tolist()
        groups = [
            (e, slice(begin, end))
            for e, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
            if begin < end
        ]
        if b.ndim == 3:
            assert (scale_a.shape, scale_b.shape) == (a.shape[:1], (len(ends), b.shape[2]))
            out = torch.full((len(a), b.shape[2]), torch.nan)
            for e, rows in groups:
                out[rows] = a[rows].float() @ b[e].float() * scale_a[rows, None] * scale_b[e]
            return out.to(out_dtype)
        assert not any(end % 16 for end in ends)
        assert ends[-1] <= a.shape[1]
        assert (scale_a.numel(), scale_b.numel()) == (len(ends) * len(a), len(ends) * b.shape[1])
        out = torch.full((len(ends), len(a), b.shape[1]), torch.nan)
        scale_a, scale_b = scale_a.view(len(ends), -1, 1), scale_b.view(len(ends), 1, -1)
        for e, rows in groups:
            out[e] = a[:, rows].float() @ b[rows].float() * scale_a[e] * scale_b[e]
        return out.to(out_dtype)
