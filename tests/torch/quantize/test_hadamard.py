"""The rotation is the simulator's, bit for bit (spec A-13)."""

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fp8ref.sim.attention.operands import hadamard as sim
from fp8ref.spec.rotation import NVFP4_ROTATION
from fp8ref.torch.quantize import hadamard


@pytest.mark.parametrize("n", [1, 2, 64, 256])
@pytest.mark.parametrize("seed", [0, 1, 2**40 + 3, 2**64 - 1])
def test_signs_and_rotation(n, seed, rng):
    signs = hadamard.signs(n, seed, torch.device("cpu"))
    np.testing.assert_array_equal(signs.numpy(), sim.signs(n, seed))
    x = rng.normal(size=(3, 5, n)).astype(np.float32)
    np.testing.assert_array_equal(
        hadamard.rotate(torch.from_numpy(x), signs).numpy(), sim.rotate(x, sim.signs(n, seed))
    )


@pytest.mark.parametrize(
    ("n", "seed", "message"),
    [(96, 0, "power of two"), (0, 0, "power of two"), (8, 2**64, "seed"), (8, True, "seed")],
)
def test_other_sizes_and_seeds_are_refused(n, seed, message):
    with pytest.raises(ValueError, match=message):
        hadamard.signs(n, seed, torch.device("cpu"))


def test_a_size_that_a_compiler_traces():
    x = torch.randn(3, 64)
    turned = make_fx(
        lambda x: hadamard.rotate(x, hadamard.signs(x.shape[-1], 5, x.device)),
        tracing_mode="symbolic",
    )(x)
    signs = hadamard.signs(64, 5, x.device)
    assert torch.equal(turned(x), hadamard.rotate(x, signs))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shape", [(48, 64), (48, 1024)])  # whole, and in pieces
def test_blocks_are_the_simulators(axis, shape, rng):  # S-23
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 9, shape)
    x.flat[:3] = np.inf, np.nan, 3e38
    x = x.astype(np.float32)
    expected = sim.rotate_blocks(np.moveaxis(x, axis, -1), NVFP4_ROTATION)
    turned = hadamard.rotate_blocks(torch.from_numpy(x), NVFP4_ROTATION, axis)
    assert turned.dtype == torch.bfloat16
    np.testing.assert_array_equal(turned.float().numpy(), np.moveaxis(expected, -1, axis))


def test_blocks_divide_the_axis():  # S-23
    with pytest.raises(ValueError, match=r"a rotation of 16 needs .* got x.shape=\(24, 32\)"):
        hadamard.rotate_blocks(torch.ones(24, 32), NVFP4_ROTATION, 0)
