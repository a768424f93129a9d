"""The host's clock around a row of calls and the wait for their results (``timing.Clock``): JAX has
no events on the streams that it runs on.
"""

import time

import jax

from measuring.timing import Call


class Blocked:
    """A row begins with the device idle, and calls return before the device is done, so that all
    launches but the first hide behind work.
    """

    kind = "time.perf_counter around rows of calls, to block_until_ready"

    def seconds(self, call: Call, calls: int, *, ahead: float = 0.0) -> tuple[float, float]:
        """ahead changes nothing: the device takes work as it comes."""
        begun = time.perf_counter()
        for i in range(calls):
            out = call(i)
        asked = time.perf_counter()
        jax.block_until_ready(out)
        return time.perf_counter() - begun, asked - begun
