"""Notice a Flax model's evaluation by scales of delayed scaling that no update has set (spec H-9).

Until a first update, a calibration or a checkpoint sets it, a scale is 1. A pass that observes
nothing and has no gradient, an evaluation, warns of it where JAX shows the state's numbers: outside
of jit, and in a function under jit that closes over the model. Where states are arguments of a
compiled program, nobody knows them while it is traced, and a callback from the device would change
the program: there nothing is said. ``fj.flax.unset_layers(model)`` answers before.
"""

import warnings
import weakref
from collections.abc import Callable

from fp8ref.jax import delayed
from fp8ref.spec.delayed import unset_scales


class Model:
    """Stands for a model of NNX that ``convert`` changed, whose hooks share one."""


models: weakref.WeakKeyDictionary[object, Model] = weakref.WeakKeyDictionary()
"""{hook: its model}. Not an attribute of a hook, which jit would compare."""

_warned: set[int] = set()


def notice(
    state: delayed.State, name: str, model: Callable[[], object]
) -> Callable[[], None] | None:
    """What warns, once a model, of a layer's pass that observes nothing; None if its scales are
    set, or its state is traced.

    model   gives what stands for the model, by its identity while it lives.
    """
    if not delayed.unset(state):
        return None

    def warn() -> None:
        key = id(owner := model())
        if key in _warned:
            return
        warnings.warn(unset_scales(name, "fp8ref.jax.flax.calibrate(model, batches)"), stacklevel=2)
        _warned.add(key)  # after the warning, which may be an error that the next pass repeats
        weakref.finalize(owner, _warned.discard, key)

    return warn
