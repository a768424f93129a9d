"""Check that a program is for one device, where it is lowered; that an untraced array is on one.

A jit may take its mesh from its inputs alone: no trace shows that, the lowered program does.
"""

from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


def check(x: Array, message: str) -> Array:
    """x, of a program that is refused where it is lowered for several devices.

    message   what the error says; ``{devices}`` in it stands for their number.
    Gradient: none; call it where nothing is differentiated.
    Raises:   ValueError, at lowering; at once for an array.
    """
    return _checked.bind(x, message=message)


_checked = Primitive("fp8ref_one_device")
_checked.def_impl(lambda x, *, message: _of(x, len(x.sharding.device_set), message))
_checked.def_abstract_eval(lambda x, *, message: x)
batching.defvectorized(_checked)


def _of(x, devices: int, message: str):
    if devices > 1:
        raise ValueError(message.format(devices=devices))
    return x


def _lower(context, x, *, message: str):
    # a context of manual axes has none
    return [_of(x, getattr(context.module_context.axis_context, "num_devices", 1), message)]


mlir.register_lowering(_checked, _lower)
