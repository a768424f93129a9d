"""Write docs/museum.md from the exhibits of tests/museum:
PYTHONPATH=tests python docs/scripts/exhibits.py
"""

import importlib
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "museum.md"

SUBJECTS = {
    "Casts to FP8 and FP4": ("casts", "casts_packed", "casts_extremes", "casts_stochastic"),
    "Decoders and dequantizers": ("decoders", "decoders_e4m3", "dequantizers"),
    "Casts to e8m0, and scales of MX blocks": ("e8m0",),
    "Scales": ("scales",),
    "Quantizers": ("quantizers", "quantizers_scales", "quantizers_nvfp4"),
    "GEMMs": ("gemms", "gemms_shapes", "gemms_scales"),
    "Grouped and batched GEMMs": ("grouped",),
    "Attention": ("attention", "attention_masks", "attention_scales"),
    "Optimizers": ("optimizers",),
    "Delayed scaling and collectives": ("delayed",),
}
"""{the heading of a table: modules of tests/museum}."""

HEAD = """# A museum of faults

FP8 code fails in the same few ways in many libraries. Each exhibit is a fault that somebody
reported in public, rewritten in a few lines of NumPy beside its fixed twin. The
[conformance kit](how-to/conform.md) is asked about both, as its users ask it: it must object to the
fault, and must not object to the twin. The functions are models of our own writing, with small
sizes. They are in `tests/museum/`, a module for each subject.

{shares}

"""

COLUMNS = """| fault | library | year | what the kit says |
|---|---|---|---|
"""

FOOT = """## Add an exhibit

1. Write the fault and the fixed function in the module of their subject, in `tests/museum/`. Each
   takes what the kit passes: an array, codes and scales, or operands.
2. Add an `Exhibit` with the link of the thread. `ask` says how the kit is asked, with a function of
   `tests/museum/ask.py`.
3. Run `pytest tests/museum -k NAME`, and copy from the report the words that are the right cause to
   `named`. If no words are, copy what it got and expected to `unnamed`. If the kit does not object,
   say why in `missed`, and open an issue.
4. Write this page anew: `PYTHONPATH=tests python docs/scripts/exhibits.py`.
"""


def exhibits() -> list[Any]:
    """All exhibits, in the order of the page."""
    return [one for names in SUBJECTS.values() for one in _of(names)]


def written() -> str:
    """The page."""
    tables = [
        f"## {heading}\n\n{COLUMNS}" + "".join(map(_row, _of(names)))
        for heading, names in SUBJECTS.items()
    ]
    return HEAD.format(shares=_shares()) + "\n".join([*tables, FOOT])


def _of(names: tuple[str, ...]) -> list[Any]:
    modules = [importlib.import_module(f"museum.{name}") for name in names]
    return [one for module in modules for one in module.EXHIBITS]


UNSEEN = """\
Names are learned from faults like these, so a fault of another kind is named less often. Of 62
faults that were collected afterwards and not looked at before (November 2026), the kit as it was
found 58 (94%) and named 25 (40%). What was learned from them is in the kit since: it finds 59 and
names 38, and of 3 it names a wrong cause. The exhibits include 59 of these 62; the other 3 models
were doubtful. Of a fault without a name the report says the smallest input, what came out and what
the specification expects."""


def _shares() -> str:
    every = exhibits()
    found = sum(not one.missed for one in every)
    named = sum(bool(one.named) for one in every)
    shares = f"({found / len(every):.0%})", f"({named / len(every):.0%})"
    return (
        f"Of {len(every)} faults the kit finds {found} {shares[0]}, and says the right cause of "
        f"{named} {shares[1]}. It objects to no twin.\n\n{UNSEEN}"
    )


def _row(one: Any) -> str:
    says = f"`{one.named}`"
    if one.unnamed:
        says = f"without a cause: `{one.unnamed}`"
    if one.missed:
        says = f"**missed**: {one.missed}"
    says = says.replace("|", "\\|")
    return f"| [{one.title}]({one.link}) | {one.library} | {one.year} | {says} |\n"


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
