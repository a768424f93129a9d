"""What the grade of a GEMM costs: python benchmarks/gemm_grades.py [--long] [NAME ...]

Seconds of processor time for each planted GEMM of the tests, by name, with the verdict and the cause; --long: at K = 131,072.
"""

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fp8ref.conformance.gemm import grade_gemm

TESTS = Path(__file__).parents[1] / "tests"
LONG = (128, 128, 131072)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--long", action="store_true")
    known = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    from graded_gemms import PLANTED

    unknown = [name for name in known.names if name not in PLANTED]
    if unknown:
        raise SystemExit(f"the planted GEMMs are {', '.join(PLANTED)}; got {', '.join(unknown)}.")
    table = Table("GEMM", "seconds", "verdict", "cause")
    shapes = {"shapes": [LONG]} if known.long else {}
    for name in known.names or PLANTED:
        begun = time.process_time()
        grade = grade_gemm(PLANTED[name].function, name=name, **PLANTED[name].options, **shapes)
        cause = grade.causes[0].name if grade.causes else ""
        table.add_row(name, f"{time.process_time() - begun:.2f}", grade.verdict, cause)
    Console().print(table)


if __name__ == "__main__":
    main()
