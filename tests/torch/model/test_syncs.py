"""A step never makes the host wait for the device, copies nothing to it, and launches and keeps
nothing that it does not need.
"""

import numpy as np
import pytest
import torch
from helpers.models import sizes
from helpers.models.sharded_models import batch, sharded
from helpers.processes.ranks import run
from helpers.processes.syncs import Ops, Syncs
from torch import nn

from fp8ref.torch import delayed
from fp8ref.torch.linear import linear
from fp8ref.torch.model import convert
from fp8ref.train.torch.trainer import Trainer

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise", "mxfp8")


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    delayed.update(model)


@pytest.mark.grid(4)
@pytest.mark.parametrize("own", [False, True], ids=["converted", "own linear"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_reads_nothing_and_copies_nothing(recipe, own, monkeypatch):
    """On the meta device: a read raises, since there is no memory, and so does a copy from the
    host.
    """
    if own:
        monkeypatch.setattr("fp8ref.torch.linear.torchao_linear.expresses", lambda recipe: False)
    with torch.device("meta"):
        model = convert.convert(
            nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)).bfloat16(), recipe
        )
        optimizer, x = (
            torch.optim.AdamW(model.parameters()),
            torch.empty(128, 128, dtype=torch.bfloat16),
        )
    step(model, optimizer, x)
    optimizer.zero_grad()
    with Ops():
        model(x).square().mean().backward()
        delayed.update(model)


def sharded_step(recipe):
    """What waits for the device or copies to it in a step, the second, so that nothing is made for
    the first time.
    """
    found = []
    for fp8 in (True, False):
        model = sharded(recipe, group=recipe == "delayed", fp8=fp8)
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer, batch(0))
        delayed.update(model)
        with Syncs() as seen:
            step(model, optimizer, batch(1))
        found += seen.found
    return found


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_sharded_step_reads_nothing_and_copies_nothing(recipe):
    assert run(3, sharded_step, recipe) == [[]] * 3  # whose shards are of unequal length


def whole_codes(recipe):
    """The bytes that linears keep for the backward pass under a gather in high precision, of 8-bit
    elements.
    """
    model, kept = sharded(recipe, group=True, fp8=False), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        model(batch(0))
    return [tuple(x.shape) for x in kept if x.dtype.itemsize == 1]


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_no_codes_of_weights_stay_after_a_gather_in_high_precision(recipe):
    """Only codes of inputs do; 32 rows."""
    for shapes in run(2, whole_codes, recipe):
        assert shapes == [(32, 64)] * 3


def test_codes_of_a_copy_under_autocast_stay():
    """They are smaller than the copy, which nothing else keeps."""
    model, kept = convert.convert(nn.Sequential(nn.Linear(64, 32)), "delayed"), []
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x),
    ):
        model(torch.ones(16, 64))
    assert sorted(tuple(x.shape) for x in kept if x.ndim) == [(16, 64), (32, 64)]
    assert {x.dtype.itemsize for x in kept if x.ndim} == {1}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed", "blockwise"])
def test_nothing_is_made_or_padded_for_nothing(recipe):
    model = linear.Linear(128, 128, recipe, bias=False, dtype=torch.bfloat16)
    x = torch.randn(128, 128).bfloat16().requires_grad_()
    model(x).sum().backward()  # the first makes the unit scale that all keep (G-5)
    with Ops() as ops:
        model(x).sum().backward()
    assert ops.found.count("ones") == 0
    assert ops.found.count("constant_pad_nd") == 0
    models = nn.Sequential(model, linear.Linear(128, 128, "delayed"))
    with Ops() as ops:
        delayed.forget(models)
    assert ops.found == ["_foreach_zero_"]


def padded(rows):
    """Whether the shard of a gathered weight is copied for padding."""
    model = sharded(
        "tensorwise",
        model=nn.Sequential(
            nn.Sequential(nn.Linear(64, rows, bias=False)), nn.Linear(rows, 64, bias=False)
        ),
    )
    with Ops() as ops:
        model(batch(0))
    return ops.found.count("constant_pad_nd")


def test_shards_of_equal_length_are_not_padded():
    assert run(2, padded, 64) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "recipe"), [("adamw", "rowwise"), ("adamw_fused", "delayed")])
def test_a_step_of_the_trainer_reads_its_metrics_once(kind, recipe, monkeypatch):  # T-4
    """Tokens come from the host. Nothing else does, rotary tables neither."""
    config = sizes.config(recipe, parts=2, optimizer=kind)
    trainer = Trainer(config)
    tokens = np.zeros((config.data.batch_size, config.data.sequence_length + 1), np.int64)
    trainer.step(tokens)
    of_numpy, copied = torch.from_numpy, []
    monkeypatch.setattr(
        torch, "from_numpy", lambda array: copied.append(array.shape) or of_numpy(array)
    )
    with Syncs() as seen:
        trainer.step(tokens)
    assert seen.found == ["tolist in train/torch/step.py:update"]
    assert copied == [(config.data.batch_size // 2, config.data.sequence_length + 1)] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_on_a_gpu_never_waits(recipe):
    with torch.device("cuda"):
        model = convert.convert(
            nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)).bfloat16(), recipe
        )
        optimizer, x = (
            torch.optim.AdamW(model.parameters(), fused=True),
            torch.ones(128, 128, dtype=torch.bfloat16),
        )
    step(model, optimizer, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(model, optimizer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
