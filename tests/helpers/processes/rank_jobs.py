"""Functions that tests run on ranks (``process_group.run``): a rank imports them by name."""

import functools
import os
import threading

import torch
from torch import distributed

from fp8ref.recipe import OPERANDS
from fp8ref.selection.statistics import planned
from fp8ref.shared.errors import ConfigError
from fp8ref.torch import delayed
from fp8ref.torch.attention import observer as attention_observer
from fp8ref.train.torch.trainer import Trainer


def add(value):
    total = torch.tensor(float(distributed.get_rank() + value))
    distributed.all_reduce(total)
    return distributed.get_rank(), total.item(), torch.get_num_threads(), torch.cuda.is_available()


def fail_on_one(kind):
    if distributed.get_rank() == 1:
        raise kind("only here")
    distributed.barrier()


def refuse_on_one():
    fail_on_one(ConfigError)


def break_on_one():
    fail_on_one(KeyError)


def die():
    os._exit(3)


def stand_still_on_one():
    if distributed.get_rank() == 1:
        threading.Event().wait()


def give_a_lambda():
    return lambda: None


# ---- faults, for every trainer of a rank ----


def wrong_scale(trainer):
    """The second rank gathers codes under half the scale that all ranks report (P-6)."""
    if distributed.get_rank() == 1:
        for module in trainer.model.modules():
            if hasattr(module, "fp8_gather"):
                module.fp8_gather.before = halved(module.fp8_gather)


def halved(gather):
    honest = gather.before

    @functools.wraps(honest)  # FSDP2 counts parameters
    def before(*args):
        _, reported = honest(*args)
        kept, gather.scale, gather.precomputed = (
            (gather.scale, gather.precomputed),
            gather.scale / 2,
            True,
        )
        codes, _ = honest(*args)
        gather.scale, gather.precomputed = kept
        return codes, reported

    return before


def apart(trainer):
    """Every rank keeps amax histories of its own rows alone (H-4)."""
    for _, state in delayed.states(trainer.model):
        # or the first update would refuse it (H-12)
        state.group, state.checked, state.compared = (None, True, True)


def same_rows(trainer):
    """The second rank trains on the batch's first rows instead of its second half."""
    if distributed.get_rank() == 1:
        trainer._step.own = lambda tokens: tokens[: len(tokens) // 2]


def broken(trainer):
    break_on_one()


# ---- statistics ----


def statistics(config, tokens):
    """After one step of a trainer.

    Statistics, GEMM operands, weights, and how many ranks' parts make each operand.
    """
    trainer = Trainer(config)
    trainer.step(tokens)
    operands = {}

    def observer(layer, gemm, a, b, out):
        for role, operand in zip(OPERANDS[gemm], (a, b), strict=True):
            operands[f"{layer}/{gemm}/{role}"] = operand

    trainer.observe(tokens, observer)
    parts = {
        operand.name: len(trainer._own_parts(operand)) for operand in planned(trainer.decisions)
    }
    return trainer.statistics(tokens), operands, trainer.weights(), parts


def attention_statistics(config, tokens):
    """A trainer's statistics, and {layer: {role: tensor}} of this rank's attention."""
    trainer, found = Trainer(config), {}
    report = attention_observer.report

    def reported(name, product, role, x, tensor):
        found.setdefault(name, {})[role] = x.float().numpy().copy()
        report(name, product, role, x, tensor)

    attention_observer.report = reported
    return trainer.statistics(tokens), found


def attention_states(config, batches):
    """Losses of a trainer's steps, and its states of delayed scaling after them."""
    trainer = Trainer(config)
    losses = [trainer.step(tokens)["loss"] for tokens in batches]
    return losses, {name: tuple(state) for name, state in trainer.fp8_states().items()}
