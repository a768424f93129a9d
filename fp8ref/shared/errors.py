"""The errors that a user can cause or must act on.

The command line turns each into its own exit code.
"""

from collections.abc import Iterable
from typing import Any


class ConfigError(ValueError):
    """An unusable configuration, file or option; the message says why and the remedy."""


class NonFiniteError(RuntimeError):
    """The loss or the gradient is not finite; the weights are those before the step (spec T-4)."""


class LostProcessError(RuntimeError):
    """Another process of the run is gone, or did not answer in time."""


class LostRunError(OSError):
    """A run's directory was removed, moved or replaced; nothing is written any more."""


class StoppedError(RuntimeError):
    """A run stopped because it was asked to; its state is saved."""


def one_of(name: str, value: object, choices: Iterable[object]) -> None:
    """ValueError unless a value is among the choices: "name is one of a, b; got 'c'."."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{name} is one of {', '.join(map(str, choices))}; got {value!r}.")


def integer(name: str, value: Any, least: int, most: int | None = None, *, other: str = "") -> None:
    """ValueError unless a value is an integer, no bool, from least to most.

    other  what the caller takes besides, for the error: " or None".
    """
    integral = isinstance(value, int) and not isinstance(value, bool)
    if not integral or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"in [{least}, {most}]"
        raise ValueError(f"{name} is an integer {bounds}{other}; got {value!r}.")


def seed(value: Any) -> None:
    """ValueError unless a value is an integer, no bool, in [0, 2^64)."""
    integral = isinstance(value, int) and not isinstance(value, bool)
    if not integral or not 0 <= value < 1 << 64:
        raise ValueError(f"a seed is an integer in [0, 2^64); got {value!r}.")


def require(condition: bool, message: str, error: type[ValueError] = ValueError) -> None:
    """ValueError, or another error, with this message unless the condition holds."""
    if not condition:
        raise error(message)


def require_least(section: str, least: int, fields: object, *names: str, note: str = "") -> None:
    """ValueError for a field of a section of a config below ``least``; one that is None is left."""
    bound = f"at least {least}" if least else "not negative"
    for name in names:
        value = getattr(fields, name)
        text = f"{section}.{name} is {bound}{note}; got {value}."
        require(value is None or value >= least, text)
