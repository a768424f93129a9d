"""Published claims about FP8 training, measured here: python benchmarks/published/findings.py
[--only NAME ...] [--json FILE] [--page FILE]

Every claim is a figure that is above a number if the claim holds. It is measured with several
seeds, and its interval is Student's, of 95 %. Claims of ``finding_casts`` are measured in the
simulator, those of ``finding_runs`` by training tiny models. The results are written to
benchmarks/results/findings.json and docs/findings.md, from which the documentation and the notebook
08_findings take every number.
"""

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import finding_casts
import finding_runs
from claim import Claim
from fp8ref.train.report import gap as gaps

RESULTS = Path(__file__).parents[1] / "results" / "findings.json"
PAGE = Path(__file__).parents[2] / "docs" / "findings.md"
REPRODUCED, REFUTED, OPEN = "reproduced", "not reproduced", "cannot tell"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A claim's figure, the mean over seeds, its interval and the verdict."""

    name: str
    claim: str
    source: str
    figure: str
    how: str
    form: str
    above: float
    margin: float
    samples: list[float]
    mean: float
    low: float
    high: float
    verdict: str
    seconds: float


def measured(claim: Claim) -> Finding:
    """Measure a claim."""
    begun = time.perf_counter()
    samples = [float(claim.measure(seed)) for seed in range(claim.seeds)]
    mean, low, high = interval(samples)
    about = {key: value for key, value in asdict(claim).items() if key not in ("measure", "seeds")}
    verdict = judge(low, high, above=claim.above, margin=claim.margin)
    return Finding(
        **about,
        samples=samples,
        mean=mean,
        low=low,
        high=high,
        verdict=verdict,
        seconds=time.perf_counter() - begun,
    )


def interval(samples: list[float]) -> tuple[float, float, float]:
    """(mean, low, high) of Student's interval of 95 %."""
    found = gaps.matched(np.array(samples)[:, None]).last
    return float(found.mean), float(found.low), float(found.high)


def judge(low: float, high: float, *, above: float, margin: float) -> str:
    """The verdict of an interval: wholly above, wholly not above or too small to matter, or
    neither.
    """
    if low > above + margin:
        return REPRODUCED
    return REFUTED if high <= above + margin else OPEN


def page(found: list[dict], about: dict) -> str:
    """The page of the documentation."""
    lines = [
        "# Published findings, measured here",
        "",
        "`make findings` measures each claim, trains the tiny models it needs, and writes this "
        "page. Each claim has a figure",
        "that is above a threshold if the claim holds. Intervals are 95 % (Student's t).",
        f"Measured on {about['machine']}, in {about['seconds'] / 60:.1f} minutes.",
        "",
        "| claim | figure | measured | 95 % interval | the claim needs | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        mean, low, high, above = (
            one["form"].format(one[key]) for key in ("mean", "low", "high", "above")
        )
        more = f", by a margin of {one['form'].format(one['margin'])}" if one["margin"] else ""
        lines.append(
            f"| [{one['name']}](#{one['name'].replace('_', '-')}) | {one['figure']} | {mean} | "
            f"{low} to {high} | above {above}{more} | **{one['verdict']}** |"
        )
    lines += [
        "",
        "*Reproduced*: the whole interval is above the threshold plus margin. *Not reproduced*: "
        "none of it is. *Cannot tell*: part of it is, at this",
        "size and with this many seeds. A tiny model that does not reproduce a claim about large "
        "models does not refute it.",
        "",
    ]
    for one in found:
        lines += [
            f"## {one['name'].replace('_', ' ')} {{ #{one['name'].replace('_', '-')} }}",
            "",
            one["claim"],
            "",
        ]
        lines += [
            f"- **Source:** {one['source']}",
            f"- **Measured:** {one['how']} {len(one['samples'])} seeds.",
            "",
        ]
    lines += [
        "## See also",
        "",
        "- [The notebook](notebooks/08_findings.ipynb) draws the samples.",
        "- [Compare runs](how-to/compare.md): the same kind of verdict for your runs.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and record."""
    claims = [*finding_casts.CLAIMS, *finding_runs.CLAIMS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[claim.name for claim in claims],
        help="measure these alone, and write nothing",
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    known = parser.parse_args()
    begun, found = time.perf_counter(), []
    table = Table("claim", "figure", "measured", "95 % interval", "verdict", "seconds")
    for claim in claims:
        if known.only is None or claim.name in known.only:
            one = measured(claim)
            numbers = [one.form.format(value) for value in (one.mean, one.low, one.high)]
            print(
                f"{one.name}: {numbers[0]} [{numbers[1]}, {numbers[2]}], {one.verdict} "
                f"({one.seconds:.0f} s)",
                flush=True,
            )
            table.add_row(
                one.name,
                one.figure,
                numbers[0],
                f"{numbers[1]} to {numbers[2]}",
                one.verdict,
                f"{one.seconds:.0f}",
            )
            found.append(asdict(one))
    Console(width=160).print(table)
    if known.only is None:
        about = {
            "machine": platform.platform(),
            "python": platform.python_version(),
            "seconds": time.perf_counter() - begun,
        }
        known.json.write_text(json.dumps(about | {"findings": found}, indent=1) + "\n")
        known.page.write_text(page(found, about))


if __name__ == "__main__":
    main()
