"""Activation checkpointing of a block, chosen by operation (spec T-8).

The backward pass of a checkpointed block runs its forward pass again, except the operators whose
results were kept. torch sees operators, so that torchao's Float8Linear, fp8ref's own linear and
nn.Linear are treated alike. By hand, with torch's own functions:

    context_fn = functools.partial(create_selective_checkpoint_contexts, checkpointing.policy())
    y = checkpoint(block, x, use_reentrant=False, context_fn=context_fn)
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterable
from typing import Literal, get_args

import torch
import torch.distributed._functional_collectives  # defines the operators of _c10d_functional
from torch._higher_order_ops import flex_attention
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fp8ref.shared import contexts
from fp8ref.torch.experts import gemm as grouped_gemm
from fp8ref.torch.gemm import blocks as block_gemm
from fp8ref.torch.gemm import hardware
from fp8ref.torch.kernels import casts

__all__ = [
    "AMAXES",
    "EVERY",
    "OPERATORS",
    "Checkpointing",
    "Operation",
    "checkpointed",
    "policy",
    "within_attention",
]

Checkpointing = Literal["none", "selective", "full"]
"""What a block keeps for the backward pass.

none       everything
selective  its inputs, and the results of operations that are named
full       its inputs
"""

Operation = Literal["linears", "attention"]
"""Operations whose results selective checkpointing may keep, the same in both trainers."""

EVERY: tuple[Operation, ...] = get_args(Operation)
"""All of them: what selective checkpointing keeps unless it is told."""


def _found(names: str, prefix: str = "") -> frozenset:
    """torch's operators of these names, as far as its version has them."""
    aten, every = torch.ops.aten, [prefix + name for name in names.split()]
    return frozenset(getattr(aten, name).default for name in every if hasattr(aten, name))


OPERATORS: dict[Operation, frozenset] = {
    "linears": frozenset(
        {
            *_found("mm addmm _scaled_mm _scaled_mm_v2"),
            *_found("_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2"),
            block_gemm.OPERATOR,
            *grouped_gemm.OPERATORS,
            hardware.OPERATOR,
            torch.ops._c10d_functional.reduce_scatter_tensor.default,
        }
    ),
    "attention": _found(
        "efficient_attention flash_attention flash_attention_for_cpu cudnn_attention "
        "fused_attention_overrideable",
        "_scaled_dot_product_",
    )
    | {flex_attention},
}
"""The operators of each operation.

linears    products with weights, in high precision or FP8, of experts too; and what tensor
           parallelism sums over ranks: a sum is kept, so that no rank waits for it again
attention  torch's fused kernels. What it composes of other operators, scores included, runs again
"""

AMAXES = _found("amax max") | casts.AMAXES
"""Always kept: a number or a few for each row, without which the tensor would be read once more."""

_within_attention = contextvars.ContextVar("within_attention", default=False)


def within_attention() -> contextlib.AbstractContextManager[None]:
    """Products here are attention's tiles: they run again, so that scores are never whole."""
    return contexts.setting(_within_attention, True)


_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
_MOST = "max"
"""The reduction of amaxes over ranks, in an all-reduce. Others are sums of linears."""


def policy(keep: Iterable[Operation | Callable] = EVERY) -> Callable[..., CheckpointPolicy]:
    """A policy for torch's ``create_selective_checkpoint_contexts``.

    keep      names of OPERATORS, or operators of torch such as ``torch.ops.aten.mm.default``.
    Raises:   ValueError: another name.
    """
    keep = check("selective", keep)
    named = frozenset(name for name in keep if not isinstance(name, str))
    kept = AMAXES.union(*(OPERATORS[name] if isinstance(name, str) else [name] for name in keep))

    def of(context, op, *args, **kwargs) -> CheckpointPolicy:
        keeps = op is _ALL_REDUCE and args[1] == _MOST
        if _within_attention.get():
            keeps = keeps or op in named
        else:
            keeps = keeps or op in kept or (op is _ALL_REDUCE and "linears" in keep)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return of


def checkpointed(
    forward: Callable, mode: Checkpointing, keep: Iterable[Operation | Callable] = EVERY
) -> Callable:
    """A block's forward under activation checkpointing. ValueError as ``check``."""
    keep = check(mode, keep)
    if mode == "none":
        return forward
    run = functools.partial(checkpoint, forward, use_reentrant=False)
    if mode == "full":
        return run
    contexts = functools.partial(create_selective_checkpoint_contexts, policy(keep))
    return functools.partial(run, context_fn=contexts)


def check(
    mode: Checkpointing, keep: Iterable[Operation | Callable]
) -> tuple[Operation | Callable, ...]:
    """What is kept, if that is known; ValueError of another name, or if nothing would read it."""
    names = (keep,) if isinstance(keep, str) else tuple(keep)
    unknown = [name for name in names if not callable(name) and name not in OPERATORS]
    if unknown:
        raise ValueError(
            f"checkpointing keeps {', '.join(EVERY)} or a torch operator; got {unknown[0]!r}."
        )
    if mode != "selective" and names != EVERY:
        raise ValueError(
            f"keep needs mode 'selective'; got {mode!r} and {names}. Use 'selective', or drop keep."
        )
    return names  # type: ignore[return-value]
