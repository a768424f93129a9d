"""The loss of logits that exist in float32 a part at a time (spec M-5)."""

import numpy as np
import pytest
import torch
from helpers.models import sizes
from helpers.processes.live_bytes import LiveBytes
from torch.nn import functional

from fp8ref.estimate import activations
from fp8ref.train.torch.llama import cross_entropy as module
from fp8ref.train.torch.llama.cross_entropy import cross_entropy
from fp8ref.train.torch.trainer import Trainer

N, V, ROWS = 1000, 512, 64


def drawn(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(N, V, generator=generator)).to(dtype)
    return logits.requires_grad_(), torch.randint(0, V, (N,), generator=generator)


def whole(logits, targets):
    return functional.cross_entropy(logits.float(), targets, reduction="none")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, ROWS, N, 4 * N])
def test_losses_and_gradients_are_those_of_all_rows_at_once(rows, dtype, monkeypatch):  # M-5
    """Also with a last part that is shorter, with rows of infinities and NaNs, and under a gradient
    of its own for each token.
    """
    monkeypatch.setattr(module, "CHUNK", rows * V)
    logits, targets = drawn(dtype)
    with torch.no_grad():
        logits[3, 7], logits[5, 0], logits[900] = torch.inf, torch.nan, -torch.inf
    weights = torch.linspace(-2, 3, N)
    expected, found = whole(logits, targets), cross_entropy(logits, targets)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    of_expected, of_found = (
        torch.autograd.grad(losses, logits, weights)[0] for losses in (expected, found)
    )
    assert of_found.dtype == dtype
    assert torch.equal(of_found.isnan(), of_expected.isnan())
    assert torch.equal(of_found.nan_to_num(), of_expected.nan_to_num())


def test_the_loss_is_that_of_the_clause():  # M-5
    logits, target = torch.tensor([[0.0, 1, 2, -1]], dtype=torch.bfloat16), torch.tensor([1])
    assert cross_entropy(logits, target).numpy().view(np.uint32) == 0x3FB85823


def test_a_row_longer_than_a_part_is_a_part(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", V - 1)
    logits, targets = drawn()
    assert torch.equal(cross_entropy(logits, targets), whole(logits, targets))


def peak(loss, logits, targets):
    """The most bytes that live at a time beside the logits, in both passes."""
    with LiveBytes() as live:
        loss(logits, targets).mean().backward()
    return live.peak


def test_float32_logits_are_never_whole(monkeypatch):
    """Beside the bfloat16 gradient: a part's float32 logits, their softmax and the gradients of
    both, and vectors of the tokens.
    """
    monkeypatch.setattr(module, "CHUNK", ROWS * V)
    vectors = 6 * 8 * N
    assert (
        2 * N * V
        <= peak(cross_entropy, *drawn())
        <= 2 * N * V + activations.WIDE_LOGIT * ROWS * V + vectors
    )
    assert peak(whole, *drawn()) >= 8 * N * V


def test_a_step_of_the_trainer_widens_a_part_at_a_time(monkeypatch):
    config = sizes.config()
    monkeypatch.setattr(module, "CHUNK", ROWS * config.model.vocab_size)
    tokens = np.random.default_rng(0).integers(
        0, 256, (config.data.batch_size, config.data.sequence_length + 1)
    )
    trainer, rows = Trainer(config), set()
    assert config.data.batch_size * config.data.sequence_length > ROWS

    class Widened(LiveBytes):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if (
                isinstance(out, torch.Tensor)
                and out.dtype == torch.float32
                and out.shape[-1:] == (config.model.vocab_size,)
                and out.ndim > 1
            ):
                rows.add(out.numel() // config.model.vocab_size)
            return out

    with Widened():
        trainer.step(tokens)
        trainer.evaluate(tokens)
    assert max(rows) == ROWS


def test_the_estimates_part_is_this():
    assert activations.LOGITS_CHUNK == module.CHUNK
