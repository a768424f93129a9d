"""Resolve data.source to files: kind, order, and which are for validation (spec D)."""

import glob
import os
import re
import sysconfig
from collections.abc import Iterator, Set
from dataclasses import dataclass, fields
from pathlib import Path

from fp8ref.shared.errors import ConfigError
from fp8ref.train.config.sections import DataConfig

SUFFIXES = {
    "shards": {".bin", ".npy"},
    "documents": {".jsonl", ".parquet"},
    "text": {".md", ".py", ".txt"},
}
"""{kind of source: suffixes of its files}."""

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Directories of Python's standard library that source ``stdlib`` leaves out."""

HUB = "hf:"  # the prefix of a source that is a dataset of the Hugging Face hub

KEYS = {
    "shards": {"token_dtype"},
    "text": {"tokenizer", "end_of_document"},
    "documents": {"tokenizer", "end_of_document", "text_column"},
    "hub": {"tokenizer", "end_of_document", "text_column"},
}
"""{kind of source: keys of config.data that apply to it}; others are refused if they are set."""

_VALIDATION = re.compile(r"(?<![a-z])val(id|idation)?(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A resolved source. kind: shards, text, documents or hub.

    files  (name, path), sorted by name; a name is the POSIX path relative to the source.
    split  of a dataset of the hub.
    """

    kind: str
    files: tuple[tuple[str, Path], ...] = ()
    split: str = "train"


def find(data: DataConfig) -> Source:
    """The files of data.source; their contents are not read.

    Raises:   ConfigError: it does not exist, is not of one readable kind, or has others' keys.
    """
    source = _find(data.source)
    defaults = {f.name: f.default for f in fields(DataConfig)}
    unused = [
        key
        for key in sorted(set().union(*KEYS.values()) - KEYS[source.kind])
        if getattr(data, key) != defaults[key]
    ]
    if unused:
        raise ConfigError(
            f"data.{', data.'.join(unused)} {'is' if len(unused) == 1 else 'are'} set, and "
            f"data.source {data.source!r}, which is {source.kind}, does not use it. Leave it "
            "out."
        )
    return source


def is_validation(name: str) -> bool:
    """Whether a file is for validation: its name has the word val, valid or validation (D-5)."""
    return bool(_VALIDATION.search(name))


def unreadable(path: Path, error: Exception) -> ConfigError:
    """The ConfigError for a file that cannot be read."""
    # Arrow's has several lines
    why = " ".join(str(getattr(error, "strerror", None) or error).split())
    return ConfigError(f"{path} cannot be read ({why}). Repair it, or leave it out of data.source.")


def _find(source: str) -> Source:
    if source.startswith(HUB):
        return Source(kind="hub")
    if source == "stdlib":
        library = Path(sysconfig.get_path("stdlib"))
        return Source(kind="text", files=_text(library, {".py"}, LEFT_OUT))
    root = Path(source)
    if root.is_dir():
        return _directory(source, root)
    paths = [root]
    if not root.exists():
        paths = [Path(p) for p in glob.glob(source, recursive=True) if not os.path.isdir(p)]
    if paths and all(_kind(path) in ("shards", "documents") for path in paths):
        common = Path(os.path.commonpath([path.parent for path in paths]))
        return _single_kind(source, {path.relative_to(common).as_posix(): path for path in paths})
    problem = "matches no file" if glob.has_magic(source) else "is not a directory"
    if len(paths) > 1 and glob.has_magic(source):
        other = next(path for path in paths if _kind(path) not in ("shards", "documents"))
        problem = f"{problem} and matches {other.name}"
    raise ConfigError(
        f"data.source is 'stdlib' or a directory; got {source!r}, which {problem}. A file or a "
        "pattern may name token shards (.bin, .npy) or documents (.jsonl, .parquet), and "
        "hf:org/name a dataset of the Hugging Face hub."
    )


def _directory(source: str, root: Path) -> Source:
    visible = {}
    for path in _walk(root):
        relative = path.relative_to(root)
        # where fp8ref data prepare keeps what is not complete yet
        hidden = any(part.startswith(".") for part in relative.parts)
        if _kind(path) in ("shards", "documents") and not hidden:
            visible[relative.as_posix()] = path
    text = _text(root, SUFFIXES["text"], frozenset())
    if visible and text:
        name, path = min(visible.items())
        raise ConfigError(
            f"data.source {source!r} holds {_kind(path)} ({name}) and text ({text[0][0]}). "
            f"Name the {_kind(path)} by a pattern, such as '{source}/**/*{path.suffix}', or "
            "move the text to another directory."
        )
    if visible:
        return _single_kind(source, visible)
    if not any(path.stat().st_size for _, path in text):
        raise ConfigError(
            f"data.source {source!r} holds no .md, .py, .txt files with text in them, no token "
            "shards (.bin, .npy) and no documents (.jsonl, .parquet)."
        )
    return Source(kind="text", files=text)


def _single_kind(source: str, files: dict[str, Path]) -> Source:
    kinds = {str(_kind(path)): name for name, path in sorted(files.items(), reverse=True)}
    if len(kinds) > 1:
        held = " and ".join(f"{kind} ({name})" for kind, name in sorted(kinds.items()))
        raise ConfigError(
            f"data.source {source!r} names {held}. Name one kind by a pattern, such as "
            "'directory/*.bin'."
        )
    return Source(kind=next(iter(kinds)), files=tuple(sorted(files.items())))


def _kind(path: Path) -> str | None:
    return next((kind for kind, suffixes in SUFFIXES.items() if path.suffix in suffixes), None)


def _text(root: Path, suffixes: set[str], left_out: Set[str]) -> tuple[tuple[str, Path], ...]:
    every = (path for path in _walk(root, left_out) if path.suffix in suffixes)
    paths = [path for path in every if path.is_file()]
    return tuple(sorted((path.relative_to(root).as_posix(), path) for path in paths))


def _walk(root: Path, left_out: Set[str] = frozenset()) -> Iterator[Path]:
    """The files under a directory, except in folders named in left_out.

    Links to directories are not followed.

    Raises:   ConfigError: a directory cannot be read, so that files could be missed silently.
    """

    def refuse(error: OSError) -> None:
        raise unreadable(Path(error.filename), error) from error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name not in left_out]
        yield from (Path(folder, name) for name in names)
