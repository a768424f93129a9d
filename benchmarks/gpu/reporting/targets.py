"""What figures are asked for, next to those that were measured."""

from dataclasses import dataclass

from measuring.timing import quartiles, ratio


@dataclass(frozen=True, kw_only=True)
class Target:
    """A ratio of two rows of one section: how many times as fast as ``over`` the row ``name``
    is.
    """

    section: str
    name: str
    over: str
    at_least: float


def judge(target: Target, sections: dict, *, dry: bool, noise: float | None) -> dict:
    """{"what", "value", "quartiles", "at_least", "verdict"}."""
    rows = {
        row["name"]: row
        for row in sections.get(target.section, {}).get("rows", [])
        if "rounds" in row
    }
    what = f"{target.section}: {target.name} / {target.over}"
    if target.name not in rows or target.over not in rows:
        return verdict(what, None, target.at_least, dry=dry, noise=noise)
    base, taken = rows[target.over]["rounds"], rows[target.name]["rounds"]
    spread = quartiles([a / b for a, b in zip(base, taken, strict=True)])
    return verdict(
        what, ratio(base, taken), target.at_least, dry=dry, noise=noise, quartiles=spread
    )


def verdict(
    what: str, value: float | None, at_least: float, *, dry: bool, noise: float | None, **more
) -> dict:
    """met, missed (and whether by less than the noise), not measured; of a dry run, that it says
    nothing.
    """
    said = (
        "not measured"
        if value is None
        else "dry"
        if dry
        else "met"
        if value >= at_least
        else "missed"
    )
    if said == "missed" and noise is not None and value is not None and value + noise >= at_least:
        said = "missed, by less than the noise"
    return {"what": what, "value": value, "at_least": at_least, "verdict": said} | more


def noise(sections: dict, prefix: str) -> float | None:
    """By how much two variants that are the same differed at most, of the sections whose names
    begin so: "bf16" and "bf16 again".
    """
    found = [
        abs(1 - row["speedup"])
        for name, section in sections.items()
        if name.startswith(prefix)
        for row in section.get("rows", [])
        if row["name"] == "bf16 again" and "speedup" in row
    ]
    return max(found, default=None)
