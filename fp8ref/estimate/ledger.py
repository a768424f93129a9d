"""Predicted seconds: of a linear in bfloat16 and in FP8, and of a step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ledger:
    """Seconds of one linear for one microbatch.

    parts: FP8's by purpose; empty if no GEMM is in FP8.
    """

    bf16: float
    parts: dict[str, float]
    kernels: int
    floor: float  # seconds of the kernel launches alone: no bandwidth makes it faster

    @property
    def seconds(self) -> float:
        """Time as configured: FP8's parts, or bfloat16 without any."""
        return sum(self.parts.values()) if self.parts else self.bf16

    @property
    def ratio(self) -> float | None:
        """bfloat16's time by FP8's; below 1, FP8 is slower."""
        return self.bf16 / self.seconds if self.parts else None


@dataclass(frozen=True)
class Step:
    """Seconds of a step.

    bf16        all linears in bfloat16.
    configured  the linears as configured.
    filtered    the same, with linears that FP8 makes slower in bfloat16.
    rest        {what: seconds} of everything else, as configured.
    in_bf16     {what: seconds} of everything else in bfloat16, with the framework's own attention.
    after       the same after filtering: a norm's kernels depend on what quantizes its result.
    """

    bf16: float
    configured: float
    filtered: float
    rest: dict[str, float]
    in_bf16: dict[str, float]
    after: dict[str, float]

    @property
    def ratio(self) -> float:
        """A step's time in bfloat16 by its time as configured."""
        return self._ratio(self.configured, self.rest)

    @property
    def filtered_ratio(self) -> float:
        """The same ratio, with linears that FP8 makes slower left in bfloat16."""
        return self._ratio(self.filtered, self.after)

    @property
    def limit(self) -> float:
        """The same ratio, if linears took no time (Amdahl's limit)."""
        return self._ratio(0.0, self.rest)

    def _ratio(self, linears: float, rest: dict[str, float]) -> float:
        return (self.bf16 + sum(self.in_bf16.values())) / (linears + sum(rest.values()))
