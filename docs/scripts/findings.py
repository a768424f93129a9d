"""Write docs/findings.md and its pictures of what was recorded: python docs/scripts/findings.py"""

import json
import math
import sys
import textwrap
from collections import Counter
from pathlib import Path

from fp8ref.findings import CLAIMS, Finding, picture, recorded
from fp8ref.plots import png
from fp8ref.train.config import config as configs

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "losses"))

from larger_losses import STUDY

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
tell*: part of it is. Four claims about losses (e5m2, MX's floor, 8 random bits, 14-bit sums) have a
margin of 0.0075 nats: 0.25 % of a loss of 3, which DeepSeek-V3 calls acceptable (arXiv:2412.19437,
section 3.3). Others have none; two name a difference that they allow. Claims of 4 bits had five
seeds at first, most of which could not tell, and then up to ten: so their intervals are a little
too narrow. **A model of 0.1 million parameters that does not reproduce a claim about a large one
does not refute it**: each text says what it does not show, and what would decide.

Losses are training losses of the last 10 of 120 steps, under a run's own casts. Runs that several
claims share are trained, and timed, once.

Measured on {machine} with fp8ref {commit}, torch {torch} and
torchao {torchao}: {minutes:.0f} minutes of computing in all, in two processes.

"""

LARGER = """## A larger model

The models above learn for 120 steps. Here one of {size:.1f} million parameters, four blocks of 256,
learns for {steps:,} steps of 512 bytes, under six recipes and two variants of `tensorwise`, from
{seeds} seeds each: runs of one seed begin with the same weights and see the same bytes. The
validation loss is of the last step, in nats a byte; the gap is of the training loss of the last
tenth, with its interval of 95 % over seeds, and judged as in [Compare runs](how-to/compare.md).

{table}

![Gap of each recipe's training loss to bf16's, by step](findings/larger.png)

`make bench-larger` trains what is missing of these runs, in some hours on two cores, by {backend};
it may be stopped. Not shown: billions of parameters and tokens, and hardware: these are the codes
of FP8 in a CPU's arithmetic.

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
    seconds = f"{finding.seconds:.0f} second{'' if round(finding.seconds) == 1 else 's'}"
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
        f"- **Here:** {claim.method} {len(finding.samples)} seeds, {seconds}.",
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
    return text + "\n".join(lines) + "\n" + larger() + TAIL


def larger() -> str:
    """The section of what ``make bench-larger`` recorded."""
    kept = json.loads(STUDY.results.read_text())
    config = configs.load(kept["config"]).replace(model=STUDY.sections["model"])
    return LARGER.format(
        size=sum(math.prod(shape) for shape in config.shapes.parameters.values()) / 1e6,
        steps=kept["steps"],
        seeds=len({row["seed"] for row in kept["runs"]}),
        table=STUDY.table(kept["runs"]),
        backend={"jax": "JAX", "torch": "PyTorch"}[kept["backend"]],
    )


def main() -> None:
    """Write the page and its pictures."""
    findings = recorded()
    missing = [name for name in CLAIMS if name not in findings]
    assert not missing, f"not recorded: {', '.join(missing)}. Run make findings."
    assert STUDY.results.exists(), f"{STUDY.results} is not there. Run make bench-larger."
    PAGE.write_text(page(findings))
    PICTURES.mkdir(exist_ok=True)
    for name, finding in findings.items():
        (PICTURES / f"{name}.png").write_bytes(png(picture.draw(finding)))
    (PICTURES / "larger.png").write_bytes(
        STUDY.picture(json.loads(STUDY.results.read_text())["runs"])
    )


if __name__ == "__main__":
    main()
