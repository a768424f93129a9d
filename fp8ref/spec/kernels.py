"""Which operations cast a tensor: the framework's own, or fp8ref's Triton kernels.

Both give the same codes, scales and amaxes. Where they run differs, and how fast.
"""

import importlib.util
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from fp8ref.shared.errors import one_of, require

__all__ = ["Choice", "Kernels", "broken", "check", "installed", "read", "warn"]

Choice = Literal["auto", "plain", "triton"]
"""Triton where faster and self-checked; framework operations; Triton, interpreted on CPUs."""

CAPABILITY = (8, 9)
"""The least compute capability of a GPU with instructions that cast to FP8."""


@dataclass(frozen=True)
class Kernels:
    """What casts tensors on a device.

    triton   whether fp8ref's Triton kernels do; else the framework's own operations.
    reason   why, in a few words.
    """

    triton: bool
    reason: str

    def over_linears(self, linears: Iterable[tuple[str, float]], choice: Choice) -> "Kernels":
        """What casts the linears of a model.

        linears   recipe, and the share of roles that kernels can cast, of each in FP8; of experts
                  none.
        Raises:   ValueError: 'triton' with linears of which kernels cast nothing.
        """
        shares: dict[str, list[float]] = {}
        for recipe, share in linears:
            shares.setdefault(recipe, []).append(share)
        if not self.triton or not shares:
            return self
        if not any(share for each in shares.values() for share in each):
            names = ", ".join(shares)
            require(
                choice != "triton",
                f"kernels 'triton' cast operands of some recipe; got recipe {names}. Use 'auto' "
                "or 'plain'.",
            )
            return Kernels(False, f"no kernel casts recipe {names}")
        plain = [name for name, each in shares.items() if min(each) < 1]
        return Kernels(True, self.reason + f"; {', '.join(plain)} not in all operands" * any(plain))

    @property
    def text(self) -> str:
        """As the console and the report say it."""
        return f"{'Triton kernels' if self.triton else 'plain operations'} ({self.reason})"

    @property
    def manifest(self) -> dict[str, str]:
        """As JSON, for the manifest of a run."""
        return {"by": "triton" if self.triton else "plain", "reason": self.reason}


def read(manifest: dict[str, str]) -> Kernels:
    """What a manifest has of a device."""
    return Kernels(manifest["by"] == "triton", manifest["reason"])


def installed() -> bool:
    """Whether Triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def check(choice: str) -> None:
    """ValueError for an unknown choice, and for 'triton' where Triton is not installed."""
    one_of("kernels", choice, get_args(Choice))
    require(
        choice != "triton" or installed(),
        "kernels 'triton' need the package triton, which is not installed. Install it with: pip "
        "install 'fp8ref[kernels]'. Or use 'auto' or 'plain', which give the same bits.",
    )


def broken(error: Exception) -> str:
    """The failure of a self-check whose kernel did not compile or run, in one line."""
    reason = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__} where a kernel was compiled or run: {reason}"


def warn(device: str, failure: str) -> None:
    """Warn that plain operations cast on a device whose self-check failed."""
    warnings.warn(
        f"plain operations cast on {device}, as Triton kernels failed their self-check there: "
        f"{failure}. Please report it, with the versions of Triton and of the driver. Use kernels "
        "'plain', which gives the same bits, to end this warning.",
        stacklevel=3,
    )
