"""Packages that an installation may lack: which extra of fp8ref brings them."""

import contextlib
import importlib.metadata
import importlib.util
import re
import sys

ORDER = ("jax", "torch", "conformance", "train", "data", "notebooks")
"""The order in which ``extra_of`` prefers extras: a package may stand in several."""


def require(extra: str, room: str, *packages: str) -> None:
    """Check that packages can be imported, without importing them.

    Raises:   ImportError: naming the packages that are missing and the extra that installs them.
    """
    missing = [package for package in packages if not _present(package)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ImportError(
            f"{room} needs {', '.join(packages)}; {', '.join(missing)} {verb} missing. Install "
            f"with: pip install 'fp8ref[{extra}]'",
            name=missing[0],
        )


def remedy(error: ImportError) -> str | None:
    """How to install a package that an import did not find; None without an extra."""
    package = (error.name or "").split(".")[0]
    if not isinstance(error, ModuleNotFoundError) or not package or package == "fp8ref":
        return None
    extra = extra_of(package)
    if extra is None:
        return None
    return f"{package} is missing. Install it with: pip install 'fp8ref[{extra}]'"


def extra_of(package: str) -> str | None:
    """The extra that requires a package, by fp8ref's metadata, or None."""
    try:
        lines = importlib.metadata.requires("fp8ref") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    normalized = _normalized(package)
    extras = set()
    for line in lines:
        name = re.match(r"[A-Za-z0-9._-]+", line)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if name and extra and _normalized(name[0]) == normalized:
            extras.add(extra[1])
    return next((extra for extra in ORDER if extra in extras), min(extras, default=None))


def versions(*packages: str) -> dict[str, str]:
    """{package: its version} of those that are installed."""
    by_name = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            by_name[name] = importlib.metadata.version(name)
    return by_name


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _present(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None
