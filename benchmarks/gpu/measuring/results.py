"""The JSON file of a benchmark: its sections, each written as soon as it is finished, and its table
in markdown next to it.
"""

import json
import os
from pathlib import Path

KEPT = Path(__file__).parents[2] / "results"
LEFT = 3  # the exit code of a script that leaves something for another run
# of an environment: what a table's figures have in common
SAME = ("dry", "device", "driver", "versions", "flags")


class RefusedError(ValueError):
    """What a user asked for and cannot have: the message says why, and what to do."""


class Results:
    """``data``: {"dry", "device", "driver", "versions", "flags", "sections": {name: {...}},
    ...}.
    """

    def __init__(
        self, path: Path, environment: dict, *, resume: bool = False, overwrite: bool = False
    ) -> None:
        """Raises:   RefusedError: a dry run's results where those of GPUs are kept; a file that is
        there, unless it is resumed or overwritten; one to resume that is of another machine, or not
        such a file.
        """
        if environment["dry"] and path.resolve().is_relative_to(KEPT.resolve()):
            raise RefusedError(
                "figures of a dry run are of no GPU, and are not written to benchmarks/results; "
                f"got {path}. Name another file by --json."
            )
        self.path, self.data = path, environment | {"sections": {}}
        if path.suffix != ".json" or path.is_dir():
            raise RefusedError(
                f"results go to a file NAME.json, and their table to NAME.md; got {path}. Name "
                "such a file by --json."
            )
        if path.exists() and not resume and not overwrite:
            raise RefusedError(
                f"{path} is there already. Add to it by --resume, or begin anew by --overwrite."
            )
        if resume and path.exists():
            self.data = _earlier(path, environment)
        try:  # before anything is measured
            _write(path, json.dumps(self.data, indent=1) + "\n")
        except OSError as error:
            raise RefusedError(
                f"results are written to {path}, which fails: {error.strerror}. Name another "
                "file by --json."
            ) from None

    def finished(self, name: str) -> bool:
        """Whether the file has a section, and nothing in it failed."""
        section = self.data["sections"].get(name)
        return section is not None and not failed(section)

    def tried(self, name: str) -> bool:
        return name in self.data["sections"]

    def put(self, name: str, section: dict) -> None:
        """Keep a section; an earlier one of which less failed stays."""
        earlier = self.data["sections"].get(name)
        if earlier is None or len(failed(section)) <= len(failed(earlier)):
            self.data["sections"][name] = section

    def write(self, markdown: str) -> None:
        """Both files, each whole or as it was before."""
        _write(self.path, json.dumps(self.data, indent=1) + "\n")
        _write(self.path.with_suffix(".md"), markdown)


def failed(section: dict) -> list[str]:
    """What went wrong in a section: "<row>: <error>"."""
    rows = [
        row
        for value in section.values()
        if isinstance(value, list)
        for row in value
        if isinstance(row, dict)
    ]
    return [f"{row['name']}: {row['error']}" for row in rows if "error" in row]


def _earlier(path: Path, environment: dict) -> dict:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        differ = [key for key in SAME if data[key] != environment[key]]
        data["sections"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RefusedError(
            f"{path} is not a file that this script wrote ({error!r}). Write it anew by "
            "--overwrite."
        ) from None
    if differ:
        found = "; ".join(f"{key} {data[key]!r}, here {environment[key]!r}" for key in differ)
        raise RefusedError(
            f"one table is of one machine; {path} has {found}. Name another file by --json."
        )
    return data


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
