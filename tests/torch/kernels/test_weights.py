"""Linears take amaxes and codes of weights from the optimizer's step, and never stale ones."""

import pytest
import torch
from helpers.states.state_layouts import MASTERED
from torch import nn

pytest.importorskip("triton")

from fp8ref.torch import delayed
from fp8ref.torch.kernels import casts, launch, weights
from fp8ref.torch.linear.cast_once import cast_once
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.states import states

X = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


class Training:
    """Steps of a bfloat16 linear that is its own master."""

    def __init__(self, recipe: str, kernels: str = "triton") -> None:
        torch.manual_seed(0)
        dense = nn.Linear(64, 48, dtype=torch.bfloat16)
        self.linear = Linear.of(dense, recipe, kernels=kernels)
        self.optimizer = states.AdamW(
            self.linear.parameters(), lr=0.01, layout=MASTERED["bfloat16_master"]
        )
        self.optimizer.kernels = kernels

    def run(self) -> torch.Tensor:
        """A pass forward and backward."""
        with cast_once(self.linear):
            out = self.linear(X)
            out.square().sum().backward()
        return out.detach()

    def step(self, *, scale_first: bool = True, change: float | None = None) -> torch.Tensor:
        """A step of training; then the weight may change from outside."""
        out = self.run()
        if scale_first:
            delayed.update(self.linear)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if scale_first:
            delayed.forget(self.linear)
        else:
            delayed.update(self.linear)
        if change is not None:
            with torch.no_grad():
                self.linear.weight.mul_(change)
        return torch.cat([out, self.linear.weight.detach()[:, :1].T.expand(2, -1)])


@pytest.mark.parametrize(
    ("recipe", "change", "scale_first"),
    [
        ("tensorwise", None, True),
        ("tensorwise_pow2", 3.0, True),
        ("rowwise", None, True),
        ("delayed", None, True),
        ("delayed", 3.0, True),
        ("delayed", None, False),
    ],
)
def test_bits_are_those_of_weights_that_each_pass_reads(recipe, change, scale_first):
    plain, triton = Training(recipe, "plain"), Training(recipe)
    for _ in range(4):
        steps = [x.step(change=change, scale_first=scale_first) for x in (plain, triton)]
        assert torch.equal(*steps)


def reads(monkeypatch) -> list[str]:
    """The kernels that read a weight from now on, by name."""
    read: list[str] = []
    run = launch.run

    def recorded(each, x, *rest):
        if x.shape == (48, 64):
            read.append(each.kernel.fn.__name__)
        run(each, x, *rest)

    monkeypatch.setattr(launch, "run", recorded)
    return read


@pytest.mark.parametrize(
    ("recipe", "reading"), [("tensorwise", ["_cast_list"]), ("delayed", [])], ids=str
)
def test_a_pass_reads_no_weight_for_what_the_step_had(monkeypatch, recipe, reading):
    training, read = Training(recipe), reads(monkeypatch)
    training.step()
    assert read
    for _ in range(2):
        read.clear()
        training.run()
        assert read == reading
        training.step()


def test_a_weight_that_changed_is_read(monkeypatch):
    training, read = Training("tensorwise"), reads(monkeypatch)
    training.step(change=2.0)
    read.clear()
    training.run()
    assert read == ["_amax_list", "_cast_list"]


def test_scales_that_change_after_the_step_end_its_casts(monkeypatch):
    training, read = Training("delayed"), reads(monkeypatch)
    for _ in range(3):
        training.step(scale_first=False)
    assert [name for name in read if name == "_cast_list"] == ["_cast_list"] * 3
    trace = weights.trace(training.linear.weight)
    assert trace.late
    assert trace.left is not None
    assert not trace.left.codes


def test_codes_by_another_scale_are_not_taken():
    """A scale that is replaced may have the version of the one before."""
    training = Training("delayed")
    for _ in range(2):
        training.step()
    state = training.linear.states["weight"]
    state.scale = state.scale.clone() * 2
    for _ in range(state.scale._version, weights.trace(training.linear.weight).left.scaled[0]):
        state.scale.add_(0)
    for _ in range(2):
        with cast_once(training.linear):
            codes = training.linear.kept.tensors[0].view(torch.uint8)
        expected = casts.cast(training.linear.weight.detach(), state.scale, e5m2=False)[0]
        assert torch.equal(codes, expected.view(torch.uint8))


def step(p: nn.Parameter, **options) -> None:
    optimizer = states.AdamW([p], layout="float32", **options)
    optimizer.kernels = "triton"
    optimizer.step()


def test_a_copy_has_the_trace_of_its_parameter():
    p = nn.Parameter(torch.ones(48, 64))
    copy = p.detach().bfloat16()
    weights.share(copy, p)
    assert weights.fresh(copy) is None
    p.grad = torch.full_like(p, 1e-3)
    step(p, lr=0.5)
    left = weights.fresh(copy)
    assert left is not None
    assert torch.equal(left.weight, p.bfloat16())
    assert left.parts.amax().view(torch.float32) == left.weight.abs().amax()
    assert weights.fresh(p) is None  # of another dtype
    with torch.no_grad():
        p.add_(1.0)
    assert weights.fresh(copy) is None


def test_nothing_is_left_of_tensors_without_versions():
    p = nn.Parameter(torch.ones(48, 64))
    p.grad = torch.ones_like(p)
    step(p)
    assert weights.fresh(p) is not None
    with torch.inference_mode():
        assert weights.versions(torch.ones(2)) == ()
