"""Which operations cast a tensor: the framework's own, or fp8ref's Triton kernels.

Both give the same codes, scales and amaxes. Where they run differs, and how fast.
"""

import importlib.util
from dataclasses import dataclass
from typing import Literal, get_args

from fp8ref.shared.errors import require

__all__ = ["Choice", "Kernels", "check", "installed"]

Choice = Literal["auto", "plain", "triton"]
"""Triton where it is faster and passes its self-check; the framework's operations; Triton, on a CPU
in its interpreter."""

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

    @property
    def manifest(self) -> dict[str, str]:
        """As JSON, for the manifest of a run."""
        return {"by": "triton" if self.triton else "plain", "reason": self.reason}


def installed() -> bool:
    """Whether Triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def check(choice: str) -> None:
    """ValueError for an unknown choice, and for 'triton' where Triton is not installed."""
    names = get_args(Choice)
    require(choice in names, f"kernels are one of {', '.join(names)}; got {choice!r}.")
    require(
        choice != "triton" or installed(),
        "kernels 'triton' need the package triton, which is not installed. Install it with: pip "
        "install 'fp8ref[kernels]'. Or use 'auto' or 'plain', which give the same bits.",
    )
