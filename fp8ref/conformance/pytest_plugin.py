"""The pytest plugin that fp8ref installs: the fixture ``fp8ref_kit``, whose functions test yours.

def test_mine(fp8ref_kit):
    fp8ref_kit.require_cast(mine, "e4m3fn")

pytest imports this module wherever fp8ref is installed, so the kit is imported when a test uses it.
What was asked becomes a property of the test: pytest-xdist, --junit-xml and the summary show it.
"""

import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest

from fp8ref import __version__
from fp8ref.shared import extras, package_data

__all__ = ["ROOMS", "Kit", "fp8ref_kit"]

ROOMS: dict[str, str] = package_data.tables(__file__, "rooms")
"""{function of the kit: its module in fp8ref.conformance}."""

OPTIONS = {
    "require_cast": ("device", "exhaustive"),
    "require_decoder": ("device",),
    "require_quantizer": ("device",),
}
"""{function of the kit: its arguments whose defaults are the options --fp8ref-...}."""

PROPERTY = "fp8ref"
"""The name of a test's property that says what was asked."""


class Kit:
    """The functions of ROOMS. They raise an AssertionError with the simplest input that differs; no
    frame of fp8ref is in its traceback.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.item: pytest.Item | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A function of ROOMS, with the defaults that the command line names."""
        try:
            function = getattr(importlib.import_module(f"{__package__}.{ROOMS[name]}"), name)
        except KeyError:
            text = f"fp8ref_kit has {', '.join(ROOMS)}; got {name!r}."
            raise AttributeError(text) from None
        option = self.config.getoption
        defaults = {key: option(f"fp8ref_{key}") for key in OPTIONS.get(name, ())}

        @functools.wraps(function)
        def require(*arguments: Any, **options: Any) -> Any:
            __tracebackhide__ = True
            try:
                outcome = function(*arguments, **(defaults | options))
            except (AssertionError, ValueError) as error:
                raise error.with_traceback(_without_own(error.__traceback__)) from error.__cause__
            text = getattr(outcome, "paragraph", None) or getattr(outcome, "message", None)
            self._record(text or _asked(function, arguments, options))
            return outcome

        return require

    def _record(self, text: str) -> None:
        """Keep what was asked by the running test, once."""
        properties = self.item.user_properties if self.item else []
        if (PROPERTY, text) not in properties:
            properties.append((PROPERTY, text))


def _asked(
    function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> str:
    """What a function without an outcome required of its first argument, in words."""
    first, *others = *arguments, *options.values()  # any of them may be given by name
    tested = getattr(first, "__qualname__", type(first).__name__)
    named = [repr(argument) for argument in others if isinstance(argument, str | int)]
    sentence = re.split(r"[,;]? else|\. ", " ".join((inspect.getdoc(function) or "").split()))[0]
    return f"{tested} passed {function.__name__}({', '.join(named)}): {sentence}"


def _without_own(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without frames of fp8ref."""
    if traceback is None:
        return None
    rest, frame = _without_own(traceback.tb_next), traceback.tb_frame
    if frame.f_globals.get("__name__", "").startswith("fp8ref."):
        return rest
    return TracebackType(rest, frame, traceback.tb_lasti, traceback.tb_lineno)


_KIT = pytest.StashKey[Kit]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the kit."""
    group = parser.getgroup("fp8ref")
    text = "device of PyTorch tensors that casts and quantizers get, such as cuda"
    group.addoption("--fp8ref-device", metavar="NAME", default="cpu", help=text)
    text = "also give casts to FP8 all 2^32 float32 inputs (minutes each)"
    group.addoption("--fp8ref-exhaustive", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Make the kit, which imports nothing yet."""
    config.stash[_KIT] = Kit(config)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Say which test asks."""
    item.config.stash[_KIT].item = item


@pytest.fixture(scope="session")  # so that tests of hypothesis can use it
def fp8ref_kit(pytestconfig: pytest.Config) -> Kit:
    """Functions that require that yours follow FP8's specification: fp8ref's conformance kit."""
    return pytestconfig.stash[_KIT]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what was asked of each function that passed, if the kit was used."""
    asked = [
        f"{report.nodeid}: {text}"
        for report in itertools.chain(*terminalreporter.stats.values())
        if getattr(report, "when", "") == "teardown"
        for key, text in report.user_properties
        if key == PROPERTY
    ]
    if asked:
        versions = extras.versions("numpy", "ml_dtypes", "torch", "jax")
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        terminalreporter.section(f"fp8ref {__version__} ({listed})")
        terminalreporter.write_line("\n".join(asked))
