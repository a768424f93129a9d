"""Rerun a failed step on one device and find its first non-finite value (spec K-9).

The step is the one that ``train.failed_step`` wrote, from any mesh. The forward pass is searched in
the simulator, which knows every value's parts; the backward pass in the backend.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8ref.conformance.kit.compare import Report
from fp8ref.crosscheck import first_nonfinite
from fp8ref.crosscheck.attention import attention
from fp8ref.crosscheck.attention.attention import AttentionPass
from fp8ref.crosscheck.first_nonfinite import NonFinite, Observed, in_backend
from fp8ref.crosscheck.operands import (
    Observation,
    States,
    compare_operands,
    in_pass_order,
    observe,
    quantizers,
    recipes_of,
)
from fp8ref.formats import FLOAT32
from fp8ref.recipe import Recipe, delayed_casts
from fp8ref.shared import console
from fp8ref.shared.console import one_line
from fp8ref.shared.errors import ConfigError
from fp8ref.shared.result import Result
from fp8ref.sim import delayed
from fp8ref.sim import llama as model
from fp8ref.sim.llama import Site
from fp8ref.spec import llama
from fp8ref.train import loop
from fp8ref.train.config import architecture, hardware
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import ParallelConfig
from fp8ref.train.run import failed_step
from fp8ref.train.run.failed_step import Failure

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["rerun"]


def rerun(path: Path) -> "RerunReport":
    """Rerun a failed step; path: its directory or its manifest.json.

    Raises:   ConfigError: it cannot be read, or cannot run on one device.
              ImportError: its backend is not installed.
    """
    failed = failed_step.read(path)
    config = _on_one_device(path, failed)
    tokens = failed.tokens
    console.say(
        f"replaying step {failed.metrics['step']} of {failed.backend} on one device: its global "
        f"batch of {tokens[:, 1:].size:,} tokens at once"
    )
    trainer = _restored(failed, config)
    config = config.under(failed.recipe)
    states = _used_states(trainer, config)
    report = Report()
    # infinities are expected
    with console.bar(f"replay {config.numerics.recipe}", 4) as advance, np.errstate(all="ignore"):
        first, finite = simulated(report, tokens, trainer.weights(), config, states)
        advance("the simulator's forward pass")
        passes: list[AttentionPass] = []
        variant = config.attention_variant
        watched = None if variant is None else passes
        scales = attention.delayed_scales(trainer.fp8_states())
        observations = in_pass_order(observe(trainer, tokens, watched), config)
        count = check_codes(report, observations, recipes_of(config), states)
        count += attention.check_codes(report, passes, variant, scales)
        advance("every FP8 GEMM and attention" if passes else "every FP8 GEMM")
        metrics = trainer.step(tokens)  # last: a finite step changes the weights
        advance("the step")
        # The simulator's forward pass is searched first, as it knows the parts of every value.
        # Where its values are finite, the backend's own GEMMs may still not be.
        observed = Observed(tokens, config, observations, passes, metrics)
        sites = _forward_sites(observed, finite)
        if first is None:
            sites = itertools.chain(sites, in_backend(trainer, observed))
        first = _first_in(report, sites, failed.backend) or first
        advance("its gradients")
    return RerunReport(
        path=path, failed=failed, metrics=metrics, first=first, report=report, operands=count
    )


def _on_one_device(path: Path, failed: Failure) -> Config:
    """The config of the failed step for one device and the whole batch at once.

    Raises:   ConfigError: one device cannot repeat its step.
    """
    config = failed.config
    if config.parallel.devices > 1 and config.optimizer.kind == "adamw_fp8":
        raise ConfigError(
            f"{path}: each process quantizes its own piece of the FP8 moments in blocks (T-6), "
            f"so one process cannot replay a step of {config.parallel.devices}. Train "
            "with optimizer.kind 'adamw' to replay failed steps."
        )
    architecture.require_llama(config, "a replay")
    config.require_tiles("a replay")
    return dataclasses.replace(config, parallel=ParallelConfig()).replace(data={"microbatches": 1})


def _restored(failed: Failure, config: Config) -> loop.Trainer:
    """A trainer in the state before the failed step, in its recipe."""
    # The saved state holds all weights, so zeros stand in for initial weights that would be drawn.
    shapes = llama.parameter_shapes(config.model)
    zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    trainer = loop.trainer(failed.backend, config, zeros)
    trainer.load(failed.state, int(failed.metrics["step"]))
    trainer.switch(failed.recipe)
    return trainer


def _used_states(trainer: loop.Trainer, config: Config) -> States:
    """The states of delayed scaling that this recipe uses: a schedule keeps those of others too."""
    casts = {path: delayed_casts(recipe) for path, recipe in recipes_of(config).items()}
    used = {
        f"{layer}/{role}"
        for roles_by_layer in (casts, config.attention_casts)
        for layer, roles in roles_by_layer.items()
        for role in roles
    }
    kept = trainer.fp8_states()
    return {name: delayed.DelayedState(*kept[name]) for name in kept if name in used}


def _first_in(report: Report, sites: Iterable[tuple[Site, str]], backend: str) -> NonFinite | None:
    """The first non-finite value of a backend's sites; all before it are counted."""
    for site, why in sites:
        check = report.check(f"{site.module}/{site.role}/finite/{backend}")
        if nonfinite := first_nonfinite.check_site(site, check, by=backend, why=why):
            return nonfinite
    return None


