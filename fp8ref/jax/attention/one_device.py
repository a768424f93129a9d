"""A check that a program is for one device, made where it is lowered.

A jit may take its mesh from its inputs alone: no trace shows that, the lowered program does.
"""

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


def check(x: jax.Array, message: str) -> jax.Array:
    """x, of a program that is refused where it is lowered for several devices.

    message   what the error says; ``{devices}`` in it stands for their number.
    Gradient: none; call it where nothing is differentiated.
    Raises:   ValueError, at lowering.
    """
    return _checked.bind(x, message=message)


_checked = Primitive("fp8ref_one_device")
_checked.def_impl(lambda x, *, message: x)  # of an array, whose devices are known to the caller
_checked.def_abstract_eval(lambda x, *, message: x)
batching.defvectorized(_checked)


def _lower(context, x, *, message: str):
    # a context of manual axes has none
    devices = getattr(context.module_context.axis_context, "num_devices", 1)
    if devices > 1:
        raise ValueError(message.format(devices=devices))
    return [x]


mlir.register_lowering(_checked, _lower)
