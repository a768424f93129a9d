"""Two levels of scales in PyTorch: codes and scales are the simulator's, bit for bit (S-22)."""

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8ref.formats import E2M1FN, E4M3FN
from fp8ref.policy import FP4_POLICIES
from fp8ref.sim.quantize import scaling as sim
from fp8ref.torch.quantize import scales, scaling
from fp8ref.torch.quantize.philox import Draw

POLICIES = sorted(name for name, p in FP4_POLICIES.items() if p.two_level.tensorwise)
LINE, SQUARE = "nvfp4_1x16", "nvfp4_16x16"
SEED = 2**40 + 9
KEY = SEED & 0xFFFFFFFF, SEED >> 32
BITS = {"nearest_even": None, "stochastic": 48, "stochastic_8": 8}


def bfloat16(x):
    """x rounded to bfloat16, for NumPy and for torch."""
    x = x.astype(ml_dtypes.bfloat16)
    return x, torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)


def quantized(x, axis, rounding="nearest_even", **kind):
    """The simulator's quantized x with a reduced axis, which its numbers go by last (S-24)."""
    seed = None if rounding == "nearest_even" else SEED
    x = np.moveaxis(x, axis, -1)
    q = sim.quantize(x, E2M1FN, rounding=rounding, seed=seed, ragged=True, **kind)
    parts = {key: np.moveaxis(getattr(q, key), -1, axis) for key in ("codes", "scale", "scale_inv")}
    return q._replace(axis=axis, **parts)


def assert_equal(mine, expected):
    np.testing.assert_array_equal(mine.code_bits.numpy(), expected.codes)
    np.testing.assert_array_equal(mine.scale.numpy(), expected.scale)
    np.testing.assert_array_equal(mine.scale_inv.numpy(), expected.scale_inv)
    assert (mine.tensor_scale_inv is None) == (expected.tensor_scale_inv is None)
    if expected.tensor_scale_inv is not None:
        np.testing.assert_array_equal(mine.tensor_scale_inv.numpy(), expected.tensor_scale_inv)
    np.testing.assert_array_equal(scaling.dequantize(mine).numpy(), sim.dequantize(expected))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("granularity", [LINE, SQUARE])
@pytest.mark.parametrize("axis", [-1, 0])
def test_codes_and_scales_are_the_simulators(policy, granularity, axis, rng):
    kind = {"granularity": granularity, "policy": FP4_POLICIES[policy]}
    x = rng.standard_normal((48, 64)) * 2.0 ** rng.integers(-12, 12, (48, 64))
    special, whole = x.copy(), x.round()
    special.flat[:4] = np.nan, np.inf, -np.inf, -0.0
    for values in (x, special, whole, x * 2.0**-120, x * 2.0**110, 0 * x):
        value, tensor = bfloat16(values)
        for rounding, bits in BITS.items():
            draw = None if bits is None else Draw(KEY, bits)
            mine = scaling.quantize(tensor, E2M1FN, axis=axis, draw=draw, **kind)
            assert_equal(mine, quantized(value, axis, rounding, **kind))


