"""Write docs/findings.md and its pictures of what was recorded: python docs/scripts/findings.py"""

import textwrap
from collections import Counter
from pathlib import Path

from fp8ref.findings import CLAIMS, Finding, picture, recorded
from fp8ref.plots import png

PAGE = Path(__file__).parents[1] / "findings.md"
PICTURES = PAGE.parent / "findings"

HEAD = """# Findings: which claims about FP8 training hold

Papers and threads claim things about FP8 and FP4. Here {count} of them are measured, each in
minutes on two cores: {verdicts}.

```console
$ fp8ref finding rowwise_outliers   # any name of this page; `fp8ref finding` lists them
$ make findings                     # all of them, and this page
```

Each claim has a figure that is above a threshold if the claim holds. A pilot of three seeds says
how many seeds it takes to decide; other seeds then measure it. *Reproduced*: the whole interval of
95 % (Student's t) is above the threshold and a margin. *Not reproduced*: none of it is. *Cannot
tell*: part of it is. **A model of 0.1 million parameters that does not reproduce a claim about a
large one does not refute it**: each text says what it does not show, and what would decide.

Losses are training losses of the last tenth of a run, under its own casts. Runs that several claims
share are trained, and timed, once.

Measured on {machine} with fp8ref {commit}, torch {torch} and
torchao {torchao}: {minutes:.0f} minutes of computing in all, in two processes.

"""

TAIL = """## See also

- [The notebook](notebooks/08_findings.ipynb) measures one claim, and writes a claim of its own.
- [What a difference of rules costs](rollout.md): trainer and rollout, with sampling.
- [4 bits](how-to/four-bits.md): NVFP4's parts in a model twice as wide.
- [Compare runs](how-to/compare.md): the same kind of verdict for your runs.
"""


def anchor(name: str) -> str:
    """The anchor of a claim's section."""
    return name.replace("_", "-")


def table(findings: dict[str, Finding]) -> list[str]:
    """A row a claim, by topic."""
    lines = ["| topic | claim | figure | 95 % interval | verdict |", "|---|---|---|---|---|"]
    topic = ""
    for name, finding in findings.items():
        claim = finding.claim
        mean, low, high = map(claim.form.format, finding.interval)
        lines.append(
            f"| {claim.topic if claim.topic != topic else ''} | [{claim.claim}](#{anchor(name)}) | "
            f"{mean} | {low} to {high} | **{finding.verdict}** |"
        )
        topic = claim.topic
    return [*lines, ""]


def section(name: str, finding: Finding) -> list[str]:
    """A claim: its picture, a sentence to quote, and how it was measured."""
    claim = finding.claim
    need = claim.form.format(claim.above + claim.margin)
    mean, low, high = map(claim.form.format, finding.interval)
    return [
        f"### {claim.claim} {{ #{anchor(name)} }}",
        "",
        f"![{claim.figure}](findings/{name}.png)",
        "",
        f"> {finding.quote()}",
        "",
        f"- **Verdict:** {finding.verdict}. {claim.figure}: {mean}, interval {low} to {high}; the "
        f"claim needs more than {need}.",
        f"- **Source:** {claim.source}.",
        *([f"- **There:** {claim.paper}."] if claim.paper else []),
        f"- **Here:** {claim.method} {len(finding.samples)} seeds, {finding.seconds:.0f} seconds.",
        f"- **Seeds:** {finding.power()}",
        f"- **Not shown:** {claim.limits}",
        f"- **Again:** `fp8ref finding {name}`",
        "",
        *answer(name, finding),
    ]


def answer(name: str, finding: Finding) -> list[str]:
    """What one could post into the thread that asks."""
    claim = finding.claim
    said = claim.answers.get(finding.verdict)
    if said is None:
        return []
    *_, owner, repository, _, number = claim.thread.split("/")
    text = textwrap.wrap(finding.written(said), 110)
    again = f"    In a clone of fp8ref, `fp8ref finding {name}`. Not shown: {claim.limits}"
    title = f'??? note "An answer to {repository}#{number}"'
    link = f"    To [{owner}/{repository}#{number}]({claim.thread}):"
    return [title, link, "", *(f"    {line}" for line in text), "", again, ""]


def page(findings: dict[str, Finding]) -> str:
    """The page of the documentation."""
    counts = Counter(finding.verdict for finding in findings.values())
    about = next(iter(findings.values())).about
    text = HEAD.format(
        count=len(findings),
        verdicts=", ".join(f"{counts[key]} {key}" for key in sorted(counts, key=counts.get)[::-1]),
        minutes=sum(finding.seconds for finding in findings.values()) / 60,
        machine=about["machine"],
        commit=" and ".join(sorted({str(f.about.get("commit")) for f in findings.values()})),
        torch=about["torch"],
        torchao=about["torchao"],
    )
    lines, topic = table(findings), ""
    for name, finding in findings.items():
        if finding.claim.topic != topic:
            topic = finding.claim.topic
            lines += [f"## {topic}", ""]
        lines += section(name, finding)
    return text + "\n".join(lines) + "\n" + TAIL


def main() -> None:
    """Write the page and its pictures."""
    findings = recorded()
    missing = [name for name in CLAIMS if name not in findings]
    assert not missing, f"not recorded: {', '.join(missing)}"
    PAGE.write_text(page(findings))
    PICTURES.mkdir(exist_ok=True)
    for name, finding in findings.items():
        (PICTURES / f"{name}.png").write_bytes(png(picture.draw(finding)))


if __name__ == "__main__":
    main()