def _forward_sites(observed: Observed, finite: set[tuple[str, str]]) -> Iterator[tuple[Site, str]]:
    """The backend's FP8 GEMMs and attention, in order, whose inputs the simulator has finite."""
    variant = observed.config.attention_variant
    for name in llama.linear_shapes(observed.config.model):
        if (name, "output") in finite:
            yield from first_nonfinite.gemm_sites(observed, name, ["output"])
        layer, _, last = name.rpartition(".")
        if last == "v_proj" and variant is not None and (layer, "rotated key") in finite:
            yield from first_nonfinite.attention_sites(observed, layer, "forward")


def simulated(
    report: Report,
    tokens: np.ndarray,
    weights: Mapping[str, np.ndarray],
    config: Config,
    states: States,
) -> tuple[NonFinite | None, set[tuple[str, str]]]:
    """Search the simulated forward pass, loss included.

    Returns:  the first non-finite value, and (module, role) of all values before it.
    """
    first: NonFinite | None = None
    finite: set[tuple[str, str]] = set()

    def record(site: Site) -> None:
        nonlocal first
        if first is None:
            first = _first_in(report, [(site, "")], "sim")
        if first is None:
            finite.add((site.module, site.role))

    logits = model.forward(
        tokens[:, :-1],
        weights,
        config.model,
        model.Numerics(
            recipes=recipes_of(config),
            states=states or {},
            multiply=hardware.of(config),
            attention=config.numerics.attention,
        ),
        watch=record,
    )
    if first is None:
        losses = model.losses(logits, tokens[:, 1:])
        target = np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        parts = {"largest logit": logits.max(-1), "its target's": target}
        record(Site(module="loss", role="of a token", value=losses, parts=parts, fmt=FLOAT32))
        mean = np.asarray(model.in_range(losses.sum()) / losses.size)
        parts = {"sum over the batch": losses.sum()}
        record(Site(module="loss", role="mean", value=mean, parts=parts, fmt=FLOAT32))
    return first, finite


def check_codes(
    report: Report,
    observations: Sequence[Observation],
    recipes: Mapping[str, Recipe],
    states: States,
) -> int:
    """Compare codes and scales of every operand with the simulator's, bit for bit.

    Returns:  how many operands were compared.
    """
    who = quantizers({o.backend for o in observations})
    for o in observations:
        compare_operands(report, o, recipes[o.layer].gemms[o.gemm], who, states)
    return 2 * len(observations)


@dataclass(frozen=True, kw_only=True)
class RerunReport(Result):
    """What the rerun of a failed step found.

    metrics   loss and grad_norm of the rerun.
    operands  how many operands had their codes and scales compared.
    """

    path: Path
    failed: Failure
    metrics: Mapping[str, float]
    first: NonFinite | None
    report: Report
    operands: int

    @property
    def reproduced(self) -> bool:
        """True if the step fails on one device too."""
        return not all(map(math.isfinite, self.metrics.values()))

    @property
    def faithful(self) -> bool:
        """True if codes and scales are the simulator's: the numbers diverged, no cast is wrong."""
        checks = self.report.checks.items()
        return all(check.ok for name, check in checks if "/finite/" not in name)

    @property
    def ok(self) -> bool:
        """True if nothing was found."""
        return self.first is None and not self.reproduced and self.report.ok

    def to_dict(self) -> dict[str, Any]:
        """The report and the first non-finite value, as --json writes them."""
        return self.report.to_dict() | {
            "ok": self.ok,
            "first": self.first and self.first.to_dict(),
            "reproduced": self.reproduced,
            "faithful": self.faithful,
            "backend": self.failed.backend,
            "metrics": {k: str(v) for k, v in self.metrics.items()},
            "failed": dict(self.failed.metrics),
        }

    def render(self, console: "Console") -> None:
        """Print how the step failed, whether it failed again, and the first non-finite value."""

        def say(text: str) -> None:
            console.print(one_line(text), markup=False, highlight=False, soft_wrap=True)

        config, (rows, length) = self.failed.config, self.failed.tokens.shape
        devices, then = config.parallel.devices, self.failed.metrics
        say(f"{self.path}: step {then['step']}, {self.failed.backend}, recipe {self.failed.recipe}")
        say(
            f"as it failed, on {devices} device{'s' * (devices > 1)}: loss {then['loss']}, "
            f"gradient norm {then['grad_norm']}"
        )
        say(
            f"on one device, with all {rows} sequences of {length - 1} tokens: loss "
            f"{self.metrics['loss']}, gradient norm {self.metrics['grad_norm']}"
        )
        if config.data.microbatches > 1:
            say(
                "in the run, scales covered each of data.microbatches = "
                f"{config.data.microbatches} parts of the batch; here they cover the whole batch"
            )
        if devices > 1 and config.parallel.amax_scope == "local":
            say(
                "in the run, scales of input and grad_output covered each device's part of the "
                "batch (parallel.amax_scope); here they cover the whole batch"
            )
        if self.first:
            by = "the simulator" if self.first.found_by == "sim" else self.first.found_by
            say(f"first not finite, by {by}: {self.first}")
            say(f"  {self.first.why}")
            if not self.reproduced:
                say(f"{self.failed.backend}'s own loss and gradient are finite on one device.")
        elif self.reproduced:
            say("the step fails again, but every value checked is finite.")
        else:
            say(
                "not reproduced: every value is finite on one device. The cause was a fault of "
                "another device, or sums in another order."
            )
        for check in self.report.failures if not self.faithful else []:
            if "/finite/" not in check.name:
                say(check.detail)
        if not self.operands:
            say("no operand is in FP8")
        elif self.faithful:
            right = ": the numbers diverged, and the quantization is right" * bool(self.first)
            say(f"codes and scales of all {self.operands} FP8 operands are the simulator's{right}")
        else:
            say(
                f"codes or scales of {self.failed.backend} are not the simulator's, as above: a "
                "fault of the implementation"
            )
