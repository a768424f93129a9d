"""Identify and test casts, quantizers, GEMMs, optimizers and attention against the specification.

``identify_cast`` and ``identify_quantizer`` identify a function of one array, ``identify_decoder``
one of codes and of their scales, ``gemm.identify_gemm`` a GEMM, ``identify_optimizer`` an optimizer
of torch, of optax or of your own, ``identify_attention`` attention, ``delayed.identify_delayed`` a
delayed scaling state. ``gemm.grade_gemm`` calls a GEMM right, imprecise or wrong.
``delayed.require_delayed``, ``sharded.require_sharded`` and ``invariants`` test scaling over steps
and ranks. ``agree`` compares how two sides quantize the same weights. ``strategies``,
``parameters`` and ``require`` are for the tests of any library, ``pytest_plugin`` is pytest's
fixture, ``vectors`` judges programs in any language, and ``certify`` compares the libraries
installed here.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8ref.conformance.agreement.agree import agree as agree
    from fp8ref.conformance.attention.identify import identify_attention as identify_attention
    from fp8ref.conformance.cast.identify import identify_cast as identify_cast
    from fp8ref.conformance.decoder.identify import identify_decoder as identify_decoder
    from fp8ref.conformance.optimizer.identify import identify_optimizer as identify_optimizer
    from fp8ref.conformance.quantizer.identify import identify_quantizer as identify_quantizer

__all__ = ["agree", "identify_cast", "identify_decoder", "identify_quantizer"]

_MODULES = {"agree": "agreement.agree"} | {
    f"identify_{kind}": f"{kind}.identify"
    for kind in ("attention", "cast", "decoder", "optimizer", "quantizer")
}

if not TYPE_CHECKING:

    def __getattr__(name: str):
        """The names above, imported when one is first used: pytest imports this package for its
        fixture wherever fp8ref is installed."""
        try:
            module = _MODULES[name]
        except KeyError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
