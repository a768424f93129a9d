"""The self-check of kernels passes on a CPU, and sees a wrong bit of any result of any kernel."""

import pytest
import torch

pytest.importorskip("triton")

from fp8ref.torch.kernels import casts, self_check

CPU = torch.device("cpu")
RESULTS = {
    "amax": 1,
    "cast": 3,
    "cast_by_amax": 4,
    "cast_by_guess_": 4,
    "transpose": 1,
    "amax_lines": 2,
    "cast_lines": 2,
    "squares": 4,
    "lines": 6,
}
"""{operator: how many results it has}."""


def test_every_kernel_passes_here():
    assert self_check.failure(CPU) == ""


def test_every_operator_that_casts_is_checked():
    assert set(casts.__all__) == {*RESULTS, "merge_"}


@pytest.mark.parametrize(
    ("name", "wrong"), [(name, i) for name, count in RESULTS.items() for i in range(count)]
)
def test_a_wrong_bit_is_seen(name, wrong, monkeypatch):
    right = getattr(casts, name)
    monkeypatch.setattr(self_check, "SHAPES", ((256, 256),))

    def operator(*arguments, **options):
        results = right(*arguments, **options)
        result = results[wrong] if isinstance(results, tuple) else results
        bits = result.view(torch.uint8 if result.dtype.itemsize == 1 else torch.int32).flatten()
        # of partial amaxes the largest, which is the one that counts
        bits[bits.argmax() if result.dtype == torch.int32 else 9 % len(bits)] ^= 1
        return results

    monkeypatch.setattr(casts, name, operator)
    assert self_check.failure(CPU).endswith("differ from those of plain operations")


def test_a_wrong_observation_is_seen(monkeypatch):
    right = casts.merge_

    def merge(seen, parts):
        right(seen, parts)
        seen[1] = 0

    monkeypatch.setattr(casts, "merge_", merge)
    assert self_check.failure(CPU) == "merged amaxes differ from those of plain operations"


def test_a_kernel_that_does_not_run_is_a_failure(monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("ptxas is missing\nmore")

    monkeypatch.setattr(casts, "cast", broken)
    assert self_check.failure(CPU) == (
        "RuntimeError where a kernel was compiled or run: ptxas is missing"
    )


def test_fused_kernels_run_by_the_launches_of_pytorch(monkeypatch):
    assert self_check.fused(CPU) == ""
    right = self_check.launch.run

    def run(made, *tensors):
        right(made, *tensors)
        tensors[-1].view(torch.int32)[0] += 1 << 20

    monkeypatch.setattr(self_check.launch, "run", run)
    assert self_check.fused(CPU) == "results of a norm differ from those of plain operations"
