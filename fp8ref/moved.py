"""Where modules went that had another name before: the error of a lookup that fails says it."""

import importlib.abc
import sys

MOVED = {
    "fp8ref.check": "fp8ref.conformance (anybody's code) and fp8ref.crosscheck (the two backends)",
    "fp8ref.check.conformance": "fp8ref.conformance",
    "fp8ref.check.probe": "fp8ref.conformance.gemm",
    "fp8ref.check.vectors": "fp8ref.conformance.vectors",
    "fp8ref.check.certify": "fp8ref.conformance.certify",
    "fp8ref.check.explain": "fp8ref.conformance.explain",
    "fp8ref.check.crosscheck": "fp8ref.crosscheck.one_device",
    "fp8ref.check.divergence": "fp8ref.crosscheck.divergence",
    "fp8ref.check.replay": "fp8ref.crosscheck.rerun",
    "fp8ref.conformance.counterexample": "fp8ref.conformance.finding",
    "fp8ref.conformance.classify": "fp8ref.conformance.subject",
    "fp8ref.conformance.library_calls": "fp8ref.conformance.libraries (casts and scales) and fp8ref.crosscheck.operands (quantizers)",
    "fp8ref.conformance.inputs.amax_inputs": "fp8ref.conformance.inputs.quantizer_inputs",
    "fp8ref.conformance.inputs.tensor_inputs": "fp8ref.conformance.inputs.quantizer_inputs",
    "fp8ref.conformance.quantizer.inner_cast": "fp8ref.conformance.quantizer.identify",
    "fp8ref.conformance.quantizer.queries": "fp8ref.conformance.quantizer.outputs",
    "fp8ref.crosscheck.nonfinite": "fp8ref.crosscheck.rerun and fp8ref.crosscheck.first_nonfinite",
    "fp8ref.crosscheck.divergence.compare_to_sim": "fp8ref.crosscheck.divergence.explain",
    "fp8ref.run": "fp8ref.train",
    "fp8ref.run.plan": "fp8ref.estimate",
    "fp8ref.run.report.judge": "fp8ref.train.report.verdict",
    "fp8ref.train.report.seed_noise": "fp8ref.train.report.verdict and fp8ref.train.report.gap",
    "fp8ref.run.report.replay": "fp8ref.train.report.what_if",
    "fp8ref.multiply": "fp8ref.hardware",
    "fp8ref.statistics": "fp8ref.stats",
    "fp8ref.estimate.step_time": "fp8ref.estimate.roofline",
    "fp8ref.estimate.linear_cost": "fp8ref.estimate.roofline",
    "fp8ref.sim.model": "fp8ref.sim.llama",
    "fp8ref.sim.parallel": "fp8ref.sim.threads",
    "fp8ref.jax.simulated": "fp8ref.jax.hardware",
    "fp8ref.jax.replay": "fp8ref.crosscheck.sharded_jax",
    "fp8ref.jax.model": "fp8ref.train.jax.llama",
    "fp8ref.jax.parallel": "fp8ref.train.jax.mesh",
    "fp8ref.jax.step": "fp8ref.train.jax.step",
    "fp8ref.jax.train": "fp8ref.train.jax.trainer",
    "fp8ref.jax.checkpoint": "fp8ref.train.jax.checkpoint",
    "fp8ref.jax.processes": "fp8ref.train.jax.processes",
    "fp8ref.sim.exact": "fp8ref.sim.accumulate",
    "fp8ref.sim.grid": "fp8ref.sim.scaling",
    "fp8ref.sim.groups": "fp8ref.sim.stats",
    "fp8ref.plots.delayed": "fp8ref.plots.runs",
    "fp8ref.plots.gemms": "fp8ref.plots.errors",
    "fp8ref.plots.tables": "fp8ref.plots.errors",
    "fp8ref.plots.conformance": "fp8ref.plots.errors",
    "fp8ref.plots.gemm_errors": "fp8ref.plots.errors",
    "fp8ref.jax.flax.observed": "fp8ref.jax.flax.amax_observations",
    "fp8ref.jax.flax.checkpoint": "fp8ref.jax.flax.fp8_ops_state",
    "fp8ref.gradients": "fp8ref.gradient_reduction",
    "fp8ref.sim.gradients": "fp8ref.sim.gradient_reduction",
    "fp8ref.jax.gradients": "fp8ref.jax.gradient_reduction",
    "fp8ref.torch.gradients": "fp8ref.torch.gradient_reduction",
    "fp8ref.torch.last_words": "fp8ref.train.torch.failure_reporting",
    "fp8ref.torch.observing": "fp8ref.torch.gemm_observer",
    "fp8ref.torch.float8_config": "fp8ref.torch.torchao_linear",
    "fp8ref.torch.reduction": "fp8ref.torch.fsdp",
    "fp8ref.torch.layer": "fp8ref.torch.linear",
    "fp8ref.torch.simulated": "fp8ref.torch.hardware",
    "fp8ref.torch.tensor": "fp8ref.torch.tensor_parallel",
    "fp8ref.torch.gather": "fp8ref.torch.fp8_gather",
    "fp8ref.torch.traced": "fp8ref.torch.compiled_fsdp",
    "fp8ref.torch.model": "fp8ref.train.torch.llama",
    "fp8ref.torch.step": "fp8ref.train.torch.step",
    "fp8ref.torch.train": "fp8ref.train.torch.trainer",
    "fp8ref.torch.checkpoint": "fp8ref.train.torch.checkpoint",
    "fp8ref.torch.processes": "fp8ref.train.torch.processes",
    "fp8ref.torch.optimizer": "fp8ref.train.torch.optimizer",
}
"""{a module's old name: where it is now}."""


def attribute_error(module: str, name: str) -> AttributeError:
    """The error of a module that has no such attribute: where it went, if it had one before."""
    where = MOVED.get(f"{module}.{name}")
    return AttributeError(f"module {module!r} has no attribute {name!r}" + (f"; it is now {where}" if where else ""))


class Finder(importlib.abc.MetaPathFinder):
    """Asked first for a module: an ImportError that says where one of fp8ref's went; of any other it knows nothing."""

    def find_spec(self, fullname, path=None, target=None):
        """None of a module that never was; ImportError of one that has moved."""
        if fullname in MOVED:
            raise ImportError(f"{fullname} is now {MOVED[fullname]}", name=fullname)


def install() -> None:
    """Put the finder before all others, once: a folder that an older version left behind would pass for a namespace package."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
