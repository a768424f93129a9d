"""The proof of a trainer's step, for the manifest (spec B-8, B-15)."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fp8ref.selection.linears import Decision
from fp8ref.shared.errors import ConfigError
from fp8ref.torch import proof
from fp8ref.torch.gemm import hardware
from fp8ref.train.torch.step import Step


def prove(
    step: Step,
    tokens: np.ndarray,
    decisions: Sequence[Decision],
    attention: Mapping[str, nn.Module],
) -> dict:
    """The GEMMs and gathers of a step on this batch, traced in a pass that updates nothing.

    attention   the model's attention by a variant, by name.
    Raises:     ConfigError: as ``Trainer.prove``.
    """
    config, multiply, keys = step.config, step.multiply, step.config.parallel
    planned = {d.path: d.recipe for d in decisions if d.fp8}
    variant = config.attention_variant
    with (proof.trace_compiled if keys.compile != "none" else proof.trace_eager)(
        step.model, attention
    ) as traced:
        step.backward(tokens)
    step.forget()
    plan = multiply.name if multiply else None
    missing = proof.missing(traced, planned, plan)
    if isinstance(step.model, FSDPModule) and keys.gather == "fp8":
        # experts' weights are gathered in the compute dtype
        gathered_linears = [d for d in decisions if d.fp8 and d.experts is None]
        missing += proof.missing_gathers(
            step.model, [d.path for d in gathered_linears if d.recipe.serves_both("weight")]
        )
    with hardware.simulating(multiply):
        codes = variant is not None and proof.multiplies_codes(
            variant, config.numerics.attention_arithmetic, step.device
        )
    layers = config.attention_in_fp8
    by_kernel = keys.attention == "kernel"
    if by_kernel:
        missing += proof.missing_kernels(traced, layers)
    elif variant is not None:
        missing += proof.missing_products(traced, layers, variant, codes=codes, plan=plan)
    if missing and not config.run.allow_fallback:
        raise ConfigError(
            "the step lacks planned GEMMs or gathers:\n  "
            + "\n  ".join(missing)
            + "\nSet run.allow_fallback to train anyway."
        )
    manifest = proof.manifest(traced, planned, missing, proof.gathers(step.model), plan)
    if variant is not None and by_kernel:
        return manifest | {"attention": proof.manifest_of_kernels(traced, variant)}
    return manifest | (
        {"attention": proof.manifest_of_products(traced, layers, variant, codes=codes)}
        if variant and layers
        else {}
    )
