"""Weights that are cast as a list, interpreted on a CPU: the results of plain operations."""

import pytest
import torch

pytest.importorskip("triton")

from helpers.kernels.launches import counted

from fp8ref.formats import FP8_FORMATS
from fp8ref.torch.kernels import cast_lists, casts
from fp8ref.torch.kernels.cast_lists import Weight
from fp8ref.torch.quantize import scaling

SHAPES = ((48, 64), (144, 80), (128, 128))


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, largest: float = 3e2) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    x[:4, 0] = torch.tensor([0.0, -0.0, 1e-7, largest])
    return x


def check(cast: tuple, expected: scaling.Quantized) -> None:
    """Both orders have the plain operations' codes, scale and scale_inv."""
    codes, scale, inverse, transposed, scale_t, inverse_t, _ = cast
    assert codes.dtype == transposed.dtype == expected.codes.dtype
    assert torch.equal(codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(transposed.view(torch.uint8), codes.view(torch.uint8).t())
    assert (scale, inverse) == (scale_t, inverse_t) == (expected.scale, expected.scale_inv)


def every_kind() -> dict[str, tuple[Weight, scaling.Quantized]]:
    """{name: a weight, and the plain operations' cast of it}, of all that a list may hold."""
    weights = {}
    for fmt in ("e4m3fn", "e5m2"):
        for i, shape in enumerate(SHAPES):
            x, scale = tensor(*shape, largest=300 * (i + 1)), torch.tensor(3.0 / (i + 1))
            plain = scaling.quantize(x, FP8_FORMATS[fmt])
            given = scaling.quantize_with(x, scale, FP8_FORMATS[fmt])
            power = scaling.quantize(x, FP8_FORMATS[fmt], policy="torchao_pow2")
            guess = (power.scale * (2 if i == 1 else 1)).view(torch.int32)
            weights |= {
                f"{fmt} {i}": (Weight(x, fmt), plain),
                f"{fmt} {i}, amaxes": (Weight(x, fmt, parts=casts.amax(x)), plain),
                f"{fmt} {i}, scale": (Weight(x, fmt, scale=scale), given),
                f"{fmt} {i}, power": (Weight(x, fmt, True), power),
                f"{fmt} {i}, guess": (Weight(x, fmt, True, guess=guess), power),
            }
    for dtype in (torch.float32, torch.float16):
        x = tensor(64, 48, dtype=dtype)
        weights[f"{dtype}"] = Weight(x, "e4m3fn"), scaling.quantize(x, FP8_FORMATS["e4m3fn"])
    odd, unaligned = tensor(131, 67), tensor(48, 64).view(-1)[8:264].view(16, 16)
    others = {"odd": odd, "transposed": odd.t(), "strided": tensor(64, 96)[:, ::2]}
    for name, x in (others | {"unaligned": unaligned}).items():
        weights[name] = Weight(x, "e4m3fn"), scaling.quantize(x, FP8_FORMATS["e4m3fn"])
    return weights


def test_weights_of_every_kind_have_the_bits_of_plain_operations():
    weights = every_kind()
    results = cast_lists.cast({name: weight for name, (weight, _) in weights.items()})
    assert results.keys() == weights.keys()
    for name, (weight, expected) in weights.items():
        check(results[name], expected)
        amax = results[name][-1].amax().view(torch.float32)
        assert amax == scaling.amax(weight.tensor)
        if weight.guess is not None:
            assert weight.guess.view(torch.float32) == expected.scale


@pytest.mark.parametrize(
    ("options", "launches"),
    [
        ({}, ["_amax_list", "_cast_list"]),
        ({"parts": torch.tensor([0x43800000], dtype=torch.int32)}, ["_cast_list"]),
        ({"scale": torch.tensor(2.0)}, ["_cast_list"]),
        ({"power": True, "guess": torch.tensor(0, dtype=torch.int32)}, ["_cast_list"] * 2),
    ],
    ids=["amaxes read", "amaxes known", "scale", "guess"],
)
def test_a_list_has_the_launches_of_one_weight(options, launches):
    for shapes in (SHAPES[:1], SHAPES):
        weights = {shape: Weight(tensor(*shape), "e4m3fn")._replace(**options) for shape in shapes}
        with counted() as names:
            cast_lists.cast(weights)
        assert [name for name in names if not name.startswith("aten::")] == launches


def test_weights_that_differ_in_kind_have_launches_of_their_own():
    x, scale = tensor(48, 64), torch.ones(())
    kinds = [
        Weight(x, "e4m3fn", scale=scale),
        Weight(x, "e5m2", scale=scale),
        Weight(x.float(), "e4m3fn", scale=scale),
        Weight(x[:, 1:], "e4m3fn", scale=scale),
        Weight(x[1:, :48], "e4m3fn", scale=scale),
    ]
    with counted() as names:
        cast_lists.cast(dict(enumerate(kinds)))
    assert names == ["_cast_list"] * 4  # the last two lie in no rows of 16 numbers


def test_a_table_serves_as_long_as_weights_and_codes_lie_as_before():
    rows = ((48, 64, 64, 1, 0, 0, 0, 0, 0, 1), (16, 32, 32, 1, -5, 2**40, 7, 8, 9, 3))
    table, device = cast_lists._table(rows, torch.device("cpu")), torch.device("cpu")
    assert table.view(torch.int64).squeeze(-1).T.tolist() == [list(row) for row in rows]
    assert table.shape == (10, 4)
    assert cast_lists._table(rows, device) is table
    assert cast_lists._table(rows[:1], device) is not table


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="float64"):
        cast_lists.cast({"w": Weight(tensor(16, 16, dtype=torch.float64), "e4m3fn")})
