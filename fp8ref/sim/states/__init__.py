"""AdamW whose moments are stored in FP8 (spec O): ``states`` is the step, ``moments`` one
moment.
"""

from fp8ref.sim.states.states import (
    AdamW,
    State,
    copy,
    decode,
    in_range,
    init,
    master,
    step,
    weight,
)

__all__ = ["AdamW", "State", "copy", "decode", "in_range", "init", "master", "step", "weight"]
