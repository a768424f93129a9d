"""The errors that a user can cause or must act on.

The command line turns each into its own exit code.
"""


class ConfigError(ValueError):
    """A configuration, a file or an option cannot be used; the message says why and what to write
    instead.
    """


class NonFiniteError(RuntimeError):
    """The loss or the gradient is not finite; the weights are those before the step (spec T-4)."""


class LostProcessError(RuntimeError):
    """Another process of the run is gone, or did not answer in time."""


class LostRunError(OSError):
    """The directory of a run was removed, moved or replaced while the run trained; nothing is
    written there any more.
    """


class StoppedError(RuntimeError):
    """A run stopped because it was asked to; its state is saved."""


def require(condition: bool, message: str) -> None:
    """ValueError(message) unless the condition holds."""
    if not condition:
        raise ValueError(message)