@pytest.mark.parametrize("granularity", [LINE, SQUARE])
def test_every_16_bit_input_beside_some_amaxes(granularity):
    """In blocks that these inputs lead, under tensors of several amaxes."""
    kind = {"granularity": granularity, "policy": FP4_POLICIES["te_nvfp4"]}
    patterns = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    finite = patterns[np.isfinite(patterns.astype(np.float32))]
    for amax in (6.0, 2.0**-90, 3e38):
        x = finite[np.abs(finite.astype(np.float32)) <= amax]
        x = np.resize(x, (-(-x.size // 256) * 16, 16))
        value, tensor = bfloat16(x.astype(np.float32))
        assert_equal(scaling.quantize(tensor, E2M1FN, **kind), quantized(value, -1, **kind))


@pytest.mark.parametrize("axis", [-1, 0])
def test_last_blocks_may_be_short(axis, rng):  # L-5
    value, tensor = bfloat16(rng.standard_normal((40, 40)))
    kind = {"granularity": LINE, "policy": FP4_POLICIES["torchao_nvfp4"]}
    mine = scaling.quantize(tensor, E2M1FN, axis=axis, ragged=True, **kind)
    assert_equal(mine, quantized(value, axis, **kind))


def test_a_piece_draws_by_its_places_in_the_whole(rng):  # S-24
    """Of rows, which follow each other, and of columns, whose places are a tensor."""
    value, tensor = bfloat16(rng.standard_normal((64, 96)))
    kind = {"granularity": LINE, "policy": FP4_POLICIES["te_nvfp4"]}
    value[::16], tensor[::16] = 6, 6  # each piece has the tensor's amax
    places = torch.arange(64 * 96).reshape(64, 96)
    for rounding in ("stochastic", "stochastic_8"):
        whole = quantized(value, -1, rounding, **kind).codes
        for rows, columns in ((slice(16, 48), slice(96)), (slice(64), slice(32, 64))):
            start = places[rows, columns].contiguous()
            starts = [start] + [int(start[0, 0])] * (columns == slice(96))
            for first in starts:
                draw = Draw(KEY, BITS[rounding], first)
                mine = scaling.quantize(tensor[rows, columns], E2M1FN, draw=draw, **kind)
                np.testing.assert_array_equal(mine.code_bits.numpy(), whole[rows, columns])


def test_large_tensors_are_drawn_in_pieces(rng):  # S-24
    value, tensor = bfloat16(rng.standard_normal((1536, 192)))
    kind = {"granularity": LINE, "policy": FP4_POLICIES["te_nvfp4"]}
    for axis in (-1, 0):
        mine = scaling.quantize(tensor, E2M1FN, axis=axis, draw=Draw(KEY, 48), **kind)
        assert_equal(mine, quantized(value, axis, "stochastic", **kind))


_SLOW = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
]


@pytest.mark.parametrize(
    ("policy", "compiler"),
    [
        ("te_nvfp4_4over6_mse_fast", "aot_eager"),
        *(
            pytest.param(policy, "inductor", marks=_SLOW)
            for policy in ("te_nvfp4", "te_nvfp4_4over6", "te_nvfp4_4over6_mse_fast")
        ),
    ],
)
def test_compiled_casts_are_the_same(policy, compiler, rng):
    torch.compiler.reset()
    kind = {"granularity": LINE, "policy": FP4_POLICIES[policy]}
    value, tensor = bfloat16(rng.standard_normal((32, 64)) * 3)

    def cast(x, low, high, bits):
        q = scaling.quantize(x, E2M1FN, draw=Draw((low, high), bits), **kind)
        return q.code_bits, q.scale, q.scale_inv, q.tensor_scale_inv

    compiled = torch.compile(cast, fullgraph=True, backend=compiler)
    for rounding in ("stochastic", "stochastic_8"):
        expected = quantized(value, -1, rounding, **kind)
        mine = compiled(tensor, *map(torch.tensor, KEY), BITS[rounding])
        for got, right in zip(mine, (*expected[:3], expected.tensor_scale_inv), strict=True):
            np.testing.assert_array_equal(got.numpy(), right)


def test_fp8_is_rounded_stochastically_too(rng):  # C-2
    value, tensor = bfloat16(rng.standard_normal((64, 64)))
    for rounding in ("stochastic", "stochastic_8"):
        expected = sim.quantize(value, E4M3FN, rounding=rounding, seed=SEED)
        mine = scaling.quantize(tensor, E4M3FN, draw=Draw(KEY, BITS[rounding]))
        np.testing.assert_array_equal(mine.code_bits.numpy(), expected.codes)
        given = scaling.quantize_with(tensor, mine.scale, E4M3FN, draw=Draw(KEY, BITS[rounding]))
        np.testing.assert_array_equal(given.code_bits.numpy(), expected.codes)


def test_what_two_levels_do_not_go_with_is_refused():  # S-22
    x, policy = torch.ones(32, 32), FP4_POLICIES["te_nvfp4"]
    for fmt, granularity, match in (
        (E4M3FN, LINE, "the format of te_nvfp4 is one of e2m1fn; got 'e4m3fn'"),
        (E2M1FN, "mx_1x32", "granularity of te_nvfp4 is one of nvfp4_1x16"),
    ):
        with pytest.raises(ValueError, match=match):
            scaling.quantize(x, fmt, granularity=granularity, policy=policy)
    with pytest.raises(ValueError, match="needs amaxes of blocks and of the tensor"):
        scales.scales_from_amax(x, E2M1FN, policy)
    with pytest.raises(ValueError, match="te_nvfp4_row"):
        scaling.quantize(x, E2M1FN, granularity=LINE, policy=FP4_POLICIES["te_nvfp4_row"])
