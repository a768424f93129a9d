"""Triton kernels as operators, interpreted on a CPU: the results of plain operations."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.torch import delayed
from fp8ref.torch.kernels import casts, launch
from fp8ref.torch.linear.linear import Linear
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
    codes, transposed, parts = casts.cast(x, scale, e5m2=fmt == E5M2)
    want = bits(scaling.quantize_with(x, scale, fmt).codes)
    assert torch.equal(bits(codes), want)
    assert torch.equal(bits(transposed), want.t())
    assert parts.amax().view(torch.float32) == scaling.amax(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_scale_of_partial_amaxes(dtype):
    for x in (tensor(dtype=dtype), tensor(dtype=dtype).t(), tensor(dtype=dtype)[:, ::2]):
        codes, transposed, scale, scale_inv = casts.cast_by_amax(x, casts.amax(x), e5m2=False)
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
    codes, transposed = casts.cast_lines(x, rows.scale, columns.scale, e5m2=False)
    assert torch.equal(bits(codes), bits(rows.codes))
    assert torch.equal(bits(transposed), bits(columns.codes.t()))


@pytest.mark.parametrize("policy", ["torchao", "torchao_pow2"])
def test_lines_cast_by_their_amaxes(policy):
    x = tensor()
    by_amaxes = casts.cast_lines_by_amaxes(
        x, *casts.amax_lines(x), e5m2=True, power=policy == "torchao_pow2"
    )
    for axis, (codes, scale, inverse) in ((-1, by_amaxes[:3]), (-2, by_amaxes[3:])):
        want = scaling.quantize(x, E5M2, granularity="rowwise", axis=axis, policy=policy)
        assert torch.equal(bits(codes), bits(want.codes if axis == -1 else want.codes.t()))
        assert torch.equal(scale, want.scale)
        assert torch.equal(inverse, want.scale_inv)


def test_a_product_is_scaled():
    x = tensor()
    rows, columns = (torch.rand(shape) for shape in ((200, 1), (1, 136)))
    expected = torch.mul(x, rows * columns, out=torch.empty_like(x))
    assert torch.equal(casts.scaled(x, rows, columns), expected)


def test_blocks_of_a_tile_along_both_axes():
    x = tensor(k=256)
    codes, transposed, *scales = casts.lines(x, e5m2=True)
    for got, axis, (scale, inverse) in ((codes, -1, scales[:2]), (transposed.t(), -2, scales[2:])):
        granularity = "blockwise_1x128"
        want = scaling.quantize(x, E5M2, granularity=granularity, axis=axis, ragged=True)
        assert torch.equal(bits(got), bits(want.codes))
        assert torch.equal(scale, want.scale)
        assert torch.equal(inverse, want.scale_inv)


def test_squares():
    x = tensor(k=256)
    codes, transposed, scale, inverse = casts.squares(x, e5m2=False)
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
    ops, e5m2, parts = torch.ops.fp8ref, launch.text(e5m2=True), casts.amax(x)
    calls = (
        (ops.amax, ([x], launch.text())),
        (ops.cast, ([x, scale], e5m2)),
        (ops.cast_by_amax, ([x, parts], e5m2)),
        (ops.amax_lines, ([x], launch.text())),
        (ops.cast_lines, ([x, *lines], e5m2)),
        (ops.cast_lines_by_amaxes, ([x, *casts.amax_lines(x)], e5m2)),
        (ops.scaled, ([x, *lines], launch.text())),
        (ops.squares, ([x], launch.text(e5m2=True, square=True))),
        (ops.lines, ([x], launch.text(e5m2=True, square=False))),
        (ops.merge_, (torch.zeros(3), parts)),
        (ops.cast_by_guess_, (x.nan_to_num(0, 1, -1), torch.ones((), dtype=torch.int32), True)),
    )
    for operator, arguments in calls:
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(operator.default, arguments, test_utils=tests)
    arguments = ([scaling.quantize(x, E5M2).codes], launch.text())
    torch.library.opcheck(ops.transpose.default, arguments, test_utils="test_faketensor")


@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_pow2", "delayed", "rowwise_native"])
def test_a_compiled_linear_takes_inputs_of_other_lengths(recipe):
    """The second length makes a compiler trace the first dim as a symbol."""
    torch._dynamo.reset()
    plain, linear = (
        Linear.of(nn.Linear(64, 48, dtype=torch.bfloat16), recipe, kernels=kernels)
        for kernels in ("plain", "triton")
    )
    linear.load_state_dict(plain.state_dict())
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    for rows in (32, 48, 200):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).bfloat16()
        grads = []
        for layer in (plain, compiled):
            leaf = x.clone().requires_grad_()
            layer(leaf).float().square().sum().backward()
            grads.append(leaf.grad)
        assert torch.equal(*grads)
    assert torch.equal(plain.weight.grad, linear.weight.grad)
