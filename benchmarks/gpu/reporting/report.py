"""What a benchmark's sections come to: the ledger, targets, and tables."""

from collections.abc import Sequence

from fp8ref.estimate.kernels import Fusion
from fp8ref.recipe import RECIPES
from measuring import kernel_cases
from reporting import breakdown, ledger, tables, targets
from reporting.ledger import Ceilings
from reporting.tables import Rows
from reporting.targets import Target

FLOOR_AT_LEAST = 0.8
FIRST = ("tensorwise", "delayed", "rowwise_native")
OURS = (
    *FIRST,
    *(name for name, r in RECIPES.items() if r.fp8 and not r.in_blocks and name not in FIRST),
)
"""Recipes with FP8 GEMMs in both frameworks, the most wanted first."""

LINEARS = {  # of a block: the section that measures its shape
    "q_proj": "linear:q_o",
    "k_proj": "linear:k_v",
    "v_proj": "linear:k_v",
    "o_proj": "linear:q_o",
    "gate_proj": "linear:gate_up",
    "up_proj": "linear:gate_up",
    "down_proj": "linear:down",
}
HEADS = ("section", "variant", "ms", "speed / bf16", "quartiles")
PARTS = ("gemm", *ledger.BYTES, "launches", "floor", "measured")


def conclude(data: dict, asked_for: Sequence[Target], of_floor: Sequence[str], how: Fusion) -> None:
    """Write ``ceilings``, ``ledger``, ``floors``, ``noise`` and ``targets`` into the results, from
    the sections that they have.

    of_floor  recipes whose step is to be near the ledger's floor.
    how       who fuses casts.
    """
    sections = data["sections"]
    data["ceilings"] = {"dry": data["dry"], "device": data["device"]} | sections.get(
        "ceilings", {}
    ).get("ceilings", {})
    ceilings = _ceilings(data["ceilings"])
    data["ledger"] = [
        line
        for name in dict.fromkeys(LINEARS.values())
        for line in _of_linear(name, sections, how, ceilings)
    ]
    data["floors"] = [
        floor for recipe in OURS if (floor := _of_step(recipe, sections, how, ceilings))
    ]
    data["noise"] = targets.noise(sections, "blocks:")
    reached = {floor["recipe"]: floor["floor_over_measured"] for floor in data["floors"]}
    known = {"dry": data["dry"], "noise": data["noise"]}
    data["targets"] = [targets.judge(target, sections, **known) for target in asked_for] + [
        targets.verdict(
            f"blocks:{r}: the ledger's floor / fp8ref {r}", reached.get(r), FLOOR_AT_LEAST, **known
        )
        for r in of_floor
    ]


def markdown(data: dict) -> str:
    said = f"# {data['device']}\n\n"
    if data["dry"]:
        said = "# A dry run on a cpu: no figure here is a GPU's\n\n"
    said += (
        f"Versions: {', '.join(f'{k} {v}' for k, v in data['versions'].items())}; driver "
        f"{data['driver']}.\n"
    )
    said += (
        "Milliseconds are medians of rounds in which variants took turns; speed / bf16 is "
        "bf16's time by the variant's, median and quartiles.\n"
    )
    revisions = {
        section["revision"] for section in data["sections"].values() if "revision" in section
    }
    if len(revisions) > 1:
        said += (
            f"Sections were measured with {len(revisions)} revisions of the code: "
            f"{', '.join(sorted(revisions))}.\n"
        )
    casts = {section["casts"] for section in data["sections"].values() if "casts" in section}
    said += "".join(f"fp8ref's variants cast by {each}.\n" for each in sorted(casts))
    return f"{said}{noise(data)}\n" + "".join(
        f"\n## {title}\n\n{tables.markdown(heads, rows)}"
        for title, heads, rows in everything(data)
        if rows
    )


def everything(data: dict) -> list[tuple[str, tuple[str, ...], Rows]]:
    return [
        (
            "Bits of kernels, next to the simulator's",
            ("kernel", "codes and scales that differ"),
            [
                (row["name"], str(row["differ"]))
                for row in data["sections"].get("bits", {}).get("bits", [])
            ],
        ),
        (
            "Kernels alone: bytes that must move, GB a second",
            ("kernel", "its own", "of plain operations, compiled"),
            _rates(data["sections"].get("kernels", {}).get("kernels", [])),
        ),
        (
            "Ceilings",
            ("what", "value"),
            [(key, _number(value)) for key, value in data["ceilings"].items()],
        ),
        ("Steps and linears", HEADS, _speeds(data["sections"])),
        (
            "Ledger of linears, ms",
            ("section", "recipe", *PARTS, "floor / measured"),
            _ledger(data["ledger"]),
        ),
        (
            "Floors of steps of blocks, ms",
            ("recipe", "floor", "measured", "floor / measured"),
            _floors(data["floors"]),
        ),
        (
            "A step of blocks by kind of kernel, ms",
            ("variant", *breakdown.NAMES),
            _kinds(data["sections"]),
        ),
        ("Asked", ("what", "value", "quartiles", "asked", ""), asked(data)),
    ]


