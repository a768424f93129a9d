"""Write "What works where" of README.md from fp8ref/spec/support.py:
python docs/scripts/support.py
"""

import re
from pathlib import Path

from fp8ref.recipe import RECIPES
from fp8ref.spec import support

README = Path(__file__).parents[2] / "README.md"
_NAMES = {"jax": "JAX", "torch": "PyTorch"}


def in_readme(text: str) -> str:
    """A README with the table of today."""
    table = support.table(RECIPES)
    return re.sub(r"(## What works where\n\n)(?:\|.*\n)+", lambda m: m[1] + table, text)


def page() -> str:
    """The page "What works where": the table, and what each backend does not take."""
    out = ["# What works where", "", support.table(RECIPES).replace("](docs/", "](../")]
    out += ["## What a backend does not take", ""]
    out += ["| | backend | needs | instead |", "|---|---|---|---|"]
    for feature, backend, needs, instead in support.refusals():
        texts = [_generic(text.replace("{backend}", backend)) for text in (needs, instead)]
        out.append(f"| {feature} | {_NAMES[backend]} | {' | '.join(texts)} |")
    return "\n".join(out) + "\n"


def _generic(text: str) -> str:
    """A format with three dots for what an error names."""
    return re.sub(r"\{[^}]*\}", "...", text)


if __name__ == "__main__":
    README.write_text(in_readme(README.read_text(encoding="utf-8")), encoding="utf-8")
