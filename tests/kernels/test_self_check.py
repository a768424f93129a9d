"""The self-check sees a wrong number among any kernel's results."""

import numpy as np
import pytest

pytest.importorskip("triton")

from helpers.kernels.forms import launched_kernels

from fp8ref.kernels import self_check
from fp8ref.kernels.jit import interpret

LAUNCHES = [
    (name, [j for j, (shape, _) in enumerate(outputs) if 0 not in shape])
    for name, *_, outputs in self_check._launches()
]
"""Names, and places of the outputs that have elements."""


def interpreted(launch, inputs, outputs):
    results = [np.zeros(shape, np.dtype(dtype)) for shape, dtype in outputs]
    arrays = [*inputs, *results]
    interpret(launch, arrays, [x.dtype.name for x in arrays])
    return results


@pytest.fixture(scope="module")
def right():
    """The results of every launch, in order."""
    return [interpreted(*launch) for _, _, *launch in self_check._launches()]


def failure(monkeypatch, right, change) -> str:
    """The failure of a device whose results of launch i are changed by ``change(i, results)``."""
    runs, interprets = iter(enumerate(right)), iter(right)

    def recorded(launch, arrays, dtypes):
        results = next(interprets)
        for array, result in zip(arrays[-len(results) :], results, strict=True):
            array[...] = result

    def run(launch, inputs, outputs):
        i, results = next(runs)
        results = [result.copy() for result in results]
        change(i, results)
        return results

    monkeypatch.setattr(self_check, "interpret", recorded)
    return self_check.failure(run)


def test_interpreted_kernels_pass(right):
    results = iter(right)
    assert self_check.failure(lambda *launch: next(results)) == ""


def test_every_kernel_is_checked():
    assert {launch.kernel.fn for _, _, launch, *_ in self_check._launches()} >= launched_kernels()


def test_a_norms_gradient_is_the_same_in_any_order_of_sums():
    """Products of a row are multiples of 1/2, and their magnitudes add up to less than 2^24 halves:
    each partial sum is exact."""
    gradients = [
        inputs for name, _, _, inputs, _ in self_check._launches() if name == "a norm's gradient"
    ]
    assert len(gradients) == 2
    for *readers, _total, h, factors, weight in gradients:
        d = sum(np.abs(x.astype(np.float64)) for x in readers)
        assert (d % 1 == 0).all()
        products = d * np.abs(h.astype(np.float64)) * factors[:, None] * np.abs(weight)
        assert (products * 2 % 1 == 0).all()
        assert 2 * products.sum(1).max() < 2**24


@pytest.mark.parametrize(
    ("launch", "wrong"), [(i, j) for i, (_, places) in enumerate(LAUNCHES) for j in places]
)
def test_a_wrong_number_is_seen(launch, wrong, monkeypatch, right):
    def change(i, results):
        if i == launch:
            bits = results[wrong].reshape(-1).view(f"i{results[wrong].itemsize}")
            bits[-1] ^= 1 << (8 * bits.itemsize - 3)

    name = LAUNCHES[launch][0]
    assert failure(monkeypatch, right, change) == (
        f"results of {name} differ from those of plain operations"
    )


@pytest.mark.parametrize("launch", range(len(LAUNCHES)))
def test_a_last_bit_is_seen_of_what_is_not_approximate(launch, monkeypatch, right):
    approximate = [approximate for _, approximate, *_ in self_check._launches()]

    def change(i, results):
        if i == launch:
            results[0].reshape(-1).view(f"i{results[0].itemsize}")[-1] ^= 1

    assert (failure(monkeypatch, right, change) == "") == (
        approximate[launch] and right[launch][0].dtype.itemsize != 2
    )
