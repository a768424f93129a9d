"""Run functions of test files on ranks.

Pytest imports these files under names that no rank can import.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from fp8ref.crosscheck import process_group

PATIENCE = 120  # seconds; a test that hangs longer has failed
process_group.CONTEXT.set_forkserver_preload([*process_group.PRELOADED, "pytest"])


def run(n: int, function: Callable, *args, timeout: int = PATIENCE) -> list:
    """As ``process_group.run``, for a function at the top level of any file."""
    return process_group.run(n, call, named(function), *args, timeout_s=timeout, patience_s=timeout)


def call(where: tuple[str, str], *args):
    file, name = where
    return getattr(_module(file), name)(*args)


def named(function: Callable) -> tuple[str, str]:
    """The file and name by which ``call`` finds a function in any process."""
    return function.__code__.co_filename, function.__name__


def _module(file: str) -> ModuleType:
    """Import a file by its path."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
