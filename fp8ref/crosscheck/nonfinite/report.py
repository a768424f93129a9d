"""What a replay of a step that failed found (SEMANTICS K-9): printed, and written as JSON."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8ref.conformance.compare import Report
from fp8ref.crosscheck.nonfinite.first import First
from fp8ref.result import Result
from fp8ref.train.failed_step import Failure

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class Replayed(Result):
    """metrics: loss and grad_norm of the step as it ran again; operands: those whose codes and scales were compared."""

    path: Path
    failed: Failure
    metrics: Mapping[str, float]
    first: First | None
    report: Report
    operands: int

    @property
    def reproduced(self) -> bool:
        """Whether the step fails on one device too."""
        return not all(map(math.isfinite, self.metrics.values()))

    @property
    def faithful(self) -> bool:
        """Whether the backend's codes and scales are the simulator's: then the numbers went wrong, and not what computes with them."""
        return all(check.ok for name, check in self.report.checks.items() if "/finite/" not in name)

    @property
    def ok(self) -> bool:
        """Nothing was found."""
        return self.first is None and not self.reproduced and self.report.ok

    def to_dict(self) -> dict[str, Any]:
        """The report, and what was found."""
        about: dict[str, Any] = {"first": self.first and self.first.to_dict(), "reproduced": self.reproduced, "faithful": self.faithful}
        about |= {
            "backend": self.failed.backend,
            "metrics": {k: str(v) for k, v in self.metrics.items()},
            "failed": dict(self.failed.metrics),
        }
        return self.report.to_dict() | {"ok": self.ok} | about

    def render(self, console: "Console") -> None:
        """How it failed, whether it did again, where it began, and codes or scales that differ."""

        def say(text: str) -> None:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        config, (rows, length) = self.failed.config, self.failed.tokens.shape
        devices, then = config.parallel.devices, self.failed.metrics
        say(f"{self.path}: step {then['step']}, {self.failed.backend}, recipe {config.numerics.recipe}")
        say(f"as it failed, on {devices} device{'s' * (devices > 1)}: loss {then['loss']}, gradient norm {then['grad_norm']}")
        say(
            f"on one device, with all {rows} sequences of {length - 1} tokens: loss {self.metrics['loss']}, gradient norm {self.metrics['grad_norm']}"
        )
        if config.data.microbatches > 1:
            say(f"scales were of each of data.microbatches = {config.data.microbatches} parts of the batch, and are of all of it here")
        if devices > 1 and config.parallel.amax_scope == "local":
            say("scales of input and grad_output were of each device's part of the batch (parallel.amax_scope), and are of all of it here")
        if self.first:
            say(f"first not finite, by {self._who(self.first.found_by)}: {self.first}\n  {self.first.why}")
            if not self.reproduced:
                say(f"{self.failed.backend}'s own loss and gradient are finite on one device.")
        elif self.reproduced:
            say("the step fails again, and every value that was looked at is finite.")
        else:
            say("not reproduced: every value is finite on one device. Another device's fault, or sums in another order, made it otherwise.")
        for check in self.report.failures if not self.faithful else []:
            if "/finite/" not in check.name:
                say(check.detail)
        if not self.operands:
            say("no operand is in FP8")
        elif self.faithful:
            verdict = ": numbers went wrong, not what quantises them" if self.first else ""
            say(f"codes and scales of all {self.operands} FP8 operands are the simulator's{verdict}")
        else:
            say(f"codes or scales of {self.failed.backend} are not the simulator's, as above: a fault of the implementation")

    def _who(self, by: str) -> str:
        return "the simulator" if by == "sim" else by
