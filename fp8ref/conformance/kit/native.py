"""Compile C++ or CUDA with the tools and headers that are installed."""

import importlib.util
import subprocess
from pathlib import Path


def packaged(pattern: str) -> list[Path]:
    """The paths in NVIDIA's installed packages that match a pattern, such as ``*/include``."""
    spec = importlib.util.find_spec("nvidia")
    roots = (spec.submodule_search_locations if spec else None) or []
    return [path for root in roots for path in sorted(Path(root).glob(pattern))]


def shared_library(source: Path, folder: Path, command: list[str]) -> tuple[Path, str]:
    """Compile a source into a folder by a command; the library, and what a failure says, or ""."""
    library = folder / f"{source.stem}.so"
    done = subprocess.run(
        [*command, "-shared", "-o", str(library), str(source)], capture_output=True, text=True
    )
    failure = (done.stderr or done.stdout).strip() or "no message"
    return library, failure if done.returncode else ""
