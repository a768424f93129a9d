"""Every number of a 16-bit dtype, all NaN payloads among them, against the behavior found of a
cast.
"""

import numpy as np

from fp8ref.conformance.cast import outputs
from fp8ref.conformance.cast.behavior import Behavior
from fp8ref.conformance.cast.outputs import Responses
from fp8ref.conformance.kit import arrays
from fp8ref.conformance.kit.explain import simplest
from fp8ref.conformance.kit.finding import Counterexample
from fp8ref.conformance.kit.subject import Subject
from fp8ref.formats import Format


def check(subject: Subject, source: str, fmt: Format, behavior: Behavior) -> list[Counterexample]:
    """The simplest number of bfloat16 or float16 whose code is not the one of the behavior; none of
    another dtype.

    All NaN codes count as equal (C-5).

    Raises:   ConformanceError: as ``outputs.ask``.
    """
    if source not in ("bfloat16", "float16"):
        return []
    bits = np.arange(1 << 16, dtype=np.uint16)
    # given by its bits: a conversion from float32 would make one NaN of all
    output = outputs.ask(subject, bits.view(arrays.numpy_dtype(source)), source)
    x = (
        bits.view(np.float16)
        if source == "float16"
        else (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    )
    responses = Responses(x=x, source=source, output=output, fmt=fmt, codes=output.codes(fmt))
    differs = responses.mismatches(behavior, canonical=True)
    return (
        [responses.counterexample(simplest(x, differs), behavior, "by the behavior found")]
        if differs.any()
        else []
    )
