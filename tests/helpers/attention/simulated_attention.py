"""The simulator's attention as a function under test."""

from fp8ref.sim.attention import attention
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import FULL


def simulated(variant):
    """The forward pass of a variant, which takes all that a call can say by name."""

    def function(q, k, v, mask=FULL, documents=None, scale=None, softcap=None, sinks=None):
        call = Call(variant=variant, mask=mask, scale=scale, softcap=softcap)
        return attention.forward(q, k, v, variant=call, documents=documents, sinks=sinks)

    return function
