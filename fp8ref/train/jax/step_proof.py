"""The proof of a trainer's step, for the manifest (spec B-7, B-15)."""

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
    kernels = proof.kernel_calls(executable.as_text() or "") if executable and by_kernel else []
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
    for key in ("gemms", "simulated", "on_dequantised_operands"):
        if key in report:
            report[key] = [
                layer_entry(gemm, i) for gemm in report[key] for i in layers_of(gemm, layers)
            ]
    if variant is not None and by_kernel:
        names = [str(layer_entry(gemm, i)) for gemm in kernels for i in layers_of(gemm, layers)]
        report["attention"] = {"variant": variant.name, "gemms": [], "kernels": names}
    elif variant is not None and attended:
        report["attention"] = proof.manifest_of_products(program, attended, variant)
        for key in ("gemms", "on_dequantised_operands"):
            report["attention"][key] = [
                layer_entry(gemm, i)
                for gemm in report["attention"][key]
                for i in layers_of(gemm, layers)
            ]
    return report


def layers_of(gemm: dict | str, layers: int) -> range:
    """Of so many layers, those that share a GEMM of the program; one, of no account, for a GEMM of
    its own.
    """
    name = gemm if isinstance(gemm, str) else gemm["gemm"]
    return range(layers if "*" in name else 1)


def layer_entry(gemm: dict | str, i: int) -> dict | str:
    """An entry of the proof under the name of layer i."""
    if isinstance(gemm, str):
        return gemm.replace("*", str(i))
    return gemm | {"gemm": gemm["gemm"].replace("*", str(i))}
