"""What ranks of ``fp8ref.crosscheck.process_group`` are given in the tests: importable by name, as processes need it."""

import functools
import os
import threading

import torch
from torch import distributed

from fp8ref.errors import ConfigError
from fp8ref.recipe import OPERANDS
from fp8ref.stats import planned
from fp8ref.torch import delayed
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
    """The second rank casts what it gathers by half the scale that it and the others tell (P-6)."""
    if distributed.get_rank() == 1:
        for module in trainer.model.modules():
            if hasattr(module, "fp8_gather"):
                module.fp8_gather.before = halved(module.fp8_gather)


def halved(gather):
    honest = gather.before

    @functools.wraps(honest)  # FSDP2 counts parameters
    def before(*args):
        _, told = honest(*args)
        kept, gather.scale, gather.precomputed = (gather.scale, gather.precomputed), gather.scale / 2, True
        codes, _ = honest(*args)
        gather.scale, gather.precomputed = kept
        return codes, told

    return before


def apart(trainer):
    """Every rank keeps the histories of its own rows (H-4)."""
    for _, state in delayed.states(trainer.model):
        state.group = None


def same_rows(trainer):
    """The second rank trains on other rows than the batch's second half: the first rows again."""
    if distributed.get_rank() == 1:
        trainer._step.own = lambda tokens: tokens[: len(tokens) // 2]


def broken(trainer):
    break_on_one()


# ---- statistics ----


def statistics(config, tokens):
    """Of a trainer after one step: its statistics, what its GEMMs had, its weights, and how many ranks' parts make each operand."""
    trainer = Trainer(config)
    trainer.step(tokens)
    seen = {}

    def observer(layer, gemm, a, b, out):
        for role, operand in zip(OPERANDS[gemm], (a, b), strict=True):
            seen[f"{layer}/{gemm}/{role}"] = operand

    trainer.observe(tokens, observer)
    parts = {operand.name: len(trainer._own_parts(operand)) for operand in planned(trainer.decisions)}
    return trainer.statistics(tokens), seen, trainer.weights(), parts
