"""FP8 training in PyTorch: ``convert`` on one device, ``parallel.parallelize`` on a mesh.

A linear becomes fp8ref's own ``linear.Linear`` where ranks share amaxes (amax_scope "global", the
trainer's default), or if torchao cannot express the recipe. Otherwise it becomes torchao's
Float8Linear, which casts and multiplies by its own code. This is one step of ``linear.Linear``
under FSDP2, with a recipe that has one scale for each tensor, and the module of each part:

    forward   scale of w: its shards' amaxes --all-reduce-->, or the state's    fp8_gather
              shard --round, cast--> codes --all-gather--> codes of w           fp8_gather
              x [M, K] --cast--> codes of x                                     linear, scaling
              output = x @ w.T         [M, K] @ [K, N] -> [M, N]                linear, gemm
    backward  FSDP2 gathers the codes of w again                                fp8_gather
              g = grad_output [M, N] --cast--> codes of g                       linear, scaling
              grad_input = g @ w       [M, N] @ [N, K] -> [M, K]                linear, gemm
              grad_weight = g.T @ x    [N, M] @ [M, K] -> [N, K], x's dtype     linear, gemm
              grad_weight --reduce-scatter, float32 mean--> shard [N/ranks, K]  FSDP2, set by
              parallel
    update    optimizer.step() on the float32 shards                            torch.optim
              delayed.update(model), of a recipe with delayed scaling           delayed

A recipe with delayed scaling takes every scale from the state of ``delayed``. Operands with scales
of rows are cast again for each GEMM, along the axis it reduces, and their weight is gathered in the
compute dtype.

    model         convert and back, ``parallel`` (dtypes, groups), ``switch`` (recipes between
                  steps), ``checkpointing`` (what a block keeps), report
    linear        fp8ref's layer, and how tensor-parallel ranks share one
    blocks        norms, SwiGLU and RoPE in the pass of their linears' casts; ``fuse`` of a model
    quantize      cast, scales, scaling: the parts, under the same names as in ``fp8ref.sim``
    gemm          torch._scaled_mm, or kernels of block scales; ``hardware`` simulates other
                  hardware
    delayed       the states of delayed scaling, and notices of states that nothing updates
    distributed   ``fsdp``, ``fp8_gather``, ``compiled_fsdp``, ``tensor_parallel``; gradients summed
                  in FP8: ``gradient_reduction``, whose scales ``gradient_factors`` tunes
    experts       a linear for each group of rows: ``grouped``, and experts of a model
    attention     FP8 attention that imitates a kernel, tile by tile over the keys
    states        AdamW whose moments are stored in FP8; ``copies`` keeps weights as codes between
                  steps, ``health`` says what storing moments cost
    observe       operands of FP8 GEMMs, and their statistics
    tensors       a rank's part of a DTensor, an input under autocast
    proof         shows that a step ran in FP8

``fp8ref.crosscheck`` checks this package against docs/spec; it shares no code with the
simulator. The trainer is ``fp8ref.train.torch``.
"""

import logging

from fp8ref.shared import extras

extras.require("torch", "fp8ref.torch", "torch", "torchao")

# On import, torchao and torch.utils._pytree warn about GPU extensions of other builds and about
# each other. A user can do nothing about it.
_loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
_levels = [logger.level for logger in _loggers]
for _logger in _loggers:
    _logger.setLevel(logging.ERROR)

from fp8ref.torch import attention, delayed, gemm, linear, proof, states
from fp8ref.torch.distributed import (
    compiled_fsdp,
    fsdp,
    gradient_factors,
    gradient_reduction,
    tensor_parallel,
)
from fp8ref.torch.experts import grouped
from fp8ref.torch.gemm import hardware
from fp8ref.torch.model import checkpointing, parallel, switch
from fp8ref.torch.model.convert import convert, deconvert, weights
from fp8ref.torch.model.report import report
from fp8ref.torch.quantize import cast, scaling
from fp8ref.torch.states import copies, health

for _logger, _level in zip(_loggers, _levels, strict=True):
    _logger.setLevel(_level)

__all__ = [
    "attention",
    "cast",
    "checkpointing",
    "compiled_fsdp",
    "convert",
    "copies",
    "deconvert",
    "delayed",
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
    "report",
    "scaling",
    "states",
    "switch",
    "tensor_parallel",
    "weights",
]
