"""FP8 training in PyTorch: ``convert.convert`` on one device, ``parallel.parallelize`` on a mesh.

A linear becomes fp8ref's own ``linear.Linear`` where ranks share amaxes (amax_scope "global", the
trainer's default), or if torchao cannot express the recipe. Otherwise it becomes torchao's
Float8Linear, which casts and multiplies by its own code. This is one step of ``linear.Linear`` under
FSDP2, with a recipe that has one scale for each tensor, and the module of each part:

    forward   scale of w: its shards' amaxes --all-reduce-->, or the state's    fp8_gather
              shard --round, cast--> codes --all-gather--> codes of w           fp8_gather
              x [M, K] --cast--> codes of x                                     linear, scaling
              output = x @ w.T         [M, K] @ [K, N] -> [M, N]                linear, gemm
    backward  FSDP2 gathers the codes of w again                                fp8_gather
              g = grad_output [M, N] --cast--> codes of g                       linear, scaling
              grad_input = g @ w       [M, N] @ [N, K] -> [M, K]                linear, gemm
              grad_weight = g.T @ x    [N, M] @ [M, K] -> [N, K], x's dtype     linear, gemm
              grad_weight --reduce-scatter, float32 mean--> shard [N/ranks, K]  FSDP2, set by parallel
    update    optimizer.step() on the float32 shards                            torch.optim
              delayed.update(model), of a recipe with delayed scaling           delayed

A recipe with delayed scaling takes every scale from the state of ``delayed``. Operands with scales of
rows are cast again for each GEMM, along the axis it reduces, and their weight is gathered in the
compute dtype. ``convert`` chooses the class; ``parallel`` sets dtypes and groups; ``fsdp`` sets the
gathers on a model, and reduces gradients in rank order if asked (off by default); ``gradient_reduction``
reduces them in FP8 if asked, and ``gradient_factors`` tunes their scales. ``gemm`` calls
torch._scaled_mm, or ``block_gemm`` for block scales; ``hardware`` simulates other hardware instead.
``grouped`` is a linear for each group of rows, by ``grouped_operands`` and ``grouped_gemm``; ``experts`` puts it in
a model.
``attention.apply`` is attention in FP8, a tile of keys after another: ``attention_function`` casts by ``attention_operands``, then
``attention_fast``, the default, or ``attention_forward`` computes the output, and ``attention_gradients`` the gradients.
``checkpointing`` says what a block keeps. ``tensor_parallel`` cuts linears, and ``linear_cut`` is how
ranks share one. ``switch`` changes the recipe of a model between two steps. ``compiled_fsdp`` shards
within a compiled graph. ``proof`` shows that a step ran in FP8. ``states`` is AdamW whose moments are
stored in FP8, ``adamw_update`` its arithmetic; ``parameter_groups`` and
``parameter_state`` check what it is given; ``moments`` is one of them, ``philox`` the stochastic rounding, and ``health`` what
storing them cost. ``copies`` keeps weights as codes between steps.

``fp8ref.crosscheck`` checks this package against docs/spec; it shares no code with the
simulator. The trainer is ``fp8ref.train.torch``.
"""

import logging

from fp8ref import extras

extras.require("torch", "fp8ref.torch", "torch", "torchao")

# On import, torchao and torch.utils._pytree warn about GPU extensions of other builds and about
# each other. A user can do nothing about it.
_loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
_levels = [logger.level for logger in _loggers]
for _logger in _loggers:
    _logger.setLevel(logging.ERROR)

from fp8ref.torch import (
    attention,
    cast,
    checkpointing,
    compiled_fsdp,
    convert,
    copies,
    delayed,
    experts,
    fsdp,
    gemm,
    gradient_factors,
    gradient_reduction,
    grouped,
    hardware,
    health,
    linear,
    parallel,
    proof,
    scaling,
    states,
    switch,
    tensor_parallel,
)

for _logger, _level in zip(_loggers, _levels, strict=True):
    _logger.setLevel(_level)

__all__ = [
    "attention",
    "cast",
    "checkpointing",
    "compiled_fsdp",
    "convert",
    "copies",
    "delayed",
    "experts",
    "fsdp",
    "gemm",
    "gradient_factors",
    "gradient_reduction",
    "grouped",
    "hardware",
    "health",
    "linear",
    "parallel",
    "proof",
    "scaling",
    "states",
    "switch",
    "tensor_parallel",
]
