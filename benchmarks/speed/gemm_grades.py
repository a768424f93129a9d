"""What a verdict costs: python benchmarks/speed/gemm_grades.py [--long] [--quantizers] [NAME ...]

Seconds of processor time for each planted GEMM of the tests, by name, with the verdict and the
cause; --long: at K = 131,072; --quantizers: for planted quantizers in their place.
"""

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fp8ref.conformance import identify_quantizer
from fp8ref.conformance.gemm import grade_gemm
from fp8ref.formats import E2M1FN, E4M3FN

TESTS = Path(__file__).parents[2] / "tests"
LONG = (128, 128, 131072)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--quantizers", action="store_true")
    known = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    if known.quantizers:
        quantizers()
        return
    from helpers.gemm.graded_gemms import PLANTED

    unknown = [name for name in known.names if name not in PLANTED]
    if unknown:
        raise SystemExit(f"the planted GEMMs are {', '.join(PLANTED)}; got {', '.join(unknown)}.")
    table = Table("GEMM", "seconds", "verdict", "cause")
    shapes = {"shapes": [LONG]} if known.long else {}
    for name in known.names or PLANTED:
        begun = time.process_time()
        grade = grade_gemm(PLANTED[name].function, **PLANTED[name].options, **shapes)
        cause = grade.causes[0].name if grade.causes else ""
        table.add_row(name, f"{time.process_time() - begun:.2f}", grade.verdict, cause)
    Console().print(table)


def quantizers() -> None:
    """The times of quantizers."""
    from helpers.quantize import fp4_libraries
    from helpers.quantize import planted_quantizers as planted

    table = Table("quantizer", "seconds", "verdict")
    given = [
        (f.__name__, f, E4M3FN, "numpy")
        for f in (planted.torchao, planted.ragged_blocks, planted.stale_ragged_scale)
    ]
    given += [
        (f.__name__, f, E4M3FN, "numpy")
        for f in (planted.eps_is_added, planted.block_scale_in_bfloat16, planted.rounds_blocks_up)
    ]
    given += [
        (f.__name__, f, E2M1FN, "torch")
        for f in (fp4_libraries.torchao_nvfp4, fp4_libraries.transformer_engine)
    ]
    for name, function, fmt, framework in given:
        begun = time.process_time()
        outcome = identify_quantizer(function, fmt, name=name, framework=framework)
        table.add_row(name, f"{time.process_time() - begun:.2f}", outcome.summary)
    Console().print(table)


if __name__ == "__main__":
    main()
