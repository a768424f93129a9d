"""Claims about FP8 training that papers and threads make, each measured with an interval.

    finding = measure(CLAIMS["mx_clipping"], "findings")
    finding.print()
    picture.draw(finding).savefig("mx_clipping.png")

registry     CLAIMS: the claims of claims.toml by name
claim        what a claim is, and how its interval decides
measuring    measure: a pilot, then as many seeds as it asks for; kept, and resumed
picture      draw: a finding as a figure
casts, sums, training, proxies
             the functions that measure: tensors, accumulations, small models of the trainer and
             of PyTorch
"""

from fp8ref.findings.claim import Claim, Sample, Trial
from fp8ref.findings.measuring import Finding, Findings, measure, measure_all, recorded
from fp8ref.findings.registry import CLAIMS

__all__ = [
    "CLAIMS",
    "Claim",
    "Finding",
    "Findings",
    "Sample",
    "Trial",
    "measure",
    "measure_all",
    "recorded",
]
