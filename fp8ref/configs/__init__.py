"""Configurations that come with the package: a command takes one by its name, such as ``tiny``.

``tiny.npz`` has operands of a run of tiny.toml: ``fp8ref.train.tensors.read("tiny")`` reads it.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
"""The directory of the packaged configs."""

NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))
"""The names of the packaged configs."""


def summary(name: str) -> str:
    """A line on a packaged config: the first comment of its file.

    >>> summary("llama-8b")
    'Llama 3 8B, for 8 GPUs.'
    """
    with open(FOLDER / f"{name}.toml", encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


def find(path: str | Path, suffix: str = ".toml") -> Path:
    """The file at a path; or, if there is none, the package's file of that name.

    path    a file, or a name without a suffix, such as "tiny".
    Returns the path itself if neither is there, so that reading it says what is missing.

    >>> find("tiny").name
    'tiny.toml'
    """
    path, shipped = Path(path), FOLDER / f"{path}{suffix}"
    return (
        shipped
        if len(path.parts) == 1 and not path.suffix and not path.is_file() and shipped.exists()
        else path
    )
