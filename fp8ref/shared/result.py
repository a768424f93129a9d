"""What a command found: data, a table for a person and an exit code, the same way for every
command.
"""

import abc
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8ref.shared import console as consoles

if TYPE_CHECKING:
    from rich.console import Console

STDOUT = Path("-")
"""Where ``write`` means standard output; everything else is printed to standard error then."""


def finite(value: Any) -> Any:
    """The value; None for NaN and infinity, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Result(abc.ABC):
    """A result states ``ok``, ``to_dict`` and ``render``; the rest follows.

    ok        whether everything that was asked for holds.
    to_dict   what --json keeps, without NaN or infinity.
    render    what a person sees, on a console of rich's.
    """

    @property
    @abc.abstractmethod
    def ok(self) -> bool:
        """Whether everything that was asked for holds."""

    @abc.abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """What --json keeps."""

    @abc.abstractmethod
    def render(self, console: "Console") -> None:
        """Print it for a person."""

    @property
    def exit_code(self) -> int:
        """0 where it is ok, else 1."""
        return 0 if self.ok else 1

    def print(self) -> None:
        """``render`` on standard output."""
        self.render(consoles.console())

    def write(self, path: Path) -> None:
        """``to_dict`` as JSON."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"
        if path == STDOUT:
            sys.__stdout__.write(text)  # type: ignore[union-attr]
        else:
            path.write_text(text, encoding="utf-8")
