"""Where the text of a clause is: the address that messages name next to a clause's number.

The address comes from the Documentation entry of [project.urls] in pyproject.toml. Without one it
is a file of the repository.
"""

import functools
import importlib.metadata
import re

# Clauses as messages cite them: "(S-9)", "(C-1, C-2)", "spec L-5".
_CLAUSE = re.compile(r"(?<![\w-])([ABCDEFGHKLMOPQRSTX])-(\d{1,2})(?![\w-])")


@functools.cache
def site() -> str | None:
    """The address of the documentation site, or None if the package names none."""
    try:
        entries = importlib.metadata.metadata("fp8ref").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return None
    return dict(entry.split(", ", 1) for entry in entries).get("Documentation")


def address(clause: str) -> str:
    """The page of a clause and the anchor in it.

    >>> address("S-9").endswith("#s-9")
    True
    """
    letter, anchor = clause[0].lower(), clause.lower()
    url = site()
    if url is None:
        return f"docs/spec/{letter}.md#{anchor}"
    return f"{url.rstrip('/')}/spec/{letter}.html#{anchor}"


def addresses(message: str) -> list[str]:
    """A line "S-9: its address" for each clause that a message cites, in its order.

    >>> cited = addresses("takes at least one row (S-7); H-2 and S-7 say why")
    >>> [line.partition(":")[0] for line in cited]
    ['S-7', 'H-2']
    """
    clauses = dict.fromkeys(f"{letter}-{number}" for letter, number in _CLAUSE.findall(message))
    return [f"{clause}: {address(clause)}" for clause in clauses]
