"""FP8 training in PyTorch: ``convert.convert`` on one device, ``parallel.parallelize`` on a mesh of devices.

A linear becomes torchao's Float8Linear, or fp8ref's own ``linear.Linear``. A recipe with delayed scaling needs
``delayed.update`` once a step. One step of an FP8 linear under FSDP2, with scales of whole tensors:

    forward     amax of every rank's shard of w --all-reduce--> scale of w                  fsdp, scaling, scales
                shard of w [N/ranks, K] --cast--> codes --all-gather--> codes of w [N, K]   fsdp
                x [M, K] --cast--> codes of x                                               linear, scaling, cast
                output      = x @ w.T   [M, K] @ [K, N] -> [M, N]                           linear, gemm
    backward    codes of w are gathered again                                               fsdp
                g = grad_output [M, N] --cast--> codes of g                                 linear, scaling, cast
                grad_input  = g @ w     [M, N] @ [N, K] -> [M, K]                           linear, gemm
                grad_weight = g.T @ x   [N, M] @ [M, K] -> [N, K]                           linear, gemm
                grad_weight --reduce-scatter in float32--> shard's gradient [N/ranks, K]    FSDP2 (or in rank order: fsdp)
    afterwards  optimizer.step() on float32 shards; delayed.update(model)                   delayed

``convert`` puts the linears in, ``torchao_linear`` runs torchao's recipes, ``block_gemm`` multiplies block scales.
``tensor_parallel`` cuts linears, ``compiled_fsdp`` shards within a compiled graph. ``proof`` shows that a step ran in
FP8. ``hardware`` puts simulated hardware in place of torch's FP8 GEMMs.

``fp8ref.crosscheck`` checks it against docs/SEMANTICS.md; it shares no code with the simulator. The trainer is
``fp8ref.train.torch``.
"""

import logging

from fp8ref import extras, moved

extras.require("torch", "fp8ref.torch", "torch", "torchao")

# torchao and torch.utils._pytree warn on import about GPU extensions of other builds and about each other, whatever a user does.
_loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
_levels = [logger.level for logger in _loggers]
for _logger in _loggers:
    _logger.setLevel(logging.ERROR)

from fp8ref.torch import cast, compiled_fsdp, convert, delayed, fsdp, gemm, hardware, linear, parallel, proof, scaling, tensor_parallel

for _logger, _level in zip(_loggers, _levels, strict=True):
    _logger.setLevel(_level)

__all__ = [
    "cast",
    "compiled_fsdp",
    "convert",
    "delayed",
    "fsdp",
    "gemm",
    "hardware",
    "linear",
    "parallel",
    "proof",
    "scaling",
    "tensor_parallel",
]


def __getattr__(name: str):
    raise moved.attribute_error(__name__, name)
