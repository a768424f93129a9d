"""Triton kernels as operators, interpreted on a CPU: the results of plain operations."""

import pytest
import torch

pytest.importorskip("triton")

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.torch.delayed import delayed
from fp8ref.torch.kernels import casts
from fp8ref.torch.quantize import scaling

FORMATS = (E4M3FN, E5M2)


def tensor(m: int = 200, k: int = 136, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """x [M, K] of ragged tiles, with zeros of both signs, subnormals and a large value."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[:4, 0] = torch.tensor([0.0, -0.0, 1e-7, 300.0])
    return x


def bits(codes: torch.Tensor) -> torch.Tensor:
    return codes.contiguous().view(torch.uint8)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_one_scale_casts_both_orders_and_observes(fmt):
    x, scale = tensor(), torch.tensor(3.1415927)
    codes, transposed, parts = casts.cast(x, scale, fmt == E5M2)
    want = bits(scaling.quantize_with(x, scale, fmt).codes)
    assert torch.equal(bits(codes), want)
    assert torch.equal(bits(transposed), want.t())
    assert parts.amax().view(torch.float32) == scaling.amax(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_scale_of_partial_amaxes(dtype):
    for x in (tensor(dtype=dtype), tensor(dtype=dtype).t(), tensor(dtype=dtype)[:, ::2]):
        codes, transposed, scale, scale_inv = casts.cast_by_amax(x, casts.amax(x), False)
        want = scaling.quantize(x, E4M3FN)
        assert (scale, scale_inv) == (want.scale, want.scale_inv)
        assert torch.equal(bits(codes), bits(want.codes))
        assert torch.equal(bits(transposed), bits(want.codes.t()))


def test_amaxes_of_lines():
    x = tensor()
    rows, columns = (parts.amax(0).view(torch.float32) for parts in casts.amax_lines(x))
    assert torch.equal(rows, x.abs().amax(1).float())
    assert torch.equal(columns, x.abs().amax(0).float())


def test_scales_of_lines():
    x = tensor()
    rows, columns = (scaling.quantize(x, E4M3FN, granularity="rowwise", axis=i) for i in (-1, -2))
    codes, transposed = casts.cast_lines(x, rows.scale, columns.scale, False)
    assert torch.equal(bits(codes), bits(rows.codes))
    assert torch.equal(bits(transposed), bits(columns.codes.t()))


def test_blocks_of_a_tile_along_both_axes():
    x = tensor(k=256)
    codes, transposed, *scales = casts.lines(x, True)
    for got, axis, (scale, inverse) in ((codes, -1, scales[:2]), (transposed.t(), -2, scales[2:])):
        granularity = "blockwise_1x128"
        want = scaling.quantize(x, E5M2, granularity=granularity, axis=axis, ragged=True)
        assert torch.equal(bits(got), bits(want.codes))
        assert torch.equal(scale, want.scale)
        assert torch.equal(inverse, want.scale_inv)


def test_squares():
    x = tensor(k=256)
    codes, transposed, scale, inverse = casts.squares(x, False)
    want = scaling.quantize(x, E4M3FN, granularity="blockwise_128x128")
    assert torch.equal(bits(codes), bits(want.codes))
    assert torch.equal(bits(transposed), bits(want.codes.t()))
    assert torch.equal(scale, want.scale)
    assert torch.equal(inverse, want.scale_inv)


def test_codes_transpose():
    codes = scaling.quantize(tensor(), E4M3FN).codes
    assert torch.equal(bits(casts.transpose(codes)), bits(codes.t()))
    assert torch.equal(bits(casts.transpose(codes.t())), bits(codes))


@pytest.mark.parametrize("special", [1.0, torch.inf, torch.nan])
def test_observations_merge(special):
    x, seen, want = tensor(), torch.tensor([0.5, 0, 0]), torch.tensor([0.5, 0, 0])
    for y in (x / 1000, torch.cat([x, torch.full_like(x, special)])):
        casts.merge_(seen, casts.amax(y))
        delayed.merge_(want, y)
        assert torch.equal(seen, want)


def test_fake_results_have_the_shapes_of_real_ones():
    x, scale = tensor(), torch.ones(())
    lines = torch.ones(200, 1), torch.ones(1, 136)
    calls = (
        (casts.amax, (x,)),
        (casts.cast, (x, scale, True)),
        (casts.cast_by_amax, (x, casts.amax(x), True)),
        (casts.amax_lines, (x,)),
        (casts.cast_lines, (x, *lines, True)),
        (casts.squares, (x, True)),
        (casts.lines, (x, True)),
        (casts.merge_, (torch.zeros(3), casts.amax(x))),
    )
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    codes = scaling.quantize(x, E5M2).codes
    torch.library.opcheck(casts.transpose, (codes,), test_utils="test_faketensor")