def asked(data: dict) -> list[tuple[str, ...]]:
    found = [
        (
            t["what"],
            tables.times(t["value"]),
            tables.spread(t.get("quartiles")),
            f">= {t['at_least']:.2f}x",
            t["verdict"],
        )
        for t in data["targets"]
    ]
    small = {
        row["name"]: row
        for row in data["sections"].get("small", {}).get("rows", [])
        if "speedup" in row
    }
    return found + [
        (
            f"small: {name} / bf16",
            tables.times(row["speedup"]),
            tables.spread(row["speedup_quartiles"]),
            "< 1.00x",
            "dry" if data["dry"] else _lost(row["speedup"]),
        )
        for name, row in small.items()
        if name.startswith("fp8ref")
    ]


def noise(data: dict) -> str:
    """What to read the table with."""
    return (
        ""
        if data["noise"] is None
        else f"Two bf16 models that took turns differed by {data['noise']:.1%} at most: less "
        "between two rows is noise."
    )


def _lost(speedup: float) -> str:
    return "loses, as it should" if speedup < 1 else "does not lose"


def _ceilings(found: dict) -> Ceilings | None:
    if not found.get("bandwidth") or not found.get("launch_in_graph_seconds"):
        return None
    return Ceilings(bandwidth=found["bandwidth"], gap=found["launch_in_graph_seconds"])


def _gemms(section: dict) -> dict[str, float]:
    return {row["name"]: row["seconds"] for row in section["gemms"] if "seconds" in row}


def _of_linear(name: str, sections: dict, how: Fusion, ceilings: Ceilings | None) -> list[dict]:
    if name not in sections or ceilings is None:
        return []
    section = sections[name]
    measured = {row["name"]: row.get("seconds") for row in section["rows"]}
    gemms, lines = _gemms(section), []
    for recipe in ("bf16", *OURS):
        variant = recipe if recipe == "bf16" else f"fp8ref {recipe}"
        if all(
            ledger.gemm_name(which, spec) in gemms for which, spec in RECIPES[recipe].gemms.items()
        ):
            found = ledger.entry(
                RECIPES[recipe],
                tuple(section["shape"]),
                how,
                gemms,
                ceilings,
                measured.get(variant),
            )
            lines.append({"section": name} | found)
    return lines


def _of_step(recipe: str, sections: dict, how: Fusion, ceilings: Ceilings | None) -> dict | None:
    """The floor of a step of blocks, next to what its section measured."""
    steps = {
        row["name"]: row.get("seconds")
        for row in sections.get(f"blocks:{recipe}", {}).get("rows", [])
    }
    measured, bf16 = steps.get(f"fp8ref {recipe}"), steps.get("bf16")
    if ceilings is None or not measured or not bf16 or not set(LINEARS.values()) <= set(sections):
        return None
    shapes = {linear: tuple(sections[section]["shape"]) for linear, section in LINEARS.items()}
    gemms = {linear: _gemms(sections[section]) for linear, section in LINEARS.items()}
    layers = sections[f"blocks:{recipe}"]["layers"]
    try:
        floor = ledger.step_floor(
            RECIPES[recipe], shapes, how, gemms, ceilings, layers=layers, bf16_step=bf16
        )
    except KeyError:  # a GEMM that failed, which its section says
        return None
    return {
        "recipe": recipe,
        "floor": floor,
        "measured": measured,
        "floor_over_measured": floor / measured,
    }


def _speeds(sections: dict) -> Rows:
    return [
        (
            name,
            row["name"],
            tables.duration(row["seconds"]),
            tables.times(row["speedup"]),
            tables.spread(row["speedup_quartiles"]),
        )
        if "speedup" in row
        else (name, row["name"], "failed", row["error"].replace("|", "/"), "-")
        for name, section in sections.items()
        if name != "profile"
        for row in section["rows"]
    ]


def _rates(rows: Sequence[dict]) -> Rows:
    found = {
        row["name"]: f"{row['bytes_per_second'] / 1e9:,.0f}"
        if "seconds" in row
        else row["error"].replace("|", "/")
        for row in rows
    }
    return [
        (name, value, found.get(f"{name}{kernel_cases.PLAIN}", "-"))
        for name, value in found.items()
        if not name.endswith(kernel_cases.PLAIN)
    ]


def _ledger(lines: list[dict]) -> Rows:
    return [
        (
            line["section"],
            line["recipe"],
            *(tables.duration(line[part]) for part in PARTS),
            tables.times(line["floor_over_measured"]),
        )
        for line in lines
    ]


def _floors(floors: list[dict]) -> Rows:
    return [
        (
            f["recipe"],
            tables.duration(f["floor"]),
            tables.duration(f["measured"]),
            tables.times(f["floor_over_measured"]),
        )
        for f in floors
    ]


def _kinds(sections: dict) -> Rows:
    return [
        (row["name"], *(tables.duration(row["kinds"].get(kind)) for kind in breakdown.NAMES))
        for row in sections.get("profile", {}).get("rows", [])
        if "kinds" in row
    ]


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
