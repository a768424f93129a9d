"""The proof of a trainer's step, for the manifest (spec B-7, B-15)."""

from collections.abc import Sequence

import jax

from fp8ref.jax import proof
from fp8ref.shared.errors import ConfigError
from fp8ref.spec.hardware import Multiply
from fp8ref.train.config.config import Config
from fp8ref.train.jax.mesh import Layout
from fp8ref.train.jax.step import Step


def prove(
    lowered: jax.stages.Lowered,
    step: Step,
    layout: Layout,
    config: Config,
    multiply: Multiply | None,
) -> dict:
    """The GEMMs and gathers of a lowered step.

    Raises:   ConfigError: as ``Trainer.prove``.
    """
    # The lowered program shows every planned GEMM before XLA rewrites any; on a GPU the compiled
    # one is read as well, because XLA may still replace an FP8 GEMM there.
    program = proof.read(lowered)
    planned = {name: recipe for name, recipe in step.model.linears.items() if recipe.fp8}
    placements = {path: placement for path in planned if (placement := layout.placement(path))}
    plan = multiply.name if multiply else None
    missing = proof.missing(program, planned, placements, plan)
    attended, variant = step.model.attention, config.attention_variant
    by_kernel = config.parallel.attention == "kernel"
    layers = config.model.num_hidden_layers
    if variant is not None and not by_kernel:
        missing += proof.missing_products(program, attended, variant, plan)
    executable = lowered.compile() if layout.on_gpu else None
    compiled = proof.read_compiled(executable) if executable else None
    text = executable.as_text() if executable and by_kernel else None
    kernels = proof.kernel_calls(text or "")
    missing += proof.missing_kernels(kernels, attended) if by_kernel else []
    missing += proof.lost(compiled, program) if compiled else []
    if missing and not config.run.allow_fallback:
        raise ConfigError(
            "the compiled step lacks planned GEMMs or gathers:\n  "
            + "\n  ".join(missing)
            + "\nSet run.allow_fallback to train anyway."
        )
    report = proof.manifest(program, planned, missing, compiled, plan)
    # Under parallel.scan one GEMM of the program is every layer's.
    for key in ("gemms", "simulated", "on_dequantised_operands", "emulated"):
        if key in report:
            report[key] = by_layer(report[key], layers)
    if variant is not None and by_kernel:
        names = by_layer(kernels, layers)
        report["attention"] = {"variant": variant.name, "gemms": [], "kernels": names}
    elif variant is not None and attended:
        report["attention"] = proof.manifest_of_products(program, attended, variant)
        for key in ("gemms", "on_dequantised_operands"):
            report["attention"][key] = by_layer(report["attention"][key], layers)
    return report


def by_layer(entries: Sequence[dict | str], layers: int) -> list[dict | str]:
    """Entries of the proof by the names of the layers: of a GEMM that all share, one for each."""
    named: list[dict | str] = []
    for entry in entries:
        name = entry if isinstance(entry, str) else entry["gemm"]
        for i in range(layers if "*" in name else 1):
            own = name.replace("*", str(i))
            named.append(own if isinstance(entry, str) else entry | {"gemm": own})
    return named
