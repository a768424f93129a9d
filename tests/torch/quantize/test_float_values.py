"""Float32 numbers of FP8 codes are those of torch's own conversion."""

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.torch.quantize import cast, float_values, scaling


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_every_code_is_decoded(fmt):  # C-3
    codes = torch.arange(256, dtype=torch.uint8).view(cast.native(fmt))
    found, right = float_values.decode(codes), codes.float()
    number = ~right.isnan()
    assert torch.equal(found.isnan(), right.isnan())
    assert torch.equal(found[number].view(torch.int32), right[number].view(torch.int32))  # -0 too
    assert torch.equal(float_values.decode(right.bfloat16())[number], right[number])


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_numbers_are_rounded_as_a_cast_does(fmt):  # C-2, S-5
    """All numbers of the format, the midpoints between neighbors and the float32 numbers next to
    them, and random ones.
    """
    numbers = np.unique(
        torch.arange(256, dtype=torch.uint8)
        .view(cast.native(fmt))
        .float()
        .nan_to_num(0, 0, 0)
        .numpy()
    )
    middles = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
    rng = np.random.default_rng(0)
    random = (rng.normal(size=1 << 16) * 2.0 ** rng.integers(-20, 12, 1 << 16)).astype(np.float32)
    beside = [np.nextafter(middles, np.float32(side)) for side in (-np.inf, np.inf)]
    x = torch.from_numpy(
        np.concatenate(
            [numbers, middles, *beside, random, np.float32([1e30, -1e30, np.inf, -np.inf, 1e-40])]
        )
    )
    right = cast.to_fp8(x, fmt).float()
    for scratch in (None, torch.empty_like(x)):
        assert torch.equal(float_values.round_(x.clone(), fmt, scratch), right)
    assert float_values.round_(torch.tensor([torch.nan]), fmt).isnan()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("shape", "rows"), [((), 1), ((1, 72), 1), ((100, 1), 1), ((4, 1), 32), ((4, 72), 32)]
)
def test_pieces_are_the_whole(monkeypatch, shape, rows, transposed):
    """Of a tensor larger than a piece, with one scale, one for each column, row or 32 rows; the
    last piece is shorter."""
    x = torch.randn(72, 100).t() if transposed else torch.randn(100, 72)
    scale, sizes = torch.rand(shape), []

    def product(part, scale):
        sizes.append(len(part))
        return (part * scaling.spread(scale, tuple(part.shape), (rows, 1))).bfloat16()

    whole = product(x, scale)
    monkeypatch.setattr(float_values, "_PIECE", 500)
    by_pieces = float_values.in_pieces(product, x, torch.bfloat16, scale, rows=rows)
    assert len(sizes) > 3
    assert sum(sizes[1:]) == 100
    assert torch.equal(by_pieces, whole)
    assert by_pieces.stride() == x.stride()


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_codes_are_decoded_in_pieces(monkeypatch, fmt):
    codes = torch.arange(256, dtype=torch.uint8).repeat(8).view(64, 32).view(cast.native(fmt))
    monkeypatch.setattr(float_values, "_PIECE", 100)
    # a NaN's bits too
    assert torch.equal(
        float_values.decode(codes).view(torch.int32), codes.float().view(torch.int32)
    )


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
@pytest.mark.parametrize(
    "trace", [lambda *call: make_fx(call[0])(call[1]), torch.jit.trace], ids=["make_fx", "jit"]
)
def test_a_trace_decodes_other_sizes(monkeypatch, trace):
    monkeypatch.setattr(float_values, "_PIECE", 100)
    small, large = (torch.randn(n, 32).to(torch.float8_e4m3fn) for n in (8, 24))
    traced = trace(lambda codes: cast.decode(codes, E4M3FN), small)
    assert torch.equal(traced(large), large.float())


def test_a_number_without_dims():
    scale = torch.tensor(3.0)
    found = float_values.in_pieces(torch.mul, torch.tensor(5.0), torch.float32, scale)
    assert found.shape == ()
    assert found == 15


def test_sizes_of_fake_tensors_are_not_guarded():
    modes = FakeTensorMode(shape_env=ShapeEnv())
    symbols = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    x, scale = (
        modes.from_tensor(torch.randn(*shape), symbolic_context=symbols)
        for shape in ((6, 8), (6, 1))
    )
    taken = float_values.in_pieces(lambda part, scale: part, x, torch.float32, scale)
    assert taken is x
    assert not modes.shape_env.guards
